"""The commands and environments of SGLang and vLLM servers, as they follow from a configuration."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from areal.api.config import (
    ClusterSpecConfig,
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    LauncherConfig,
    NativeServerConfig,
    OptimizerConfig,
    PPOActorConfig,
    TrainDatasetConfig,
)
from areal.api.config.train import LoRAConfig
from areal.fleet.server_backend import SERVER_SIDE, backend_named, flag_words, server_python
from areal.fleet.sglang import SGLANG, core_bindings
from areal.fleet.vllm import VLLM
from areal.launcher.job import another_server, make_plan
from areal.launcher.placement import Machine
from areal.models.model_shape import ModelShape
from areal.system.process import ProcessContext
from tests.expect import raises_code

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 40000,
    "tie_word_embeddings": True,
}
KV_VALUES = 2 * 2 * 2 * 16


def config_of(backend, sizes="d2", *, actor=None, **changes):
    settings = {
        "experiment_name": "e",
        "trial_name": "t",
        "seed": 40,
        "allocation_mode": f"{backend}:{sizes}+fsdp:d1",
        "cluster": ClusterSpecConfig(fileroot="/runs"),
        "train_dataset": TrainDatasetConfig(path="x", batch_size=8),
        "gconfig": GenerationHyperparameters(max_new_tokens=8),
        "actor": PPOActorConfig(
            **({"path": "org/model", "dtype": "float32", "optimizer": OptimizerConfig()} | (actor or {}))
        ),
    }
    return GRPOConfig(**(settings | changes))


def command(config, *, on_gpu=True):
    return backend_named(config.server_backend).command(config, on_gpu)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return str(tmp_path)


def test_command_of_sglang():
    argv = command(config_of("sglang", "d2t4", server_python="/env/bin/python")).argv
    assert argv == (
        "/env/bin/python",
        "-m",
        "sglang.launch_server",
        "--model-path=org/model",
        "--dtype=float32",
        "--log-level-http=warning",
        "--skip-server-warmup",
        "--tp-size=4",
        "--nccl-port={port_nccl}",
        "--enable-metrics",
        "--incremental-streaming-output",
        "--host=127.0.0.1",
        "--port={port}",
        "--random-seed={index+40}",
    )


def test_command_of_vllm():
    argv = command(config_of("vllm", "d2t4")).argv
    assert argv[:5] == (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "org/model")
    assert set(argv[5:]) == {
        "--dtype=float32",
        "--uvicorn-log-level=warning",
        "--max-logprobs=64",
        "--tensor-parallel-size=4",
        "--enable-scale-out",
        "--worker-extension-cls=areal_vllm.extension.WorkerExtension",
        '--weight-transfer-config={"backend":"areal"}',
        "--logprobs-mode=raw_logprobs",
        "--host=127.0.0.1",
        "--port={port}",
        "--seed={index+40}",
    }


@pytest.mark.parametrize(
    ("backend", "flag", "ours"),
    [("sglang", "--context-length=32768", "context_length"), ("vllm", "--max-model-len=32768", "max_model_len")],
)
def test_the_profile_of_areal_gives_flags_that_the_user_does_not(backend, flag, ours):
    assert flag not in command(config_of(backend)).argv
    assert flag in command(config_of(backend, server_defaults="areal")).argv
    changed = command(config_of(backend, server_defaults="areal", **{backend: {ours: 100}})).argv
    assert (flag in changed, f"{flag.partition('=')[0]}=100" in changed) == (False, True)
    servers_own = command(config_of(backend, server_defaults="areal", **{backend: {ours: None}})).argv
    assert not any(word.startswith(flag.partition("=")[0]) for word in servers_own)
    assert "--disable-sliding-window" not in servers_own  # AReaL's; vLLM would end for a window below its own length


def test_flags_of_the_user_override_the_defaults():
    flags = {"model_path": "/other", "dtype": "half", "random_seed": 7, "page-size": 16, "torchao_config": ""}
    argv = command(config_of("sglang", sglang=flags | {"enable_fast_load": True})).argv
    assert {"--model-path=/other", "--dtype=half", "--random-seed={index+7}", "--page-size=16"} < set(argv)
    assert not [word for word in argv if "torchao" in word or "fast-load" in word or "float32" in word]
    argv = command(config_of("vllm", vllm={"model": "/other", "seed": 7, "worker_extension_cls": "x.Y"})).argv
    assert argv[4] == "/other"
    assert sorted(word for word in argv if word.startswith(("--model", "--seed", "--worker"))) == [
        "--seed={index+7}",
        "--worker-extension-cls=areal_vllm.extension.WorkerExtension",
    ]


@pytest.mark.parametrize(
    ("backend", "name", "value", "words"),
    [
        (SGLANG, "enable_lora", True, ["--enable-lora"]),
        (SGLANG, "enable_lora", False, []),
        (SGLANG, "chunked_prefill_size", -1, ["--chunked-prefill-size=-1"]),
        (SGLANG, "lora_paths", ["a", "b"], ["--lora-paths", "a", "b"]),
        (SGLANG, "lora_paths", [{"lora_name": "a"}], ["--lora-paths", '{"lora_name":"a"}']),
        (SGLANG, "log_level", "warning", ["--log-level=warning"]),
        (VLLM, "enable_prefix_caching", False, ["--no-enable-prefix-caching"]),
        (VLLM, "disable_log_stats", False, []),
        (VLLM, "compilation_config", {"level": 3, "on": True}, ['--compilation-config={"level":3,"on":true}']),
        (VLLM, "gpu_memory_utilization", 0.9, ["--gpu-memory-utilization=0.9"]),
    ],
)
def test_a_flag_as_words(backend, name, value, words):
    assert flag_words(backend.flags, name, value) == words


def test_servers_without_a_gpu_get_cpu_flags(model):
    actor = {"path": model}
    sglang = command(config_of("sglang", actor=actor), on_gpu=False)
    assert {"--device=cpu", "--attention-backend=torch_native", "--max-total-tokens=40000"} < set(sglang.argv)
    assert sglang.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "PYTHONPATH" not in sglang.env
    vllm = command(config_of("vllm", actor=actor), on_gpu=False)
    assert {"--enforce-eager", f"--kv-cache-memory-bytes={40000 * KV_VALUES * 4}"} < set(vllm.argv)
    assert vllm.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert vllm.env["PYTHONPATH"] == str(SERVER_SIDE)
    short = command(config_of("vllm", actor=actor, vllm={"max_model_len": 128, "dtype": "bfloat16"}), on_gpu=False)
    assert f"--kv-cache-memory-bytes={64 * 512 * KV_VALUES * 2}" in short.argv
    unknown = command(config_of("vllm"), on_gpu=False)
    assert f"--kv-cache-memory-bytes={2**30}" in unknown.argv


def test_linear_attention_of_vllm_on_the_cpu_needs_bfloat16(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"model_type": "qwen3_5_text"}))
    config = config_of("vllm", actor={"path": str(tmp_path)})
    with raises_code("model.unsupported", "vllm.dtype", "bfloat16"):
        command(config, on_gpu=False)
    command(config, on_gpu=True)
    command(replace(config, vllm={"dtype": "bfloat16"}), on_gpu=False)


def test_flags_of_the_user_override_cpu_flags(model):
    flags = {"attention_backend": "intel_amx", "max_total_tokens": 77, "disable_cuda_graph": False}
    argv = command(config_of("sglang", actor={"path": model}, sglang=flags), on_gpu=False).argv
    assert [word for word in argv if word.startswith(("--att", "--max-total", "--disable"))] == [
        "--attention-backend=intel_amx",
        "--max-total-tokens=77",
    ]
    on_gpu = command(config_of("sglang", actor={"path": model}))
    assert not [word for word in on_gpu.argv if "torch_native" in word or "device" in word]
    assert "PYTHONPATH" not in on_gpu.env


def test_flags_for_health_during_pauses_and_development_routes():
    assert command(config_of("sglang")).env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    env = command(config_of("vllm")).env
    assert (env["VLLM_SERVER_DEV_MODE"], env["VLLM_HOST_IP"]) == ("1", "127.0.0.1")
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in env
    lora = command(config_of("vllm", vllm={"enable-lora": True})).env
    assert lora["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_flags_of_adapters_in_areal_files_reach_a_server_that_gets_adapters():
    """AReaL's files repeat the modules of the trainer, and name its limits of one adapter."""
    actor = {"lora": LoRAConfig(rank=4)}
    flags = {"lora_target_modules": ["all-linear"], "max_loaded_loras": 1, "max_loras_per_batch": 1}
    argv = command(config_of("sglang", actor=actor, sglang=flags)).argv
    at = argv.index("--lora-target-modules")
    assert argv[at + 1] == "all"
    assert {"--enable-lora", "--max-lora-rank=4", "--max-loras-per-batch=4"} < set(argv)
    assert not [word for word in argv if word.startswith("--max-loaded-loras")]
    on_vllm = command(config_of("vllm", actor=actor))
    assert "--enable-lora" in on_vllm.argv
    assert on_vllm.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_a_server_that_keeps_caches_has_no_step_in_flight_at_an_update():
    """SGLang reports the token of that step with the version after it."""
    words = {
        mode: command(config_of("sglang", rollout=InferenceEngineConfig(weight_update=mode))).argv
        for mode in ("keep", "keep_cache")
    }
    flag = "--disable-overlap-schedule"
    assert (flag in words["keep"], flag in words["keep_cache"]) == (False, True)


