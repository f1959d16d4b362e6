"""What servers cannot do is found before anything starts; versions come from their environment without an import."""

import dataclasses
import json
import os
import socket
import sys
import time

import pytest

from areal.api.config import (
    ClusterSpecConfig,
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    NativeServerConfig,
    OptimizerConfig,
    PPOActorConfig,
    RolloutCorrectionConfig,
    TrainDatasetConfig,
    TrainEngineConfig,
)
from areal.api.config.schema import options_without_effect
from areal.api.errors import ConfigError
from areal.launcher import local, preflight
from areal.launcher.job import make_plan
from areal.launcher.placement import Machine
from areal.launcher.preflight import (
    environment_versions,
    nccl_versions,
    notices,
    precision_notice,
    server_problems,
    with_dtypes,
)
from areal.launcher.status import StatusLine
from areal.system.network import Host


def config_of(backend, python="", **changes):
    settings = {
        "experiment_name": "e",
        "trial_name": "t",
        "allocation_mode": f"{backend}:d1+fsdp:d1",
        "cluster": ClusterSpecConfig(fileroot="/runs"),
        "train_dataset": TrainDatasetConfig(path="x", batch_size=8),
        "gconfig": GenerationHyperparameters(max_new_tokens=8),
        "actor": PPOActorConfig(path="org/model", optimizer=OptimizerConfig()),
        "server_python": str(python),
    }
    return GRPOConfig(**(settings | changes))


@pytest.fixture
def interpreter(tmp_path):
    """Makes a program in place of a server's interpreter, which leaves a file when it runs."""

    def make(body):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n{body}\n")
        path.chmod(0o755)
        return path

    return make


def reporting(**versions):
    """A shell command that answers as an environment with these packages."""
    known = {"torch": "2.9.0", "nvidia-nccl-cu13": "", "nvidia-nccl-cu12": "", "vllm": "", "sglang": ""} | versions
    return f"echo '{json.dumps(known)}'"


def check(config, *, machine=None, said=None, **limits):
    plan = make_plan(config, [machine or Machine(cores=2)])
    return server_problems(config, plan, (said if said is not None else []).append, **limits)


def test_versions_are_reported_in_one_line(interpreter):
    python, said = interpreter(reporting(vllm="0.32.0", **{"nvidia-nccl-cu12": "2.27.3"})), []
    assert check(config_of("vllm", python), said=said) == []
    assert said == [f"areal: vLLM 0.32.0, torch 2.9.0, NCCL 2.27.3 in {python}"]


def test_nccl_of_both_ends_is_known_from_the_metadata_of_their_environments(interpreter, monkeypatch):
    other = interpreter(reporting(vllm="0.32.0", **{"nvidia-nccl-cu12": "2.27.3"}))
    ours = other.with_name("own")
    ours.write_text("#!/bin/sh\n" + reporting(**{"nvidia-nccl-cu13": "2.28.9"}))
    ours.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(ours))
    same = nccl_versions(GRPOConfig(allocation_mode="native:d1+fsdp:d1"))
    assert (same.trainers, same.servers) == ("2.28.9", "2.28.9")
    different = nccl_versions(config_of("vllm", other))
    assert (different.trainers, different.servers) == ("2.28.9", "2.27.3")
    other.write_text("#!/bin/sh\nexit 1")
    unknown = nccl_versions(config_of("vllm", other))
    assert (unknown.trainers, unknown.servers) == ("", "")


@pytest.mark.parametrize(
    ("backend", "version", "oldest"),
    [
        ("vllm", "0.29.1", "0.30.0"),
        ("sglang", "0.5.9.post1", "0.5.10"),
        ("vllm", "0.30.0+cu129", ""),
        ("sglang", "0.5.10rc0", ""),
        ("vllm", "0.1.dev7+gabc", ""),
    ],
)
def test_a_version_that_is_too_old_is_refused(interpreter, backend, version, oldest):
    result = check(config_of(backend, interpreter(reporting(**{backend: version}))))
    assert len(result) == bool(oldest)
    assert all(text.startswith("server_python: ") and version in text and oldest in text for text in result)


