"""The adaptive coefficient against the formula of Ziegler et al., the divergence of a sequence, any cut of a batch."""

import math
from dataclasses import replace

import pytest
import torch

from areal.algorithm.aggregate import identity_reduce
from areal.algorithm.kl import KLController, adapted_coefficient, sequence_kl
from areal.api.config import KLControlConfig

ADAPTIVE = KLControlConfig(type="adaptive", target=0.5, horizon=100.0)
NAN = float("nan")


@pytest.mark.parametrize(
    ("measured", "factor"),
    [
        (0.5, 1.0),  # on target
        (0.55, 1.0 + 0.1 * 10 / 100),  # a tenth above: e = 0.1
        (0.45, 1.0 - 0.1 * 10 / 100),
        (9.0, 1.0 + 0.2 * 10 / 100),  # far above: e = 0.2
        (-3.0, 1.0 - 0.2 * 10 / 100),  # k1 may be negative: e = -0.2
        (math.inf, 1.0 + 0.2 * 10 / 100),
        (NAN, 1.0),
    ],
)
def test_the_next_coefficient_by_hand(measured, factor):
    result = adapted_coefficient(0.3, measured, target=0.5, num_sequences=10, horizon=100.0)
    assert result == pytest.approx(0.3 * factor, rel=1e-12)


def test_a_batch_above_the_horizon_never_turns_the_sign():
    assert adapted_coefficient(1.0, 0.0, target=1.0, num_sequences=10**6, horizon=10.0) == pytest.approx(0.8)


def test_divergence_of_a_sequence_by_hand():
    kl = torch.tensor([1.0, 2.0, 4.0, 9.0, 5.0])
    mask = torch.tensor([True, True, False, True, False])
    index = torch.tensor([0, 0, 0, 2, 3])
    assert sequence_kl(kl, mask, index, 4, "token-mean").tolist() == pytest.approx([1.5, NAN, 9, NAN], nan_ok=True)
    assert sequence_kl(kl, mask, index, 4, "sequence-sum").tolist() == pytest.approx([3, NAN, 9, NAN], nan_ok=True)
    with pytest.raises(ValueError, match="token-mean or sequence-sum"):
        sequence_kl(kl, mask, index, 4, "mean")


def a_batch(seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    kl = torch.rand(sum(lengths), generator=generator)
    return torch.where(index == 1, NAN, kl), (torch.rand(sum(lengths), generator=generator) > 0.3) & (index != 1), index


@pytest.mark.parametrize("measure", ["token-mean", "sequence-sum"])
def test_the_controller_against_a_loop_over_sequences(measure):
    """The second sequence has no token that counts, and NaN besides: it is one of n, and in no mean."""
    kl, mask, index = a_batch(0, [5, 3, 1, 8, 6])
    result = []
    for sequence in range(5):
        values = [v for v, m, s in zip(kl.tolist(), mask.tolist(), index.tolist(), strict=True) if m and s == sequence]
        if values:
            result.append(sum(values) / (len(values) if measure == "token-mean" else 1))
    measured = sum(result) / len(result)
    target = measured * 0.9
    controller = KLController(0.2, replace(ADAPTIVE, target=target, measure=measure))
    controller.observe(kl, mask, index, 5, reduce=identity_reduce)
    assert len(result) < 5
    assert controller.coefficient == pytest.approx(0.2 * (1 + (1 / 0.9 - 1) * 5 / 100), rel=1e-6)


def test_any_cut_into_ranks_gives_the_same_coefficient():
    lengths = [5, 3, 1, 8, 6, 2]
    kl, mask, index = a_batch(1, lengths)
    alone = KLController(0.2, ADAPTIVE)
    alone.observe(kl, mask, index, 6, reduce=identity_reduce)
    for shares in ([[0, 1, 2, 3, 4, 5], []], [[5, 0], [1], [2, 4, 3]]):
        sent = []

        def collect(values, sent=sent):
            sent.append(values)
            return values

        cut = []
        for share in shares:
            chosen = torch.isin(index, torch.tensor(share, dtype=torch.int64))
            places = torch.tensor([share.index(s) for s in index[chosen].tolist()], dtype=torch.int64)
            cut.append((kl[chosen], mask[chosen], places, len(share)))
        for part in cut:
            KLController(0.2, ADAPTIVE).observe(*part, reduce=collect)
        total = sum(sent)
        for part in cut:
            controller = KLController(0.2, ADAPTIVE)
            controller.observe(*part, reduce=lambda _, total=total: total)
            assert controller.coefficient == pytest.approx(alone.coefficient, rel=1e-12)
    assert alone.coefficient != 0.2


def test_a_batch_without_a_token_changes_nothing():
    controller = KLController(0.2, ADAPTIVE)
    controller.observe(*a_batch(2, [1, 2])[:1], torch.zeros(3, dtype=torch.bool), torch.tensor([0, 1, 1]), 2,
                       reduce=identity_reduce)  # fmt: skip
    nothing = torch.zeros(0)
    controller.observe(nothing, nothing.bool(), nothing.long(), 0, reduce=identity_reduce)
    assert controller.coefficient == 0.2


def test_a_divergence_that_is_no_number_leaves_the_coefficient():
    kl, mask, index = torch.tensor([9.0, NAN]), torch.tensor([True, True]), torch.tensor([0, 1])
    controller = KLController(0.2, ADAPTIVE)
    controller.observe(kl, mask, index, 2, reduce=identity_reduce)
    assert controller.coefficient == 0.2


def test_a_fixed_coefficient_stays_and_exchanges_nothing():
    controller = KLController(0.2, KLControlConfig())
    controller.observe(*a_batch(3, [4, 4]), 2, reduce=lambda _: pytest.fail("not a collective"))
    assert controller.coefficient == 0.2
    assert not controller.is_adaptive
