"""Shared by the tests of this folder: `engine_cases.py` beside this file, which two-rank processes run as well, and
`foreign_host.py`."""

from pathlib import Path
from types import ModuleType

import pytest

from areal.engine import micro_batch as shared_prompts
from tests.engine import engine_cases


@pytest.fixture(scope="session")
def cases() -> ModuleType:
    """Models, batches, losses and the two-rank scenarios."""
    return engine_cases


@pytest.fixture(scope="session")
def models(cases, tmp_path_factory) -> Path:
    """A folder of tiny random checkpoints, one subfolder each."""
    folder = tmp_path_factory.mktemp("models")
    cases.write_models(folder)
    return folder


@pytest.fixture
def shares_in_small_rows(monkeypatch) -> None:
    """Prompts are shared even if that saves fewer tokens than an additional call of attention costs."""
    monkeypatch.setattr(shared_prompts, "SAVED_PER_CALL", 0)
