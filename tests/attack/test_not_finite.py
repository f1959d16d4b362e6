"""NaN at each stage of a run: the trainer ends it with the cause, servers keep their weights, checkpoints stay."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.conftest import cases, models
from tests.engine.test_fsdp_engine import (
    test_a_loss_that_is_not_finite_is_found_even_if_no_gradient_shows_it,
    test_what_is_not_finite_ends_the_training,
)
from tests.inference.test_sampler import test_accepted_parameters_give_finite_logprobs
from tests.inference.test_weight_update import test_a_broadcast_that_is_not_finite_restores_the_weights
from tests.test_end_to_end import ROOT, folder

__all__ = [
    "cases",
    "folder",
    "models",
    "test_a_broadcast_that_is_not_finite_restores_the_weights",
    "test_a_loss_that_is_not_finite_is_found_even_if_no_gradient_shows_it",
    "test_accepted_parameters_give_finite_logprobs",
    "test_what_is_not_finite_ends_the_training",
]


@pytest.mark.parametrize("mode", ["disk", "xccl"])
def test_a_run_whose_weights_overflow_ends_with_the_cause_and_publishes_none_of_them(folder, mode):
    words = [f"trial_name={mode}", f"actor.weight_update_mode={mode}", "recover.mode=auto", "recover.freq_steps=1"]
    command = [sys.executable, "-m", "areal.launcher.local", "--config", str(folder / "c.yaml"), *words]
    done = subprocess.run([*command, "total_train_steps=2"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = folder / "runs" / "e2e" / mode
    checkpoints = sorted(path.name for path in (run / "recover").iterdir())
    done = subprocess.run(
        [*command, "total_train_steps=6", "actor.optimizer.lr=1e36"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "[training.not_finite]" in last, done.stderr
    assert sorted(path.name for path in (run / "recover").iterdir()) == checkpoints
    restarts = json.loads((run / "summary.json").read_text())["restarts"]
    assert not [name for name in restarts if name.startswith("server")], "a server died of the weights"
    for path in [*(run / "weights").rglob("*.safetensors"), *(run / "recover").rglob("*.safetensors")]:
        assert all(torch.isfinite(value).all() for value in load_file(path).values() if value.is_floating_point())
