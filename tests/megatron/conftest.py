"""Tests in this folder need the package megatron-core, unless they are in `test_rules.py`: `make test-megatron`."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "megatron" and item.path.name != "test_rules.py":
            item.add_marker("megatron")
