"""M2PO's mask: the tokens that are kept to bound the second moment of the log-ratios over all ranks."""

from fractions import Fraction
from typing import cast

import torch
from torch import Tensor

from areal.algorithm.aggregate import Reduce, require_same_shape

_STEP_BITS = 40
_DIGIT_BITS = 10
_NUM_DIGITS = 5
"""Second moments are counted in steps of 2^-40; the largest, 20^2 * 2^40, has 49 of the 50 bits."""
_HALF = 20
"""Sums are taken of the upper and the lower 20 bits apart: both stay exact in float64 up to 2e7 tokens."""


def second_moment_kept(log_ratio: Tensor, mask: Tensor, threshold: float, *, reduce: Reduce) -> Tensor:
    """M2PO (arXiv 2510.01161): remove the tokens of largest (log ratio)^2 until the mean of the rest <= threshold.

    log_ratio [T] clamped to +-20, mask [T] bool -> [T] bool, the tokens of the mask that are kept. The result is that
    of sorting the tokens of all ranks, computed from histograms added by `reduce`; it is exact because squares are
    multiples of 2^-40. Equal squares are kept or removed together. The tokens with the smallest square are always
    kept. NaN is kept, so that it reaches the loss, and is not counted.
    """
    require_same_shape(log_ratio=log_ratio, mask=mask)
    counted = mask & ~log_ratio.isnan()
    squares = torch.where(counted, log_ratio, 0.0).double().square()
    steps = (squares * 2.0**_STEP_BITS).round().long()
    limit = _largest_kept(steps[counted], Fraction(threshold) * 2**_STEP_BITS, reduce)
    return mask & (~counted | (steps <= limit))


def _largest_kept(steps: Tensor, threshold: Fraction, reduce: Reduce) -> int:
    """The largest kept square, found digit by digit: the mean of all squares up to c grows with c."""
    first, count, total = 0, 0, 0
    for digit in reversed(range(_NUM_DIGITS)):
        shift = digit * _DIGIT_BITS
        same_before = (steps >> (shift + _DIGIT_BITS)) == (first >> (shift + _DIGIT_BITS))
        for value, (more, added) in enumerate(_sums_by_digit(steps[same_before], shift, reduce)):
            if (total + added) * threshold.denominator > threshold.numerator * (count + more):
                first |= value << shift
                break
            count, total = count + more, total + added
        else:
            return 2 ** (_DIGIT_BITS * _NUM_DIGITS)  # only at the first digit: the mean of all is low enough
    return first - 1 if count else first


def _sums_by_digit(steps: Tensor, shift: int, reduce: Reduce) -> list[tuple[int, int]]:
    """(count, sum) of the `steps` of all ranks for each value of one digit."""
    size = 1 << _DIGIT_BITS
    digits = (steps >> shift) & (size - 1)
    parts = torch.stack([torch.ones_like(steps), steps >> _HALF, steps & ((1 << _HALF) - 1)]).double()
    local = parts.new_zeros(3, size).index_add(1, digits, parts)
    numbers = reduce(local.cpu().reshape(-1)).reshape(3, size).long()
    rows = cast("list[list[int]]", numbers.T.tolist())  # pyright: ignore[reportUnknownMemberType]
    return [(more, (high << _HALF) + low) for more, high, low in rows]
