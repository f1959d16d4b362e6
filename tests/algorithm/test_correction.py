"""Off-policy correction against a slow reference, numbers worked by hand, hostile inputs, and any cut of the batch."""

import math
from itertools import pairwise

import pytest
import torch

from areal.algorithm.correction import Spans, at_level, broken_by, correct, segment_index, weighted
from areal.algorithm.policy_loss import PolicyLoss
from areal.api.config import CorrectionRule, RolloutCorrectionConfig
from areal.api.config.algorithm import RULE_LEVELS
from tests.expect import raises_code

NAN, INF = float("nan"), float("inf")


def rule(**options):
    return CorrectionRule(**options)


def section(**options):
    return RolloutCorrectionConfig(**options)


class Rows:
    """Sequences as plain lists: log-ratios d = log old - log rollout, and which tokens are trained."""

    def __init__(self, log_ratios, masks):
        self.log_ratios, self.masks = log_ratios, masks

    @classmethod
    def random(cls, seed, num_sequences=12, scale=0.6):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 12, (num_sequences,), generator=generator).tolist()
        draws = [(torch.randn(n, generator=generator, dtype=torch.float64) * scale).tolist() for n in lengths]
        masks = [[*(torch.rand(n, generator=generator) > 0.3).tolist()[:-1], False] for n in lengths]
        return cls(draws, masks)

    @property
    def flat_mask(self):
        return [on for mask in self.masks for on in mask]

    def apply(self, options, sequences=None, **further):
        """correct() on these sequences; log pi_rollout is -1.5."""
        chosen = range(len(self.masks)) if sequences is None else sequences
        gaps = torch.tensor([d for s in chosen for d in self.log_ratios[s]], dtype=torch.float64)
        lengths = torch.tensor([len(self.masks[s]) for s in chosen], dtype=torch.int64)
        rollout = torch.full_like(gaps, -1.5)
        mask = torch.tensor([on for s in chosen for on in self.masks[s]], dtype=torch.bool)
        index = torch.arange(len(lengths)).repeat_interleave(lengths)
        return correct(rollout + gaps, rollout, Spans(mask, index, len(lengths)), options, **further)


def slow_places(mask, unit):
    """For each position the trained positions that share its unit; loops only."""
    result = []
    for t in range(len(mask)):
        if unit == "sequence":
            result.append([u for u in range(len(mask)) if mask[u]])
        elif unit == "segment":
            first, last = t, t
            while first > 0 and mask[first - 1]:
                first -= 1
            while last + 1 < len(mask) and mask[last + 1]:
                last += 1
            result.append([u for u in range(first, last + 1) if mask[u]])
        else:
            result.append([t])
    return result


def cut(x):
    return max(-20.0, min(20.0, x))


