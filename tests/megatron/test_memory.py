"""The memory plan of a Megatron-Core rank against what the engine allocates."""

import gc
import importlib

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal.api.allocation import ParallelDims
from areal.api.config import OptimizerConfig, TrainEngineConfig
from areal.engine.build import build_megatron_engine
from areal.engine.mesh import TrainerMesh
from areal.launcher.memory_plan import rank_memory
from areal.models.model_shape import ModelShape
from tests.engine.engine_cases import make_batch, policy_loss
from tests.launcher.test_memory_plan import SHAPES, SIZES


def living_bytes() -> int:
    """Of all tensors on the CPU."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor) and item.device.type == "cpu"]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def kept_bytes(config: TrainEngineConfig) -> int:
    """Of the tensors that an engine has after its construction and two optimiser steps.

    The memory events of torch's profiler do not contain what a thread of gloo frees.
    """
    before = living_bytes()
    engine = build_megatron_engine(config, role="actor", total_steps=5, mesh=TrainerMesh.open(None), seed=0)
    for _ in range(2):
        engine.forward_backward(make_batch([64] * 4), policy_loss, denominator=256.0)
        engine.optimizer_step()
    return living_bytes() - before


@pytest.fixture
def _groups():
    importlib.import_module("tests.megatron.cpu_modules")
    yield
    importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_groups")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_has_the_state_of_a_rank(tmp_path, dtype):
    Qwen2ForCausalLM(Qwen2Config(**SIZES, **SHAPES["narrow"])).save_pretrained(tmp_path)
    config = TrainEngineConfig(path=str(tmp_path), dtype=dtype, optimizer=OptimizerConfig())
    size = ModelShape.read(str(tmp_path))
    plan = rank_memory([(config, size)], dims=ParallelDims(), tokens=256, on_gpu=False, backend="megatron")
    assert plan.weights + plan.gradients + plan.optimizer == pytest.approx(kept_bytes(config), rel=0.05)


def test_parts_of_a_model_are_on_stages_and_their_state_on_data_ranks(tmp_path):
    Qwen2Config(**SIZES | {"tie_word_embeddings": False}, **SHAPES["deep"]).save_pretrained(tmp_path)
    size = ModelShape.read(str(tmp_path))
    config = TrainEngineConfig(path=str(tmp_path), dtype="bfloat16", optimizer=OptimizerConfig())

    def plan(**dims: int):
        return rank_memory([(config, size)], dims=ParallelDims(**dims), tokens=256, on_gpu=True, backend="megatron")

    first, stages, data = plan(), plan(pp=2), plan(dp=2)
    table = 2 * size.vocabulary * size.hidden
    assert first.weights == 2 * size.parameters
    assert stages.weights - table == pytest.approx((first.weights - 2 * table) / 2, rel=1e-3)
    assert (data.weights, data.gradients) == (first.weights, first.gradients)
    assert data.optimizer == first.optimizer // 2
