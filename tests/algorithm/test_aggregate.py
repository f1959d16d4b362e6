"""Loss assembly does not depend on how the batch is cut; logged statistics merge."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from areal.algorithm.aggregate import TokenStat, local_denominator, loss_scale, loss_weights, to_metrics, trained_counts
from areal.api.metrics import merge_metrics
from tests.expect import raises_code

MASK = torch.tensor([1, 1, 1, 0, 1, 0, 0, 1], dtype=torch.bool)
INDEX = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
LOSSES = torch.tensor([1.0, 2.0, 3.0, 99.0, 5.0, 99.0, 99.0, 7.0], dtype=torch.float64)
# trained tokens a sequence: 3, 1, 0, 1; sums 6, 5, -, 7; 3 sequences have trained tokens
BY_HAND = {
    "token-mean": 18 / 5,
    "token-sum": 18 / 4,
    "seq-mean-token-sum": 18 / 3,
    "seq-mean-token-mean": (2 + 5 + 7) / 3,
    "seq-mean-token-sum-norm": 18 / (3 * 4),
}


def aggregated(mask, index, losses, num_sequences, aggregation, parts, *, length):
    """The sums of all parts over one denominator, as an engine forms them."""
    total, denominator = 0.0, 0.0
    for part in parts:
        rows = [t for s in part for t in range(len(index)) if index[t] == s]
        ours = torch.tensor([part.index(int(index[t])) for t in rows], dtype=torch.int64)
        weights = loss_weights(mask[rows], ours, len(part), aggregation)
        total += (weights * losses[rows]).sum().item()
        denominator += local_denominator(mask[rows], ours, len(part), aggregation, max_tokens=length).item()
    return total / denominator * loss_scale(aggregation, denominator, length)


@pytest.mark.parametrize("aggregation", BY_HAND)
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 0], [], [2, 1]]])
def test_any_cut_gives_the_loss_worked_by_hand(aggregation, parts):
    result = aggregated(MASK, INDEX, LOSSES, 4, aggregation, parts, length=4)
    assert result == pytest.approx(BY_HAND[aggregation], rel=1e-6)


@st.composite
def cut_batches(draw):
    """Sequences of losses and masks, at least one trained token, and a cut of the sequences into parts."""
    rows = draw(
        st.lists(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=6)
    )
    rows[0][0] = (rows[0][0][0], True)
    num_parts = draw(st.integers(1, 4))
    place = [draw(st.integers(0, num_parts - 1)) for _ in rows]
    return rows, [[s for s in range(len(rows)) if place[s] == p] for p in range(num_parts)]


def by_formula(rows, aggregation, length):
    """The definitions of the docstring, sequence by sequence."""
    kept = [[value for value, trained in row if trained] for row in rows]
    kept = [values for values in kept if values]
    everything = [value for values in kept for value in values]
    match aggregation:
        case "token-mean":
            return sum(everything) / len(everything)
        case "token-sum":
            return sum(everything) / length
        case "seq-mean-token-sum":
            return sum(sum(values) for values in kept) / len(kept)
        case "seq-mean-token-mean":
            return sum(sum(values) / len(values) for values in kept) / len(kept)
        case _:
            return sum(sum(values) / length for values in kept) / len(kept)


@pytest.mark.parametrize("aggregation", BY_HAND)
@settings(max_examples=60, deadline=None)
@given(cut_batches(), st.integers(1, 50))
def test_any_cut_equals_the_formula(aggregation, drawn, length):
    rows, parts = drawn
    mask = torch.tensor([trained for row in rows for _, trained in row])
    losses = torch.tensor([value for row in rows for value, _ in row], dtype=torch.float64)
    index = torch.tensor([s for s, row in enumerate(rows) for _ in row])
    result = aggregated(mask, index, losses, len(rows), aggregation, parts, length=length)
    assert result == pytest.approx(by_formula(rows, aggregation, length), rel=1e-6, abs=1e-5)


def test_a_sum_without_a_constant_is_the_plain_sum():
    assert loss_scale("token-sum", 5.0) * 18 / 5 == pytest.approx(18)
    assert all(loss_scale(name, 5.0, 7) == 1.0 for name in BY_HAND if name != "token-sum")


@pytest.mark.parametrize("aggregation", BY_HAND)
def test_nothing_trained_gives_weights_and_denominator_0(aggregation):
    nothing = torch.zeros(8, dtype=torch.bool)
    assert loss_weights(nothing, INDEX, 4, aggregation).tolist() == [0.0] * 8
    assert local_denominator(nothing, INDEX, 4, aggregation, max_tokens=4).tolist() == [0.0]
    empty = torch.zeros(0, dtype=torch.int64)
    assert loss_weights(empty.bool(), empty, 0, aggregation).tolist() == []
    assert local_denominator(empty.bool(), empty, 0, aggregation, max_tokens=4).tolist() == [0.0]


def test_trained_counts():
    assert trained_counts(MASK, INDEX, 5).tolist() == [3, 1, 0, 1, 0]


def test_a_constant_length_must_be_given():
    with pytest.raises(ValueError, match="max_tokens"):
        local_denominator(MASK, INDEX, 4, "seq-mean-token-sum-norm")


def test_statistics_by_hand():
    values, mask = torch.tensor([1.0, 4.0, float("nan"), -2.0]), torch.tensor([True, True, False, True])
    stats = {kind: TokenStat(values, mask, kind) for kind in ("mean", "sum", "max", "min")}
    stats["share"] = TokenStat(torch.tensor([True, False, True, False]), mask)
    result = {name: metric.value for name, metric in to_metrics(stats).items()}
    assert result == pytest.approx({"mean": 1.0, "sum": 3.0, "max": 4.0, "min": -2.0, "share": 1 / 3})


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
    with raises_code("algorithm.shapes_differ"):
        to_metrics({"x": TokenStat(torch.ones(3), torch.ones(1, dtype=torch.bool))})