def slow_value(log_ratios, places, metric, how):
    """The metric of one unit from the formulas of Schulman's note; ratio in the log domain."""
    each = {"ratio": lambda d: d, "k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}[
        metric
    ]
    values = [each(cut(log_ratios[u])) for u in places]
    total = {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[how]
    return math.exp(cut(total)) if metric == "ratio" else total


def slow_level(level):
    unit, _, how = level.partition("_")
    return unit, how or "sum"


WEIGHTS = {
    "token": "token",
    "segment": "segment_sum",
    "segment_mean": "segment_mean",
    "sequence": "sequence_sum",
    "geometric": "sequence_mean",
}


def slow_correct(rows, options):
    """Weights and kept flags of every position, by loops over tokens."""
    weights, kept = [], []
    for log_ratios, mask in zip(rows.log_ratios, rows.masks, strict=True):
        unit, how = slow_level(WEIGHTS[options.level])
        vetoed = options.veto_threshold is not None and any(
            on and math.exp(d) < options.veto_threshold for d, on in zip(log_ratios, mask, strict=True)
        )
        for t, on in enumerate(mask):
            if not on:
                weights.append(0.0)
                kept.append(False)
                continue
            ratio = slow_value(log_ratios, slow_places(mask, unit)[t], "ratio", how)
            weight, stays = ratio if options.mode != "off" else 1.0, not vetoed
            lower = options.lower if options.lower is not None or options.upper is None else 1 / options.upper
            if options.mode == "truncate" and options.upper is not None:
                weight = min(weight, options.upper)
            elif options.mode == "clamp":
                weight = min(max(weight, lower), options.upper)
            elif options.mode == "mask":
                stays = stays and lower <= ratio <= options.upper
            for item in options.rules:
                one_unit, one_how = slow_level(item.level)
                value = slow_value(log_ratios, slow_places(mask, one_unit)[t], item.metric, one_how)
                if item.action == "clamp":
                    weight = min(max(weight, item.lower or -INF), item.upper or INF)
                else:
                    stays = stays and (item.lower or -INF) <= value <= (item.upper or INF)
            kept.append(stays)
            weights.append((weight if options.apply_weights else 1.0) if stays else 0.0)
    return weights, kept


CASES = [
    section(),
    section(upper=1.3),
    *(section(level=level, upper=1.5) for level in WEIGHTS if level != "token"),
    *(section(level=level, mode="clamp", upper=1.5) for level in WEIGHTS),
    *(section(level=level, mode="mask", upper=2.0) for level in WEIGHTS),
    section(mode="mask", lower=0.0, upper=1.4),
    section(mode="mask", lower=0.9, upper=5.0),
    section(mode="clamp", lower=0.7, upper=1.0),
    section(mode="off", veto_threshold=0.5),
    section(mode="mask", upper=1.5, apply_weights=False),
    section(veto_threshold=0.4, upper=2.0),
    *(
        section(mode="off", rules=[rule(metric=metric, level=level, upper=bound)])
        for metric, bound in (("ratio", 1.4), ("k1", 0.3), ("k2", 0.1), ("k3", 0.1))
        for level in RULE_LEVELS
    ),
    section(rules=[rule(metric="k1", lower=-0.5, upper=0.4), rule(level="sequence_mean", lower=0.9)]),
    section(upper=3.0, rules=[rule(action="clamp", lower=0.8), rule(action="clamp", upper=1.1)]),
    section(level="geometric", rules=[rule(level="sequence_mean", action="clamp", lower=0.95, upper=1.05)]),
]


@pytest.mark.parametrize("options", CASES, ids=range(len(CASES)))
def test_it_equals_the_slow_reference(options):
    for seed in range(3):
        rows = Rows.random(seed)
        weights, kept = slow_correct(rows, options)
        result = rows.apply(options)
        assert result.kept.tolist() == kept
        assert result.weights.tolist() == pytest.approx(weights, rel=1e-12, abs=1e-12)
        assert result.weights.dtype == torch.float64


@pytest.mark.parametrize("options", CASES, ids=range(len(CASES)))
def test_any_cut_into_micro_batches_decides_alike(options):
    """Which is why it may also be computed inside the loss of a micro-batch: no bound looks beyond a sequence."""
    rows = Rows.random(7)
    whole = rows.apply(options)
    for size in (1, 3, 5):
        bounds = [*range(0, 12, size), 12]
        parts = [rows.apply(options, range(a, b)) for a, b in pairwise(bounds)]
        assert torch.equal(torch.cat([part.weights for part in parts]), whole.weights)
        assert torch.equal(torch.cat([part.kept for part in parts]), whole.kept)
        assert all(part.stats.keys() == whole.stats.keys() for part in parts)


def two_turns():
    """Prompt, a turn of two tokens (ratios 2 and 3), a tool's answer, a turn of one (ratio 1/2), the end."""
    return Rows([[9.0, math.log(2), math.log(3), -9.0, math.log(0.5), 9.0]], [[False, True, True, False, True, False]])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [0, 2, 3, 0, 0.5, 0]),
        ("segment", [0, 6, 6, 0, 0.5, 0]),  # 2 * 3 | 1/2
        ("segment_mean", [0, 6**0.5, 6**0.5, 0, 0.5, 0]),
        ("sequence", [0, 3, 3, 0, 3, 0]),  # 2 * 3 / 2
        ("geometric", [0, 3 ** (1 / 3), 3 ** (1 / 3), 0, 3 ** (1 / 3), 0]),
    ],
)
def test_levels_of_two_turns_by_hand(level, expected):
    assert two_turns().apply(section(level=level)).weights.tolist() == pytest.approx(expected)


