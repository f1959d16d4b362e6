"""KL-Cov's loss, given which tokens were chosen."""

import math

import pytest


def slow_kl_cov(rows, t, coef):
    log_ratio = rows.theta[t] - rows.old[t]
    return -rows.advantages[t] * math.exp(log_ratio) + (coef * abs(log_ratio) if rows.chosen[t] else 0.0)


@pytest.mark.parametrize("coef", [1.0, 0.3])
def test_it_conforms(kit, coef):
    kit.conforms(lambda rows, t: slow_kl_cov(rows, t, coef), policy_loss=kit.section("kl_cov", coef=coef))


def test_by_hand(kit):
    # rho = 2, A = 1: no clip; the chosen tokens pay 0.5 |log 2|, whichever way they moved
    tokens = kit.make_tokens(
        [math.log(2), math.log(2), -math.log(2)], advantages=[1.0, 1.0, 1.0], chosen=[False, True, True]
    )
    result = kit.loss_of(tokens, policy_loss=kit.section("kl_cov", coef=0.5))
    half = 0.5 * math.log(2)
    assert result.losses.tolist() == pytest.approx([-2.0, -2.0 + half, -0.5 + half])
    assert result.stats["covariance_chosen_ratio"].values.tolist() == [False, True, True]
