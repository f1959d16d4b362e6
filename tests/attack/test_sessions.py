"""Thousands of malformed requests of every dialect: no error of the server, nothing accepted in silence."""

import asyncio
import logging

import pytest

from areal.agent.session_server import SessionServer
from areal.observe.http_log import HttpLogger
from tests.agent.malformed import VALID
from tests.agent.session_kit import ScriptedDirectory, ScriptedSession
from tests.agent.test_malformed import attack
from tests.attack.test_http import attack as attack_port
from tests.attack.test_http import refuse_headers
from tests.rollout.http_kit import listening
from tests.run_token import TOKEN

PATHS = [*(f"/v1{path}" for path in VALID), "/v1/models", "/v1/messages/count_tokens", "/sessions", "/none"]


async def test_no_bytes_on_the_port_of_a_session_server_disturb_it(caplog):
    directory = ScriptedDirectory(**{TOKEN: ScriptedSession()})
    server = SessionServer(directory, admin_token=TOKEN, token_text=str)
    with caplog.at_level(logging.INFO):
        options = {"logger": HttpLogger(), "auto_decompress": False, "access_log": None}
        async with listening(server.application(), **options) as address:
            await asyncio.to_thread(attack_port, address, PATHS)
            await asyncio.to_thread(refuse_headers, address, PATHS[: len(VALID)])
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info] == []
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(("is_real", "num"), [(False, 5000), (True, 1000)])
@pytest.mark.parametrize("path", VALID)
async def test_no_request_disturbs_a_session(path, is_real, num, rng, caplog):
    with caplog.at_level(logging.INFO):
        await attack(path, rng, num, is_real=is_real)
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info] == []
