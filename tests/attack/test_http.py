"""Any bytes on the HTTP ports of a server and of a controller: refused, logged in one line, and the process answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from aiohttp import ClientSession
from hypothesis import given

from areal.ledger.ledger import Ledger
from areal.observe.http_log import HttpLogger
from areal.rollout.controller_process import make_app
from tests.attack.controller import VALID
from tests.attack.http import exchanges, statuses_of
from tests.attack.native import FIELDS, check_alive
from tests.attack.requests import REFUSED_HEADERS, status_of
from tests.rollout import rollout_kit
from tests.rollout.http_kit import listening
from tests.run_token import BEARER, TOKEN

NATIVE = [*FIELDS, "/health", "/get_model_info", "/server_info", "/metrics", "/none"]
CONTROLLER = [*VALID, "/health", "/status", "/replicas", "/none"]
EXPECTED = {200, 204, 400, 401, 403, 404, 405, 409, 412, 413, 414, 415, 417, 431}


@contextlib.asynccontextmanager
async def controller_at(folder):
    """The address of a controller that waits for a trainer."""
    controller = rollout_kit.make_controller(Ledger.open(folder))
    await controller.start()
    async with listening(
        make_app(controller, token=TOKEN, poll_s=0.01), logger=HttpLogger(), auto_decompress=False
    ) as address:
        yield address
        async with ClientSession(headers=BEARER) as session, session.get(f"{address}/status") as answer:
            assert answer.status == 200
            assert (await answer.json())["waiting_for"] == "a trainer to attach"
    await controller.close()


def attack(address, paths):
    @given(exchanges(paths))
    def attacked(exchange):
        statuses = statuses_of(address, exchange)
        assert set(statuses) <= EXPECTED, statuses
        assert not (exchange.is_refused and 200 in statuses)
        if exchange.is_complete:
            assert statuses, "no answer"

    attacked()


def refuse_headers(address, paths):
    for path in paths:
        for headers, status in REFUSED_HEADERS:
            assert status_of(address, path, headers) == status, (path, headers)


@pytest.fixture(autouse=True)
def no_traceback(caplog):
    """Nothing that a request contains puts a traceback in the log."""
    with caplog.at_level(logging.INFO):
        yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info] == []


async def test_no_bytes_on_the_port_of_a_native_server_disturb_it(served):
    await asyncio.to_thread(attack, served.address, NATIVE)
    await asyncio.to_thread(check_alive, served.address)


async def test_no_bytes_on_the_port_of_a_controller_disturb_it(tmp_path):
    async with controller_at(tmp_path) as address:
        await asyncio.to_thread(attack, address, CONTROLLER)


async def test_every_route_of_a_native_server_requires_token_host_and_type(served):
    await asyncio.to_thread(refuse_headers, served.address, FIELDS)


async def test_every_route_of_a_controller_requires_token_host_and_type(tmp_path):
    async with controller_at(tmp_path) as address:
        await asyncio.to_thread(refuse_headers, address, VALID)
