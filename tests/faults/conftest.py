"""Shared by the tests of faults on real runs. The soak's modules lie beside this file and are run as scripts too."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.driver import ROOT, Run
from tests.faults.proofs import prove

CONFIG = """
experiment_name: faults
trial_name: run
seed: 3
allocation_mode: native:d2+fsdp:d2
cluster: {fileroot: RUNS}
total_train_epochs: 9
total_train_steps: 30
train_dataset: {path: DATA/train.jsonl, batch_size: 8}
valid_dataset: {path: DATA/held_out.jsonl, batch_size: 64}
reward_fn: HERE/reward.py:share_of_ones
gconfig: {n_samples: 4, max_new_tokens: 8}
rollout: {max_head_offpolicyness: 2, health_check_interval_s: 0.5, weight_update_timeout_s: 20}
native: {dtype: float32, max_running_requests: 64, context_length: 32}
actor:
  path: DATA/model
  dtype: float32
  ppo_n_minibatches: 2
  use_decoupled_loss: true
  weight_update_mode: xccl
  reward_norm: {mean_level: group, std_level: null}
  optimizer: {lr: 1.0e-3, lr_scheduler_type: constant, warmup_steps_proportion: 0.0}
evaluator: {eval_before_train: true, freq_steps: 10, modes: [greedy]}
reward: {timeout_s: 900}
recover: {mode: auto, freq_steps: 3, retries: 9}
launcher: {hang_s: 6.0}
"""
REWARD = '''"""A reward that a random model gets some of. It waits while a file named `hold` lies in this folder."""

import pathlib
import time

HOLD = pathlib.Path(__file__).with_name("hold")


def share_of_ones(prompt, completion, prompt_ids, completion_ids, **row):
    while HOLD.exists():
        time.sleep(0.02)
    return completion.count("1") / 8
'''


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """The quickstart's data and random model."""
    folder = tmp_path_factory.mktemp("faults") / "data"
    subprocess.run([sys.executable, "examples/quickstart/prepare.py", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """While this file exists no reward returns: the run makes no progress and does not end."""
    return tmp_path / "hold"


@pytest.fixture
def make_run(data: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts a run on two servers and two ranks below `root`; ended by force when the test is over."""
    runs: list[Run] = []

    def make(*overrides: str, root: Path = tmp_path) -> Run:
        config = tmp_path / "config.yaml"
        config.write_text(CONFIG.replace("DATA", str(data)).replace("RUNS", str(root)).replace("HERE", str(tmp_path)))
        (tmp_path / "reward.py").write_text(REWARD)
        run = Run(
            arguments=["--config", str(config), *overrides],
            folder=root / "faults" / "run",
            log_path=tmp_path / f"launcher-{len(runs)}.log",
        )
        runs.append(run)
        run.start()
        return run

    yield make
    for run in runs:
        run.abandon()


@pytest.fixture
def prove_all(data: Path) -> Callable[[Run], None]:
    """Everything that must hold after a run that completed."""

    def check(run: Run) -> None:
        assert run.exit_code == 0, run.log_path.read_text()[-3000:]
        _, problems = prove(run, data=data, is_to_solve=False)
        assert problems == []

    return check
