"""Models of the engine tests, and the device of the parts."""

from pathlib import Path

import pytest
import torch

from areal.engine.build import build_megatron_engine
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


@pytest.fixture
def megatron_core():
    """The builder of engines of Megatron-Core, whose process groups are closed after the test."""
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    yield build_megatron_engine
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
