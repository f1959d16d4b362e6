"""Loss assembly does not depend on how the batch is cut; logged statistics merge."""

import math

import pytest
import torch

from areal.algorithm.aggregate import TokenStat, local_denominator, loss_weights, to_metrics, trained_counts
from areal.api.metrics import merge_metrics

MASK = torch.tensor([1, 1, 1, 0, 1, 0, 0, 1], dtype=torch.bool)
INDEX = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
LOSSES = torch.tensor([1.0, 2.0, 3.0, 99.0, 5.0, 99.0, 99.0, 7.0])
# trained tokens a sequence: 3, 1, 0, 1; sums 6, 5, -, 7; 3 sequences have trained tokens
BY_HAND = {
    "token-mean": 18 / 5,
    "seq-mean-token-sum": 18 / 3,
    "seq-mean-token-mean": (2 + 5 + 7) / 3,
    "seq-mean-token-sum-norm": 18 / (3 * 4),
}


@pytest.mark.parametrize("aggregation", BY_HAND)
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 0], [], [2, 1]]])
def test_any_cut_gives_the_same_loss(aggregation, parts):
    total, denominator = 0.0, 0.0
    for part in parts:
        rows = [t for s in part for t in range(8) if INDEX[t] == s]
        index = torch.tensor([part.index(int(INDEX[t])) for t in rows], dtype=torch.int64)
        mask, losses = MASK[rows], LOSSES[rows]
        weights = loss_weights(mask, index, len(part), aggregation)
        total += (weights * losses).sum().item()
        denominator += local_denominator(mask, index, len(part), aggregation, max_tokens=4).item()
    assert total / denominator == pytest.approx(BY_HAND[aggregation])


def test_trained_counts():
    assert trained_counts(MASK, INDEX, 5).tolist() == [3, 1, 0, 1, 0]


def test_a_constant_length_must_be_given():
    with pytest.raises(ValueError, match="max_tokens"):
        local_denominator(MASK, INDEX, 4, "seq-mean-token-sum-norm")


def test_statistics_by_hand():
    values, mask = torch.tensor([1.0, 4.0, float("nan"), -2.0]), torch.tensor([True, True, False, True])
    stats = {kind: TokenStat(values, mask, kind) for kind in ("mean", "sum", "max", "min")}
    stats["share"] = TokenStat(torch.tensor([True, False, True, False]), mask)
    found = {name: metric.value for name, metric in to_metrics(stats).items()}
    assert found == pytest.approx({"mean": 1.0, "sum": 3.0, "max": 4.0, "min": -2.0, "share": 1 / 3})


def test_parts_merge_to_the_whole_even_with_empty_parts():
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.randn(30, generator=generator), torch.rand(30, generator=generator) > 0.4

    def metrics(rows):
        return to_metrics({k: TokenStat(values[rows], mask[rows], k) for k in ("mean", "sum", "max", "min")})

    whole = metrics(slice(0, 30))
    merged = merge_metrics(*(metrics(slice(a, b)) for a, b in ((0, 0), (0, 7), (7, 7), (7, 30))))
    for name, metric in whole.items():
        assert merged[name].value == pytest.approx(metric.value)
        assert merged[name].count == metric.count


def test_nothing_to_log_and_nothing_seen():
    assert to_metrics({}) == {}
    seen = to_metrics({"mean": TokenStat(torch.ones(2), torch.zeros(2, dtype=torch.bool))})["mean"]
    assert seen.count == 0
    assert math.isnan(seen.value)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        to_metrics({"x": TokenStat(torch.ones(3), torch.ones(1, dtype=torch.bool))})
