"""The examples of agents: each loses nothing in its rehearsal, and each is trained in a real run."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from areal.cli.main import run_command
from areal.ledger.audit import audit
from tests.agent.observed_agents import MARK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
EXAMPLES, OBSERVED = ROOT / "examples" / "agents", Path(__file__).parent / "observed_agents.py"
CONFIG = str(EXAMPLES / "calculator.yaml")
OTHER = "~workflow_args.agent"
CALCULATOR: list[str] = []
ENVIRONMENT = [
    OTHER,
    f"workflow_args.environment={EXAMPLES}/environment.py:Multiplication",
    f"workflow_args.tools=[{EXAMPLES}/calculator.py:calculator]",
]
BLACK_BOX = [OTHER, f'workflow_args.command=[python, {EXAMPLES}/black_box.py, "{{question}}"]', "reward_fn=exact"]
HTTP = [OTHER, f'workflow_args.command=[python, {EXAMPLES}/black_box_http.py, "{{question}}", "{{answer}}"]']
OPENAI = [OTHER, f'workflow_args.command=[python, {EXAMPLES}/black_box_http.py, "{{question}}", --openai]']
OPENAI += ["reward_fn=exact"]
SEARCH = [f"workflow_args.agent={EXAMPLES}/search.py:Search"]
PRIVATE = [f"workflow_args.agent={OBSERVED}:run"]
PRIVATE_COMMAND = [OTHER, f'workflow_args.command=[python, {OBSERVED}, "{{question}}"]', "reward_fn=exact"]
INLINE = ["agent.inline=true"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    """The random model and the data of each task."""
    folders: dict[str, Path] = {}
    for task in ("calculator", "search"):
        folders[task] = tmp_path_factory.mktemp(task)
        words = [EXAMPLES / "prepare.py", folders[task], "--task", task]
        subprocess.run([sys.executable, *map(str, words)], check=True)
    return folders


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("calculator", ["--config", CONFIG, *CALCULATOR]),
        ("calculator", ["--config", CONFIG, *ENVIRONMENT]),
        ("calculator", ["--config", CONFIG, *BLACK_BOX]),
        ("calculator", ["--config", CONFIG, *HTTP]),
        ("calculator", ["--config", CONFIG, *OPENAI]),
        ("calculator", ["--online", f"python {EXAMPLES}/online.py {{run}}"]),
        ("search", [f"{EXAMPLES}/search.py:Search"]),
    ],
    ids=["calculator", "environment", "black_box", "black_box_http", "black_box_openai", "online", "search"],
)
def test_an_example_loses_nothing_in_its_rehearsal(data, capsys, monkeypatch, task, words):
    monkeypatch.chdir(ROOT)
    status = run_command(["rehearse", *words, "--data", str(data[task] / "held_out.jsonl"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {
        scenario["scenario"]: scenario["problems"] for scenario in report["scenarios"] if scenario["problems"]
    } == {}
    assert all(scenario["is_reached"] for scenario in report["scenarios"])
    assert (status, report["good_reward"]) == (0, 1.0)


def test_a_black_box_over_the_variables_of_openai_learns(data, tmp_path):
    """Scored by a function over the finished session: after the warm-up, the policy learns to use the tool."""
    common = [f"cluster.fileroot={tmp_path}", f"train_dataset.path={data['calculator']}/warm_up.jsonl"]
    launch = [sys.executable, "-m", "areal.launcher.local", "--config"]
    warm_up = [*launch, str(EXAMPLES / "warm_up.yaml"), *common, f"model.path={data['calculator']}/model"]
    subprocess.run(warm_up, cwd=ROOT, check=True)
    common[1] = f"train_dataset.path={data['calculator']}/train.jsonl"
    more = [f"valid_dataset.path={data['calculator']}/held_out.jsonl", "total_train_steps=15"]
    subprocess.run([*launch, CONFIG, *common, *more, *OPENAI], cwd=ROOT, check=True)
    lines = map(json.loads, (tmp_path / "agents" / "calculator" / "metrics.jsonl").read_text().splitlines())
    rewards = [line["eval/sampled/reward"] for line in lines if "eval/sampled/reward" in line]
    assert rewards[-1] >= max(rewards[0] + 0.3, 0.8), rewards


def trained(data: Path, folder: Path, *words: str, program: tuple[str, ...] = ()) -> list[dict]:
    """A run of two train steps, and what `areal show` prints of it. `program`: runs at the same time."""
    common = [
        f"cluster.fileroot={folder}", f"actor.path={data}/model", f"train_dataset.path={data}/train.jsonl",
        "train_dataset.batch_size=3", "valid_dataset=null", "evaluator.stop_at={}",
        "evaluator.eval_before_train=false", "total_train_steps=2", "gconfig.n_samples=2",
        "~rollout.should_accept_fn",
    ]  # fmt: skip
    run = folder / "agents" / "calculator"
    command = [sys.executable, "-m", "areal.launcher.local", "--config", CONFIG, *common, *words]
    with contextlib.ExitStack() as stack:
        if program:
            stack.enter_context(subprocess.Popen([sys.executable, *program, str(run)]))
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    report = audit(run / "ledger")
    assert not report.violations
    shown = subprocess.run(
        [sys.executable, "-m", "areal", "show", str(run), "--json", "--limit", "99"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(shown.stdout)["samples"]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("calculator", CALCULATOR), ("calculator", INLINE), ("calculator", ENVIRONMENT), ("calculator", BLACK_BOX),
        ("calculator", HTTP), ("search", SEARCH), ("calculator", PRIVATE), ("calculator", PRIVATE_COMMAND),
    ],
    ids=["calculator", "inline", "environment", "black_box", "black_box_http", "search", "private", "private_command"],
)  # fmt: skip
def test_an_example_is_trained_in_a_real_run(data, tmp_path, task, words):
    samples = trained(data[task], tmp_path, *words)
    assert sum(sample["state"] == "trained" for sample in samples) >= 12
    assert all(sample["session"]["turns"] and sample["session"]["status"] == "ok" for sample in samples)
    metrics = (tmp_path / "agents" / "calculator" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["rollout/episode/num_turns"] >= 1


def test_a_program_from_outside_is_trained(data, tmp_path):
    program = ("-c", WAIT, str(EXAMPLES / "online.py"))
    samples = trained(data["calculator"], tmp_path, OTHER, "workflow_args.online=true", program=program)
    assert sum(sample["state"] == "trained" for sample in samples) >= 12


WAIT = """
import pathlib, subprocess, sys, time
run = pathlib.Path(sys.argv[2])
while not (run / "sessions.json").exists():
    time.sleep(0.1)
sys.exit(subprocess.run([sys.executable, *sys.argv[1:], "--sessions", "8", "--patience", "1"]).returncode)
"""
"""Starts a program when a run has its address."""


def test_what_agents_of_users_do_ends_with_a_clear_line_and_leaves_nothing(data, tmp_path):
    """Errors, a hang, a child process, prints, turns at the same time, a client that blocks."""
    words = [f"workflow_args.agent={OBSERVED}:behaves", "agent.timeout_s=20", "agent.workers=2", "total_train_steps=6"]
    samples = trained(data["calculator"], tmp_path, *words)
    assert {len(sample["session"]["turns"]) for sample in samples} == {1, 3}
    run = tmp_path / "agents" / "calculator"
    failed = subprocess.run(
        [sys.executable, "-m", "areal", "show", str(run), "--rejected", "--json", "--limit", "99"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    reasons = {sample["reason"] for sample in json.loads(failed.stdout)["samples"]}
    assert any("LookupError: no such page" in reason and "observed_agents.py" in reason for reason in reasons)
    assert "agent_timeout" in reasons
    left = [item.pid for item in psutil.process_iter(["cmdline"]) if MARK in " ".join(item.info["cmdline"] or [])]
    assert not left
