"""The configuration of a small run with overrides."""

import pytest

from areal.api.config import GRPOConfig, load_config
from tests.api.minimal import MINIMAL


@pytest.fixture
def load(tmp_path):
    """Loads the small file with overrides."""
    path = tmp_path / "x.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return lambda *overrides: load_config(["--config", str(path), *overrides], GRPOConfig)