def test_segments_by_hand():
    # two sequences; the first begins and ends with trained tokens, and still no segment crosses into the second
    mask = torch.tensor([True, True, False, True, True, False, True])
    index = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    assert segment_index(Spans(mask, index, 2))[mask].tolist() == [0, 0, 1, 2, 3]
    assert segment_index(Spans(torch.tensor([False, False, True]), torch.zeros(3).long(), 1)).tolist() == [0, 0, 0]
    values = torch.tensor([1.0, 2.0, NAN, 4.0, 8.0, INF, 16.0], dtype=torch.float64)
    assert at_level(values, "segment_sum", Spans(mask, index, 2)).tolist() == [3, 3, 0, 4, 8, 0, 16]
    assert at_level(values, "segment_mean", Spans(mask, index, 2)).tolist() == [1.5, 1.5, 0, 4, 8, 0, 16]
    assert at_level(values, "sequence_max", Spans(mask, index, 2)).tolist() == [4, 4, 0, 4, 16, 0, 16]
    assert at_level(-values, "sequence_max", Spans(mask, index, 2)).tolist() == [-1, -1, 0, -1, -8, 0, -8]
    for level in ("segment", "segment_min", "turn_sum"):
        with pytest.raises(ValueError, match=level):
            at_level(values, level, Spans(mask, index, 2))


def test_veto_by_hand():
    # the second token of the second sequence has ratio 0.05 < 0.1: all of that sequence goes, nothing else
    ratios = [[0.2, 5.0, 1.0], [1.0, 0.05, 1.0, 1.0], [0.1, 1.0]]
    masks = [[True, True, False], [True, True, True, False], [True, False]]
    rows = Rows([[math.log(r) for r in row] for row in ratios], masks)
    result = rows.apply(section(mode="off", veto_threshold=0.0999))
    assert result.kept.tolist() == [True, True, False] + [False] * 4 + [True, False]
    assert result.stats["correction/vetoed"].values.sum() == 3
    sequences = result.stats["correction/vetoed_sequences"]
    assert sequences.values[sequences.mask].tolist() == [False, True, False]
    # an untrained token never vetoes
    masks[1][1] = False
    assert Rows(rows.log_ratios, masks).apply(section(mode="off", veto_threshold=0.0999)).kept.sum() == 5


def test_modes_by_hand():
    rows = Rows([[math.log(r) for r in (0.25, 0.5, 1.0, 2.0, 4.0)]], [[True] * 5])

    def weights(**options):
        return rows.apply(section(**options)).weights.tolist()

    assert weights(upper=2.0) == pytest.approx([0.25, 0.5, 1, 2, 2])
    assert weights(mode="clamp", upper=2.01) == pytest.approx([1 / 2.01, 0.5, 1, 2, 2.01])
    assert weights(mode="mask", upper=2.01) == pytest.approx([0, 0.5, 1, 2, 0])
    assert weights(mode="mask", lower=0.0, upper=2.01) == pytest.approx([0.25, 0.5, 1, 2, 0])
    assert weights(mode="mask", upper=2.01, apply_weights=False) == [0, 1, 1, 1, 0]
    assert weights(upper=2.0, apply_weights=False) == [1] * 5
    assert weights(mode="off", rules=[rule(metric="k1", lower=0.0)]) == [1, 1, 1, 0, 0]
    # 1/2 of log(4)^2 = 0.961; expm1(log 4) - log 4 = 1.614; of 1/4: -0.75 + 1.386 = 0.636
    assert weights(mode="off", rules=[rule(metric="k2", upper=0.96)]) == [0, 1, 1, 1, 0]
    assert weights(mode="off", rules=[rule(metric="k3", upper=0.7)]) == [1, 1, 1, 1, 0]


def test_rules_look_at_the_ratios_as_measured_and_their_masks_meet():
    """The second rule sees the sequence's mean with the token that the first one leaves out; order cannot matter."""
    ratios = [0.5, 0.5, 16.0]  # geometric mean 4^(1/3) = 1.587; without the third token it would be 0.5
    rows = Rows([[math.log(r) for r in ratios]], [[True] * 3])
    token, mean = rule(upper=10.0), rule(level="sequence_mean", lower=1.5)
    for rules in ([token, mean], [mean, token]):
        assert rows.apply(section(mode="off", rules=rules)).kept.tolist() == [True, True, False]
    # a clamp moves weights, not what later rules see: 16 -> 2 does not save the token from the mask
    result = rows.apply(section(rules=[rule(action="clamp", upper=2.0), rule(upper=10.0)]))
    assert result.weights.tolist() == pytest.approx([0.5, 0.5, 0])
    assert result.stats["correction/rule0_clamped"].values.tolist() == [False, False, True]
    assert result.stats["correction/rule1_masked"].values.tolist() == [False, False, True]


