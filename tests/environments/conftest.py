"""Workflows of environments over the fake packages, closed after each test."""

import pytest
import pytest_asyncio

from tests.environments.environment_kit import FAKES, build


@pytest.fixture
def in_fakes(monkeypatch) -> None:
    monkeypatch.chdir(FAKES)


@pytest_asyncio.fixture
async def make():
    """Makes a workflow of a class."""
    made = []

    def new(kind, **options):
        made.append(build(kind, **options))
        return made[-1]

    yield new
    for workflow in made:
        await workflow.aclose()
