"""GMPO: the geometric mean of clipped ratios."""

import math

import pytest
import torch


def slow_gmpo(rows, t, low, high):
    """-A (prod over the sequence of the clipped ratios) ^ (1 / n), the clip on the side that A pushes to."""
    a = rows.mean(rows.advantages, t)
    product, places = 1.0, rows.trained(rows.sequence[t])
    for u in places:
        ratio = math.exp(rows.theta[u] - rows.old[u])
        product *= min(ratio, math.exp(high)) if a > 0 else max(ratio, math.exp(-low))
    return -a * product ** (1 / len(places))


@pytest.mark.parametrize(
    ("low", "high", "options"),
    [
        (0.2, 0.2, {}),
        (0.4, 0.1, {"eps_clip": 0.4, "eps_clip_higher": 0.1}),
        (100, 0.3, {"eps_clip": -1.0, "eps_clip_higher": 0.3}),
        (0.3, 100, {"eps_clip": 0.3, "eps_clip_higher": -1.0}),
    ],
)
def test_it_conforms(kit, low, high, options):
    kit.conforms(lambda rows, t: slow_gmpo(rows, t, low, high), policy_loss="gmpo", **options)


def test_by_hand(kit):
    # log-ratios 0.6, -0.2, 0.2, -0.6 with epsilon 0.4
    # A = 2: 0.4, -0.2, 0.2, -0.6 -> mean -0.05;  A = -2: 0.6, -0.2, 0.2, -0.4 -> mean 0.05
    log_ratios = [0.6, -0.2, 0.2, -0.6]
    tokens = kit.make_tokens(log_ratios * 2, advantages=[2.0] * 4 + [-2.0] * 4, sequence=[0] * 4 + [1] * 4)
    result = kit.loss_of(tokens, policy_loss="gmpo", eps_clip=0.4)
    assert result.losses.tolist() == pytest.approx([-2 * math.exp(-0.05)] * 4 + [2 * math.exp(0.05)] * 4)
    assert result.stats["clip_ratio"].values.tolist() == [True, False, False, False, False, False, False, True]


def test_without_clip_it_is_gspo(kit):
    tokens = kit.random_tokens(3)
    gmpo, gspo = (kit.loss_of(tokens, policy_loss=name, eps_clip=-1.0).losses for name in ("gmpo", "gspo"))
    assert torch.allclose(gmpo, gspo, atol=1e-12)