def test_log_probabilities_are_of_the_kind_that_the_sampling_needs():
    warm = config_of("vllm", gconfig=GenerationHyperparameters(temperature=0.7))
    assert "--logprobs-mode=processed_logprobs" in command(warm).argv


def test_init_from_scratch_loads_no_weights():
    scratch = {"init_from_scratch": True}
    assert "--load-format=dummy" in command(config_of("vllm", actor=scratch)).argv
    assert "--load-format=dummy" not in command(config_of("vllm")).argv
    other = config_of("sglang", actor=scratch, sglang={"model_path": "/trained"})
    assert "--load-format=dummy" in command(other).argv


def test_another_tokenizer_is_passed_to_the_server():
    assert "--tokenizer-path=/tok" in command(config_of("sglang", tokenizer_path="/tok")).argv
    assert "--tokenizer=/tok" in command(config_of("vllm", tokenizer_path="/tok")).argv
    assert not [word for word in command(config_of("vllm", tokenizer_path="org/model")).argv if "tokenizer" in word]


def test_interpreter_of_the_servers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert server_python(config_of("vllm")) == sys.executable
    (tmp_path / "link").symlink_to(sys.executable)
    assert server_python(config_of("vllm", server_python="./link")) == str(tmp_path / "link")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mypython").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert server_python(config_of("vllm", server_python="mypython")) == str(tmp_path / "bin" / "mypython")