@pytest.mark.parametrize("versions", [{"vllm": "0.32.0+cpu"}, {"vllm": "0.32.0", "torch": "2.9.0+cpu"}])
def test_a_cpu_build_is_refused_where_servers_get_gpus(interpreter, versions):
    config = config_of("vllm", interpreter(reporting(**versions)))
    assert check(config) == []
    (text,) = check(config, machine=Machine(cores=2, gpus=("0", "1")))
    assert text.startswith("server_python: ")
    assert "cluster.n_gpus_per_node=0" in text


def test_a_real_environment_answers_quickly_and_imports_nothing():
    began_s = time.monotonic()
    result = environment_versions(sys.executable, ("torch", "no-such-package"))
    assert result["torch"]
    assert result["no-such-package"] == ""
    assert time.monotonic() - began_s < 10, "an import of torch alone takes seconds on a busy machine"


def test_a_missing_environment_is_reported_in_one_line(tmp_path, interpreter):
    for python in (tmp_path / "nothing", tmp_path):
        (text,) = check(config_of("vllm", python))
        assert text.startswith(f"server_python: {python} is not a program")
    python = interpreter(reporting())
    (text,) = check(config_of("vllm", python))
    assert text.startswith(f"server_python: {python}: vLLM is not installed there")
    assert text.endswith(", or set server_python to another interpreter")


def test_areals_own_interpreter_has_no_sglang():
    (text,) = check(config_of("sglang"))
    assert text.startswith(f"server_python: {sys.executable}: SGLang is not installed there")
    assert "set server_python" in text


def test_a_probe_that_fails_or_hangs_is_reported(interpreter):
    python = interpreter("echo 'Traceback' >&2; echo 'ImportError: libcuda.so.1' >&2; exit 1")
    (text,) = check(config_of("vllm", python))
    assert text.startswith(f"server_python: {python} ")
    assert text.endswith("ImportError: libcuda.so.1")
    (text,) = check(config_of("vllm", interpreter("exec sleep 1000")), limit_s=0.2)
    assert "0.2 s" in text


def test_a_wrapper_of_the_interpreter_may_print_other_lines(interpreter):
    odd = "echo activated; printf '\\377\\n' >&2"
    assert check(config_of("vllm", interpreter(f"{odd}\n{reporting(vllm='0.32.0')}"))) == []


@pytest.mark.parametrize("text", ["17", "[1]", "{}", ""])
def test_an_answer_in_another_form_counts_as_no_answer(interpreter, text):
    (problem,) = check(config_of("vllm", interpreter(f"echo '{text}'")))
    assert problem.startswith("server_python: ")
    assert problem.endswith("exit code 0")


def test_environments_of_other_backends_are_not_probed(interpreter, tmp_path):
    python = interpreter("exit 1")
    assert check(config_of("native", python)) == []
    attached = InferenceEngineConfig(server_addrs=["127.0.0.1:1"])
    assert check(config_of("vllm", python, rollout=attached)) == []
    assert [text.split(":")[0] for text in check(config_of("vllm", python, rollout=attached, vllm={"port": 3}))] == [
        "vllm.port"
    ]
    assert not (tmp_path / "asked").exists()


def test_flags_without_effect_are_listed_once():
    assert notices(config_of("native")) == notices(config_of("vllm", vllm={"seed": 1})) == []
    both = {"sglang": {"a": 1}, "vllm": {"swap_space": 4}, "native": NativeServerConfig(dtype="float32")}
    (ignored,) = notices(config_of("vllm", **both))
    assert ignored.endswith(": vllm.swap_space")
    assert [item.path for item in options_without_effect(config_of("vllm", **both))] == ["native.dtype", "sglang"]
    assert [item.path for item in options_without_effect(config_of("native", "/python"))] == ["server_python"]
    attached = InferenceEngineConfig(server_addrs=["127.0.0.1:1"])
    assert notices(config_of("vllm", vllm={"seed": 1}, rollout=attached))[0].startswith("areal: vllm: ")


