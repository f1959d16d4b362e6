"""Any body for any endpoint: no answer of status 500, and the engine generates after each."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings

from tests.attack.native import FIELDS, bodies, check_alive, send


@pytest.mark.parametrize("path", FIELDS)
async def test_no_body_causes_a_server_error_or_stops_the_engine(served, path):
    @settings(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
    @given(body=bodies(path))
    def attack(body: bytes) -> None:
        if path == "/generate":
            send(served.address, "POST", "/continue_generation", b"{}")
        status, answer = send(served.address, "POST", path, body)
        assert status in (200, 400, 413), answer
        check_alive(served.address)

    await asyncio.to_thread(attack)
