"""A kill -9 of the controller, and deaths of the worker, in whole runs over a fake package."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

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


@pytest.mark.timeout(200)
def test_a_worker_that_dies_fails_its_episodes_without_a_reward_and_the_run_goes_on(tmp_path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncd {FAKES} && exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    rows = ["env:sums?size=200&seed=1", "env:dying?size=2"]
    run = run_of(tmp_path, "reasoning_gym", rows, {"python": str(python), "args": {"extract": False}})
    kill_worker_then_controller(run)
    episodes = json.loads((run.folder / "summary.json").read_text())["episodes"]
    assert episodes["consumed"] == 48
    # a group whose samples all ended without a reward fails, and one with some of them is rejected
    lost = {"failed: agent_error: EnvironmentDied", "rejected: agent_error: EnvironmentDied"}
    assert "failed: agent_error: EnvironmentDied" in episodes["reasons"]
    assert {*episodes["reasons"]} <= lost
