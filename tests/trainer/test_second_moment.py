"""M2PO's mask: the same as sorting every token of every rank in one place."""

from fractions import Fraction

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.algorithm.aggregate import identity_reduce
from areal.algorithm.correction import second_moment_kept

THRESHOLD = 0.04


def by_sorting(log_ratios, threshold):
    """Which stay, from the paper's words: drop the largest square until the mean of the rest is at most threshold.

    Squares are exact but for being whole numbers of 2^-40; equal ones go together, and the smallest stay in any case.
    """
    squares = [round(Fraction(d) ** 2 * 2**40) for d in log_ratios]
    rest = sorted(squares)
    while rest and sum(rest) > Fraction(threshold) * 2**40 * len(rest) and rest[-1] != rest[0]:
        rest = [square for square in rest if square < rest[-1]]
    return [square <= rest[-1] for square in squares]


def kept(log_ratios, threshold=THRESHOLD, mask=None):
    values = torch.tensor(log_ratios, dtype=torch.float64)
    mask = torch.ones(len(log_ratios), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return second_moment_kept(values, mask, threshold, reduce=identity_reduce).tolist()


def test_by_hand():
    # squares 0.01, 0.04, 0.09, 0.25: means of the smallest 4, 3, 2: 0.0975, 0.0467, 0.025
    values = [0.1, -0.5, 0.2, -0.3]
    assert kept(values, 0.1) == [True] * 4
    assert kept(values, 0.05) == [True, False, True, True]
    assert kept(values, 0.04) == [True, False, True, False]
    assert kept(values, 0.015) == [True, False, False, False]
    assert kept(values, 0.001) == [True, False, False, False]


def test_a_mean_equal_to_the_threshold_is_allowed():
    # squares 1/16, 1/16, 1/4 are exact: mean of all 1/8
    values = [0.25, -0.25, 0.5]
    assert kept(values, 0.125) == [True] * 3
    assert kept(values, 0.125 - 2**-30) == [True, True, False]


def test_squares_of_float32_are_exact():
    values = torch.tensor([0.1, 0.3], dtype=torch.float32)
    both = sum(round(Fraction(float(d)) ** 2 * 2**40) for d in values)
    for excess, expected in ((0, [True, True]), (1, [True, False])):
        threshold = (both / 2 - excess) / 2**40
        actual = second_moment_kept(values, torch.ones(2, dtype=torch.bool), threshold, reduce=identity_reduce)
        assert actual.tolist() == expected


def test_equal_squares_go_together():
    # without ties one of the two 0.5 could stay: (1/16 + 1/4) / 2 = 0.156
    assert kept([0.5, 0.25, -0.5], 0.16) == [False, True, False]
    assert kept([0.5, -0.5, 0.5], 0.1) == [True] * 3
    assert kept([0.5, 1.0, -0.5], 0.1) == [True, False, True]


def test_squares_of_all_sizes():
    assert kept([20.0, -20.0], 500.0) == [True, True]
    assert kept([20.0, -20.0, 0.0], 266.0) == [False, False, True]
    assert kept([20.0, -20.0, 0.0], 267.0) == [True] * 3
    assert kept([1e-4, 2e-4], 2e-8) == [True, False]
    assert kept([1e-9, 0.0], 1e-30) == [True, True]  # below 2^-41 a square counts as 0


def test_masked_tokens_do_not_count_and_nan_stays():
    nan = float("nan")
    assert kept([5.0, 0.1, nan], mask=[False, True, False]) == [False, True, False]
    assert kept([nan, 0.1, 5.0]) == [True, True, False]
    assert kept([0.1, 0.1], mask=[False, False]) == [False, False]
    assert kept([]) == []
    assert kept([3.0]) == [True]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32) | st.sampled_from([0.0, 0.25, -0.25, 0.5, 1.0]), max_size=40),
    st.sampled_from([1e-6, 0.01, 0.0625, 0.1, 0.25, 1.0, 10.0, 400.0]),
)
def test_it_equals_sorting(log_ratios, threshold):
    assert kept(log_ratios, threshold) == by_sorting(log_ratios, threshold)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), num_ranks=st.integers(1, 5), threshold=st.sampled_from([1e-4, 0.01, 0.04, 0.3, 2.0]))
def test_ranks_that_are_threads_find_what_one_list_would(toolbox, seed, num_ranks, threshold):
    """Unequal shares, some empty, dealt at random; every rank calls the reduction equally often."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = int(torch.randint(0, 60, (), generator=generator))
    gaps = torch.randn(num_tokens, generator=generator) * 10 ** torch.randn(1, generator=generator)
    gaps = gaps.clamp(-20, 20)
    if seed % 2:
        gaps = (gaps * 4).round() / 4  # many ties
    mask = torch.rand(num_tokens, generator=generator) > 0.2
    owner = torch.randint(0, num_ranks, (num_tokens,), generator=generator)
    group = toolbox.RankGroup(num_ranks)
    calls = [0] * num_ranks

    def rank_main(rank):
        def reduce(values):
            calls[rank] += 1
            assert values.dtype == torch.float64
            assert values.shape == (3 * 1024,), "shares of every size bring the same"
            return group.all_reduce(rank, values, "sum")

        mine = owner == rank
        return second_moment_kept(gaps[mine], mask[mine], threshold, reduce=reduce)

    actual = torch.zeros(num_tokens, dtype=torch.bool)
    for rank, part in enumerate(group.run(rank_main)):
        actual[owner == rank] = part
    assert len(set(calls)) == 1
    assert calls[0] <= 5
    expected = by_sorting(gaps[mask].tolist(), threshold)
    assert actual[mask].tolist() == expected
    assert not actual[~mask].any()
