"""Which tokens Clip-Cov and KL-Cov choose: against a sort of everything, and however the batch is cut."""

import math

import pytest
import torch

from areal.algorithm.aggregate import identity_reduce
from areal.algorithm.policy_loss import drawn_between, highest_covariances, token_covariances, token_draws

ALL = {"reduce": identity_reduce}


def draw(seed, size):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2, size, dtype=torch.float64, generator=generator)
    mask = torch.rand(size, generator=generator) > 0.3
    draws = torch.randint(0, 2**31, (size,), generator=generator)
    return values[0], values[1], mask, draws


def slow_covariances(advantages, logprobs, mask):
    places = [t for t, trained in enumerate(mask.tolist()) if trained]
    a = math.fsum(float(advantages[t]) for t in places) / len(places)
    b = math.fsum(float(logprobs[t]) for t in places) / len(places)
    return [(float(advantages[t]) - a) * (float(logprobs[t]) - b) if mask[t] else 0.0 for t in range(len(mask))]


def ranks(function, *shares):
    """Run on several ranks in lock step: the first pass gathers what each reduction would add, round by round."""
    totals: list[torch.Tensor] = []
    while True:
        pending: list[torch.Tensor] = []

        class Waits(Exception):
            pass

        def run(share, pending=pending):
            seen = 0

            def reduce(values):
                nonlocal seen
                seen += 1
                if seen <= len(totals):
                    return totals[seen - 1]
                pending.append(values)
                raise Waits

            try:
                return function(share, reduce)
            except Waits:
                return None

        results = [run(share) for share in shares]
        if not pending:
            return results
        assert len(pending) == len(shares), "every rank reduces the same number of times"
        totals.append(torch.stack(pending).sum(0))


def test_covariances_by_hand():
    # A = 1, 3, -1 (mean 1), log pi = -1, -2, -3 (mean -2): 0 * 1, 2 * 0, -2 * -1; the NaN is masked
    nan = float("nan")
    mask = torch.tensor([True, True, True, False])
    result = token_covariances(torch.tensor([1.0, 3, -1, nan]), torch.tensor([-1.0, -2, -3, nan]), mask, **ALL)
    assert result.tolist() == [0, 0, 2, 0]


def test_covariances_equal_the_formula():
    advantages, logprobs, mask, _ = draw(0, 200)
    result = token_covariances(advantages, logprobs, mask, **ALL)
    assert result.tolist() == pytest.approx(slow_covariances(advantages, logprobs, mask), abs=1e-12)


@pytest.mark.parametrize("ratio", [0.0001, 0.01, 0.3, 1.0])
def test_the_highest_are_those_of_a_sort(ratio):
    advantages, logprobs, mask, draws = draw(1, 500)
    values = token_covariances(advantages, logprobs, mask, **ALL)
    actual = highest_covariances(values, draws, mask, ratio=ratio, **ALL)
    order = sorted((t for t in range(500) if mask[t]), key=lambda t: -float(values[t]))
    expected = sorted(order[: max(1, int(ratio * len(order)))])
    assert actual.nonzero().flatten().tolist() == expected


def test_equal_covariances_are_told_apart_by_the_draw():
    mask = torch.ones(6, dtype=torch.bool)
    values = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, 2.0])
    draws = torch.tensor([5, 900, 7, 1000, 2**31 - 1, 0])
    result = highest_covariances(values, draws, mask, ratio=0.5, **ALL)  # 3 of 6: the 2, then the highest draws
    assert result.tolist() == [False, True, False, False, True, True]


@pytest.mark.parametrize(
    ("ratio", "bounds"), [(0.02, (0.1, 1.0)), (0.5, (0.1, 1.0)), (0.1, (-0.2, 0.2)), (0.1, (50, 60))]
)
def test_a_draw_takes_the_largest_between_the_bounds(ratio, bounds):
    advantages, logprobs, mask, draws = draw(2, 400)
    values = token_covariances(advantages, logprobs, mask, **ALL)
    actual = drawn_between(values, draws, mask, low=bounds[0], high=bounds[1], ratio=ratio, **ALL)
    between = [t for t in range(400) if mask[t] and bounds[0] < values[t] < bounds[1]]
    wanted = max(1, int(ratio * int(mask.sum())))
    assert actual.nonzero().flatten().tolist() == sorted(sorted(between, key=lambda t: -int(draws[t]))[:wanted])


def test_at_least_one_token_and_none_of_none():
    values, draws = torch.tensor([1.0, 2.0]), torch.tensor([4, 3])
    mask = torch.tensor([True, False])
    assert highest_covariances(values, draws, mask, ratio=0.01, **ALL).tolist() == [True, False]
    nothing = torch.zeros(2, dtype=torch.bool)
    assert not highest_covariances(values, draws, nothing, ratio=0.5, **ALL).any()
    assert not drawn_between(values, draws, nothing, low=0, high=9, ratio=0.5, **ALL).any()
    empty = torch.zeros(0)
    chosen = highest_covariances(empty.double(), empty.long(), empty.bool(), ratio=0.5, **ALL)
    assert chosen.shape == (0,)


@pytest.mark.parametrize("sizes", [(300,), (100, 200), (0, 250, 50), (1, 1, 298)])
def test_any_cut_over_ranks_chooses_the_same(sizes):
    tensors = draw(3, 300)

    def choose(share, reduce):
        advantages, logprobs, mask, draws = share
        values = token_covariances(advantages, logprobs, mask, reduce=reduce)
        high = highest_covariances(values, draws, mask, ratio=0.05, reduce=reduce)
        return torch.stack([high, drawn_between(values, draws, mask, low=0.1, high=2, ratio=0.05, reduce=reduce)])

    whole = choose(tensors, identity_reduce)
    parts = ranks(choose, *zip(*(tensor.split(sizes) for tensor in tensors), strict=True))
    assert torch.equal(torch.cat(parts, 1), whole)
    assert whole.sum(1).tolist() == [int(0.05 * int(tensors[2].sum()))] * 2


def record(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)
    ids = torch.randint(0, 50, (size,), generator=generator)
    logprobs = -torch.rand(size, generator=generator)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return ids, logprobs, bounds, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def test_draws_depend_on_the_record_alone():
    ids, logprobs, bounds, index = record([4, 6, 5])
    whole = token_draws(ids, logprobs, bounds, index)
    alone = token_draws(ids[4:10], logprobs[4:10], torch.tensor([0, 6]), torch.zeros(6, dtype=torch.int64))
    assert torch.equal(whole[4:10], alone)
    assert (whole >= 0).all()
    assert (whole < 2**31).all()


def test_draws_look_random():
    draws = token_draws(*record([200] * 50)).double() / 2**31
    assert draws.unique().numel() == 10_000
    assert float(draws.mean()) == pytest.approx(0.5, abs=0.02)
    histogram = torch.histc(draws, 16, 0, 1)
    assert histogram.min() > 500
    assert histogram.max() < 750
    following = torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1]
    assert abs(float(following)) < 0.04


def test_each_part_of_a_record_matters():
    ids, logprobs, bounds, index = record([8])
    draws = token_draws(ids, logprobs, bounds, index)
    for other in (
        token_draws(ids + 1, logprobs, bounds, index),
        token_draws(ids, logprobs - 0.1, bounds, index),
        token_draws(ids, logprobs, bounds - 1, index),
    ):
        assert (draws != other).all()
