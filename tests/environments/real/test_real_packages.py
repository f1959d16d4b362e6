"""The adapters against the real packages: equal rewards, exact token spans, and kills in the middle of a run."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from areal.data.dataset import environment_rows
from areal.environments.adapters import OpenEnvWorkflow, TextArenaWorkflow
from areal.environments.reasoning_gym import ReasoningGymWorkflow
from tests.environments.environment_kit import build, policy, trained_text
from tests.faults.driver import ROOT, Run

PYTHON = ROOT / ".venv-environments/bin/python"
OWN = Path(__file__).parent / "own_rewards.py"
EPISODES = 256


def own(kind, asked):
    """What the package itself says, in another process."""
    given = json.dumps(asked)
    done = subprocess.run([PYTHON, OWN, kind], input=given, capture_output=True, text=True, cwd=ROOT, check=True)
    return json.loads(done.stdout)


async def played(workflow, asked):
    """The rewards of the sessions of each episode, whose policy gives the answers of `asked` one after another."""
    found = []
    try:
        for row, answers in asked:
            left = list(answers)
            group = await workflow.arun_episode(policy(lambda _, left=left: left.pop(0)), row)
            texts = [trained_text(one).split("<|im_end|>")[:-1] for one in group.trajectories]
            used = answers[: len(answers) - len(left)]
            assert sorted(text for one in texts for text in one) == sorted(used)
            assert len(texts) > 1 or texts[0] == used
            found.append([one.reward for one in group.trajectories])
    finally:
        await workflow.aclose()
    return found


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "countdown"])
async def test_rewards_of_reasoning_gym_are_those_of_the_package(name) -> None:
    rows = environment_rows(f"env:{name}?size={EPISODES}&seed=5")
    references = own("reference", [(row, []) for row in rows])
    answers = [text if k % 3 else references[(k + 1) % EPISODES] for k, text in enumerate(references)]
    expected = own("reasoning_gym", [(row, [text]) for row, text in zip(rows, answers, strict=True)])
    workflow = build(ReasoningGymWorkflow, python=str(PYTHON))
    asked = [(row, [f"<answer>{text}</answer>"]) for row, text in zip(rows, answers, strict=True)]
    assert await played(workflow, asked) == [[value] for value in expected]
    assert 0.5 < sum(value == 1 for value in expected) / EPISODES < 0.8


MOVES = {
    "GuessTheNumber-v0": [f"[{number}]" for number in range(1, 21)],
    "Nim-v0": [f"[{pile} {count}]" for pile in range(3) for count in (1, 2, 3)],
    "TicTacToe-v0": [f"[{cell}]" for cell in range(9)],
}


@pytest.mark.parametrize("name", MOVES)
async def test_rewards_of_games_are_those_of_the_package(name) -> None:
    rows = environment_rows(f"env:{name}?size={EPISODES}&seed=5")
    asked = [(row, random.Random(row["index"]).choices(MOVES[name], k=64)) for row in rows]
    workflow = build(TextArenaWorkflow, python=str(PYTHON))
    assert await played(workflow, asked) == own("textarena", asked)


async def test_rewards_of_an_openenv_server_are_those_of_its_class() -> None:
    rows = environment_rows(f"env:guessing?size={EPISODES}&seed=5")
    asked = [(row, random.Random(row["index"]).choices("0123456789", k=4)) for row in rows]
    workflow = build(OpenEnvWorkflow, python=str(PYTHON), env=str(ROOT / "examples/environments/guess_server.py:app"))
    assert await played(workflow, asked) == [[value] for value in own("openenv", asked)]


CONFIG = """
experiment_name: environments
trial_name: KIND
seed: 3
allocation_mode: native:d1+fsdp:d1
cluster: {fileroot: RUNS, n_gpus_per_node: 0}
total_train_steps: 12
train_dataset: {path: "ROWS", batch_size: 4}
workflow: KIND
workflow_args: ARGS
gconfig: {n_samples: 2, max_new_tokens: 8, max_tokens: 96}
rollout: {max_head_offpolicyness: 2}
native: {dtype: float32, max_running_requests: 64, context_length: 96}
actor:
  path: MODEL
  dtype: float32
  ppo_n_minibatches: 1
  use_decoupled_loss: true
  optimizer: {lr: 1.0e-3, lr_scheduler_type: constant, warmup_steps_proportion: 0.0}
recover: {mode: auto, freq_steps: 3, retries: 9}
"""
RUNS = {
    "reasoning_gym": ("env:chain_sum?size=200&seed=1", {"args": {"extract": False}, "curriculum": {"target": 0.5}}),
    "openenv": ("env:guessing?size=200&seed=1", {"env": str(ROOT / "examples/environments/guess_server.py:app")}),
}


def workers(run):
    """Processes of the environment's worker program, and what they have started."""
    roots = [one for one in psutil.process_iter(["cmdline"]) if "worker.py" in " ".join(one.info["cmdline"] or [])]
    ours = [one for one in roots if one.environ().get("HOME", "").startswith(str(run.folder))]
    return {process for one in ours for process in (one, *one.children(recursive=True))}


@pytest.mark.timeout(280)
@pytest.mark.parametrize("kind", RUNS)
def test_a_killed_environment_and_a_killed_controller_lose_and_repeat_nothing(kind, tmp_path) -> None:
    rows, args = RUNS[kind]
    task = {"reasoning_gym": "mixture", "openenv": "guess"}[kind]
    prepared = [sys.executable, "examples/environments/prepare.py", str(tmp_path / "data"), "--task", task]
    subprocess.run(prepared, cwd=ROOT, check=True)
    text = CONFIG.replace("KIND", kind).replace("RUNS", str(tmp_path)).replace("ROWS", rows)
    text = text.replace("MODEL", str(tmp_path / "data/model")).replace(
        "ARGS", json.dumps({"python": str(PYTHON), **args})
    )
    (tmp_path / "config.yaml").write_text(text)
    assert yaml.safe_load(text)["workflow"] == kind
    run = Run(
        arguments=["--config", str(tmp_path / "config.yaml")],
        folder=tmp_path / "environments" / kind,
        log_path=tmp_path / "launcher.log",
    )
    run.start()
    try:
        run.train_up_to(3)
        for process in workers(run):
            os.kill(process.pid, signal.SIGKILL)
        run.train_up_to(6)
        before = workers(run)
        assert before
        run.kill(["controller"])
        assert not psutil.wait_procs(before, timeout=30)[1], "a worker outlives its controller"
        assert run.wait_for_the_end(200) == 0, run.log_path.read_text()[-3000:]
        assert not workers(run)
    finally:
        run.abandon()
    audited = subprocess.run(
        [sys.executable, "-m", "areal.ledger", "audit", str(run.folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert audited.returncode == 0, audited.stdout
    if kind == "reasoning_gym":
        lines = [json.loads(line) for line in (run.folder / "environments/levels.jsonl").read_text().splitlines()]
        begun = [line["episode"] for line in lines if line["event"] == "begin"]
        assert len(begun) == len(set(begun)), "an episode has two levels"
