"""Clip-Cov's loss, given which tokens were chosen."""

import math
from dataclasses import replace

import pytest
import torch

from tests.expect import raises_code


def slow_clip_cov(rows, t):
    if rows.chosen[t]:
        return 0.0
    ratio, a = math.exp(rows.theta[t] - rows.old[t]), rows.advantages[t]
    return max(-a * ratio, -a * min(max(ratio, 0.8), 1.2))


def test_it_conforms(kit):
    kit.conforms(slow_clip_cov, policy_loss="clip_cov")


def test_by_hand(kit):
    tokens = kit.make_tokens(torch.tensor([1.5, 1.1, 1.1], requires_grad=True).log(), chosen=[False, True, False])
    result = kit.loss_of(tokens, policy_loss="clip_cov")
    assert result.losses.tolist() == pytest.approx([-1.2, 0.0, -1.1])
    assert result.stats["covariance_chosen_ratio"].values.tolist() == [False, True, False]
    assert result.stats["clip_ratio"].values.tolist() == [True, False, False]


def test_it_requires_the_stage_that_chooses_tokens(kit):
    with raises_code("training.stage_missing", "chosen_tokens"):
        kit.loss_of(replace(kit.make_tokens([0.0]), columns={}), policy_loss="clip_cov")
