"""Every command of the documentation is executed, on files that have the names of its placeholders.

A command that starts a run ends with its plan, on machines that are not there. Commands that read a run, start
processes or compute for seconds are in the slow tier.
"""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from areal.api.config import BaseExperimentConfig, load_experiment
from areal.cli.main import run_command
from areal.data.row_check import dataset_paths
from areal.data.tiny_model import character_tokenizer, tiny_model
from areal.launcher import local, logs, ray, slurm, ssh
from areal.launcher.local import TriedRow
from areal.launcher.placement import Machine
from areal.system.network import Host
from tests.expect import raises_code
from tests.test_docs import PAGES, ROOT, areal_words, blocks, write_files

SHELL = {
    "git": "copies a repository",
    ".": "activates an environment",
    "export": "sets a variable",
    "mkdir": "copies files",
    "pip": "installs packages",
    "python -m venv": "makes an environment",
}
"""Beginning of a command that is about the machine of the reader -> what it does. No test executes it."""
ELSEWHERE = {
    "make": ("tests/test_docs.py", '"--dry-run"'),
    "ray start": ("tests/cluster/nodes.py", 'ray_command("start"'),
    "ray job": ("tests/cluster/test_ray_job.py", '"job"'),
    "sudo .venv/bin/python -m tests.cluster.nodes": ("tests/cluster/conftest.py", "Nodes("),
    "python -m tests.cluster.slurm_cluster": ("tests/cluster/test_slurm.py", "SlurmCluster("),
    "VLLM_SERVER_DEV_MODE=1": ("tests/fleet/test_server_command.py", "--enable-scale-out"),
    "python -m sglang.launch_server": ("tests/fleet/test_server_command.py", "sglang.launch_server"),
    "python -m areal.inference.server": ("tests/inference/test_server_process.py", "areal.inference.server"),
    "curl -H 'Authorization: Bearer $AREAL_SERVER_TOKEN'": ("tests/inference/test_server.py", "/server_info"),
    "curl -H 'Authorization: Bearer $(cat RUN/token)'": ("tests/rollout/test_controller_http.py", "/status"),
    "python examples/agents/online.py": ("tests/agent/test_examples.py", '"online.py"'),
    "python my/prepare.py": ("tests/test_tutorials.py", "test_the_agent_of_the_warehouse_learns"),
    "areal test-workflow --config my/warehouse.yaml actor.path=runs/warehouse/data/model": (
        "tests/test_tutorials.py",
        "test_the_agent_of_the_warehouse_learns",
    ),
    "areal watch RUN --web": ("tests/cli/test_page_server.py", '"watch", str(run.root), "--web"'),  # until Ctrl-C
    "areal rehearse": ("tests/agent/test_examples.py", '"rehearse"'),
    "areal run --config x.yaml --sweep": ("tests/launcher/test_local.py", '"--sweep"'),
}
"""Beginning of a command -> the test that executes it, and a text that occurs there."""
SLOW = {
    *("watch", "show", "audit", "stats", "replay", "compare", "export", "trace", "eval", "generate", "benchmark"),
    *("prove-template", "plan", "fetch"),
}
"""Subcommands that read a run, start processes or compute for seconds."""
REFUSED = {
    "areal plan --config my.yaml --from RUN": "plan.too_few_steps",  # the small run has two
    "areal export RUN --role critic": "export.no_checkpoint",  # the small run has no critic
    "areal run --attach": "launch.no_answer",  # its launcher has ended
    "areal run --launcher slurm --attach": "launch.no_run_folder",  # it is no run of Slurm
}
"""Beginning of a command about something that the small run lacks -> the code of the error."""
CONFIGS = ["grpo", "my", "CONFIG", "FILE", "shared/grpo", "my/warehouse", "my/warm_up"]
RUNS = [
    "RUN", "OTHER", "runs/quickstart/grpo", "runs/quickstart/rloo", "runs/quickstart/synchronous",
    "runs/quickstart/my_task",
    "runs/agents/calculator", "runs/calculator/grpo", "runs/my_task/first", "runs/warehouse/base",
    "runs/warehouse/lr1e-4", "runs/warehouse/warm_up", "runs/EXPERIMENT/s0", "runs/EXPERIMENT/s4",
    "runs/EXPERIMENT/grpo", "runs/EXPERIMENT/rloo", "shared/runs/EXPERIMENT/TRIAL",
]  # fmt: skip
IMPORTED = {
    "run_grpo.sh": "verl_grpo_gsm8k.sh", "run.sh": "verl_grpo_gsm8k.sh", "ppo_trainer.yaml": "verl_ppo.yaml",
    "rlvr.yaml": "roll_rlvr.yaml", "grpo.toml": "cosmos_grpo.toml", "gsm8k_grpo.yaml": "areal_v05_grpo.yaml",
}  # fmt: skip
CONFIG = """
experiment_name: docs
trial_name: small
allocation_mode: native:d1+fsdp:d1
cluster: {fileroot: runs, n_gpus_per_node: 0}
total_train_steps: 2
train_dataset: {path: rows.jsonl, batch_size: 4}
valid_dataset: {path: rows.jsonl}
reward_fn: reward.py:reward
gconfig: {n_samples: 4, max_new_tokens: 6}
native: {dtype: float32, context_length: 32}
actor: {path: MODEL, dtype: float32, kl_ctl: 0.0, optimizer: {lr: 1.0e-3}, lora: {rank: 2}}
saver: {freq_steps: 1}
recover: {mode: auto, freq_steps: 1}
perf_tracer: {enabled: true}
"""
TEMPLATE = """
{%- if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }} {{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set given = call.function.arguments %}
{%- set arguments = given if given is string else given | tojson %}
{#- #}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ arguments }}}</tool_call>
{%- endfor %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant {% endif %}"""
BENCHMARK = """
native: {context_length: 4096}
benchmark: {warmup_steps: 1, steps: 1}
"""


