"""Makes the fake server importable by the tests of this folder and gives them a kit to start it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_server import FleetKit


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[FleetKit]:
    made = FleetKit(tmp_path / "names")
    yield made
    await made.close()
