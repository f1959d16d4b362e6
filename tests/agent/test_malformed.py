"""A few malformed requests of every dialect; tests/attack/test_sessions.py sends thousands."""

import random

import orjson
import pytest
from aiohttp import ClientSession

from tests.agent.bridge.templates import NO_USER_AFTER_TOOL
from tests.agent.malformed import VALID, malformed
from tests.agent.policies import ScriptedEngine
from tests.agent.session_kit import KEY, served
from tests.agent.test_session import session_of

JSON = {"Content-Type": "application/json"}


async def attack(path, rng, num, *, is_real=False):
    """Send `num` malformed requests, and check that each that is wrong is refused and that the session is intact.

    `is_real`: to a session with a chat template that refuses some dialogues, and a policy.
    """
    valid = VALID[path]
    ours = session_of(ScriptedEngine(lambda prompt: "four"), template=NO_USER_AFTER_TOOL) if is_real else None
    async with served(session=ours) as (address, session, _), ClientSession(headers=JSON) as http:
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
            assert (len(session.requests) if ours is None else ours.counts.turns) == num_answered
        async with http.post(url, json=valid) as answer:
            assert answer.status == 200, await answer.text()


@pytest.mark.parametrize("is_real", [False, True])
@pytest.mark.parametrize("path", VALID)
async def test_malformed_requests_are_refused_by_name_and_leave_the_session_intact(path, is_real):
    await attack(path, random.Random(f"0:{path}"), 80, is_real=is_real)