def commands() -> list[str]:
    """Every command of the pages, once."""
    result: dict[str, None] = {}
    for page in PAGES:
        variables: dict[str, str] = {}
        for text in blocks(page, "bash", "sh", "console"):
            lines = text.replace("\\\n", " ").splitlines()
            if any(line.startswith("$ ") for line in lines):
                lines = [line[2:] for line in lines if line.startswith("$ ")]
            for line in lines:
                line = re.sub(r"(?<=\s)\[[^]]*\]", "", line)  # what may follow, as in `[key=value ...]`
                words = [word for word in shlex.split(line, comments=True) if word not in ("&", "...")]
                for name, value in variables.items():
                    words = [word.replace(f"${name}", value) for word in words]
                if len(words) == 1 and (inputs := re.fullmatch(r"(\w+)=(.*)", words[0])):
                    variables[inputs[1]] = inputs[2]
                elif words:
                    result[shlex.join(words)] = None
    return list(result)


def begins(line: str, table: dict) -> str:
    """The entry of a table that a command begins with, else empty."""
    return next((entry for entry in table if f"{line} ".startswith(f"{entry} ")), "")


def cases() -> list:
    result = []
    for line in commands():
        name = (areal_words(shlex.split(line)) or [""])[0]
        is_slow = name in SLOW or "--attach" in line or line == "areal config RUN" or "launcher.logs" in line
        result.append(pytest.param(line, marks=[pytest.mark.slow] if is_slow else [], id=line))
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a model, rows and configurations under all the names that the pages use."""
    place = tmp_path_factory.mktemp("docs")
    (place / "examples").symlink_to(ROOT / "examples")
    special = ["<pad>", "<|im_end|>", "<unk>"]
    tokenizer = character_tokenizer(
        [*special, *map(chr, range(32, 127))], end="<|im_end|>", context_length=4096, chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(place / "MODEL")
    tiny_model(tokenizer, 1, vocab_size=128).save_pretrained(place / "MODEL")
    shutil.copytree(place / "MODEL", place / "PATH")
    (place / "template.jinja").write_text(TEMPLATE)
    rows = [{"prompt": f"{n}+1=", "question": f"{n}+1=", "answer": str(n + 1)} for n in range(16)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "data").mkdir()
    shutil.copy(place / "rows.jsonl", place / "data" / "train.jsonl")
    (place / "answers.jsonl").write_text(json.dumps(rows[0] | {"output": "#### 1"}) + "\n")
    (place / "reward.py").write_text(
        "def reward(prompt, completion, prompt_ids, completion_ids, answer, **row):\n    return len(completion) / 8\n"
    )
    for page in ("README.md", "docs/own_task.md"):
        write_files(page, place)
    for name in CONFIGS:
        (place / name).parent.mkdir(exist_ok=True)
        (place / f"{name}.yaml").write_text(CONFIG)
    (place / "x.yaml").write_text(CONFIG.replace("native: {dtype: float32, context_length: 32}", "") + BENCHMARK)
    for name, source in IMPORTED.items():
        shutil.copy(ROOT / "tests/importers/examples" / source, place / name)
    return place


@pytest.fixture(scope="module")
def runs(place) -> Path:
    """The same folder, with one real run under all the names of runs."""
    run = [sys.executable, "-m", "areal", "run", "--config", "grpo.yaml"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(run, cwd=place, env=env, check=True, timeout=240)
    for name in RUNS:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(place / "runs/docs/small", place / name)
    return place


@pytest.mark.timeout(600)
@pytest.mark.parametrize("line", cases())
def test_a_command_is_executed(line, request, monkeypatch, capsys):
    if begins(line, SHELL) or begins(line, ELSEWHERE):
        return
    is_slow = any(mark.name == "slow" for mark in request.node.iter_markers())
    place = request.getfixturevalue("runs" if is_slow else "place")
    monkeypatch.chdir(place)
    words = [word.removeprefix("/") if word.startswith("/shared/") else word for word in shlex.split(line)]
    if inner := areal_words(words):
        with_inputs(place, monkeypatch)
        inner = on_the_small_run(inner)
        if entry := begins(line, REFUSED):
            with raises_code(REFUSED[entry]):
                run_command(inner)
        else:
            assert run_command(inner) == 0, capsys.readouterr()
    elif words[:3] == ["python", "-m", "areal.launcher.logs"]:
        monkeypatch.setattr(sys, "argv", [words[2], "RUN"])
        logs.main()
        assert "trainer-0" in capsys.readouterr().out
    else:
        assert words[0] == "python", line
        monkeypatch.setattr(sys, "argv", words[1:])
        monkeypatch.syspath_prepend(Path(words[1]).parent)
        runpy.run_path(words[1], run_name="__main__")


@pytest.mark.slow
def test_every_file_of_a_real_run_is_on_the_page(runs):
    page = (ROOT / "docs/recovery.md").read_text()
    assert [path.name for path in (runs / "runs/docs/small").iterdir() if f"`{path.name}`" not in page] == []


def test_what_no_command_begins_with_is_not_in_a_table():
    used = {begins(line, table) for line in commands() for table in (SHELL, ELSEWHERE, REFUSED)}
    assert {*SHELL, *ELSEWHERE, *REFUSED} - used == set()


def test_what_is_executed_elsewhere_is_there():
    missing = {path: text for path, text in ELSEWHERE.values() if text not in (ROOT / path).read_text()}
    assert missing == {}


class Machines:
    """Three machines with GPUs. Implements `Cluster`."""

    def machines(self) -> list[Machine]:
        return [Machine(cores=64, gpus=tuple(map(str, range(8))), host=Host(node=f"n{n}")) for n in range(3)]

    def close(self) -> None:
        pass


def with_inputs(place: Path, monkeypatch) -> None:
    """Every launcher finds machines, servers that can start, and the models and rows that a configuration names."""
    launch, submit = local.launch, slurm.submit

    def started(request, cluster):
        complete(request.config, place)
        return launch(request, Machines() if request.dry_run else cluster)

    def submitted(requests, *inputs, **named):
        complete(requests[0].config, place)
        return submit(requests, *inputs, **named)

    for module in (local, ray, ssh):
        monkeypatch.setattr(module, "launch", started)
    monkeypatch.setattr(slurm, "submit", submitted)
    monkeypatch.setattr(local, "tried_row", lambda config: TriedRow())  # a process each
    monkeypatch.setattr(local, "reward_notice", lambda config: "")
    monkeypatch.setattr(local, "server_problems", lambda *passed: [])
    monkeypatch.setattr(local, "nccl_versions", lambda config: None)


def on_the_small_run(words: list[str]) -> list[str]:
    """The words with the steps and episodes that the small run has. A run ends with its plan."""
    if words[0] in ("run", "slurm", "ray", "ssh"):
        return words if {"--dry-run", "--attach"} & {*words} else [*words, "--dry-run"]
    for flag, number in (("--step", "2" if words[0] == "export" else "1"), ("--episode", "1")):
        if flag in words:
            words[words.index(flag) + 1] = number
    words += ["-o", "model"] if words[0] == "export" and "-o" not in words else []
    if "-o" in words:
        words[words.index("-o") + 1] = str(Path(tempfile.mkdtemp(dir=".")) / words[words.index("-o") + 1])
    if words[0] == "watch" and "--json" not in words:
        words.append("--once")
    if words[0] == "test-workflow":
        config = load_experiment([word for word in words[1:] if word == "--config" or word.endswith(".yaml")])
        complete(config, Path.cwd())
        words += [] if "--answer" in words else ["--answer", "1"]
    return words


def complete(config: BaseExperimentConfig, place: Path) -> None:
    """Models and rows at the paths that a configuration names, as an earlier command of the page makes them."""
    for model in config.models.values():
        if not Path(model.path).exists():
            shutil.copytree(place / "MODEL", model.path)
    for _, path in dataset_paths(config):
        if not Path(path).exists():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text("".join((place / "rows.jsonl").read_text() for _ in range(40)))
