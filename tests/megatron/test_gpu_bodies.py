"""The GPU tests of Megatron-Core: their bodies run on the CPU."""

import importlib

import pytest
import torch

from areal.api.config.train import MegatronEngineConfig
from areal.engine.build import build_megatron_engine
from tests.gpu import bodies
from tests.gpu.conftest import models  # noqa: F401 - a fixture

CPU = torch.device("cpu")


@pytest.fixture
def megatron_core():
    importlib.import_module("tests.megatron.cpu_modules")
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    yield build_megatron_engine
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def test_bodies(models, megatron_core, tmp_path):  # noqa: F811
    for model in ("qwen3_moe", "deepseek_v3"):
        assert bodies.gradient_error(CPU, models / model, build=megatron_core, gradient_checkpointing=True) < 1e-5
    assert bodies.gradient_error(CPU, models / "qwen2", build=megatron_core, role="critic") < 1e-5
    assert bodies.recovered_equals_unbroken(CPU, models / "qwen3_moe", tmp_path / "state", build=megatron_core)
    offloads = {"build": megatron_core, "megatron": MegatronEngineConfig(offload_optimizer=True)}
    assert bodies.offloaded_share(CPU, models / "qwen3", lambda: 0, **offloads) == (0.0, 0.0)
    bodies.write_model(tmp_path / "wide", hidden=64, layers=2, vocabulary=100)
    assert bodies.mean_difference(CPU, tmp_path / "wide", build=megatron_core, megatron=MegatronEngineConfig()) == 0.0