def test_plan_starts_hosts_with_gpus_of_their_own(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    machine = Machine(cores=64, gpus=("0", "1", "2", "3", "4", "5", "7"))
    plan = make_plan(config_of("sglang", "d2t2"), [machine])
    servers = [process for process in plan.processes if process.role == "server"]
    assert [server.gpus for server in servers] == [("0", "1"), ("2", "3")]
    assert [server.env["CUDA_VISIBLE_DEVICES"] for server in servers] == ["0,1", "2,3"]
    assert [gpus for _, gpus in plan.spare_gpus] == [("5", "7")]
    at = servers[0].argv.index("--")
    assert servers[0].argv[1:at] == (
        "-m",
        "areal.fleet.server_host",
        "--backend",
        "sglang",
        "--config",
        "/runs/e/t/config.yaml",
    )
    assert servers[0].argv == servers[1].argv, "the host puts the port and the index in"
    joins = another_server(servers[0], 2, host=machine.host, gpus=("5", "7"))
    assert (joins.env["CUDA_VISIBLE_DEVICES"], joins.argv) == ("5,7", servers[0].argv)
    assert ProcessContext.from_env(joins.env).index == 2
    trainer = plan.processes[-1]
    assert trainer.gpus == ("4",)
    assert (trainer.env["NCCL_CUMEM_ENABLE"], trainer.env["NCCL_NVLS_ENABLE"]) == ("0", "0")
    assert "NCCL_CUMEM_ENABLE" not in make_plan(config_of("vllm", "d1"), [machine]).processes[-1].env


def test_every_rank_of_a_server_counts_when_cores_are_shared_out(monkeypatch):
    plan = make_plan(config_of("vllm", "d1t3"), [Machine(cores=8)])
    assert [process.num_threads for process in plan.processes] == [1, 2, 2]
    assert plan.processes[1].env["OMP_NUM_THREADS"] == "2"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(12, 20), 3, 5})  # in a container
    bound = make_plan(config_of("sglang", "d2t2"), [Machine(cores=10)]).processes
    assert [item.env["SGLANG_CPU_OMP_THREADS_BIND"] for item in bound[1:3]] == ["3,5|12,13", "14,15|16,17"]
    assert core_bindings(1, 2, 1, [0, 1]) == {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, "round and round"
    assert core_bindings(0, 1, 1, [0]) == {}
    assert VLLM.core_bindings is None


def test_search_paths_begin_with_entries_of_areal(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("PATH", "/usr/bin")
    config = config_of("vllm", server_python="/env/bin/python")
    server = make_plan(config, [Machine(cores=4)]).processes[1]
    assert server.env["PYTHONPATH"] == f"{SERVER_SIDE}{os.pathsep}/mine"
    assert server.env["PATH"] == f"/env/bin{os.pathsep}/usr/bin"
    launcher = LauncherConfig(inference_server_env_vars="PYTHONPATH=/given,VLLM_HOST_IP=10.0.0.1")
    server = make_plan(config_of("vllm", launcher=launcher), [Machine(cores=4)]).processes[1]
    assert server.env["PYTHONPATH"] == f"{SERVER_SIDE}{os.pathsep}/given", "in place of the inherited, as elsewhere"
    assert server.env["PATH"] == f"{os.path.dirname(sys.executable)}{os.pathsep}/usr/bin"
    assert server.env["VLLM_HOST_IP"] == "10.0.0.1"


def test_memory_of_a_foreign_server(model):
    def memory(machine, **changes):
        return make_plan(config_of(changes.pop("backend"), actor={"path": model}, **changes), [machine]).processes[1]

    on_cpu, parameters = Machine(cores=4), ModelShape.read(model).parameters
    assert memory(on_cpu, backend="vllm").memory_bytes == 4 * (parameters + 40000 * KV_VALUES)
    assert memory(on_cpu, backend="sglang").memory_bytes == 4 * (parameters + 40000 * KV_VALUES)
    on_gpu = Machine(cores=4, gpus=("0", "1", "2"))
    assert memory(on_gpu, backend="vllm", vllm={"dtype": "bfloat16"}).memory_bytes == 2 * parameters


def test_memory_of_a_native_server(model):
    native = NativeServerConfig(dtype="float32", max_total_tokens=1000)
    start = command(config_of("native", actor={"path": model}, native=native), on_gpu=False)
    # Twice the weights: an update is received beside those that generate.
    assert start.memory_bytes == 4 * (2 * ModelShape.read(model).parameters + 1000 * KV_VALUES)
    assert start.argv[1:] == ("-m", "areal.inference.server", "--config", "/runs/e/t/config.yaml")
    assert command(config_of("native")).memory_bytes is None


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [(Qwen2Config, {}), (Qwen2Config, {"num_key_value_heads": 4}), (Qwen3Config, {"head_dim": 32})],
    ids=["qwen2-gqa", "qwen2", "qwen3-gqa"],
)
def test_matrices_in_blocks_are_those_of_a_built_model(tmp_path, kind, sizes):
    config = kind(**{name: value for name, value in MODEL.items() if name != "model_type"} | sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers
    built = sum(module.weight.numel() for module in layers.modules() if isinstance(module, torch.nn.Linear))
    assert ModelShape.read(str(tmp_path)).block_matrices == built


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("fp8", 8), ("int4", 5), ("mxfp4", 4.25), ("nvfp4", 4.5)])
def test_memory_of_a_native_server_with_quantised_weights(model, kind, bits):
    native = NativeServerConfig(dtype="bfloat16", max_total_tokens=1000, quantization=kind)
    start = command(config_of("native", actor={"path": model}, native=native), on_gpu=False)
    shape = ModelShape.read(model)
    inside = shape.block_matrices
    weights = 2 * (shape.parameters - inside) + int(inside * bits / 8)
    assert start.memory_bytes == max(2 * weights, 2 * shape.parameters) + 2 * 1000 * KV_VALUES
    on_gpu = command(config_of("vllm", actor={"path": model, "dtype": "bfloat16"}, vllm={"quantization": "fp8"}))
    assert on_gpu.memory_bytes == 2 * shape.parameters - inside
    assert "--quantization=fp8" in on_gpu.argv


