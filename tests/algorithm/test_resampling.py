"""PF-PPO's resampling: the weights of verl, counts that are right in the mean, and any number of ranks."""

import pytest
import torch

from areal.algorithm.aggregate import identity_reduce
from areal.algorithm.policy_loss import resampled_counts, resampling_weights, sequence_draws
from areal.api.config import ResamplingConfig

REWARDS = torch.tensor([0.5, -2.0, 1.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"method": "pow"}, [0.25, 4.0, 1.0, 1.0, 0.0]),
        ({"method": "pow", "power": 0.5}, [0.5**0.5, 2**0.5, 1.0, 1.0, 0.0]),
        ({"method": "max_min"}, [0.0, 1.0, 1.0, 1.0, 0.0]),
        ({"method": "max_random"}, [0.1, 0.1, 0.4, 0.4, 0.1]),
    ],
)
def test_the_weights_equal_verl(options, expected):
    """compute_pf_ppo_reweight_data's three methods, plus 1e-8."""
    actual = resampling_weights(REWARDS, ResamplingConfig(**options), reduce=identity_reduce)
    assert actual.tolist() == pytest.approx([w + 1e-8 for w in expected], rel=1e-12)


def test_zero_and_minus_zero_are_one_extreme():
    rewards = torch.tensor([-0.0, 0.0, 1.0, 0.5])
    result = resampling_weights(rewards, ResamplingConfig(method="max_min"), reduce=identity_reduce)
    assert result.tolist() == pytest.approx([1.0, 1.0, 1.0, 1e-8])


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_extremes_and_sums_are_over_all_ranks(method):
    """Two ranks in turn: the second call of each sees the sums of both."""
    options = ResamplingConfig(method=method)
    parts = [REWARDS[:2], REWARDS[2:]]

    def together(function):
        calls = [[], []]
        for _ in range(12):  # as many rounds as there are reductions: each round knows one sum more
            results = []
            for rank in (0, 1):
                ours = []

                def reduce(values, rank=rank, ours=ours):
                    ours.append(values.clone())
                    known = calls[1 - rank]
                    return values + known[len(ours) - 1] if len(ours) <= len(known) else values

                results.append(function(rank, reduce))
                calls[rank] = ours
        return torch.cat(results)

    whole = resampling_weights(REWARDS, options, reduce=identity_reduce)
    result = together(lambda rank, reduce: resampling_weights(parts[rank], options, reduce=reduce))
    assert torch.equal(result, whole)
    draws = torch.linspace(0.05, 0.95, 5, dtype=torch.float64)
    counts = resampled_counts(whole, draws, reduce=identity_reduce)
    shares = [(whole[:2], draws[:2]), (whole[2:], draws[2:])]
    assert torch.equal(together(lambda rank, reduce: resampled_counts(*shares[rank], reduce=reduce)), counts)


def test_counts_by_hand():
    # N = 4, weights 3, 1, 0, 4 of 8: expected 1.5, 0.5, 0, 2; rounded up where the draw reaches the rest
    weights = torch.tensor([3.0, 1.0, 0.0, 4.0], dtype=torch.float64)
    low, high = torch.full((4,), 0.49, dtype=torch.float64), torch.full((4,), 0.5, dtype=torch.float64)
    assert resampled_counts(weights, low, reduce=identity_reduce).tolist() == [1, 0, 0, 2]
    assert resampled_counts(weights, high, reduce=identity_reduce).tolist() == [2, 1, 0, 2]
    nothing = torch.zeros(0, dtype=torch.float64)
    assert resampled_counts(nothing, nothing, reduce=identity_reduce).tolist() == []


def test_the_mean_count_is_that_of_draws_with_replacement():
    weights = torch.tensor([0.3, 1.7, 0.0, 2.5, 1.1], dtype=torch.float64)
    expected = 5 * weights / weights.sum()
    records = torch.arange(5) * 7919
    counts = torch.zeros(5, dtype=torch.float64)
    for step in range(4000):
        draws = sequence_draws(records, torch.arange(5), 5, seed=3, step=step)
        counts += resampled_counts(weights, draws, reduce=identity_reduce)
    assert (counts / 4000).tolist() == pytest.approx(expected.tolist(), abs=0.03)


def test_draws_depend_on_record_seed_and_step_alone():
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 2**31, (12,), generator=generator)
    index = torch.arange(4).repeat_interleave(3)
    draws = sequence_draws(tokens, index, 4, seed=1, step=5)
    assert ((draws >= 0) & (draws < 1)).all()
    alone = sequence_draws(tokens[6:9], torch.zeros(3, dtype=torch.int64), 1, seed=1, step=5)
    assert alone[0] == draws[2]
    for other in ({"seed": 2, "step": 5}, {"seed": 1, "step": 6}):
        assert not torch.equal(sequence_draws(tokens, index, 4, **other), draws)
