"""Rewards to advantages: against slow float64 loops written from the formulas, and against numbers worked by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithm.advantage import (
    generalised_advantages,
    last_trained,
    shape_rewards,
    token_rewards,
    withhold_unfinished,
)
from tests.expect import raises_code


def packed(masks):
    mask = torch.tensor([bool(m) for row in masks for m in row], dtype=torch.bool)
    index = torch.tensor([s for s, row in enumerate(masks) for _ in row], dtype=torch.int64)
    return mask, index


def slow_gae(rewards, values, masks, discount, gae_lambda, bootstrap):
    """The recurrence, token by token, one sequence after another, on Python floats."""
    advantages, returns, start = [], [], 0
    for row, after in zip(masks, bootstrap, strict=True):
        a = [0.0] * len(row)
        ret = [0.0] * len(row)
        next_value, next_advantage = after, 0.0
        for t in reversed(range(len(row))):
            if not row[t]:
                continue  # value and advantage of the later token are carried over
            value = values[start + t]
            delta = rewards[start + t] + discount * next_value - value
            a[t] = next_advantage = delta + discount * gae_lambda * next_advantage
            ret[t] = a[t] + value
            next_value = value
        advantages += a
        returns += ret
        start += len(row)
    return advantages, returns


@settings(max_examples=60, deadline=None)
@given(
    masks=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=11), min_size=1, max_size=6),
    discount=st.sampled_from([0.0, 0.5, 0.97, 1.0]),
    gae_lambda=st.sampled_from([0.0, 0.9, 1.0]),
    seed=st.integers(0, 1000),
)
def test_gae_equals_the_recurrence_on_any_packed_batch(masks, discount, gae_lambda, seed):
    generator = torch.Generator().manual_seed(seed)
    mask, index = packed(masks)
    rewards = torch.randn(mask.numel(), dtype=torch.float64, generator=generator)
    values = torch.randn(mask.numel(), dtype=torch.float64, generator=generator)
    bootstrap = torch.randn(len(masks), dtype=torch.float64, generator=generator)
    result = generalised_advantages(
        rewards, values, mask, index, len(masks), discount=discount, gae_lambda=gae_lambda, bootstrap=bootstrap
    )
    advantages, returns = slow_gae(rewards.tolist(), values.tolist(), masks, discount, gae_lambda, bootstrap.tolist())
    assert torch.allclose(result.advantages, torch.tensor(advantages, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(result.returns, torch.tensor(returns, dtype=torch.float64), atol=1e-12)


def test_gae_by_hand_with_a_gap():
    # trained tokens 0, 2, 3; token 1 (a tool's answer) takes no time. discount 0.5, lambda 0.5, V after the end 0
    # t=3: delta = 1 + 0       - 0.4 = 0.6            A = 0.6
    # t=2: delta = 0 + 0.5*0.4 - 0.2 = 0              A = 0    + 0.25 * 0.6  = 0.15
    # t=0: delta = 0 + 0.5*0.2 - 0.8 = -0.7           A = -0.7 + 0.25 * 0.15 = -0.6625
    mask, index = packed([[1, 0, 1, 1]])
    rewards, values = torch.tensor([0.0, 99.0, 0.0, 1.0]), torch.tensor([0.8, 77.0, 0.2, 0.4])
    result = generalised_advantages(rewards, values, mask, index, 1, discount=0.5, gae_lambda=0.5)
    assert result.advantages.tolist() == pytest.approx([-0.6625, 0.0, 0.15, 0.6])
    assert result.returns.tolist() == pytest.approx([0.1375, 0.0, 0.35, 1.0])


def test_gae_bootstraps_by_hand():
    # one token: A = r + discount * after - V = 0 + 0.9 * 2 - 0.5 = 1.3; return 1.8
    mask, index = packed([[1]])
    result = generalised_advantages(
        torch.zeros(1), torch.tensor([0.5]), mask, index, 1, discount=0.9, bootstrap=torch.tensor([2.0])
    )
    assert result.advantages.item() == pytest.approx(1.3)
    assert result.returns.item() == pytest.approx(1.8)


def test_without_critic_and_discount_every_token_gets_the_sequence_reward():
    mask, index = packed([[0, 1, 1, 1, 0], [1, 1, 0], [0, 0]])
    rewards = token_rewards(torch.tensor([2.0, -1.0, 7.0]), mask, index)
    result = generalised_advantages(rewards, None, mask, index, 3)
    assert result.advantages.tolist() == [0, 2, 2, 2, 0, -1, -1, 0, 0, 0]


def test_gae_does_not_depend_on_the_neighbours_in_the_pack():
    generator = torch.Generator().manual_seed(3)
    mask, index = packed([[1] * 37, [1, 0] * 9, [1]])
    rewards, values = torch.randn(56, generator=generator), torch.randn(56, generator=generator)
    together = generalised_advantages(rewards, values, mask, index, 3, discount=0.99, gae_lambda=0.95)
    for s in range(3):
        ours = index == s
        alone = generalised_advantages(
            rewards[ours], values[ours], mask[ours], index[ours] - s, 1, discount=0.99, gae_lambda=0.95
        )
        assert torch.equal(together.advantages[ours], alone.advantages)


def test_masked_nan_does_not_spread_and_trained_nan_does():
    mask, index = packed([[1, 0, 1], [1, 1]])
    rewards = torch.tensor([0.0, float("nan"), 1.0, 1.0, float("nan")])
    result = generalised_advantages(rewards, None, mask, index, 2)
    assert result.advantages[:3].tolist() == [1, 0, 1]
    assert result.advantages[3:].isnan().all()


@pytest.mark.parametrize("masks", [[[0, 0], [0]], []])
def test_nothing_trained(masks):
    mask, index = packed(masks)
    result = generalised_advantages(torch.zeros(mask.numel()), None, mask, index, len(masks))
    assert result.advantages.tolist() == [0.0] * mask.numel()


def test_shaping_order_is_bias_scale_clip():
    # (1 + 0.5) * 4 = 6 -> 5;  (-1 + 0.5) * 4 = -2;  (-3 + 0.5) * 4 = -10 -> -5
    shaped = shape_rewards(torch.tensor([1.0, -1.0, -3.0]), bias=0.5, scale=4.0, clip=5.0)
    assert shaped.tolist() == [5, -2, -5]


def test_only_answers_told_unfinished_lose_their_reward():
    finished = torch.tensor([True, False, True])
    assert withhold_unfinished(torch.tensor([1.0, 1.0, -1.0]), finished).tolist() == [1, 0, -1]


def test_task_reward_sits_on_the_last_trained_token_and_kl_on_all():
    # -0.1 * KL at trained tokens; +2 at position 2, +3 at position 4; the third sequence has no trained token
    mask, index = packed([[0, 1, 1, 0], [1], [0, 0]])
    kl = torch.tensor([9.0, 0.5, 1.0, 9.0, -2.0, 9.0, 9.0])
    rewards = token_rewards(torch.tensor([2.0, 3.0, 4.0]), mask, index, kl=kl, kl_coef=0.1)
    assert rewards.tolist() == pytest.approx([0, -0.05, 1.9, 0, 3.2, 0, 0])
    assert last_trained(mask, index, 3).tolist() == [2, 4, -1]


def test_shapes_that_would_broadcast_are_refused():
    mask, index = packed([[1, 1]])
    with raises_code("algorithm.shapes_differ"):
        generalised_advantages(torch.zeros(1), None, mask, index, 1)
    with raises_code("algorithm.shapes_differ"):
        token_rewards(torch.zeros(1), mask, index, kl=torch.zeros(1))