def test_quantized_weights_without_a_correction_are_pointed_out():
    native = NativeServerConfig(quantization="int8")
    (text,) = notices(config_of("native", native=native))
    assert text.startswith("areal: native.quantization=int8: answers come from quantized weights")
    actor = {"path": "org/model", "optimizer": OptimizerConfig()}
    for correction in ({"use_decoupled_loss": True}, {"rollout_correction": RolloutCorrectionConfig(upper=2)}):
        assert not notices(config_of("native", native=native, actor=PPOActorConfig(**actor, **correction)))
    for kind, dtype in {"int8": "float8", "fp8": "float8", "int4": "int4", "nvfp4": "int4", "none": "bfloat16"}.items():
        assert config_of("native", native=NativeServerConfig(quantization=kind)).served_dtype == dtype
    assert config_of("sglang", sglang={"quantization": "w8a8_fp8"}).served_dtype == "float8"
    kinds = {"fp8_per_block": "float8", "mxfp8": "float8", "mxfp4": "int4", "none": "bfloat16"}
    for kind, dtype in kinds.items():
        assert config_of("vllm", vllm={"quantization": kind}).served_dtype == dtype
    (text,) = notices(config_of("vllm", vllm={"quantization": "fp8"}))
    assert text.startswith("areal: vllm.quantization=fp8: ")


@pytest.mark.parametrize(
    ("parts", "changes", "num"), [(8, {}, 0), (9, {}, 1), (5, {"allocation_mode": "native:d1+fsdp:d2"}, 1)]
)
def test_more_minibatches_than_answers_are_pointed_out(parts, changes, num):
    actor = PPOActorConfig(path="org/model", optimizer=OptimizerConfig(), ppo_n_minibatches=parts)
    sizes = {
        "train_dataset": TrainDatasetConfig(path="x", batch_size=4), "gconfig": GenerationHyperparameters(n_samples=2),
    }  # fmt: skip
    result = notices(config_of("native", actor=actor, **sizes, **changes))
    assert [text.startswith(f"areal: actor.ppo_n_minibatches={parts}: ") for text in result] == [True] * num
    assert not notices(config_of("native", actor=actor, workflow="agent", **sizes, **changes))


HERE = Machine(cores=2, host=Host(node=socket.gethostname()))
GPUS = dataclasses.replace(HERE, gpus=("0", "1"))


def typed(backend, actor, native="auto"):
    model = PPOActorConfig(path="org/model", optimizer=OptimizerConfig(), dtype=actor)
    return config_of(backend, actor=model, native=NativeServerConfig(dtype=native))


def test_bfloat16_on_a_processor_without_its_products_is_pointed_out(monkeypatch):
    monkeypatch.setattr(preflight, "has_bfloat16_products", lambda: False)
    both = typed("native", "bfloat16", "bfloat16")
    assert precision_notice(both, [HERE]).endswith("on this processor: set actor.dtype=float32 native.dtype=float32")
    assert precision_notice(typed("vllm", "bfloat16"), [HERE]).endswith(": set actor.dtype=float32")
    assert not precision_notice(typed("vllm", "float32"), [HERE])
    assert not precision_notice(both, [GPUS])
    assert not precision_notice(both, [dataclasses.replace(HERE, host=Host(node="another"))])
    monkeypatch.setattr(preflight, "has_bfloat16_products", lambda: True)
    assert not precision_notice(both, [HERE])


def test_the_automatic_type_is_float32_on_a_processor_without_bfloat16_products_alone(monkeypatch):
    def types(config, *machines):
        chosen = with_dtypes(config, machines)
        assert with_dtypes(chosen, machines) == chosen
        return [model.compute_dtype for model in (chosen.actor, chosen.ref, chosen.native)]

    monkeypatch.setattr(preflight, "has_bfloat16_products", lambda: False)
    automatic = dataclasses.replace(typed("native", "auto"), ref=TrainEngineConfig(path="org/model"))
    assert types(automatic, HERE) == ["float32"] * 3
    assert types(automatic, GPUS) == types(automatic, HERE, Machine(cores=2, host=Host(node="b"))) == ["bfloat16"] * 3
    mixed = dataclasses.replace(automatic, actor=typed("native", "bfloat16").actor)
    assert types(mixed, HERE) == ["bfloat16", "float32", "float32"]
    foreign = dataclasses.replace(automatic, allocation_mode="vllm:d1+fsdp:d1")
    assert with_dtypes(foreign, [HERE]).native == foreign.native, "a section of other servers stays as it is"
    monkeypatch.setattr(preflight, "has_bfloat16_products", lambda: True)
    assert types(automatic, HERE) == ["bfloat16"] * 3


