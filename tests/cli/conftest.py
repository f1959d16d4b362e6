"""What a command prints."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from areal.cli.main import run_command


@pytest.fixture
def text_of(capsys) -> Callable[..., str]:
    """Runs a command that succeeds."""

    def run(*words: object) -> str:
        assert run_command(list(map(str, words))) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def json_of(text_of) -> Callable[..., Any]:
    return lambda *words: json.loads(text_of(*words, "--json"))
