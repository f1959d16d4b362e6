"""DPPO: a bound on the divergence of a token's probability."""

import math

import pytest
import torch


def slow_dppo(rows, t, divergence, low, high, max_ratio):
    p, q, a = math.exp(rows.fixed[t]), math.exp(rows.old[t]), rows.advantages[t]
    p, q = min(p, 1 - 1e-12), min(q, 1 - 1e-12)
    d = abs(p - q) if divergence == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    gone = (d > high and p > q) if a > 0 else (d > low and p < q)
    return 0.0 if gone else -min(p / q, max_ratio) * a * rows.theta[t]


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_it_conforms(kit, divergence):
    kit.conforms(
        lambda rows, t: slow_dppo(rows, t, divergence, 0.02, 0.05, 1.3),
        policy_loss=kit.section("dppo", divergence=divergence, max_ratio=1.3),
        eps_clip=0.02,
        eps_clip_higher=0.05,
    )
    kit.conforms(
        lambda rows, t: slow_dppo(rows, t, "tv", 100, 0.05, 20), policy_loss="dppo", eps_clip=-1.0, eps_clip_higher=0.05
    )


def test_by_hand(kit):
    # q -> p: 0.5 -> 0.8 with A > 0 is 0.3 too far up; 0.01 -> 0.1 is not, though its ratio is 10; 0.5 -> 0.1 with A < 0
    # is too far down; 0.5 -> 0.8 with A < 0 goes back to where the advantage pushes: kept with the ratio 1.6
    logprobs = torch.tensor([0.8, 0.1, 0.1, 0.8]).log().requires_grad_()
    tokens = kit.make_tokens(logprobs, old=torch.tensor([0.5, 0.01, 0.5, 0.5]).log(), advantages=[1.0, 1.0, -1.0, -1.0])
    result = kit.loss_of(tokens, policy_loss="dppo")
    assert result.stats["clip_ratio"].values.tolist() == [True, False, True, False]
    gradient = kit.gradient_of(tokens, torch.ones(4), policy_loss="dppo")
    assert gradient.tolist() == pytest.approx([0, -10, 0, 1.6], rel=1e-5)
    capped = kit.gradient_of(tokens, torch.ones(4), policy_loss=kit.section("dppo", max_ratio=4.0))
    assert capped.tolist() == pytest.approx([0, -4, 0, 1.6], rel=1e-5)


def test_kl_by_hand(kit):
    # q = 0.5, p = 0.8: 0.5 log(0.5 / 0.8) + 0.5 log(0.5 / 0.2) = 0.22314
    tokens = kit.make_tokens(torch.tensor([0.8]).log(), old=torch.tensor([0.5]).log())
    for bound, gone in ((0.2231, True), (0.2232, False)):
        result = kit.loss_of(tokens, policy_loss=kit.section("dppo", divergence="kl"), eps_clip=bound)
        assert result.stats["clip_ratio"].values.tolist() == [gone]


def test_certain_tokens_have_a_finite_divergence(kit):
    # a certain token that has become very unlikely: D = 30, whatever 0 log 0 is
    tokens = kit.make_tokens([0.0, -1e-9, -30.0], old=[-1e-3, 0.0, 0.0], advantages=[1.0, 1.0, -1.0])
    result = kit.loss_of(tokens, policy_loss=kit.section("dppo", divergence="kl"))
    assert result.losses.isfinite().all()
    assert result.stats["clip_ratio"].values.tolist() == [False, False, True]
