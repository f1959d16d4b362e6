"""The flags in `sglang:` and `vllm:` are passed to the server as written, except those that areal sets itself."""

from pathlib import Path

import pytest

from areal.api.config import GRPOConfig, load_config
from areal.fleet.server_backend import backend_named, flag_problems, given_flags, ignored_flags
from areal.fleet.sglang import SGLANG
from areal.fleet.vllm import VLLM

MINIMAL = """
experiment_name: sort
trial_name: t0
allocation_mode: sglang:d1+fsdp:d1
train_dataset: {path: rows.jsonl, batch_size: 8}
gconfig: {max_new_tokens: 64}
actor: {path: /models/tiny, optimizer: {lr: 1e-4}}
"""
ON_VLLM = "allocation_mode=vllm:d1+fsdp:d1"
KEEP_CACHE = ["rollout.weight_update=keep_cache"]
REPLAY = ["actor.router_replay=true"]


@pytest.fixture
def load(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return lambda *overrides: load_config(["--config", str(path), *overrides], GRPOConfig)


def test_flags_are_kept_as_they_are_written(load) -> None:
    config = load("sglang.mem-fraction-static=0.7", "sglang.lora_paths=[a, b]", "sglang.cuda_graph_config={bs: [1]}")
    assert config.server_backend == "sglang"
    assert config.server_flags == {
        "mem-fraction-static": 0.7,
        "lora_paths": ["a", "b"],
        "cuda_graph_config": {"bs": [1]},
    }


def problems(config: GRPOConfig) -> list[tuple[str, str]]:
    return list(backend_named(config.server_backend).problems(config))


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        (["sglang.port=3"], "sglang.port", "3 "),
        (["sglang.tp-size=2"], "sglang.tp-size", "allocation_mode"),
        (["sglang.device=cpu"], "sglang.device", "'cpu'"),
        (["sglang.enable_metrics=false"], "sglang.enable_metrics", "set it to true"),
        (["sglang.dp_size=2"], "sglang.dp_size", "set it to 1"),
        (["sglang.config=x.yaml"], "sglang.config", "x.yaml"),
        (["sglang.random_seed=-1"], "sglang.random_seed", "-1 "),
        (["sglang.load-format=auto", "actor.init_from_scratch=true"], "sglang.load_format", "'auto'"),
        (["sglang={--dtype: auto}"], "sglang.--dtype", "dtype"),
        (["sglang={page_size: 1, page-size: 1}"], "sglang.page-size", "twice"),
        (["sglang.log_level=.nan"], "sglang.log_level", "nan"),
        (["sglang.context_length=64"], "gconfig.max_new_tokens", "sglang.context_length=64"),
        ([ON_VLLM, "vllm.logprobs_mode=raw_logprobs"], "vllm.logprobs_mode", "gconfig"),
        ([ON_VLLM, "vllm.api_server_count=2"], "vllm.api_server_count", "set it to 1"),
        (["sglang.use_ray=true"], "sglang.use_ray", "set it to false"),
        (["actor.lora={}", "sglang.enable_lora=false"], "sglang.enable_lora", "actor.lora"),
        ([ON_VLLM, "actor.lora={}", "vllm.enable-lora=false"], "vllm.enable-lora", "actor.lora"),
        ([ON_VLLM, "actor.router_replay=true"], "actor.router_replay", "native or sglang"),
        (["sglang.tokenizer_worker_num=2"], "sglang.tokenizer_worker_num", "2 "),
        (["sglang.allow_auto_truncate=true"], "sglang.allow_auto_truncate", "set it to false"),
        ([*KEEP_CACHE, "sglang.disable-overlap-schedule=false"], "sglang.disable-overlap-schedule", "keep_cache"),
        ([*REPLAY, "sglang.enable_return_routed_experts=false"], "sglang.enable_return_routed_experts", "replay"),
        ([ON_VLLM, "vllm.distributed-executor-backend=ray"], "vllm.distributed-executor-backend", "set it to mp"),
        ([ON_VLLM, "vllm.disable_log_stats=true"], "vllm.disable_log_stats", "set it to false"),
        ([ON_VLLM, "vllm.max-model-len=8"], "gconfig.max_new_tokens", "vllm.max_model_len=8"),
        ([ON_VLLM, "vllm.max_model_len=99", "eval_gconfig.max_new_tokens=99"], "eval_gconfig.max_new_tokens", "99 "),
    ],
)
def test_what_a_server_cannot_do_is_found_by_key_and_value(load, overrides: list[str], path: str, value: str) -> None:
    [(result, sentence)] = problems(load(*overrides))
    assert result == path
    assert value in sentence


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["gconfig.frequency_penalty=1"], "gconfig.frequency_penalty"),
        (["eval_gconfig.repetition_penalty=2", "eval_gconfig.max_new_tokens=8"], "eval_gconfig.repetition_penalty"),
        ([ON_VLLM, "gconfig.temperature=0.5", "actor.temperature=0.5", "gconfig.top_p=0.5"], "gconfig.temperature"),
        ([ON_VLLM, "vllm.skip-tokenizer-init=true", "gconfig.stop=['x']"], "gconfig.stop"),
    ],
)
def test_sampling_that_a_server_cannot_do_is_refused(load, overrides: list[str], path: str) -> None:
    assert [item for item, _ in problems(load(*overrides))] == [path]


