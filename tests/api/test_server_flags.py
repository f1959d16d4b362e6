"""The mappings sglang: and vllm: are passed on verbatim, but for what areal itself sets; addresses are addresses."""

from pathlib import Path

import pytest

from areal.api.config import GRPOConfig, load_config
from areal.api.config.rollout import server_url
from areal.api.config.servers import FOREIGN_SERVERS, flag_problems, given_flags, ignored_keys
from areal.api.errors import ConfigError

MINIMAL = """
experiment_name: sort
trial_name: t0
allocation_mode: sglang:d1+fsdp:d1
train_dataset: {path: rows.jsonl, batch_size: 8}
gconfig: {max_new_tokens: 64}
actor: {path: /models/tiny, optimizer: {lr: 1e-4}}
"""
VLLM = "allocation_mode=vllm:d1+fsdp:d1"


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


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["sglang.port=3"], "sglang.port: 3 cannot be chosen here, areal chooses free ports on loopback: remove it"),
        (["sglang.tp-size=2"], "sglang.tp-size: 2 cannot be chosen here, allocation_mode says it"),
        (["sglang.device=cpu"], "sglang.device: 'cpu' cannot be chosen here, areal gives each server its GPUs"),
        (["sglang.enable_metrics=false"], "sglang.enable_metrics: False cannot .* remove it or set it to true"),
        (["sglang.dp_size=2"], "sglang.dp_size: 2 cannot be chosen here, allocation_mode says it: .* set it to 1"),
        (["sglang.config=x.yaml"], "sglang.config: .* write the flags of that file here"),
        (["sglang.random_seed=-1"], "sglang.random_seed: -1 is no seed"),
        (
            ["sglang.load-format=auto", "actor.init_from_scratch=true"],
            "sglang.load_format: 'auto' would let the servers",
        ),
        (["sglang={--dtype: auto}"], "sglang.--dtype: is no name of a flag: write dtype"),
        (["sglang={page_size: 1, page-size: 1}"], "sglang.page-size: is given twice"),
        (["sglang.log_level=.nan"], "sglang.log_level: nan is no number"),
        (["sglang.context_length=64"], "gconfig.max_new_tokens: 64 leaves no room .* sglang.context_length=64"),
        ([VLLM, "vllm.logprobs_mode=raw_logprobs"], "vllm.logprobs_mode: .* areal chooses it by gconfig"),
        ([VLLM, "vllm.api_server_count=2"], "vllm.api_server_count: 2 .* set it to 1"),
        (["sglang.use_ray=true"], "sglang.use_ray: True .* one group of processes: .* set it to false"),
        (["sglang.tokenizer_worker_num=2"], "sglang.tokenizer_worker_num: 2 .* one HTTP process"),
        ([VLLM, "vllm.distributed-executor-backend=ray"], "vllm.distributed-executor-backend: 'ray' .* set it to mp"),
        ([VLLM, "vllm.disable_log_stats=true"], "vllm.disable_log_stats: True .* set it to false"),
        ([VLLM, "vllm.max-model-len=8"], "gconfig.max_new_tokens: 64 leaves no room .* vllm.max_model_len=8"),
        (
            [VLLM, "vllm.max_model_len=99", "eval_gconfig.max_new_tokens=99"],
            "eval_gconfig.max_new_tokens: 99 leaves no room",
        ),
    ],
)
def test_what_cannot_be_asked_of_a_server(load, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{expected}"):
        load(*overrides)


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["gconfig.frequency_penalty=1"], "gconfig.frequency_penalty"),
        (["eval_gconfig.repetition_penalty=2", "eval_gconfig.max_new_tokens=8"], "eval_gconfig.repetition_penalty"),
        ([VLLM, "gconfig.temperature=0.5", "actor.temperature=0.5", "gconfig.top_p=0.5"], "gconfig.temperature"),
        ([VLLM, "vllm.skip-tokenizer-init=true", "gconfig.stop=['x']"], "gconfig.stop"),
    ],
)
def test_sampling_that_a_server_cannot_do_is_refused(load, overrides: list[str], path: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{path}: "):
        load(*overrides)


def test_evaluations_need_no_log_probabilities(load) -> None:
    load(VLLM, "eval_gconfig={temperature: 0.5, top_p: 0.5, max_new_tokens: 8}")


def test_the_section_of_other_servers_is_not_judged(load) -> None:
    load("vllm.port=3", "native.context_length=8")
    load(VLLM, "sglang.context_length=8")
    with pytest.raises(ConfigError, match=r"native.context_length=8"):
        load("allocation_mode=native:d1+fsdp:d1", "native.context_length=8", "sglang.port=1")


def test_what_areal_sets_may_stand_there_when_it_is_the_same() -> None:
    flags = {"enable_metrics": True, "dp-size": 1, "port": None, "host": "", "nnodes": 1}
    assert list(flag_problems("sglang", flags)) == []
    assert list(flag_problems("vllm", {"pipeline_parallel_size": 1, "disable_log_stats": False})) == []


def test_flags_without_a_value_and_patches_of_areal_are_left_out() -> None:
    flags = {"torchao_config": "", "lora_paths": [], "cuda_graph_bs": None, "enable_fast_load": True, "page-size": 0}
    assert given_flags("sglang", flags) == {"page_size": 0}
    assert ignored_keys("sglang", flags) == ["sglang.enable_fast_load"]
    assert given_flags("sglang", {"enable_ep_moe": True}) == {"enable_ep_moe": True}
    assert given_flags("sglang", {"enable_ep_moe": False}) == {}
    vllm = {"worker_extension_cls": "areal.thirdparty.Extension", "swap_space": 4, "seed": 1}
    assert given_flags("vllm", vllm) == {"seed": 1}
    assert ignored_keys("vllm", vllm) == ["vllm.worker_extension_cls", "vllm.swap_space"]


@pytest.mark.parametrize("section", FOREIGN_SERVERS)
def test_names_of_flags_are_plain(section: str) -> None:
    server = FOREIGN_SERVERS[section]
    names = [*server.owned, *server.fixed, *server.ignored, *server.bare, server.context, server.model, server.seed]
    assert all(name == name.replace("-", "_") for name in names)
    assert not set(server.owned) & (set(server.fixed) | set(server.ignored) | {server.context, server.model})


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:80", "http://127.0.0.1:80"),
        ("http://h:80/", "http://h:80"),
        ("[::1]:80", "http://[::1]:80"),
    ],
)
def test_addresses_of_servers(text: str, url: str) -> None:
    assert server_url(text) == url


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("https://h:80", "areal speaks plain HTTP, not https"),
        ("h", "it names no port"),
        ("h:0", "it names no port"),
        ("h:x", "Port could not be cast"),
        ("h:80/v1", "something follows the port"),
        (":80", "it names no host"),
        ("a b:80", "it names no host"),
    ],
)
def test_what_is_no_address(load, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout.server_addrs: {text!r} is no address of a server \({why}"):
        load(f"rollout.server_addrs=['{text}']")


def test_addresses_are_as_many_as_allocated(load) -> None:
    assert load("allocation_mode=sglang:d2t4+fsdp:d1", "rollout.server_addrs=['h:1', 'h:2']").rollout.server_addrs
    with pytest.raises(
        ConfigError, match=r"names 2 servers, but allocation_mode=sglang:d1t4\+d1 has 1: write sglang:d2t4"
    ):
        load("allocation_mode=sglang:d1t4+d1", "rollout.server_addrs=['h:1', 'h:2']")


def test_an_address_stands_for_one_server(load) -> None:
    with pytest.raises(ConfigError, match=r"rollout.server_addrs: 'http://h:1' is given twice"):
        load("rollout.server_addrs=['h:1', 'http://h:1']")
