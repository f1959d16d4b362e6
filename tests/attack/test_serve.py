"""The gateway of `areal serve` and a trainer rank under hostile requests: each fails alone."""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
from urllib.parse import urlsplit

import pytest
from hypothesis import given

from areal.api.errors import ArealError
from areal.serve.gateway import API
from areal.serve.wire import AdapterSettings, LossRequest, decode_loss_request
from areal.serve.worker import computed_loss
from tests.attack.http import exchanges, statuses_of
from tests.attack.serve import BODIES, GETS, attacks, loss_bodies
from tests.serve.adapters import make_slots, random_data, write_model
from tests.serve.messages import encode_loss_request
from tests.serve.test_gateway import opened

ROUTES = [f"{API}/{path}" for path in (*BODIES, *GETS, "forward_backward")] + ["/trainer/command", "/trainer/result"]
EXPECTED = {200, 204, 400, 401, 403, 404, 405, 408, 410, 413, 415, 417, 422, 429, 431}


@pytest.fixture(autouse=True)
def no_traceback(caplog):
    """Nothing that a request contains puts a traceback in the log."""
    with caplog.at_level(logging.INFO):
        yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info] == []


async def test_no_json_disturbs_the_gateway(tmp_path):
    async with opened(tmp_path, hold_s=0.01) as (api, other, *_, address):
        session = (await api.ok("create_session"))["session_id"]
        model = f"{session}:train:0"
        await api.ok("create_model", {**BODIES["create_model"], "session_id": session})
        await api.ok("create_sampling_session", {**BODIES["create_sampling_session"], "session_id": session})

        def attack(key, expected):
            host = urlsplit(address)
            connection = http.client.HTTPConnection(host.hostname, host.port, timeout=60)

            @given(attacks())
            def attacked(item):
                path = item.path.replace("MODEL", model).replace("SESSION", session)
                body = item.body.replace(b"MODEL", model.encode()).replace(b"SESSION", session.encode())
                connection.request(
                    item.method, f"{API}/{path}", body, {"X-API-Key": key, "Content-Type": "application/json"}
                )
                answer = connection.getresponse()
                answer.read()
                assert answer.status in expected, (item.path, answer.status)

            attacked()

        await asyncio.to_thread(attack, api.key, EXPECTED)
        await asyncio.to_thread(attack, other.key, EXPECTED)
        assert (await api.ok("get_info", {"model_id": model}))["lora_rank"] == 4


async def test_no_bytes_on_the_port_of_the_gateway_disturb_it(tmp_path):
    async with opened(tmp_path) as (api, *_, address):

        @given(exchanges(ROUTES))
        def attacked(exchange):
            statuses = statuses_of(address, exchange)  # without an API key: nothing but the trainer's routes may pass
            assert set(statuses) <= EXPECTED, statuses
            assert not (exchange.is_refused and 200 in statuses)
            assert statuses or not exchange.is_complete

        await asyncio.to_thread(attacked)
        await api.ok("client/config")


async def test_a_client_that_sends_slowly_delays_nobody(tmp_path):
    async with opened(tmp_path) as (api, *_, address):
        parts = urlsplit(address)
        head = f"POST {API}/asample HTTP/1.1\r\nHost: {parts.netloc}\r\nX-API-Key: {api.key}\r\n"
        head += "Content-Length: 1000\r\n\r\n"
        slow = [socket.create_connection((parts.hostname, parts.port)) for _ in range(50)]
        for item in slow:
            item.sendall(head.encode() + b"{")
        async with asyncio.timeout(5):
            await api.ok("client/config")
        for item in slow:
            item.close()


def test_a_loss_request_fails_alone(tmp_path_factory):
    slots = make_slots(write_model(tmp_path_factory.mktemp("model") / "tiny"))
    slots.create("one", AdapterSettings(rank=4))

    @given(loss_bodies("m", 1))
    def attacked(body):
        try:
            computed_loss(slots, decode_loss_request(body))
        except ArealError:
            assert all(weight.grad is None for weight in slots._trained.values())
        slots.clear_gradients()

    attacked()
    request = decode_loss_request(encoded(random_data(1, [5])))
    assert computed_loss(slots, request).loss == computed_loss(slots, request).loss


def encoded(data):
    return encode_loss_request(LossRequest(data=data, loss_fn="ppo"))
