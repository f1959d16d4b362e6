"""PPO's loss: asymmetric and dual clip, sides that are off, the level of the sequence."""

import math

import pytest
import torch


def slow_ppo(rows, t, *, low=0.2, high=0.2, c_clip=None):
    ratio = math.exp(rows.theta[t] - rows.old[t])
    a = rows.advantages[t]
    floor, ceiling = (1 - low if low >= 0 else 0.0), (1 + high if high >= 0 else math.inf)
    loss = max(-a * ratio, -a * min(max(ratio, floor), ceiling))
    return loss if c_clip is None else min(loss, c_clip * abs(a))


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({}, {}),
        ({"eps_clip": 0.1, "eps_clip_higher": 0.5}, {"low": 0.1, "high": 0.5}),
        ({"eps_clip": 0.3}, {"low": 0.3, "high": 0.3}),
        ({"c_clip": 1.2}, {"c_clip": 1.2}),
        ({"eps_clip": -1.0, "eps_clip_higher": 0.2}, {"low": -1, "high": 0.2}),
        ({"eps_clip": 0.2, "eps_clip_higher": -1.0}, {"low": 0.2, "high": -1}),
        ({"eps_clip": -0.5}, {"low": -1, "high": -1}),
        ({"eps_clip": 0.0}, {"low": 0.0, "high": 0.0}),
    ],
)
def test_it_conforms(kit, options, formula):
    kit.conforms(lambda rows, t: slow_ppo(rows, t, **formula), **options)


def test_by_hand(kit):
    # ratios 1.5, 1.5, 0.5, 0.5 with A = 2, -2, 2, -2, clip to [0.8, 1.2]; 1.1 is inside of it
    # A=2, 1.5: max(-3, -2.4) = -2.4 clipped;  A=-2, 1.5: max(3, 2.4) = 3
    # A=2, 0.5: max(-1, -1.6) = -1;            A=-2, 0.5: max(1, 1.6) = 1.6 clipped
    tokens = kit.make_tokens(torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1]).log(), advantages=[2.0, -2, 2, -2, 2])
    result = kit.loss_of(tokens, eps_clip=0.2)
    assert result.losses.tolist() == pytest.approx([-2.4, 3.0, -1.0, 1.6, -2.2])
    assert result.stats["clip_ratio"].values.tolist() == [True, False, False, True, False]
    assert result.stats["importance_weight"].values.tolist() == pytest.approx([1.5, 1.5, 0.5, 0.5, 1.1])


def test_dual_clip_by_hand(kit):
    # ratio 5, A = -2: max(10, 2.4) = 10, bounded by 3 * 2 = 6; A = +2 is never bounded
    tokens = kit.make_tokens(torch.tensor([5.0, 5.0]).log(), advantages=[-2.0, 2.0])
    result = kit.loss_of(tokens, c_clip=3.0)
    assert result.losses.tolist() == pytest.approx([6.0, -2.4])
    assert result.stats["dual_clip_ratio"].values.tolist() == [True, False]


def test_a_negative_epsilon_removes_its_side(kit):
    tokens = kit.make_tokens(torch.tensor([3.0, 0.1]).log(), advantages=[1.0, -1.0])
    assert kit.loss_of(tokens, eps_clip_higher=-1.0).losses.tolist() == pytest.approx([-3.0, 0.8])
    assert kit.loss_of(tokens, eps_clip=-1.0, eps_clip_higher=0.2).losses.tolist() == pytest.approx([-1.2, 0.1])
    assert kit.loss_of(tokens, eps_clip=-1.0).losses.tolist() == pytest.approx([-3.0, 0.1])


def test_huge_ratios_stay_finite(kit):
    tokens = kit.make_tokens(torch.tensor([800.0, float("inf")]), advantages=[-1.0, -1.0])
    assert kit.loss_of(tokens).losses.tolist() == pytest.approx([math.exp(20)] * 2)


def test_c_clip_must_exceed_one(kit):
    with pytest.raises(ValueError, match="c_clip"):
        kit.loss_of(kit.make_tokens([0.0]), c_clip=1.0)