def test_evaluations_need_no_log_probabilities(load) -> None:
    assert problems(load(ON_VLLM, "eval_gconfig={temperature: 0.5, top_p: 0.5, max_new_tokens: 8}")) == []


def test_the_sections_of_other_servers_are_not_checked(load) -> None:
    assert problems(load("vllm.port=3", "native.context_length=8")) == []
    assert problems(load(ON_VLLM, "sglang.context_length=8")) == []
    native = load("allocation_mode=native:d1+fsdp:d1", "native.context_length=8", "sglang.port=1")
    [(path, sentence)] = problems(native)
    assert path == "gconfig.max_new_tokens"
    assert "native.context_length=8" in sentence


def test_fixed_flags_are_accepted_with_the_same_value() -> None:
    flags = {"enable_metrics": True, "dp-size": 1, "port": None, "host": "", "nnodes": 1}
    assert list(flag_problems("sglang", SGLANG.flags, flags)) == []
    assert list(flag_problems("vllm", VLLM.flags, {"pipeline_parallel_size": 1, "disable_log_stats": False})) == []


def test_flags_without_a_value_and_patches_of_areal_are_left_out() -> None:
    flags = {"torchao_config": "", "lora_paths": [], "cuda_graph_bs": None, "enable_fast_load": True, "page-size": 0}
    assert given_flags(SGLANG.flags, flags) == {"page_size": 0}
    assert ignored_flags(SGLANG.flags, flags) == ["enable_fast_load"]
    assert given_flags(SGLANG.flags, {"enable_ep_moe": True}) == {"enable_ep_moe": True}
    assert given_flags(SGLANG.flags, {"enable_ep_moe": False}) == {}
    alone = {"max_loaded_loras": 1, "max_loras_per_batch": 1}
    assert (given_flags(SGLANG.flags, alone), ignored_flags(SGLANG.flags, alone)) == ({}, list(alone))
    assert given_flags(SGLANG.flags, {"max_loaded_loras": 9}) == {"max_loaded_loras": 9}
    vllm = {"worker_extension_cls": "areal.thirdparty.Extension", "swap_space": 4, "seed": 1}
    assert given_flags(VLLM.flags, vllm) == {"seed": 1}
    assert ignored_flags(VLLM.flags, vllm) == ["worker_extension_cls", "swap_space"]


@pytest.mark.parametrize("backend", [SGLANG, VLLM], ids=lambda backend: backend.name)
def test_names_of_flags_are_plain(backend) -> None:
    rules, keys = backend.flags, {backend.context_key, backend.model_key}
    names = [*rules.owned, *rules.fixed, *rules.ignored, *rules.bare, *keys, rules.seed, rules.tokenizer]
    assert all(name == name.replace("-", "_") for name in names)
    assert not set(rules.owned) & (set(rules.fixed) | set(rules.ignored) | keys)
