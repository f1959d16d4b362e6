"""The fixture `forge`: a ledger written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ledger.forge import Forge


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(tmp_path / "ledger")