def test_only_trained_tokens_break_a_rule():
    mask, index = torch.tensor([True, False, True]), torch.zeros(3).long()
    gaps = torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64)
    result = broken_by(rule(metric="k1", lower=0.5), gaps, Spans(mask, index, 1))
    assert result.tolist() == [True, False, False]


def test_batch_normalisation_by_hand():
    # weights 2, 4 (bounded to 3) stay, 9 is left out: mean of the stay (2 + 3) / 2 = 2.5
    rows = Rows([[math.log(2), math.log(4)], [math.log(9)]], [[True, True], [True]])
    options = section(mode="truncate", upper=3.0, batch_normalize=True, rules=[rule(upper=8.0)])
    assert rows.apply(options).weights.tolist() == pytest.approx([0.8, 1.2, 0])
    # another rank adds a sum of 4 over 2 tokens: mean 9 / 4
    summed = rows.apply(options, reduce=lambda values: values + torch.tensor([4.0, 2.0], dtype=torch.float64))
    assert summed.weights.tolist() == pytest.approx([8 / 9, 12 / 9, 0])


@pytest.mark.parametrize(
    ("options", "mean"),
    [
        # one weight for each sequence, 2 * 3 = 6 cut to 4, and 1/2: 4.5 / 2; by kept tokens 8.5 / 3
        ({"level": "sequence", "upper": 4.0}, 2.25),
        # of tokens, before the rule rejects 1/2: (2 + 3 + 1/2) / 3
        ({"level": "token", "rules": [rule(lower=0.6)]}, 5.5 / 3),
        # outside the bounds of mode=mask a weight counts 0: (2 + 0 + 1/2) / 3
        ({"level": "token", "mode": "mask", "lower": 0.1, "upper": 2.5}, 2.5 / 3),
    ],
)
def test_weights_normalised_by_units_equal_verl(options, mean):
    """verl's compute_rollout_correction_weights: mean over tokens or sequences, zeros of IcePop in, rejection after."""
    rows = Rows([[math.log(2), math.log(3)], [math.log(0.5)]], [[True, True], [True]])
    plain = rows.apply(section(**options))
    by_units = rows.apply(section(**options, batch_normalize=True, normalize_by="units"))
    assert by_units.weights.tolist() == pytest.approx([weight / mean for weight in plain.weights.tolist()])
    assert torch.equal(by_units.kept, plain.kept)


def test_what_is_logged_by_hand():
    rows = Rows([[math.log(r) for r in (0.25, 1.0, 4.0)]], [[True, True, True]])
    stats = rows.apply(section(mode="mask", upper=2.0)).stats
    assert stats["correction/masked"].values.tolist() == [True, False, True]
    assert stats["correction/left_out"].values.tolist() == [True, False, True]
    assert stats["correction/weight"].mask.tolist() == [False, True, False]
    stats = rows.apply(section(mode="clamp", upper=2.0, apply_weights=False)).stats
    assert stats["correction/clamped"].values.tolist() == [True, False, True]
    assert stats["correction/weight"].values.tolist() == pytest.approx([0.5, 1, 2])
    assert not stats["correction/left_out"].values.any()


