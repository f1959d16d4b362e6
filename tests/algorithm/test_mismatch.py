"""Distances between the rollout policy and the old policy: formulas, numbers by hand, sums over ranks."""

import math

import pytest
import torch

from areal.algorithm.aggregate import identity_reduce
from areal.algorithm.correction import Spans, effective_sample_size, mismatch_metrics
from areal.api.metrics import merge_metrics, metric_values

NAN, INF = float("nan"), float("inf")
NAMES = {
    "k1", "k2", "k3", "ppl_rollout", "ppl_old", "ppl_gap", "ppl_ratio", "ppl_ratio_max", "ratio", "ratio_max",
    "ratio_min", "chi2_token", "chi2_sequence", "ess_token", "ess_sequence",
}  # fmt: skip


def measure(sequences, reduce=identity_reduce):
    """`sequences` of (log old, log rollout, trained) -> plain metrics."""
    flat = [token for sequence in sequences for token in sequence]
    old, rollout = (torch.tensor([token[i] for token in flat], dtype=torch.float64) for i in (0, 1))
    mask = torch.tensor([token[2] for token in flat], dtype=torch.bool)
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
    index = torch.arange(len(sequences)).repeat_interleave(lengths)
    return mismatch_metrics(old, rollout, Spans(mask, index, len(sequences)), reduce=reduce)


def values_of(sequences):
    return {name.removeprefix("mismatch/"): value for name, value in metric_values(measure(sequences)).items()}


def random_sequences(seed, count=9):
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(count):
        length = int(torch.randint(1, 8, (), generator=generator))
        rollout = (-3 * torch.rand(length, generator=generator, dtype=torch.float64)).tolist()
        gaps = (0.4 * torch.randn(length, generator=generator, dtype=torch.float64)).tolist()
        trained = (torch.rand(length, generator=generator) > 0.3).tolist()
        sequences.append([(r + d, r, on) for r, d, on in zip(rollout, gaps, trained, strict=True)])
    return sequences


def slow(sequences):
    """The formulas by loops over tokens."""
    chosen = [[(old, rollout) for old, rollout, on in sequence if on] for sequence in sequences]
    chosen = [sequence for sequence in chosen if sequence]
    tokens = [pair for sequence in chosen for pair in sequence]
    gaps = [old - rollout for old, rollout in tokens]
    ratios = [math.exp(d) for d in gaps]
    products = [math.exp(sum(old - rollout for old, rollout in sequence)) for sequence in chosen]
    mean = lambda xs: sum(xs) / len(xs)  # noqa: E731
    ppl_old, ppl_rollout = math.exp(-mean([o for o, _ in tokens])), math.exp(-mean([r for _, r in tokens]))
    return {
        "k1": mean([-d for d in gaps]),
        "k2": mean([d * d / 2 for d in gaps]),
        "k3": mean([math.exp(d) - 1 - d for d in gaps]),
        "ppl_rollout": ppl_rollout,
        "ppl_old": ppl_old,
        "ppl_gap": ppl_old - ppl_rollout,
        "ppl_ratio": ppl_old / ppl_rollout,
        "ppl_ratio_max": max(math.exp(mean([r - o for o, r in sequence])) for sequence in chosen),
        "ratio": mean(ratios),
        "ratio_max": max(ratios),
        "ratio_min": min(ratios),
        "chi2_token": mean([r * r for r in ratios]) - 1,
        "chi2_sequence": mean([r * r for r in products]) - 1,
        "ess_token": sum(ratios) ** 2 / sum(r * r for r in ratios) / len(ratios),
        "ess_sequence": sum(products) ** 2 / sum(r * r for r in products) / len(products),
    }


@pytest.mark.parametrize("seed", range(4))
def test_it_equals_the_slow_reference(seed):
    sequences = random_sequences(seed)
    assert values_of(sequences) == pytest.approx(slow(sequences), rel=1e-9, abs=1e-12)
    assert set(values_of(sequences)) == NAMES


