"""A kill -9 of the controller, and deaths of the worker, in whole runs over a fake package."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from areal.ledger.show import Samples
from tests.environments.environment_kit import FAKES, kill_worker_then_controller, run_of
from tests.faults.driver import ROOT

CONTROLLER = """
import asyncio
from areal.environments.process import EnvironmentWorker, WorkerSetup

async def main():
    worker = EnvironmentWorker(WorkerSetup(adapter="textarena", env="Guess-v0", python="", args={}))
    row = {"config": {}, "seed": 4, "index": 1}
    await worker.call("reset", {"row": row}, episode="game", limit_s=60)
    print(worker.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_controller_ends_its_worker_and_the_processes_of_games() -> None:
    paths = {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", CONTROLLER], cwd=FAKES, env=os.environ | paths, stdout=subprocess.PIPE, text=True
    ) as controller:
        worker = psutil.Process(int(controller.stdout.readline()))
        processes = [worker, *worker.children(recursive=True)]
        controller.send_signal(signal.SIGKILL)
    assert len(processes) == 2
    assert not psutil.wait_procs(processes, timeout=30)[1]


def shim(folder):
    """An interpreter that finds the fake packages."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\ncd {FAKES} && exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def version_of(policy):
    return int(policy.removeprefix("policy-v").partition("-")[0])


@pytest.mark.timeout(200)
def test_a_run_against_older_policies_continues_after_kills_with_the_recorded_ones(tmp_path) -> None:
    python = shim(tmp_path)
    args = {"python": str(python), "args": {"trained": 1, "opponent": {"steps": 4}}}
    run = run_of(tmp_path, "textarena", "env:Both-v0?size=200&seed=1", args, ["actor.lora={rank: 4}"])
    kill_worker_then_controller(run)
    episodes = json.loads((run.folder / "summary.json").read_text())["episodes"]
    assert episodes["consumed"] == 48
    folder = run.folder / "environments" / "opponents"
    lines = [json.loads(line) for line in (folder / "opponents.jsonl").read_text().splitlines()]
    played = {line["episode"]: version_of(line["policy"]) for line in lines}
    assert len(lines) == len(played), "an episode has two opponents"
    versions = sorted({*played.values()})
    assert [version // 4 for version in versions][:3] == [0, 1, 2]
    kept = sorted(version_of(path.name) for path in folder.glob("policy-v*"))
    assert kept == versions[-len(kept) :], "only policies that nobody plays against are deleted"
    assert versions[0] not in kept
    samples = Samples.read(run.folder / "ledger")
    trained = [record for record in samples.records.values() if record.state == "trained"]
    assert {record.episode: record.stats["opponent_version"] for record in trained}.items() <= played.items()
    rows = [trajectory for record in trained for trajectory in samples.trajectories(record)]
    assert len(rows) == 2 * 48, "one row of each game: that of the policy"


@pytest.mark.slow
def test_a_worker_that_dies_fails_its_episodes_without_a_reward_and_the_run_goes_on(tmp_path) -> None:
    python = shim(tmp_path)
    rows = ["env:sums?size=200&seed=1", "env:dying?size=2"]
    run = run_of(tmp_path, "reasoning_gym", rows, {"python": str(python), "args": {"extract": False}})
    kill_worker_then_controller(run)
    episodes = json.loads((run.folder / "summary.json").read_text())["episodes"]
    assert episodes["consumed"] == 48
    # a group whose samples all ended without a reward fails, and one with some of them is rejected
    lost = {"failed: agent_error: EnvironmentDied", "rejected: agent_error: EnvironmentDied"}
    assert "failed: agent_error: EnvironmentDied" in episodes["reasons"]
    assert {*episodes["reasons"]} <= lost
