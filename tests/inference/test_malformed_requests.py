"""Any body for any endpoint: no answer of status 500, and the engine generates after each."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from hypothesis import HealthCheck, given, settings

from areal.api.data import MAX_REPLICAS
from tests.attack.native import FIELDS, bodies, check_alive, send
from tests.attack.requests import BROKEN_BODIES, send_broken


@pytest.mark.parametrize("path", FIELDS)
async def test_no_body_causes_a_server_error_or_stops_the_engine(served, path):
    @settings(max_examples=8, deadline=None, suppress_health_check=[*HealthCheck])
    @given(body=bodies(path))
    def attack(body: bytes) -> None:
        if path == "/generate":
            send(served.address, "POST", "/continue_generation", b"{}")
        status, answer = send(served.address, "POST", path, body)
        assert status in (200, 400, 413), answer
        check_alive(served.address)

    await asyncio.to_thread(attack)


@pytest.mark.parametrize(("rest", "status"), BROKEN_BODIES)
async def test_a_broken_body_is_refused_without_a_traceback(served, caplog, rest, status):
    result = await send_broken(served.address, "/generate", rest, is_cut=not status)
    assert status in result
    assert b" 500 " not in result
    assert [record for record in caplog.records if record.exc_info] == []
    await asyncio.to_thread(check_alive, served.address)


@pytest.mark.parametrize("sizes", [{"world_size": MAX_REPLICAS + 2}, {"world_size": 2**63}, {"rank_offset": 2**63}])
async def test_an_update_group_has_at_most_one_rank_per_replica(served, sizes):
    group = {"master_address": "127.0.0.1", "master_port": 1, "group_name": "g", "backend": "gloo"}
    body = orjson.dumps({**group, "rank_offset": 1, "world_size": 2, **sizes})
    status, answer = await asyncio.to_thread(send, served.address, "POST", "/init_weights_update_group", body)
    assert (status, orjson.loads(answer)["code"]) == (400, "request.invalid_field")
