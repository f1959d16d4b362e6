"""NaN at each stage: loss, gradient, weights, broadcast, logits, run; see also test_native_states.py."""

import os
import subprocess
import sys

import pytest

from areal.ledger.audit import audit
from tests.engine.conftest import cases, models
from tests.engine.test_fsdp_engine import (
    test_a_loss_that_is_not_finite_is_found_even_if_no_gradient_shows_it,
    test_non_finite_values_end_the_training,
)
from tests.inference.test_sampler import test_accepted_parameters_give_finite_logprobs
from tests.inference.test_weight_update import test_a_broadcast_that_is_not_finite_leaves_the_weights
from tests.test_end_to_end import ROOT, folder

__all__ = [
    "cases", "folder", "models", "test_a_broadcast_that_is_not_finite_leaves_the_weights",
    "test_a_loss_that_is_not_finite_is_found_even_if_no_gradient_shows_it",
    "test_accepted_parameters_give_finite_logprobs", "test_non_finite_values_end_the_training",
]  # fmt: skip


@pytest.mark.timeout(300)  # starts a run three times
@pytest.mark.parametrize("mode", ["disk", "xccl"])
def test_a_diverging_run_publishes_nothing_more_and_keeps_its_checkpoint(folder, mode):
    root = folder / "runs" / "e2e" / f"diverged-{mode}"
    command = [sys.executable, "-m", "areal.launcher.local", "--config", str(folder / "c.yaml")]
    command += [
        f"trial_name={root.name}",
        f"actor.weight_update_mode={mode}",
        "recover.mode=auto",
        "recover.freq_steps=1",
    ]

    def launch(*words: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run([*command, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    def recovery_files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in (root / "recover").rglob("*") if path.is_file()}

    done = launch("total_train_steps=2")
    assert done.returncode == 0, done.stderr
    saved = recovery_files()
    assert saved
    done = launch("total_train_steps=4", "actor.optimizer.lr=1e9")
    assert done.returncode == 1, done.stderr
    assert "[training.not_finite]" in done.stderr.strip().splitlines()[-1]
    kept = recovery_files()
    assert {path: kept.get(path) for path in saved} == saved
    log = "".join(path.read_text() for path in (root / "logs").glob("server*.log"))
    assert "weights.not_finite" not in log, "the trainer published weights that are not finite"
    assert "Traceback" not in log
    report = audit(root / "ledger")
    assert report.is_clean, report.lines()
    done = launch("total_train_steps=4")
    assert done.returncode == 0, done.stderr
    assert audit(root / "ledger").counts["consumed"] == 4 * 4
