"""20 steps of GRPO on the quickstart's task with real servers, started as a user starts them; one is killed on the way.

Each waits for its launcher, which ends by itself, or for a time limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest

from areal.ledger.audit import audit
from tests.servers.real_server import ROOT, SGLANG_STUBS, Backend, environment_python

STEPS = 20
LIMIT_S = 420.0
pytestmark = pytest.mark.timeout(3 * LIMIT_S)
COMMON = (
    f"total_train_steps={STEPS}",
    "rollout.max_head_offpolicyness=1",
    "rollout.should_accept_fn=",  # every group counts, so that the reward of the batches is that of the policy
    "rollout.setup_timeout=300",
    "launcher.ready_timeout_s=300",
    "actor.ppo_n_minibatches=4",
    "actor.optimizer.lr=3.0e-4",
    "actor.optimizer.lr_scheduler_type=constant",
    "evaluator.eval_before_train=false",
    "evaluator.freq_steps=null",
    "evaluator.stop_at={}",
)


@pytest.fixture(scope="session")
def warm_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's folders after its stage of supervised training."""
    folder = tmp_path_factory.mktemp("quickstart")
    python("examples/quickstart/prepare.py", str(folder / "quickstart" / "data"))
    python(*launch_words("sft.yaml", folder))
    return folder


def launch_words(config: str, folder: Path, *overrides: str) -> list[str]:
    words = ["-m", "areal.launcher.local", "--config", f"examples/quickstart/{config}", f"cluster.fileroot={folder}"]
    return [*words, *overrides]


def python(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@dataclass(frozen=True)
class Launched:
    """A run that is on its way."""

    process: subprocess.Popen[bytes]
    folder: Path
    mark: str
    log: Path

    def rows(self) -> list[dict[str, Any]]:
        """Metrics by train step, so far."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        with contextlib.suppress(ValueError):  # the last line may be half written
            return [row for row in map(json.loads, lines) if "batch/reward" in row]
        return []

    def processes(self, *names: str) -> list[psutil.Process]:
        """Those alive whose command holds one of the names; all of the run's without names."""
        result = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("AREAL_TEST_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    command = " ".join(process.cmdline())
                    if not names or any(name in command for name in names):
                        result.append(process)
        return result

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while len(self.rows()) < count:
            assert self.process.poll() is None, self.last_words()
            assert time.monotonic() < deadline, self.last_words()
            time.sleep(0.1)

    def last_words(self) -> str:
        return self.log.read_text()[-4000:]


def launch(backend: Backend, folder: Path, *overrides: str) -> Launched:
    mark = uuid.uuid4().hex[:12]
    ours = (
        f"allocation_mode={backend}:d1+fsdp:d1",
        f"server_python={environment_python(backend)}",
        f"trial_name={mark}",
        *([f"launcher.inference_server_env_vars=PYTHONPATH={SGLANG_STUBS}"] if backend == "sglang" else []),
    )
    log = folder / f"{mark}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *launch_words("grpo.yaml", folder, *ours, *COMMON, *overrides)],
            cwd=ROOT,
            env=os.environ | {"AREAL_TEST_MARK": mark, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return Launched(process, folder / "quickstart" / mark, mark, log)


def check_to_the_end(run: Launched) -> None:
    """It completes, the reward rises, the two sides agree about the log-probabilities, and nothing is left behind."""
    try:
        assert run.process.wait(timeout=LIMIT_S) == 0, run.last_words()
    finally:
        if run.process.poll() is None:
            run.process.kill()
        leftovers = run.processes()
        for process in leftovers:
            process.kill()
    assert leftovers == []
    rows = run.rows()
    rewards = [row["batch/reward"] for row in rows]
    assert len(rewards) == STEPS
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.05, rewards
    assert rows[0]["batch/prox_rollout_gap_max"] < 1e-4  # made and trained on by the same weights
    report = audit(run.folder / "ledger")
    assert report.is_clean, report.lines()


def test_weights_over_the_collective(backend: Backend, warm_up: Path) -> None:
    run = launch(backend, warm_up, "actor.weight_update_mode=xccl", "rollout.weight_update=keep")
    check_to_the_end(run)


@pytest.mark.parametrize("mode", ["disk", "delta_disk", "delta_xccl"])
def test_weights_reach_a_server_that_is_killed_on_the_way(backend: Backend, warm_up: Path, mode: str) -> None:
    """kill -9 of the foreign server, not of its host: the launcher starts it again, it loads the current version."""
    run = launch(backend, warm_up, f"actor.weight_update_mode={mode}")
    run.wait_for_steps(6)
    victims = run.processes("vllm.entrypoints.cli.main", "sglang.launch_server")
    servers = [process for process in victims if "server_host" not in " ".join(process.cmdline())]
    assert len(servers) == 1
    servers[0].kill()
    check_to_the_end(run)
    assert servers[0].pid not in {process.pid for process in run.processes()}


@pytest.mark.parametrize("mode", ["http", "delta"])
def test_weights_over_http_with_the_trainer_killed_on_the_way(backend: Backend, warm_up: Path, mode: str) -> None:
    """The trainer that starts again serves its versions at another address; the server pulls them from there."""
    recovers = ("recover.mode=auto", "recover.freq_steps=3")
    run = launch(backend, warm_up, f"actor.weight_update_mode={mode}", *recovers)
    run.wait_for_steps(6)
    (trainer,) = [
        process
        for process in run.processes("areal.trainer")
        if json.loads(process.environ()["AREAL_PROCESS"])["role"] == "trainer"
    ]
    trainer.kill()
    check_to_the_end(run)
    assert not any((run.folder / "weights").glob("*"))
