"""Shared by the train-engine tests: `engine_cases.py` beside this file, which two-rank processes run as well."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


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
