"""Baselines beyond plain means: against slow loops written from the formulas, numbers worked by hand, and bad input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithm.advantage import (
    best_of_group,
    decoupled_rewards,
    length_weighted,
    mixed_group,
    overlong_penalty,
    valid_sample_scale,
)
from tests.expect import raises_code

NAN = float("nan")


def groups_of(ids):
    return {g: [i for i, other in enumerate(ids) if other == g] for g in ids}


def slow_length_weighted(rewards, lengths, ids):
    result = []
    for i, g in enumerate(ids):
        members = groups_of(ids)[g]
        total = sum(lengths[j] for j in members)
        result.append(rewards[i] - (sum(lengths[j] * rewards[j] for j in members) / total if total else 0.0))
    return result


def slow_best_of_group(rewards, ids):
    result = []
    for i, g in enumerate(ids):
        ordered = sorted((rewards[j] for j in groups_of(ids)[g]), reverse=True)
        alone = len(ordered) == 1
        result.append(0.0 if alone or rewards[i] < ordered[0] else ordered[0] - ordered[1])
    return result


ROWS = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.5]), st.integers(0, 9), st.sampled_from([3, 7, 40])),
    min_size=1,
    max_size=14,
)


@settings(max_examples=80, deadline=None)
@given(ROWS)
def test_equals_the_formulas_for_unequal_and_interleaved_groups(rows):
    rewards, lengths, ids = (list(column) for column in zip(*rows, strict=True))
    r, n, g = torch.tensor(rewards, dtype=torch.float64), torch.tensor(lengths), torch.tensor(ids)
    assert length_weighted(r, n, g).tolist() == pytest.approx(slow_length_weighted(rewards, lengths, ids))
    assert best_of_group(r, g).tolist() == pytest.approx(slow_best_of_group(rewards, ids))
    mixed = [len({rewards[j] for j in groups_of(ids)[g]}) > 1 for g in ids]
    assert mixed_group(r, g).tolist() == mixed
    assert valid_sample_scale(r, g) == pytest.approx(len(ids) / sum(mixed) if any(mixed) else 1.0)


def test_a_reward_that_is_no_number_makes_no_group_uniform():
    rewards, groups = torch.tensor([float("nan"), 1.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1])
    assert mixed_group(rewards, groups).tolist() == [True, True, False, False]
    assert mixed_group(rewards[:0], groups[:0]).tolist() == []


def test_length_weighted_by_hand():
    # group 5: lengths 1, 3 and rewards 1, 0 -> baseline 1/4; group 2 alone: itself
    advantages = length_weighted(torch.tensor([1.0, 6.0, 0.0]), torch.tensor([1, 8, 3]), torch.tensor([5, 2, 5]))
    assert advantages.tolist() == pytest.approx([0.75, 0, -0.25])


def test_best_of_group_by_hand():
    # 0.9 leads 0.5 by 0.4; the tie of group 1 has no lead; group 2 has no rival
    rewards = torch.tensor([0.9, 1.0, 0.5, 1.0, 4.0, 0.1])
    assert best_of_group(rewards, torch.tensor([0, 1, 0, 1, 2, 0])).tolist() == pytest.approx([0.4, 0, 0, 0, 0, 0])


def test_decoupled_rewards_by_hand():
    # group 0: function 0 gives (1 - 0.5) / std 0.7071 = +-0.7071, function 1 is constant: 0; group 1 has no function 1
    parts = torch.tensor([[1.0, 3.0], [0.0, 3.0], [2.0, NAN], [2.0, NAN]], dtype=torch.float64)
    result = decoupled_rewards(parts, [2.0, 1.0], torch.tensor([0, 0, 1, 1]))
    assert result.tolist() == pytest.approx([2 * 0.5**0.5, -2 * 0.5**0.5, 0, 0], abs=1e-4)
    other = torch.tensor([[1.0, 1.0], [0.0, 1000.0]], dtype=torch.float64)
    assert decoupled_rewards(other, [1.0, 1.0], torch.tensor([4, 4])).tolist() == pytest.approx([0, 0], abs=1e-4)
    assert decoupled_rewards(parts[:0], [1.0, 1.0], torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_best_of_group_over_the_std_equals_verl():
    """verl's compute_grpo_passk_outcome_advantage: (0.9 - 0.5) / (std with n - 1 of {0.9, 0.5, 0.1} = 0.4, + 1e-6)."""
    result = best_of_group(torch.tensor([0.9, 0.5, 0.1, 2.0, 2.0]), torch.tensor([0, 0, 0, 1, 1]), divide_by_std=True)
    assert result.tolist() == pytest.approx([1.0, 0, 0, 0, 0], abs=1e-5)


def test_the_scale_counts_all_ranks_by_hand():
    # here 2 of 4 answers are in a mixed group, elsewhere 1 of 8: 12 / 3
    scale = valid_sample_scale(
        torch.tensor([1.0, 0.0, 1.0, 1.0]),
        torch.tensor([0, 0, 1, 1]),
        reduce=lambda ours: ours + torch.tensor([8.0, 1.0], dtype=torch.float64),
    )
    assert scale == 4.0
    empty = valid_sample_scale(torch.zeros(0), torch.zeros(0, dtype=torch.int64), reduce=lambda count: count + 3)
    assert empty == 1.0


def test_nan_spreads_over_its_own_group_only():
    rewards, ids = torch.tensor([NAN, 1.0, 2.0, 0.0]), torch.tensor([0, 0, 1, 1])
    spread = length_weighted(rewards, torch.ones(4, dtype=torch.int64), ids)
    assert spread.isnan().tolist() == [True, True, False, False]
    best = best_of_group(rewards, ids)
    assert best[0].isnan()
    assert best[2:].tolist() == [2.0, 0.0]


def test_infinite_rewards_show_themselves():
    rewards = torch.tensor([float("inf"), 1.0])
    assert best_of_group(rewards, torch.tensor([0, 0])).tolist() == [float("inf"), 0.0]
    assert not length_weighted(rewards, torch.tensor([1, 1]), torch.tensor([0, 0])).isfinite().any()


def test_nothing_at_all():
    nothing, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert length_weighted(nothing, ids, ids).tolist() == []
    assert best_of_group(nothing, ids).tolist() == []


def test_shapes_that_would_broadcast_are_refused():
    with raises_code("algorithm.shapes_differ"):
        length_weighted(torch.zeros(2), torch.ones(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    with raises_code("algorithm.shapes_differ"):
        best_of_group(torch.zeros(2), torch.zeros(1, dtype=torch.int64))


def test_overlong_penalty_by_hand():
    # limit 10, tail 4, factor 2: nothing to 6, -2 * 1/4 at 7, whole at 10, and not more beyond
    lengths = torch.tensor([0, 6, 7, 9, 10, 25])
    penalty = overlong_penalty(lengths, max_tokens=10, tail_tokens=4, factor=2.0)
    assert penalty.tolist() == pytest.approx([0, 0, -0.5, -1.5, -2, -2])
