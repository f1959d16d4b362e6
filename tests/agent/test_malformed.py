"""A few malformed requests of every dialect; tests/attack/test_sessions.py sends thousands."""

import random

import orjson
import pytest
from aiohttp import ClientSession

from tests.agent.malformed import VALID, malformed
from tests.agent.session_kit import KEY, served

JSON = {"Content-Type": "application/json"}


async def attack(path, rng, num):
    """Send `num` malformed requests, and check that each that is wrong is refused and that the session is intact."""
    valid = VALID[path]
    async with served() as (address, session, _), ClientSession(headers=JSON) as http:
        url = f"{address}/sessions/{KEY}/v1{path}"
        num_answered = 0
        for _ in range(num):
            request = malformed(rng, valid)
            async with http.post(url, data=request.data) as answer:
                text = await answer.text()
                assert answer.status in (200, 400), (request, text)
                if answer.status == 200:
                    assert not request.is_wrong, request
                    num_answered += 1
                else:
                    error = orjson.loads(text)["error"]
                    assert error["code"].startswith(("agent.", "request.")), (request, error)
                    assert error["message"], request
                    assert not request.param or error["param"] == request.param, (request, error)
            assert len(session.requests) == num_answered
        async with http.post(url, json=valid) as answer:
            assert answer.status == 200, await answer.text()


@pytest.mark.parametrize("path", VALID)
async def test_malformed_requests_are_refused_by_name_and_leave_the_session_intact(path):
    await attack(path, random.Random(f"0:{path}"), 150)
