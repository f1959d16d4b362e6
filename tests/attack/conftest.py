"""Marks every test of this folder as `attack` and gives the tests their random numbers.

`make test-attack SEED=7` runs the folder. hypothesis takes its examples from the same seed.
"""

import random
from pathlib import Path

import pytest
from hypothesis import settings

from tests.inference.conftest import build_model, checkpoint, keep_engine, options, serve_with, served

__all__ = ["build_model", "checkpoint", "keep_engine", "options", "serve_with", "served"]

HERE = Path(__file__).parent
DEFAULT_SEED = 0

settings.register_profile("attack", settings.get_profile("areal"), max_examples=300, print_blob=True, database=None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder: `make test` and `make test-slow` leave them out."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.attack)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of one test. They depend on SEED and on the test's name only, not on the tests before it."""
    inputs = request.config.getoption("hypothesis_seed")
    return random.Random(f"{DEFAULT_SEED if inputs is None else inputs}:{request.node.nodeid}")