@pytest.mark.parametrize(
    ("backend", "kind", "config_json", "text"),
    [
        ("native", "int8", {"num_experts": 4, "moe_intermediate_size": 8}, "this one has experts: remove it"),
        ("native", "fp8", {"layer_types": ["conv"], "conv_L_cache": 3}, "this one has layers with a state: remove it"),
        ("sglang", "fp8", {}, "'fp8': areal cannot update the weights of SGLang servers that quantize them: remove"),
        (
            "vllm",
            "nvfp4",
            {},
            "'nvfp4' is no kind that vLLM makes from the trainer's weights, of all linear layers: use",
        ),
        ("vllm", "awq", {}, "'awq' is no kind that vLLM makes from the trainer's weights, of all linear layers: use"),
    ],
)
def test_quantization_that_a_server_cannot_do_is_refused_before_the_start(model, backend, kind, config_json, text):
    path = Path(model) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config_json))
    section = NativeServerConfig(quantization=kind) if backend == "native" else {"quantization": kind}
    config = config_of(backend, actor={"path": model}, **{backend: section})
    ((key, sentence),) = backend_named(backend).problems(config)
    assert key == f"{backend}.quantization"
    assert text in sentence
    assert not list(backend_named(backend).problems(config_of(backend, actor={"path": model})))
    if backend != "native":
        adapters = config_of(backend, actor={"path": model, "lora": LoRAConfig()}, **{backend: section})
        assert adapters.publishes_adapters
        assert not list(backend_named(backend).problems(adapters))
        off = config_of(backend, actor={"path": model}, **{backend: {"quantization": "none"}})
        assert not list(backend_named(backend).problems(off))
        assert not [word for word in command(off).argv if word.startswith("--quantization")]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("int3", "'int3' is not one of none, int8, fp8, int4, mxfp4, nvfp4"),
    ],
)
def test_kinds_that_native_servers_lack_are_refused(kind, text):
    (problem,) = NativeServerConfig(quantization=kind).problems()
    assert (problem.path, problem.code) == ("quantization", "config.not_a_choice")
    assert problem.message.startswith(text)


def test_attached_servers_need_no_gpu_in_the_plan(tmp_path):
    rollout = InferenceEngineConfig(server_addrs=["127.0.0.1:1", "http://127.0.0.1:2"])
    for backend in ("native", "sglang"):
        plan = make_plan(config_of(backend, rollout=rollout), [Machine(cores=2, gpus=("0",))])
        assert [(process.name, process.gpus) for process in plan.processes] == [
            ("controller", ()),
            ("trainer-0", ("0",)),
        ]
        assert plan.attached == ("http://127.0.0.1:1", "http://127.0.0.1:2")
        assert plan.num_servers == 2
        assert ProcessContext.from_env(plan.processes[0].env).num_servers == 2
        assert plan.processes[1].num_threads == 2


def test_options_of_native_servers_do_not_bind_others():
    config = config_of("vllm", native=NativeServerConfig(device="cpu"))
    assert make_plan(config, [Machine(cores=4, gpus=("0", "1", "2"))]).processes[1].gpus == ("0",)
