"""Imports of text or of a file as the command reports them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal.cli.main import run_command


@dataclass(frozen=True)
class Imported:
    report: dict[str, Any]
    path: Path  # of the file

    @property
    def values(self) -> dict[str, Any]:
        return {path: option["value"] for path, option in self.report["options"].items()}

    def of_keys(self, name: str) -> dict[str, Any]:
        """`fate`, `text` or `value` of each key."""
        return {entry["key"]: entry[name] for entry in self.report["keys"]}

    @property
    def fates(self) -> dict[str, str]:
        return self.of_keys("fate")


@pytest.fixture
def imported(tmp_path, capsys) -> Callable[..., Imported]:
    def read(system: str, text: str, *words: str, name: str = "f.yaml") -> Imported:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        assert run_command(["config", "import", system, str(path), *words, "--json"]) == 0
        return Imported(json.loads(capsys.readouterr().out), path)

    return read
