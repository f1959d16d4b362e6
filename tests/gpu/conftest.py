"""Models of the engine tests, and the device of the parts."""

from pathlib import Path

import pytest
import torch

from tests.engine import engine_cases
from tests.trainer import row_cases


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A folder of tiny random checkpoints, one subfolder each."""
    folder = tmp_path_factory.mktemp("models")
    engine_cases.write_models(folder)
    row_cases.write_models(folder)
    return folder


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
