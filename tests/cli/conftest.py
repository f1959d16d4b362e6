"""What a command prints."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from areal.cli.main import run_command
from tests.cli.run_files import write_run


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


@pytest.fixture
def run(tmp_path):
    """A run that has trained 4 of 10 steps."""
    return write_run(tmp_path / "exp" / "trial")
