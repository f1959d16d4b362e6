"""Shared by the tests of this folder: `engine_cases.py` beside this file, which two-rank processes run as well, and
`foreign_host.py`."""

from pathlib import Path
from types import ModuleType

import pytest

from areal.data import prefix_tree
from areal.engine import micro_batch
from areal.models import tree_states
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
    """Tokens are shared even if that saves fewer than an additional call of attention costs."""
    monkeypatch.setattr(micro_batch, "SAVED_PER_CALL", 0)
    monkeypatch.setattr(prefix_tree, "MIN_SHARED", 1)
    monkeypatch.setattr(tree_states, "MIN_PART", 2)
