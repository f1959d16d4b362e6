"""Marks every test of this folder as `environments`: the real packages, from .venv-environments, which `make
test-environments` makes; without it a test fails."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder: the other make targets leave them out."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.environments)