def test_server_problems_are_reported_with_all_others(interpreter, tmp_path, capsys):
    python = interpreter(reporting(vllm="0.32.0"))
    (tmp_path / "x.yaml").write_text(
        f"""
experiment_name: e
trial_name: t
allocation_mode: vllm:d1+fsdp:d1
server_python: {python}
cluster: {{fileroot: {tmp_path}/runs}}
train_dataset: {{path: missing.jsonl, batch_size: 8}}
gconfig: {{max_new_tokens: 8, stop_token_ids: {list(range(101))}}}
launcher: {{inference_server_env_vars: "HUB_TOKEN=mine,MODE=a b"}}
actor: {{path: org/model, optimizer: {{lr: 1e-4}}}}
vllm: {{port: 1, model: {tmp_path}/none}}
sglang: {{page_size: 1}}
reward_fn: exact
"""
    )
    for words in ([], ["--dry-run"]):
        with pytest.raises(ConfigError) as error:
            local.launch(
                local.read_command_line(["--config", str(tmp_path / "x.yaml"), *words]),
                local.LocalCluster(Machine(cores=2)),
            )
        lines = str(error.value).split("\n  ")
        assert [line.split(": ")[0] for line in lines] == [
            "vllm.model",
            "train_dataset.path",
            "vllm.port",
            "gconfig.stop_token_ids",
        ]
    shown = capsys.readouterr()
    assert "server-0: cpu, CPU threads 1" in shown.out
    assert '\'--weight-transfer-config={"backend":"areal"}\'' in shown.out, "a command that can be pasted"
    assert "VLLM_SERVER_DEV_MODE=1" in shown.out
    assert (
        "HUB_TOKEN=... MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=134217728 MKL_NUM_THREADS=1 MODE='a b' "
        in shown.out
    ), "with its variables, but for secrets"
    assert shown.err.count("\n  sglang has an effect only ") == 2, "one notice for each launch"
    assert not os.path.exists(tmp_path / "runs")


def test_images_of_a_model_on_the_hub_are_known_before_the_command_is_made(interpreter, tmp_path, monkeypatch):
    """On a machine whose cache has no file of it yet."""
    files = {
        "config.json": {"model_type": "qwen3_vl", "vision_config": {}, "image_token_id": 4},
        "preprocessor_config.json": {"patch_size": 4},
    }
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    fetched = set()

    def fetch(name, file, *, key):
        assert name == "org/model"
        fetched.add(file)
        return tmp_path / file

    monkeypatch.setattr("areal.models.vision_layout.hub_file", fetch)
    monkeypatch.setattr(
        "areal.models.vision_layout.cached_hub_file", lambda name, file: tmp_path / file if file in fetched else None
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 8)
    (tmp_path / "x.yaml").write_text(
        f"""
experiment_name: e
trial_name: t
allocation_mode: sglang:d1+fsdp:d1
server_python: {interpreter(reporting(sglang="0.5.23"))}
cluster: {{fileroot: {tmp_path}/runs}}
train_dataset: {{path: {tmp_path}/rows.jsonl, batch_size: 8}}
gconfig: {{max_new_tokens: 8}}
actor: {{path: org/model, optimizer: {{lr: 1e-4}}}}
reward_fn: exact
"""
    )
    monkeypatch.setattr(local, "tried_row", lambda config: local.TriedRow())
    request = local.read_command_line(["--config", str(tmp_path / "x.yaml")])
    plan = local.checked_plan(request, [Machine(cores=2)], StatusLine())
    (server,) = (process for process in plan.processes if process.role == "server")
    assert server.env["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
