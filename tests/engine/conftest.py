"""Shared by the tests of this folder: `engine_cases.py` beside this file, which two-rank processes run as well, and
`foreign_host.py`."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def cases() -> ModuleType:
    """Models, batches, losses and the two-rank scenarios."""
    spec = importlib.util.spec_from_file_location("engine_cases", Path(__file__).with_name("engine_cases.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def models(cases, tmp_path_factory) -> Path:
    """A folder of tiny random checkpoints, one subfolder each."""
    folder = tmp_path_factory.mktemp("models")
    cases.write_models(folder)
    return folder
