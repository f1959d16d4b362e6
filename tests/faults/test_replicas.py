"""A real run whose servers come and go by command while its processes are killed."""

import json
import subprocess
import sys

import pytest

from tests.faults.driver import ROOT, Run
from tests.faults.ledger_proof import raw_events

pytestmark = pytest.mark.slow

LIMIT_S = 900.0
"""For whatever is waited for; on an idle machine a twentieth is enough."""
SMALL = ["allocation_mode=native:d1+fsdp:d1", "evaluator.freq_steps=null", "total_train_steps=40"]
SMALL += ["rollout.setup_timeout=600", "launcher.ready_timeout_s=900"]
REWARD = '''"""A reward that holds the run up until all is over that must happen before its end."""

import os
import time


def share_of_ones(prompt, completion, prompt_ids, completion_ids, **row):
    time.sleep(0.0 if os.path.exists("{is_over}") else 0.2)
    return completion.count("1") / 8
'''


def train_up_to(run: Run, step: int) -> None:
    def is_there() -> bool:
        run.status()
        return run.highest_step >= step

    assert run.wait_for(is_there, LIMIT_S), run.log_path.read_text()[-3000:]


def attach(run: Run, *words: str) -> str:
    """What the command says, its exit status first."""
    argv = [sys.executable, "-m", "areal.launcher.local", "--attach", str(run.folder), *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return f"{done.returncode} {done.stdout or done.stderr.splitlines()[-1]}"


def test_replicas_join_and_leave_a_run_whose_processes_are_killed(make_run, prove_all, tmp_path):
    is_over = tmp_path / "is_over"
    (tmp_path / "slow.py").write_text(REWARD.format(is_over=is_over))
    run = make_run(*SMALL, f"reward_fn={tmp_path}/slow.py:share_of_ones")
    train_up_to(run, 3)
    assert attach(run, "--add-replica").startswith("0 server-1 is ready")

    def serves(name: str) -> bool:
        return any(name in event.get("replicas", ()) for event in raw_events(run.folder / "ledger"))

    assert run.wait_for(lambda: serves("server-1"), LIMIT_S), "the run has no use for it"
    assert attach(run, "--remove-replica", "server-0").startswith("0 server-0 is removed")
    assert attach(run, "--remove-replica", "server-0").startswith("2 areal: error: this run has no replica 'server-0'")
    assert "server-0" not in run.pids(fresh=True)
    for dead in ("controller", "trainer-0", "server-1"):
        before = run.pids(fresh=True)
        run.kill([dead])
        back = run.wait_for(
            lambda dead=dead, before=before: (
                run.pids(fresh=True).get(dead, before[dead]) != before[dead] and run.is_ready(dead, run.pids()[dead])
            ),
            LIMIT_S,
        )
        assert back, f"{dead} is not back\n{run.log_path.read_text()[-3000:]}"
        train_up_to(run, run.highest_step + 2)
    is_over.touch()
    assert run.launcher is not None
    run.launcher.wait(timeout=LIMIT_S)
    prove_all(run)
    summary = json.loads((run.folder / "summary.json").read_text())
    assert {name: len(why) for name, why in summary["restarts"].items()} == {
        "controller": 1,
        "trainers": 1,
        "server-1": 1,
    }
    assert sorted(summary["exit_codes"]) == ["controller", "server-0", "server-1", "trainer-0"]
    assert list((run.folder / "requests").iterdir()) == []
