"""Thousands of malformed requests of every dialect: no error of the server, nothing accepted in silence."""

import logging

import pytest

from tests.agent.malformed import VALID
from tests.agent.test_malformed import attack


@pytest.mark.parametrize("path", VALID)
async def test_no_request_disturbs_a_session(path, rng, caplog):
    with caplog.at_level(logging.INFO):
        await attack(path, rng, 5000)
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info] == []
