"""Part 6: the Megatron-Core engine on a GPU against the CPU, with and without Transformer Engine, and a whole run."""

import pytest
import torch

from areal.api.config.train import DistributedDataParallelConfig, MegatronEngineConfig
from tests.gpu import bodies
from tests.gpu.test_part4_runs import run

pytestmark = pytest.mark.gpu
SHORT = MegatronEngineConfig(use_precision_aware_optimizer=True, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")
OVERLAP = DistributedDataParallelConfig(overlap_grad_reduce=True, overlap_param_gather=True)


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointed"])
def test_gradients_of_megatron_core_are_those_of_the_cpu(gpu, models, megatron_core, model, options):
    assert bodies.gradient_error(gpu, models / model, build=megatron_core, **options) < 1e-4


def test_gradients_of_a_critic_are_those_of_the_cpu(gpu, models, megatron_core):
    assert bodies.gradient_error(gpu, models / "qwen2", build=megatron_core, role="critic") < 1e-4


@pytest.mark.parametrize(
    "megatron", [MegatronEngineConfig(), MegatronEngineConfig(ddp=OVERLAP)], ids=["plain", "overlap"]
)
def test_a_recovered_megatron_engine_continues_with_the_same_bits(gpu, models, megatron_core, tmp_path, megatron):
    options = {"build": megatron_core, "megatron": megatron}
    assert bodies.recovered_equals_unbroken(gpu, models / "qwen3_moe", tmp_path / "state", **options)


def test_moments_in_cpu_memory_leave_the_card(gpu, models, megatron_core):
    options = {"build": megatron_core, "megatron": MegatronEngineConfig(offload_optimizer=True)}
    left, gap = bodies.offloaded_share(gpu, models / "qwen3", lambda: torch.cuda.memory_allocated(gpu), **options)
    assert left < 0.6  # weights and gradients are half of it
    assert gap < 1e-5


def test_short_types_of_the_optimiser_continue_with_the_same_bits(gpu, models, megatron_core, tmp_path):
    pytest.importorskip("transformer_engine.pytorch")
    options = {"build": megatron_core, "megatron": SHORT}
    assert bodies.recovered_equals_unbroken(gpu, models / "qwen3", tmp_path / "state", **options)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_products_of_8_bits_are_near_those_of_bfloat16(gpu, tmp_path, megatron_core, recipe):
    pytest.importorskip("transformer_engine.pytorch")
    if torch.cuda.get_device_capability(gpu) < (8, 9):
        pytest.skip("this card has no products of 8 bits")
    bodies.write_model(tmp_path, hidden=256, layers=4, vocabulary=1024)
    options = {"build": megatron_core, "megatron": MegatronEngineConfig(fp8="hybrid", fp8_recipe=recipe)}
    result = bodies.mean_difference(gpu, tmp_path, **options)
    print(f"{torch.cuda.get_device_name()}, fp8 {recipe}: {result:.3f} nats")  # noqa: T201
    assert 0.0 < result < 0.3


def test_a_run_on_the_card(tmp_path):
    pytest.importorskip("megatron.core")
    words = ("allocation_mode=native:d1+megatron:d1", "actor.shared_prefixes=auto")
    run(tmp_path, *words, "actor.weight_update_mode=auto", "actor.dtype=bfloat16")
