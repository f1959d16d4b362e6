"""The installed server is asked before anything starts, and what it refuses is told by the key of its mapping."""

import json
import os
import time

import psutil
import pytest

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
from areal.api.errors import ConfigError
from areal.launcher import local
from areal.launcher.job import Machine, make_plan
from areal.launcher.server_check import foreign_server_problems, notices
from areal.system.process import AREAL_PROCESS


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
    """Makes a program in place of a server's interpreter; it keeps the question and what it was started with."""

    def make(body):
        path = tmp_path / "python"
        path.write_text(
            f'#!/bin/sh\ncat > {tmp_path}/question\nenv > {tmp_path}/env\necho "$@" >> {tmp_path}/asked\n{body}\n'
        )
        path.chmod(0o755)
        return path

    return make


def saying(answer):
    return f"echo '{json.dumps(answer)}'"


def check(config, *, machine=None, said=None, **limits):
    plan = make_plan(config, machine or Machine(cores=2))
    return foreign_server_problems(config, plan, (said if said is not None else []).append, **limits)


def test_what_the_server_refuses_is_told_by_key_with_its_version(interpreter):
    python = interpreter(saying({"version": "0.32.0", "problems": [["max-modle_len", "unknown flag"], ["", "is odd"]]}))
    said = []
    assert check(config_of("vllm", python), said=said) == [
        "vllm.max-modle_len: unknown flag (vLLM 0.32.0)",
        f"server_python: {python} is odd (vLLM 0.32.0)",
    ]
    assert said == [f"areal: asks vLLM in {python} about its flags, which takes a while"]


def test_the_question_holds_what_the_user_gave_and_what_areal_sets(interpreter, tmp_path):
    python = interpreter(saying({"version": "0.32.0", "problems": []}))
    flags = {"max-num_seqs": 3, "model": "/m", "seed": 5, "swap_space": 4, "served_model_name": None}
    launcher = LauncherConfig(inference_server_env_vars="MINE=1")
    assert check(config_of("vllm", python, vllm=flags, launcher=launcher)) == []
    question = json.loads((tmp_path / "question").read_text())
    assert question["flags"] == [["max-num_seqs", 3, ["--max-num-seqs=3"]], ["model", "/m", ["--model=/m"]]]
    assert question["model"] == ["/m"]
    assert "--port=1" in question["ours"]
    assert question["on_gpu"] is False
    env = (tmp_path / "env").read_text()
    assert "MINE=1" in env
    assert "VLLM_SERVER_DEV_MODE=1" in env
    assert AREAL_PROCESS not in env, "it is no process of a run"
    assert (tmp_path / "asked").read_text().strip().endswith("probe_vllm.py")


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_numbers_stand_where_the_host_will_put_some(backend, interpreter, tmp_path):
    check(config_of(backend, interpreter(saying({"version": "9.9.9", "problems": []}))))
    ours = json.loads((tmp_path / "question").read_text())["ours"]
    assert [word for word in ours if "port" in word] == (["--nccl-port=1"] if backend == "sglang" else []) + [
        "--port=1"
    ]
    assert [word for word in ours if "seed" in word] == ["--random-seed=1" if backend == "sglang" else "--seed=1"]


def test_gpus_are_part_of_the_question(interpreter, tmp_path):
    python = interpreter(saying({"version": "0.5.23", "problems": []}))
    assert check(config_of("sglang", python), machine=Machine(cores=2, gpus=("0", "1"))) == []
    assert json.loads((tmp_path / "question").read_text())["on_gpu"] is True


def test_the_same_question_is_asked_once(interpreter, tmp_path):
    config = config_of("sglang", interpreter(saying({"version": "0.5.23", "problems": []})))
    assert check(config) == check(config) == []
    assert len((tmp_path / "asked").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("backend", "version", "says"),
    [
        ("vllm", "0.29.1", "vLLM 0.29.1 is too old, areal needs 0.30.0 or newer (tested with 0.32.0): upgrade it"),
        ("sglang", "0.5.9.post1", "SGLang 0.5.9.post1 is too old, areal needs 0.5.10 or newer"),
        ("vllm", "0.30.0+cu129", ""),
        ("sglang", "0.5.10rc0", ""),
        ("vllm", "0.1.dev7+gabc", ""),
    ],
)
def test_versions(interpreter, backend, version, says):
    found = check(config_of(backend, interpreter(saying({"version": version, "problems": []}))))
    assert len(found) == bool(says)
    assert says in " ".join(found)


def test_an_environment_that_is_not_there_is_one_clear_line(tmp_path, interpreter):
    (text,) = check(config_of("vllm", tmp_path / "nothing"))
    assert text == f"server_python: {tmp_path}/nothing is no program: give the Python interpreter of vLLM's environment"
    (text,) = check(config_of("vllm", tmp_path))
    assert "is no program" in text
    python = interpreter(saying({"missing": "vllm"}))
    (text,) = check(config_of("vllm", python))
    assert text == (
        f"server_python: vLLM is not installed for {python}: install it there, or give the interpreter of vLLM's "
        "environment"
    )


