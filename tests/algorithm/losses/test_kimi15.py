"""The loss of Kimi k1.5."""

import math

import pytest
import torch


def slow_kimi(rows, t, tau, ratio):
    places = rows.trained(rows.sequence[t]) if ratio == "trajectory" else [t]
    log_ratio = sum(rows.theta[u] - rows.old[u] for u in places)
    return -rows.advantages[t] * rows.theta[t] + tau / 2 * log_ratio**2 / len(places)


@pytest.mark.parametrize("ratio", ["trajectory", "token"])
def test_it_conforms(kit, ratio):
    kit.conforms(
        lambda rows, t: slow_kimi(rows, t, 0.7, ratio), policy_loss=kit.section("kimi15", tau=0.7, ratio=ratio)
    )


def test_by_hand(kit):
    # log-ratios 0.3 and 0.1, tau 0.5: the sum 0.4 squared is 0.16, times 0.25 / 2 tokens = 0.02 for each
    tokens = kit.make_tokens([-0.7, -0.9], old=[-1.0, -1.0], advantages=[1.0, -2.0])
    options = {"policy_loss": kit.section("kimi15", tau=0.5)}
    assert kit.loss_of(tokens, **options).losses.tolist() == pytest.approx([0.7 + 0.02, -1.8 + 0.02])
    by_token = {"policy_loss": kit.section("kimi15", tau=0.5, ratio="token")}
    assert kit.loss_of(tokens, **by_token).losses.tolist() == pytest.approx([0.7 + 0.0225, -1.8 + 0.0025])
    assert kit.loss_of(tokens, **by_token).stats["log_ratio_penalty"].values.sum().item() == pytest.approx(0.025)


def test_without_advantage_it_pulls_back_to_the_old_policy(kit):
    tokens = kit.make_tokens(torch.tensor([-0.5, -1.5], requires_grad=True), old=[-1.0, -1.2], advantages=[0.0, 0.0])
    gradient = kit.gradient_of(tokens, torch.ones(2), policy_loss="kimi15")
    assert gradient.tolist() == pytest.approx([0.1 * 0.2] * 2)  # tau times the sum of log-ratios 0.5 - 0.3
    assert math.isclose(0.5 - 0.3, 0.2)
