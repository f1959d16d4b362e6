"""CISPO: a clipped weight that carries no gradient."""

import math

import pytest
import torch


def slow_cispo(rows, t, *, low=0.2, high=0.2, unified=False, by_sequence=False):
    log_ratios = [a - b for a, b in zip(rows.fixed, rows.old, strict=True)]
    ratio = math.exp(rows.mean(log_ratios, t) if by_sequence else log_ratios[t])
    a = rows.mean(rows.advantages, t) if by_sequence else rows.advantages[t]
    if unified and ((a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)):
        return 0.0
    return -min(max(ratio, 1 - low), 1 + high) * a * rows.theta[t]


def test_it_conforms(kit):
    kit.conforms(lambda rows, t: slow_cispo(rows, t), policy_loss="cispo")
    kit.conforms(
        lambda rows, t: slow_cispo(rows, t, low=1.0, high=0.3), policy_loss="cispo", eps_clip=-1.0, eps_clip_higher=0.3
    )
    kit.conforms(
        lambda rows, t: slow_cispo(rows, t, low=0.1, high=0.3, unified=True),
        policy_loss=kit.section("cispo", unified_mask=True),
        eps_clip=0.1,
        eps_clip_higher=0.3,
    )
    kit.conforms(
        lambda rows, t: slow_cispo(rows, t, low=0.1, high=0.1, by_sequence=True),
        policy_loss="cispo",
        eps_clip=0.1,
        importance_sampling_level="sequence",
    )


def test_by_hand(kit):
    # rho = 0.6 / 0.3 = 2 cut to 1.2: -1.2 * 3 * log 0.6; rho = 0.1 / 0.2 cut to 0.8: -0.8 * -1 * log 0.1
    logprobs = torch.tensor([0.6, 0.1]).log().requires_grad_()
    tokens = kit.make_tokens(logprobs, old=torch.tensor([0.3, 0.2]).log(), advantages=[3.0, -1.0])
    result = kit.loss_of(tokens, policy_loss="cispo")
    assert result.losses.tolist() == pytest.approx([-3.6 * math.log(0.6), 0.8 * math.log(0.1)])
    assert result.stats["clip_ratio"].values.tolist() == [True, True]
    # PPO gives both tokens no gradient, here they keep the clipped weight
    assert kit.gradient_of(tokens, torch.ones(2), policy_loss="cispo").tolist() == pytest.approx([-3.6, 0.8])
    unified = kit.gradient_of(tokens, torch.ones(2), policy_loss=kit.section("cispo", unified_mask=True))
    assert unified.tolist() == [0, 0]


def test_truncated_importance_sampling_of_roll_is_cispo_without_a_lower_side(kit):
    # weights min(rho, 1) of rho = 2 and 0.5
    tokens = kit.make_tokens(torch.tensor([0.6, 0.1]).log().requires_grad_(), old=torch.tensor([0.3, 0.2]).log())
    gradient = kit.gradient_of(tokens, torch.ones(2), policy_loss="cispo", eps_clip=-1.0, eps_clip_higher=0.0)
    assert gradient.tolist() == pytest.approx([-1.0, -0.5])
