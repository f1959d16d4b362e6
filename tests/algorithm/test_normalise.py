"""Normalisation against a slow reference per element, by hand, and over ranks."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithm.normalise import normalise
from areal.api.config import NormConfig


def slow_normalise(values, groups, config):
    """(x_i - mean of its scope) / (std of its scope + eps), one element at a time."""
    out = []
    for i, x in enumerate(values):
        scopes = _scopes(groups, i)
        mean = subtracted(values, scopes, config, i)
        divisor = 1.0
        if config.std_level:
            scope = scopes[config.std_level]
            if len(scope) > 1:
                centre = statistics.fmean(values[j] for j in scope)
                about = [centre] * len(scope)
                if config.std_about == "subtracted":
                    about = [subtracted(values, _scopes(groups, j), config, j) for j in scope]
                squares = math.fsum((values[j] - m) ** 2 for j, m in zip(scope, about, strict=True))
                std = math.sqrt(squares / (len(scope) - (1 if config.std_unbiased else 0)))
                divisor = std + config.eps if std > 0 else 1.0
        out.append((x - mean) / divisor)
    return out


def _scopes(groups, i):
    return {"batch": list(range(len(groups))), "group": [j for j in range(len(groups)) if groups[j] == groups[i]]}


def subtracted(values, scopes, config, i):
    """The mean that is subtracted from element i."""
    if not config.mean_level:
        return 0.0
    members = scopes[config.mean_level]
    if config.mean_leave1out:
        members = [j for j in members if j != i]
    return statistics.fmean(values[j] for j in members) if members else 0.0


levels = st.sampled_from(["batch", "group", None])


@settings(max_examples=120, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.25]), st.integers(-2, 3)), max_size=14),
    mean_level=levels,
    std_level=levels,
    leave_one_out=st.booleans(),
    unbiased=st.booleans(),
    about=st.sampled_from([None, "own", "subtracted"]),
)
def test_equals_the_formula_for_every_option_and_group_layout(
    rows, mean_level, std_level, leave_one_out, unbiased, about
):
    config = NormConfig(
        mean_level=mean_level, std_level=std_level, mean_leave1out=leave_one_out, std_unbiased=unbiased, std_about=about
    )
    values, groups = [v for v, _ in rows], [g for _, g in rows]
    result = normalise(torch.tensor(values, dtype=torch.float64), config, torch.tensor(groups, dtype=torch.int64))
    assert result.tolist() == pytest.approx(slow_normalise(values, groups, config), abs=1e-9)


def test_std_about_the_subtracted_mean_equals_areal():
    """AReaL takes squares of x less the subtracted mean: 4 x 0.25 / 3 = 1/3, so 0.5 / sqrt(1/3) = sqrt(3)/2.

    About the mean of the batch the squares are 30.25 + 20.25 + 20.25 + 30.25 = 101, and 0.5 / sqrt(101/3) = 0.0862.
    """
    rewards, groups = torch.tensor([0.0, 1.0, 10.0, 11.0]), torch.tensor([0, 0, 1, 1])
    areal = NormConfig(mean_level="group", std_level="batch", eps=0.0, group_size=2)  # a section written for AReaL
    expected = [-math.sqrt(3) / 2, math.sqrt(3) / 2] * 2
    assert normalise(rewards, areal, groups).tolist() == pytest.approx(expected)
    assert normalise(rewards, replace(areal, group_size=1, std_about="subtracted"), groups).tolist() == pytest.approx(
        expected
    )
    half = 0.5 / math.sqrt(101 / 3)
    ours = replace(areal, std_about="own")
    assert normalise(rewards, ours, groups).tolist() == pytest.approx([-half, half] * 2)


def test_grpo_by_hand():
    # groups interleaved and unequal: group 5 = {1, 0, 0, 1}, group 2 = {4, 1}
    # 5: mean 0.5, population std 0.5 -> +-1;  2: mean 2.5, population std 1.5 -> +-1
    values = torch.tensor([1.0, 4.0, 0.0, 0.0, 1.0, 1.0])
    groups = torch.tensor([5, 2, 5, 5, 2, 5])
    config = NormConfig(mean_level="group", std_level="group", std_unbiased=False, eps=0.0)
    assert normalise(values, config, groups).tolist() == pytest.approx([1, 1, -1, -1, -1, 1])


def test_rloo_by_hand():
    # {1, 0, 0}: baselines (0+0)/2, (1+0)/2, (1+0)/2
    config = NormConfig(mean_level="group", std_level=None, mean_leave1out=True)
    result = normalise(torch.tensor([1.0, 0.0, 0.0]), config, torch.tensor([3, 3, 3]))
    assert result.tolist() == pytest.approx([1, -0.5, -0.5])


def test_litepp_by_hand():
    # group means 1 and 3; batch of {0, 2, 2, 4}: mean 2, unbiased std sqrt(8/3) = 1.632993
    config = NormConfig(mean_level="group", std_level="batch", eps=0.0)
    result = normalise(torch.tensor([0.0, 2.0, 2.0, 4.0]), config, torch.tensor([0, 0, 1, 1]))
    assert result.tolist() == pytest.approx([-0.612372, 0.612372, -0.612372, 0.612372], abs=1e-6)


@pytest.mark.parametrize("std_unbiased", [True, False])
@pytest.mark.parametrize(("leave_one_out", "expected"), [(False, 0.0), (True, 7.0)])
def test_a_group_of_one_is_defined(std_unbiased, leave_one_out, expected):
    config = NormConfig(mean_level="group", std_level="group", mean_leave1out=leave_one_out, std_unbiased=std_unbiased)
    assert normalise(torch.tensor([7.0]), config, torch.tensor([0])).tolist() == [expected]


def test_a_group_without_spread_is_not_blown_up():
    config = NormConfig(mean_level="batch", std_level="group")
    result = normalise(torch.tensor([1.0, 1.0, 0.0, 2.0]), config, torch.tensor([0, 0, 1, 1]))
    assert result[:2].tolist() == [0, 0]
    config = NormConfig(mean_level=None, std_level="group")
    assert normalise(torch.tensor([1.0, 1.0]), config, torch.tensor([0, 0])).tolist() == [1, 1]


def test_masked_elements_are_neither_counted_nor_returned():
    config = NormConfig(mean_level="batch", std_level="batch", std_unbiased=False, eps=0.0)
    values = torch.tensor([1.0, float("nan"), 3.0, float("inf")])
    mask = torch.tensor([True, False, True, False])
    result = normalise(values, config, torch.zeros(4, dtype=torch.int64), mask=mask)
    assert result.tolist() == [-1, 0, 1, 0]  # mean 2, std 1


def test_all_masked_and_empty():
    config = NormConfig()
    nothing = torch.zeros(3, dtype=torch.bool)
    assert normalise(torch.ones(3), config, torch.zeros(3, dtype=torch.int64), mask=nothing).tolist() == [0, 0, 0]
    assert normalise(torch.zeros(0), config, torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_nan_spreads_over_its_own_group_only():
    config = NormConfig(mean_level="group", std_level="group")
    result = normalise(torch.tensor([float("nan"), 1.0, 0.0, 2.0]), config, torch.tensor([0, 0, 1, 1]))
    assert result[:2].isnan().all()
    assert result[2:].isfinite().all()


@pytest.mark.parametrize("mean_level", ["batch", "group"])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_batch_level_is_over_all_ranks(mean_level, leave_one_out):
    """Rank by rank with the sums of the other ranks added equals the whole batch at once; one rank is empty."""
    config = NormConfig(mean_level=mean_level, std_level="batch", mean_leave1out=leave_one_out)
    shares = [
        (torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 1])),
        (torch.tensor([2.0, 2.5]), torch.tensor([2, 2])),
        (torch.zeros(0), torch.zeros(0, dtype=torch.int64)),
    ]
    whole = normalise(torch.cat([v for v, _ in shares]), config, torch.cat([g for _, g in shares]))
    results = run_ranks(lambda rank, reduce: normalise(shares[rank][0], config, shares[rank][1], reduce=reduce), 3)
    assert torch.allclose(torch.cat(results), whole, atol=1e-6)


def run_ranks(function, num_ranks):
    """Run the ranks as threads that meet in a sum."""
    import threading
    from concurrent.futures import ThreadPoolExecutor

    slots = [None] * num_ranks
    barrier = threading.Barrier(num_ranks, timeout=200)

    def reduce_of(rank):
        def reduce(values):
            slots[rank] = values
            barrier.wait()
            total = torch.stack(slots).sum(0)
            barrier.wait()
            return total

        return reduce

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(function, rank, reduce_of(rank)) for rank in range(num_ranks)]
        return [future.result(timeout=250) for future in futures]
