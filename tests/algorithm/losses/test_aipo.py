"""AIPO's one-sided truncation, as a weight and as an objective."""

import math

import pytest
import torch


def slow_aipo(rows, t, rho, truncation, *, by_sequence=False):
    a = rows.mean(rows.advantages, t) if by_sequence else rows.advantages[t]
    policy = rows.fixed if truncation == "weight" else rows.theta
    log_ratios = [new - old for new, old in zip(policy, rows.old, strict=True)]
    ratio = min(math.exp(rows.mean(log_ratios, t) if by_sequence else log_ratios[t]), rho)
    return -ratio * a * (rows.theta[t] if truncation == "weight" else 1.0)


@pytest.mark.parametrize("truncation", ["weight", "objective"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_it_conforms(kit, truncation, level):
    kit.conforms(
        lambda rows, t: slow_aipo(rows, t, 1.1, truncation, by_sequence=level == "sequence"),
        policy_loss=kit.section("aipo", rho=1.1, truncation=truncation),
        importance_sampling_level=level,
    )


def test_by_hand(kit):
    # rho = 0.9 / 0.3 = 3 cut to 2, and 0.2 / 0.4 = 0.5; A = 1, -4
    logprobs = torch.tensor([0.9, 0.2]).log().requires_grad_()
    tokens = kit.make_tokens(logprobs, old=torch.tensor([0.3, 0.4]).log(), advantages=[1.0, -4.0])
    weight = kit.loss_of(tokens, policy_loss="aipo")
    assert weight.losses.tolist() == pytest.approx([-2 * math.log(0.9), 2 * math.log(0.2)])
    assert weight.stats["clip_ratio"].values.tolist() == [True, False]
    assert kit.gradient_of(tokens, torch.ones(2), policy_loss="aipo").tolist() == pytest.approx([-2.0, 2.0])
    options = {"policy_loss": kit.section("aipo", truncation="objective")}
    assert kit.loss_of(tokens, **options).losses.tolist() == pytest.approx([-2.0, 2.0])
    assert kit.gradient_of(tokens, torch.ones(2), **options).tolist() == pytest.approx([0.0, 2.0])
