"""Part 2: FP8 training on a card that has it (Ada, Hopper and newer), against torchao's emulation and bfloat16."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config

from areal.api.config import Float8Config, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from benchmark.gpu_step import HALF_BILLION, one_step
from tests.engine import mesh_cases
from tests.gpu import bodies
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def card():
    pytest.importorskip("torchao", reason="the extra quantization")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"{torch.cuda.get_device_name()} has no FP8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float8")
    mesh_cases.write_models(folder)
    (folder / "model").symlink_to(folder / "qwen3")
    return folder


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "tensorwise"])
def test_gradients_are_those_of_the_emulation(gpu, folder, recipe):
    """But for sums in another order; with scales of rows torchao rounds products to bfloat16."""
    assert bodies.float8_error(gpu, folder / "qwen3", recipe) < (5e-2 if "rowwise" in recipe else 2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_cards_that_gather_weights_in_8_bits_compute_what_one_does(folder):
    for difference, size in run_ranks(bodies.float8_ranks, folder):
        assert difference < 1e-2 * size


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_tokens_per_second_against_bfloat16(gpu, tmp_path, recipe):
    Qwen2Config(**HALF_BILLION).save_pretrained(tmp_path)
    plain = TrainEngineConfig(
        path=str(tmp_path), init_from_scratch=True, optimizer=OptimizerConfig(), compile=True,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=16384),
    )  # fmt: skip
    seconds: list[float] = []
    for config in (plain, replace(plain, fp8=Float8Config(recipe=recipe))):
        result, _ = one_step(config, gpu, tokens=16384, repeats=4)
        seconds.append(result["forward_backward"])
    rates = {"card": torch.cuda.get_device_name(), "recipe": recipe, "ratio": seconds[0] / seconds[1]}
    print(json.dumps(rates))  # noqa: T201
    assert rates["ratio"] > 1.0
