"""Tutorials of the documentation: the files are written, and the commands executed, as a page shows them."""

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal.workflow.rlvr import RLVRWorkflow
from tests.test_docs import ROOT, blocks, write_files

AGENTS, WORKFLOWS, GSM8K = ROOT / "docs/agents.md", ROOT / "docs/workflows.md", ROOT / "examples/gsm8k/README.md"


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def commands_of(page: Path, text: str) -> list[str]:
    """The lines of the block of commands that contains `text`."""
    (block,) = [block for block in blocks(page, "bash") if text in block]
    return [line.partition(" #")[0].strip() for line in block.replace("\\\n", " ").splitlines()]


def execute(folder: Path, line: str) -> str:
    """What a command prints to its standard output."""
    words = shlex.split(line)
    program = ["-m", *words] if words[0] == "areal" else words[1:]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *program], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_agent_of_the_warehouse_learns(folder):
    (folder / "my").mkdir()
    shutil.copy(ROOT / "examples/agents/tiny_model.py", folder / "my")
    write_files("docs/agents.md", folder)
    scripted, rewards = "", []
    for line in commands_of(AGENTS, "python my/prepare.py"):
        if line.startswith("areal eval"):
            result = json.loads(execute(folder, f"{line} --json"))
            rewards.append(result["results"][0]["metrics"]["mean@4"]["mean"])
        elif "--answer" in line:
            scripted = execute(folder, line)
        elif line.startswith("areal watch"):
            execute(folder, f"{line} --once")
        else:
            execute(folder, f"{line} total_train_steps=1" if "trial_name" in line else line)
    assert "\nreward: 1.0\n" in scripted
    before, after = rewards
    assert before < 0.4 < 0.8 < after


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_workflow_of_the_calculator_prints_what_the_page_shows_and_is_trained(folder):
    prepare, warm_up = commands_of(WORKFLOWS, "prepare.py")
    execute(folder, prepare)
    execute(folder, warm_up)
    (shown,) = blocks(WORKFLOWS, "console")
    command, _, output = shown.removeprefix("$ ").partition("\n")
    assert execute(folder, command) == output
    execute(folder, "areal run --config examples/workflows/calculator.yaml total_train_steps=2")
    last = rows_of(folder / "runs/calculator/grpo/metrics.jsonl")[-1]
    assert last["rollout/episode/calculator_calls"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tiny_model_of_gsm8k_is_trained(folder):
    (folder / "data").mkdir()
    rows = [{"question": f"What is {n} plus 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(64)]
    for name in ("train", "test"):
        (folder / f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make, run = commands_of(GSM8K, "make_tiny_model.py")
    execute(folder, make)
    model = AutoModelForCausalLM.from_pretrained(folder / "runs/gsm8k/tiny")
    assert len(AutoTokenizer.from_pretrained(folder / "runs/gsm8k/tiny")) <= model.config.vocab_size
    run = run.replace("total_train_steps=20", "total_train_steps=1").replace("max_rows=64", "max_rows=8")
    execute(folder, f"{run} gconfig.max_new_tokens=16")
    (metrics,) = (folder / "runs").glob("*/*/metrics.jsonl")
    assert rows_of(metrics)[-1]["step"] == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_of_the_readme_is_trained(folder):
    write_files("README.md", folder)
    execute(folder, "python examples/quickstart/prepare.py runs/quickstart/data")
    (run,) = [line for line in commands_of(ROOT / "README.md", "my_task.py") if line.startswith("areal run")]
    model = "actor.path=runs/quickstart/data/model evaluator.eval_before_train=false valid_dataset.max_rows=16"
    execute(folder, f"{run} {model} train_dataset.batch_size=4 total_train_steps=1 evaluator.freq_steps=1")
    (row,) = [row for row in rows_of(folder / "runs/quickstart/my_task/metrics.jsonl") if row["step"] == 1]
    assert {"eval/greedy/reward", "eval/sampled/reward"} <= row.keys()


def test_the_script_of_the_readme_starts_what_the_configuration_names(folder, monkeypatch):
    """The same script without a run: its rows, held-out rows and workflow reach PPOTrainer."""
    write_files("README.md", folder)
    execute(folder, "python examples/quickstart/prepare.py runs/quickstart/data")
    (run,) = [line for line in commands_of(ROOT / "README.md", "my_task.py") if line.startswith("areal run")]
    _, _, script, *arguments = shlex.split(run)
    seen: dict = {}

    class Trainer:
        def __init__(self, config, **rows):
            seen.update(rows, config=config)

        def __enter__(self):
            return self

        def __exit__(self, *error): ...

        def train(self, workflow):
            seen["workflow"] = workflow

    monkeypatch.chdir(folder)
    monkeypatch.setattr("areal.trainer.ppo.PPOTrainer", Trainer)
    monkeypatch.setattr(sys, "argv", [script, *arguments, "actor.path=runs/quickstart/data/model"])
    runpy.run_path(script, run_name="__main__")
    assert (len(seen["train_dataset"]) > 0, len(seen["valid_dataset"]) > 0) == (True, True)
    assert seen["config"].trial_name == "my_task"
    assert isinstance(seen["workflow"], RLVRWorkflow)