def test_m2po_looks_at_what_the_bounds_leave():
    # squares 0.04, 0.09, 1; the bound takes the last: mean of the rest 0.065 <= 0.07. Alone it would leave only 0.04
    rows = Rows([[0.2, 0.3, 1.0]], [[True] * 3])
    result = rows.apply(section(mode="off", rules=[rule(upper=2.0)]), m2_threshold=0.07)
    assert result.kept.tolist() == [True, True, False]
    assert not result.stats["correction/m2_masked"].values.any()
    # squares 0.01, 0.04, 0.09: all of them have mean 0.047 <= 0.05, without the first 0.065
    rows_of_small = Rows([[0.1, -0.2, -0.3]], [[True] * 3])
    result = rows_of_small.apply(section(mode="off", rules=[rule(metric="k1", lower=0.0)]), m2_threshold=0.05)
    assert result.kept.tolist() == [False, True, False]
    stats = {name: stat.values[stat.mask].tolist() for name, stat in result.stats.items()}
    assert stats["correction/m2_masked"] == [False, False, True]
    assert stats["correction/m2"] == pytest.approx([0.04, 0.09])
    assert stats["correction/m2_kept"] == pytest.approx([0.04])
    alone = rows.apply(section(), m2_threshold=0.06)
    assert alone.kept.tolist() == [True, False, False]
    assert alone.weights.tolist() == pytest.approx([math.exp(0.2), 0, 0])
    assert alone.stats["correction/m2_masked"].values.tolist() == [False, True, True]


def test_masked_garbage_reaches_nothing():
    masks = [[False, True, True, False], [False, False]]
    options = section(
        level="sequence",
        mode="mask",
        upper=2.0,
        veto_threshold=0.1,
        rules=[rule(metric="k3", level="segment_max", upper=9.0)],
    )
    clean = Rows([[0.0, 0.1, 0.2, 0.0], [0.0, 0.0]], masks).apply(options)
    for bad in (NAN, INF, -INF, -50.0):
        result = Rows([[bad, 0.1, 0.2, bad], [bad, bad]], masks).apply(options)
        assert torch.equal(result.weights, clean.weights)
        assert torch.equal(result.kept, clean.kept)


def test_a_trained_nan_stays_in_and_shows_itself():
    masks = [[True, True], [True, True]]
    options = section(mode="mask", upper=2.0, veto_threshold=0.1, rules=[rule(metric="k2", upper=0.5)])
    result = Rows([[NAN, 0.1], [0.1, 0.1]], masks).apply(options, m2_threshold=0.04)
    assert result.weights[0].isnan()
    assert result.kept.all()
    assert result.weights[2:].isfinite().all()
    by_sequence = Rows([[NAN, 0.1], [0.1, 0.1]], masks).apply(section(level="sequence", mode="mask", upper=2.0))
    assert by_sequence.weights[:2].isnan().all()


def test_infinite_log_ratios_are_cut_like_large_ones():
    result = Rows([[INF, -INF, 50.0]], [[True] * 3]).apply(section())
    assert result.weights.tolist() == pytest.approx([math.exp(20), math.exp(-20), math.exp(20)])
    # sums are cut again: 30 tokens of ratio e are e^20, not e^30
    assert Rows([[1.0] * 30], [[True] * 30]).apply(section(level="sequence")).weights[0] == pytest.approx(math.exp(20))


@pytest.mark.parametrize("options", CASES, ids=range(len(CASES)))
def test_nothing_to_train_on(options):
    masked = Rows([[0.1, 0.2], [0.3]], [[False, False], [False]]).apply(options, m2_threshold=0.04)
    assert masked.weights.tolist() == [0, 0, 0]
    assert not masked.kept.any()
    empty = Rows([], []).apply(options, m2_threshold=0.04)
    assert empty.weights.numel() == 0
    assert empty.stats.keys() == masked.stats.keys()


def test_weights_carry_no_gradient():
    old, rollout = torch.zeros(3, requires_grad=True), torch.full((3,), 0.1, requires_grad=True)
    spans = Spans(torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64), 1)
    result = correct(old, rollout, spans, section(level="sequence", batch_normalize=True))
    assert not result.weights.requires_grad
    assert result.weights.dtype == torch.float32


def test_a_token_left_out_gives_nothing_however_bad_its_loss():
    losses = torch.tensor([INF, NAN, 2.0], requires_grad=True)
    result = weighted(PolicyLoss(losses=losses, stats={}), torch.tensor([0.0, 0.0, 1.5]))
    assert result.losses.tolist() == [0, 0, 3]
    result.losses.sum().backward()
    assert losses.grad.tolist() == [0, 0, 1.5]
    assert weighted(PolicyLoss(losses=losses, stats={}), None).losses is losses
    with raises_code("algorithm.shapes_differ"):
        weighted(PolicyLoss(losses=losses, stats={}), torch.ones(1))
