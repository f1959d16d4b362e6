"""Every command of the documentation is carried out, on files that have the names of its placeholders."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from areal.api.config import BaseExperimentConfig, load_experiment
from areal.cli.main import run_command
from areal.data.row_check import dataset_paths
from areal.data.tiny_model import character_tokenizer, tiny_model
from areal.launcher import local
from areal.launcher.local import checked_plan, read_command_line
from areal.launcher.placement import Machine
from areal.launcher.status import StatusLine
from areal.system.network import Host
from tests.expect import raises_code
from tests.test_docs import PAGES, ROOT, areal_words, blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ELSEWHERE = {
    "git": "needs a server",
    "make": "tests/test_docs.py starts it with --dry-run",
    ".": "the shell of the reader",
    "export": "the shell of the reader",
    "pip": "installs packages",
    "ray": "tests/cluster, with Ray",
    "curl": "tests/inference and tests/rollout send these requests",
    "VLLM_SERVER_DEV_MODE=1": "tests/servers, with vLLM",
    "---": "output",
    "reward:": "output",
    "statistics": "output",
    "13+15=[[13+15?<eos>]]28=[[28<eos>]]": "output",
    "CONFIG=examples/agents/calculator.yaml": "a variable of the following lines",
}
"""First word -> why the test does not start it."""
NOT_STARTED = {
    "areal.launcher.logs": "tests/launcher",
    "areal.inference.server": "tests/inference",
    "sglang.launch_server": "tests/servers, with SGLang",
    "areal.replay": "as `areal replay`",
    "tests.cluster.slurm_cluster": "tests/cluster, with Slurm",
    "venv": "makes an environment",
}
"""Module after `python -m` -> where it is tested."""
DRY = ("run", "eval", "generate", "benchmark", "slurm", "ray", "ssh")
"""Subcommands that start processes: a dry run, which needs no machine."""
LACKS = {"--role": "export.no_checkpoint"}
"""Flag of a command about something that the small run lacks -> the code of the error."""
CONFIGS = ["grpo", "my", "x", "CONFIG", "FILE", "my_run", "shared/grpo", "my/warehouse", "my/warm_up"]
RUNS = [
    "RUN", "OTHER", "PATH", "runs/quickstart/grpo", "runs/quickstart/rloo", "runs/quickstart/synchronous",
    "runs/agents/calculator", "runs/my_task/first", "runs/warehouse/base", "runs/warehouse/lr1e-4",
    "runs/warehouse/warm_up", "runs/EXPERIMENT/s0", "runs/EXPERIMENT/s4",
    "runs/EXPERIMENT/grpo", "runs/EXPERIMENT/rloo", "shared/runs/EXPERIMENT/TRIAL",
]  # fmt: skip
IMPORTED = {
    "run_grpo.sh": "verl_grpo_gsm8k.sh", "run.sh": "verl_grpo_gsm8k.sh", "ppo_trainer.yaml": "verl_ppo.yaml",
    "rlvr.yaml": "roll_rlvr.yaml", "grpo.toml": "cosmos_grpo.toml", "gsm8k_grpo.yaml": "areal_v05_grpo.yaml",
}  # fmt: skip
LAUNCH_FLAGS = ("--hosts", "--launcher", "--sweep", "--at-once")
CONFIG = """
experiment_name: docs
trial_name: small
allocation_mode: native:d1+fsdp:d1
cluster: {fileroot: runs, n_gpus_per_node: 0}
total_train_steps: 2
train_dataset: {path: rows.jsonl, batch_size: 4}
reward_fn: reward.py:reward
gconfig: {n_samples: 4, max_new_tokens: 6}
native: {dtype: float32, context_length: 32}
actor: {path: MODEL, dtype: float32, kl_ctl: 0.0, optimizer: {lr: 1.0e-3}, lora: {rank: 2}}
saver: {freq_steps: 1}
recover: {mode: auto, freq_steps: 1}
perf_tracer: {enabled: true}
"""


def commands() -> list[tuple[str, str]]:
    """Page and line of every command."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        for text in blocks(page, "bash", "sh", "console"):
            lines = [line.removeprefix("$ ").strip() for line in text.replace("\\\n", " ").splitlines()]
            found += [(str(page.relative_to(ROOT)), line) for line in lines if line and line[0] != "#"]
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a model, rows, configurations and one real run under all the names that the pages use."""
    place = tmp_path_factory.mktemp("docs")
    (place / "examples").symlink_to(ROOT / "examples")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = character_tokenizer(
        ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))], context_length=256, chat_template=template
    )
    tokenizer.save_pretrained(place / "MODEL")
    tiny_model(tokenizer, 1, vocab_size=128).save_pretrained(place / "MODEL")
    (place / "template.jinja").write_text(template)
    rows = [{"prompt": f"{n}+1=", "question": f"{n}+1=", "answer": str(n + 1)} for n in range(16)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "answers.jsonl").write_text(json.dumps(rows[0] | {"output": "#### 1"}) + "\n")
    (place / "reward.py").write_text(
        "def reward(prompt, completion, prompt_ids, completion_ids, answer, **row):\n    return len(completion) / 8\n"
    )
    (place / "my_task.py").write_text("")
    for text in blocks(ROOT / "docs/own_task.md", "python", "yaml"):
        path = place / re.match(r"# (\S+)\n", text)[1]
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    for name in CONFIGS:
        (place / name).parent.mkdir(exist_ok=True)
        (place / f"{name}.yaml").write_text(CONFIG)
    for name, source in IMPORTED.items():
        shutil.copy(ROOT / "tests/importers/examples" / source, place / name)
    run = [sys.executable, "-m", "areal", "run", "--config", "grpo.yaml"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(run, cwd=place, env=env, check=True, timeout=240)
    for name in RUNS:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(place / "runs/docs/small", place / name)
    return place


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_is_carried_out(page, line, place, monkeypatch):
    monkeypatch.chdir(place)
    line = re.sub(r"(?<=\s)\[[^]]*\]", "", line)  # what may follow, as in `[key=value ...]`
    words = [word for word in shlex.split(line, comments=True) if word not in ("&", "...")]
    if words[0] in ELSEWHERE:
        return
    words = [word.replace("$CONFIG", "examples/agents/calculator.yaml") for word in words]
    words = [word.removeprefix("/") if word.startswith("/shared/") else word for word in words]
    if inner := areal_words(words):
        carry_out(inner, place, monkeypatch)
    elif words[0] == "python" and words[1] == "-m":
        assert words[2] in NOT_STARTED, line
    else:
        assert words[0] == "python", line
        script = place / words[1]
        assert script.is_file() or words[1].startswith("my/"), line
        if script.name == "make_rows.py":
            subprocess.run([sys.executable, *words[1:]], cwd=place, check=True)


def carry_out(words: list[str], place: Path, monkeypatch) -> None:
    if words[0] in DRY:
        if "--attach" not in words:  # changes a run that runs: tests/launcher
            dry_run(words, place, monkeypatch)
        return
    if words[0] == "rehearse":
        return  # tests/agent/test_rehearsal.py
    number = {"export": "2", "show": "1"}.get(words[0], "1")
    for flag in ("--step", "--episode"):
        if flag in words:
            words[words.index(flag) + 1] = number
    words += ["-o", "model"] if words[0] == "export" and "-o" not in words else []
    if "-o" in words:
        words[words.index("-o") + 1] = f"out/{abs(hash(tuple(words)))}/{words[-1]}"
        Path(words[words.index("-o") + 1]).parent.mkdir(parents=True)
    words += ["--once"] if words[0] == "watch" and "--json" not in words else []
    words += ["--answer", "1"] if words[0] == "test-workflow" and "--answer" not in words else []
    code = next((code for flag, code in LACKS.items() if flag in " ".join(words)), "")
    if words[0] == "test-workflow" and "--config" in words:
        complete(load_experiment(words[1:][: words.index("--answer") - 1]), place)
    if code:
        with raises_code(code):
            run_command(words)
    else:
        assert run_command(words) in (0, 1)


def dry_run(words: list[str], place: Path, monkeypatch) -> None:
    """Everything up to the start of processes, on machines that are not there."""
    if words[0] == "score" or "--config" not in words:
        return  # eval of a run: tests/evaluate
    rest = words[1:]
    for flag in (*LAUNCH_FLAGS, "--model", "--data", "-o", "-n"):
        while flag in rest:
            del rest[rest.index(flag) : rest.index(flag) + 2]
    rest = [word for word in rest if word not in ("--detach", "--dry-run", "--overwrite")]
    request = read_command_line([*rest, "--dry-run"], on_one_machine=False)
    complete(request.config, place)
    monkeypatch.setattr(local, "server_problems", lambda *given: [])
    monkeypatch.setattr(local, "_nccl_of", lambda *given: None)
    cluster = request.config.cluster
    gpus = tuple(map(str, range(8)))
    machines = [Machine(cores=64, gpus=gpus, host=Host(node=f"n{n}")) for n in range(cluster.n_nodes)]
    checked_plan(request, machines, StatusLine(), tries_row=False)


def complete(config: BaseExperimentConfig, place: Path) -> None:
    """Models and rows at the paths that a configuration names, as an earlier command of the page makes them."""
    for model in config.models.values():
        if not Path(model.path).exists():
            shutil.copytree(place / "MODEL", model.path)
    for _, path in dataset_paths(config):
        if not Path(path).exists():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text("".join((place / "rows.jsonl").read_text() for _ in range(40)))