def test_by_hand():
    # ratios 2 and 1/2 in one sequence (product 1), 2 in another; pi_rollout 1/4 throughout
    def token(ratio):
        return (math.log(0.25 * ratio), math.log(0.25), True)

    values = values_of([[token(2), (9.0, 9.0, False), token(0.5)], [token(2)]])
    log2 = math.log(2)
    expected = {
        "k1": -log2 / 3,
        "k2": log2 * log2 / 2,
        "k3": (1 - log2 - 0.5 + log2 + 1 - log2) / 3,
        "ppl_rollout": 4.0,
        "ppl_old": 4 * 2 ** (-1 / 3),
        "ppl_gap": 4 * 2 ** (-1 / 3) - 4,
        "ppl_ratio": 2 ** (-1 / 3),
        "ppl_ratio_max": 1.0,
        "ratio": 1.5,
        "ratio_max": 2.0,
        "ratio_min": 0.5,
        "chi2_token": (4 + 0.25 + 4) / 3 - 1,
        "chi2_sequence": (1 + 4) / 2 - 1,
        "ess_token": 4.5**2 / 8.25 / 3,
        "ess_sequence": 9 / 5 / 2,
    }
    assert values == pytest.approx(expected)


def test_equal_policies_are_at_no_distance():
    values = values_of([[(-1.0, -1.0, True)] * 3, [(-2.0, -2.0, True)]])
    nothing = dict.fromkeys(("k1", "k2", "k3", "ppl_gap", "chi2_token", "chi2_sequence"), 0.0)
    subject = dict.fromkeys(("ratio", "ratio_max", "ratio_min", "ppl_ratio", "ess_token", "ess_sequence"), 1.0)
    assert {name: values[name] for name in nothing | subject} == pytest.approx(nothing | subject)


def test_the_metrics_of_ranks_are_those_of_the_whole_batch():
    """A quotient of sums is not the mean of the ranks' quotients: only the reduction inside makes it right."""
    sequences = random_sequences(9)
    shares = [sequences[:2], [], sequences[2:]]
    sums = []

    def record(values):
        sums.append(values)
        return values

    for share in shares:
        measure(share, record)
    total = torch.stack(sums).sum(0)
    parts = [measure(share, lambda _: total) for share in shares]
    assert all(set(part) == {f"mismatch/{name}" for name in NAMES} for part in parts)
    merged = metric_values(merge_metrics(*parts))
    assert merged == pytest.approx(metric_values(measure(sequences)), rel=1e-9)


def test_garbage_outside_the_mask_reaches_nothing_and_nan_inside_shows():
    clean = [[(-1.0, -1.5, True), (0.0, 0.0, False)], [(0.0, 0.0, False)]]
    dirty = [[(-1.0, -1.5, True), (NAN, INF, False)], [(-INF, NAN, False)]]
    assert values_of(dirty) == values_of(clean)
    assert math.isnan(values_of([[(NAN, -1.0, True)]])["k1"])


def test_far_apart_policies_give_finite_numbers():
    values = values_of([[(-1.0, -900.0, True), (-900.0, -1.0, True)], [(-1.0, -900.0, True)] * 3])
    assert all(math.isfinite(values[name]) for name in NAMES - {"ppl_rollout", "ppl_old", "ppl_gap", "ppl_ratio"})
    assert values["ratio_max"] == pytest.approx(math.exp(20))


@pytest.mark.parametrize("sequences", [[], [[(0.0, 0.0, False)]]])
def test_without_trained_tokens_the_names_are_there_and_count_nothing(sequences):
    metrics = measure(sequences)
    assert set(metrics) == {f"mismatch/{name}" for name in NAMES}
    assert all(metric.count == 0 for metric in metrics.values())


def test_effective_sample_size_by_hand():
    # weights 1, 3 of two tokens here; another rank has sum 2, squares 4, one token: 6^2 / (3 * 14)
    weights, kept = torch.tensor([1.0, 3.0, 50.0]), torch.tensor([True, True, False])
    assert effective_sample_size(weights, kept, reduce=identity_reduce).value == pytest.approx(16 / 20)
    other = torch.tensor([2.0, 4.0, 1.0], dtype=torch.float64)
    assert effective_sample_size(weights, kept, reduce=lambda x: x + other).value == pytest.approx(36 / 42)
    assert effective_sample_size(weights, torch.zeros(3, dtype=torch.bool), reduce=identity_reduce).count == 0