def test_areals_own_interpreter_has_no_sglang():
    (text,) = check(config_of("sglang"))
    assert "that is the interpreter of areal itself; give the interpreter of SGLang's environment" in text


def test_an_environment_that_does_not_answer(interpreter):
    python = interpreter("echo 'Traceback' >&2; echo 'ImportError: libcuda.so.1' >&2; exit 1")
    (text,) = check(config_of("vllm", python))
    assert text == f"server_python: {python} cannot be asked about vLLM: ImportError: libcuda.so.1"
    (text,) = check(config_of("vllm", interpreter("exec sleep 1000")), limit_s=0.2)
    assert "no answer in 0.2 s" in text


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_script_around_the_interpreter_may_say_more_and_leaves_nothing_behind(interpreter, tmp_path):
    started = f"sleep 1000 </dev/null >/dev/null 2>&1 & echo $! > {tmp_path}/pid"
    odd = "echo activated; printf '\\377\\n' >&2"
    assert (
        check(config_of("vllm", interpreter(f"{started}\n{odd}\n{saying({'version': '0.32.0', 'problems': []})}")))
        == []
    )
    pid = int((tmp_path / "pid").read_text())
    while alive(pid):  # killed, and so gone in a moment
        time.sleep(0.01)


@pytest.mark.parametrize("text", ["17", "[1]", ""])
def test_an_answer_of_something_else_is_none(interpreter, text):
    (problem,) = check(config_of("vllm", interpreter(f"echo '{text}'")))
    assert problem.endswith("cannot be asked about vLLM: it ended with 0")


def test_other_servers_are_not_asked(interpreter, tmp_path):
    python = interpreter("exit 1")
    assert check(config_of("native", python)) == []
    attached = InferenceEngineConfig(server_addrs=["127.0.0.1:1"])
    assert check(config_of("vllm", python, rollout=attached)) == []
    assert not (tmp_path / "asked").exists()


def test_what_has_no_effect_is_said_once():
    assert notices(config_of("native")) == notices(config_of("vllm", vllm={"seed": 1})) == []
    both = {"sglang": {"a": 1}, "vllm": {"swap_space": 4}, "native": NativeServerConfig(dtype="float32")}
    assert notices(config_of("vllm", **both)) == [
        "areal: not used with allocation_mode=vllm:d1+fsdp:d1: native, sglang",
        "areal: ignored, areal brings its own or the server has none of it: vllm.swap_space",
    ]
    (text,) = notices(config_of("native", "/python"))
    assert text.endswith(": server_python")
    attached = InferenceEngineConfig(server_addrs=["127.0.0.1:1"])
    assert "the servers run already" in notices(config_of("vllm", vllm={"seed": 1}, rollout=attached))[0]


def test_flags_are_told_with_all_other_problems_and_nothing_starts(interpreter, tmp_path, capsys):
    python = interpreter(saying({"version": "0.32.0", "problems": [["x", "unknown flag"]]}))
    (tmp_path / "x.yaml").write_text(
        f"""
experiment_name: e
trial_name: t
allocation_mode: vllm:d1+fsdp:d1
server_python: {python}
cluster: {{fileroot: {tmp_path}/runs}}
train_dataset: {{path: missing.jsonl, batch_size: 8}}
gconfig: {{max_new_tokens: 8}}
launcher: {{inference_server_env_vars: "HUB_TOKEN=mine,MODE=a b"}}
actor: {{path: org/model, optimizer: {{lr: 1e-4}}}}
vllm: {{x: 1, model: {tmp_path}/none}}
sglang: {{page_size: 1}}
reward_fn: exact
"""
    )
    for words in ([], ["--dry-run"]):
        with pytest.raises(ConfigError) as error:
            local.launch(local.read_command_line(["--config", str(tmp_path / "x.yaml"), *words]), Machine(cores=2))
        lines = str(error.value).split("\n  ")
        assert lines == [
            f"vllm.model: {tmp_path}/none is no folder; give a checkpoint folder or a hub name",
            "train_dataset.path: missing.jsonl does not exist",
            "vllm.x: unknown flag (vLLM 0.32.0)",
        ]
    shown = capsys.readouterr()
    assert "server-0: cpu, 1 threads" in shown.out
    assert '\'--weight-transfer-config={"backend":"areal"}\'' in shown.out, "a command that can be pasted"
    assert "VLLM_SERVER_DEV_MODE=1" in shown.out
    assert "HUB_TOKEN=... MKL_NUM_THREADS=1 MODE='a b' " in shown.out, "with its variables, but for secrets"
    assert shown.err.count("not used with allocation_mode=vllm:d1+fsdp:d1: sglang\n") == 2
    assert not os.path.exists(tmp_path / "runs")
