"""Every option of the Megatron engine reaches Megatron-Core, or is refused with its reason."""

import importlib
import os
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

from areal.api.allocation import ParallelDims
from areal.api.config import OptimizerConfig, TrainEngineConfig
from areal.api.config.legacy import LEGACY
from areal.api.config.train import DistributedDataParallelConfig, MegatronEngineConfig
from areal.api.errors import ConfigError
from areal.models.mesh_rules import package_problem

SHAPE = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
}  # fmt: skip
DENSE = Qwen3MoeConfig(**SHAPE, num_experts=4)
SHARED = DeepseekV3Config(
    **SHAPE, n_routed_experts=4, n_group=1, topk_group=1, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=6,
    qk_rope_head_dim=4, v_head_dim=10,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _on_cpu():
    importlib.import_module("tests.megatron.cpu_modules")


def settings_of(options: MegatronEngineConfig, hf: Any = DENSE) -> dict[str, Any]:
    """What Megatron-Core gets for a model that is trained with `options`."""
    from areal.engine.megatron.model_config import ddp_config, optimizer_config, transformer_config

    optimizer = OptimizerConfig(type="adam")
    config = TrainEngineConfig(path="x", megatron=options, optimizer=optimizer, gradient_checkpointing=True)
    chunks = options.virtual_pipeline_parallel_size
    dims = ParallelDims(pp=2, dp=2, ep=2 if hf.model_type != "qwen3" else 1)
    model = transformer_config(hf, config, dims, torch.device("cpu"), dtype=torch.float32, chunks=chunks)
    result = vars(model) | {f"ddp.{name}": value for name, value in vars(ddp_config(config)).items()}
    return result | {
        f"optimizer.{name}": value for name, value in vars(optimizer_config(config, torch.float32)).items()
    }


def ddp(**options: Any) -> dict[str, Any]:
    return {"ddp": DistributedDataParallelConfig(**options)}


SELECTIVE = {"recompute_granularity": "selective"}
OVERLAP = {"overlap_grad_reduce": True}
ALIVE: dict[str, tuple[dict[str, Any], str, Any]] = {
    "ddp.grad_reduce_in_fp32": (ddp(grad_reduce_in_fp32=False), "ddp.grad_reduce_in_fp32", False),
    "ddp.overlap_grad_reduce": (ddp(**OVERLAP), "ddp.overlap_grad_reduce", True),
    "ddp.overlap_param_gather": (ddp(**OVERLAP, overlap_param_gather=True), "optimizer.overlap_param_gather", True),
    "ddp.align_param_gather": (
        ddp(**OVERLAP, overlap_param_gather=True, align_param_gather=True),
        "ddp.align_param_gather",
        True,
    ),
    "ddp.use_distributed_optimizer": (
        ddp(use_distributed_optimizer=False),
        "optimizer.use_distributed_optimizer",
        False,
    ),
    "ddp.check_for_nan_in_grad": (ddp(check_for_nan_in_grad=True), "ddp.check_for_nan_in_grad", True),
    "ddp.bucket_size": (ddp(**OVERLAP, bucket_size=77), "ddp.bucket_size", 77),
    "ddp.average_in_collective": (ddp(average_in_collective=True), "calculate_per_token_loss", False),
    "virtual_pipeline_parallel_size": (
        {"virtual_pipeline_parallel_size": 2},
        "virtual_pipeline_model_parallel_size",
        2,
    ),
    "use_deterministic_algorithms": ({"use_deterministic_algorithms": True}, "deterministic_mode", True),
    "recompute_granularity": (SELECTIVE, "recompute_granularity", "selective"),
    "recompute_method": ({"recompute_method": "block"}, "recompute_method", "block"),
    "recompute_num_layers": ({"recompute_num_layers": 2}, "recompute_num_layers", 2),
    "recompute_modules": ({**SELECTIVE, "recompute_modules": ["moe"]}, "recompute_modules", ["moe"]),
    "distribute_saved_activations": ({"distribute_saved_activations": True}, "distribute_saved_activations", True),
    "moe_token_dispatcher_type": ({"moe_token_dispatcher_type": "allgather"}, "variable_seq_lengths", False),
    "moe_shared_expert_overlap": ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap", True),
    "overlap_param_gather_with_optimizer_step": (
        {
            "overlap_param_gather_with_optimizer_step": True,
            "virtual_pipeline_parallel_size": 2,
            **ddp(**OVERLAP, overlap_param_gather=True),
        },
        "optimizer.overlap_param_gather_with_optimizer_step",
        True,
    ),
}
"""Option -> options that set it, a setting of Megatron-Core, its value."""
NEEDING: dict[str, dict[str, Any]] = {
    "fp8=hybrid": {"fp8": "hybrid"},
    "ddp.fp8_param_gather": ddp(fp8_param_gather=True),
    "use_precision_aware_optimizer": {"use_precision_aware_optimizer": True},
    "moe_permute_fusion": {"moe_permute_fusion": True},
    "recompute_modules=layernorm": {**SELECTIVE, "recompute_modules": ["layernorm"]},
}
"""Refused without Transformer Engine."""
TYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Of use_precision_aware_optimizer."""
TESTED_ALONE = ("moe_router_dtype", "offload_optimizer", "fp8_recipe")
"""`test_the_router_computes_in_its_type`, `test_optimizer_state.py`, `test_options_of_transformer_engine_reach_it`."""


@pytest.mark.parametrize("name", ALIVE)
def test_an_option_reaches_megatron_core(name):
    options, setting, value = ALIVE[name]
    settings = partial(settings_of, hf=SHARED if "shared" in name else DENSE)
    assert settings(MegatronEngineConfig())[setting] != value
    assert settings(MegatronEngineConfig(**options))[setting] == value


@pytest.mark.parametrize("name", NEEDING)
def test_an_option_that_needs_transformer_engine_is_refused_without_it(name):
    options = MegatronEngineConfig(**NEEDING[name])
    problem = package_problem("megatron", options)
    assert problem is not None
    assert f"megatron.{name} " in problem
    assert "transformer-engine" in problem
    assert "\n" not in problem


@pytest.mark.parametrize(("recipe", "multiple"), [("delayed", 16), ("tensorwise", 16), ("mxfp8", 32)])
def test_options_of_transformer_engine_reach_it(recipe, multiple):
    """A model without experts, whose configuration asks for no version of Transformer Engine."""
    from areal.engine.megatron.model_config import row_multiple

    options = MegatronEngineConfig(fp8="hybrid", fp8_recipe=recipe, **ddp(fp8_param_gather=True))
    result = settings_of(options, Qwen3Config(**SHAPE))
    assert (result["fp8"], result["fp8_recipe"], result["fp8_param"]) == ("hybrid", recipe, True)
    assert result["ddp.fp8_param_gather"]
    assert result["optimizer.fp8_recipe"] == recipe
    assert row_multiple(options) == multiple
    assert row_multiple(MegatronEngineConfig()) == 1


@pytest.fixture
def plain_kernels(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        monkeypatch.setenv(name, "mine")  # restored after the test
        monkeypatch.delenv(name)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("plain_kernels")
def test_deterministic_algorithms_are_those_of_torch_too():
    from areal.engine.megatron.model_config import choose_kernels

    choose_kernels(MegatronEngineConfig())
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    choose_kernels(MegatronEngineConfig(use_deterministic_algorithms=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_dropout_of_a_trained_model_is_refused():
    from areal.engine.megatron.model_config import require_mapped

    hf, trained = Qwen3Config(**SHAPE, attention_dropout=0.1), TrainEngineConfig(path="x", optimizer=OptimizerConfig())
    with pytest.raises(ConfigError) as caught:
        require_mapped(hf, trained)
    assert caught.value.code == "model.unsupported"
    require_mapped(hf, replace(trained, disable_dropout=True))
    require_mapped(hf, replace(trained, optimizer=None))
    require_mapped(Qwen3Config(**SHAPE), trained)


def test_a_dispatcher_without_its_package_is_refused():
    problem = package_problem("megatron", MegatronEngineConfig(moe_token_dispatcher_type="flex"))
    assert problem is not None
    assert "deep_ep" in problem


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", torch.float32), ("fp64", torch.float64), (None, None)])
def test_the_router_computes_in_its_type(dtype, expected, monkeypatch):
    from areal.engine.megatron.assembly import ROUTER_DTYPES
    from areal.engine.megatron.model import PackedRouter

    options = replace(MegatronEngineConfig(), moe_router_dtype=dtype)
    config = SimpleNamespace(**settings_of(options) | {"params_dtype": torch.bfloat16})
    router = PackedRouter(DENSE, ROUTER_DTYPES[dtype], config=config, pg_collection=None)
    seen, plain = [], type(router.gate).forward

    def record(gate, states):
        seen.append((states.dtype, gate.weight.dtype))
        return plain(gate, states)

    monkeypatch.setattr(type(router.gate), "forward", record)
    weights, chosen = router(torch.randn(5, 1, 16, dtype=torch.bfloat16))
    assert seen == [(expected or torch.bfloat16,) * 2]
    assert weights.dtype == torch.float32
    assert chosen.sum(1).tolist() == [2] * 5


def test_the_table_has_every_option():
    ours = {field.name for field in fields(MegatronEngineConfig)} - {"ddp"}
    ours |= {f"ddp.{field.name}" for field in fields(DistributedDataParallelConfig)}
    refused = {name.split("=")[0] for name in NEEDING}
    assert {*ALIVE, *refused, *TYPES, *TESTED_ALONE} == ours
    assert len(ours | LEGACY["MegatronEngineConfig"].keys()) >= 28
