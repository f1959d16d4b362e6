"""Every policy loss through a real engine: whole, and cut into micro-batches."""

import pytest
import torch

from areal.api.config import MicroBatchSpec, PPOActorConfig
from areal.api.registry import entries
from tests.engine import test_loss_two_ranks as loss_cases

CASES = {name: {"policy_loss": name} for name in entries("losses") if name != "custom"} | {
    "guess": {"prox_logp_method": "loglinear", "behav_imp_weight_cap": 1.5},
    "compared": {"prox_logp_method": "metrics"},
}


@pytest.fixture(scope="module")
def path(cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("every_loss")
    cases.write_models(folder)
    return folder / "qwen3"


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_make_the_update_of_the_whole(cases, path, case):
    """Two optimiser steps, so that ratios are not 1 in the second."""
    config = PPOActorConfig(path="x", kl_ctl=0.0, ppo_n_minibatches=2, use_decoupled_loss=True, **CASES[case])
    whole, metrics = loss_cases.update(path, None, loss_cases.rewarded_batch(), config)
    spec = MicroBatchSpec(max_tokens_per_mb=15)
    cut, result = loss_cases.update(path, None, loss_cases.rewarded_batch(), config, mb_spec=spec)
    before = cases.weights_of(cases.make_engine(path))
    assert max(float((before[name] - value).abs().max()) for name, value in whole.items()) > 1e-4
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=0, atol=1e-6, msg=name)
    assert result == pytest.approx(metrics, abs=1e-5)
