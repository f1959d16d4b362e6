"""Owns the choice of tokens by covariance: those whose update would cost the most entropy, over a whole batch.

Clip-Cov and KL-Cov (Cui et al. 2025, arXiv 2505.22617) treat a few tokens apart whose

    Cov_t = (log pi(t) - mean of log pi) * (A_t - mean of A)

is high, the means over the N tokens of the batch. verl takes the means and the choice within a micro-batch, so that
its update depends on how the batch is cut, and draws with the process's generator. Here all of it is decided once, over
the whole batch on all ranks, with the policy before the update: any cut gives the same choice, and so does a replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.algorithm.aggregate import Reduce, require_same_shape

_DIGIT_BITS = 16
_NUM_DIGITS = 4
_LOW_31_BITS = 0x7FFFFFFF
_LOW_32_BITS = 0xFFFFFFFF


def token_covariances(advantages: Tensor, logprobs: Tensor, mask: Tensor, *, reduce: Reduce) -> Tensor:
    """Cov_t of each token with the means over the trained tokens of all ranks, [T] float64, 0 where the mask is off."""
    require_same_shape(advantages=advantages, logprobs=logprobs, mask=mask)
    a = torch.where(mask, advantages, 0.0).double()
    b = torch.where(mask, logprobs, 0.0).double()
    sums = reduce(torch.stack([a.sum(), b.sum(), mask.sum().double()]).cpu()).to(a.device)
    count = sums[2].clamp(min=1)
    return torch.where(mask, (a - sums[0] / count) * (b - sums[1] / count), 0.0)


def highest_covariances(covariances: Tensor, draw: Tensor, mask: Tensor, *, ratio: float, reduce: Reduce) -> Tensor:
    """KL-Cov: the max(1, int(ratio N)) trained tokens of highest covariance on all ranks, [T] bool.

    `draw` [T] int64 below 2^31 decides among equal covariances (told apart in float32). Tokens equal in both are
    chosen together.
    """
    bits = covariances.float().view(torch.int32).long() & _LOW_32_BITS
    negative = bits > _LOW_31_BITS
    ordered = torch.where(negative, ~bits & _LOW_32_BITS, bits + _LOW_31_BITS + 1)
    return _largest((ordered << 31) | draw, mask, _part_of(mask, ratio, reduce), reduce=reduce)


def drawn_between(
    covariances: Tensor, draw: Tensor, mask: Tensor, *, low: float, high: float, ratio: float, reduce: Reduce
) -> Tensor:
    """Clip-Cov: max(1, int(ratio N)) of the trained tokens with low < Cov < high on all ranks, [T] bool.

    Those with the largest `draw`, [T] int64 below 2^31: a draw that looks random and needs no generator.
    """
    eligible = mask & (covariances > low) & (covariances < high)
    return _largest(draw, eligible, _part_of(mask, ratio, reduce), reduce=reduce)


def token_draws(input_ids: Tensor, rollout_logprobs: Tensor, cu_seqlens: Tensor, sequence_index: Tensor) -> Tensor:
    """A number from 0 to 2^31 - 1 for each token, [T] int64, that looks random and depends on its record alone.

    A function of its place in its sequence, of the token before it and of its log-probability when it was sampled: the
    same however the batch is cut, and in every replay. Two records equal in all three draw alike.
    """
    place = torch.arange(input_ids.numel(), device=input_ids.device) - cu_seqlens.long()[sequence_index]
    sampled = rollout_logprobs.float().contiguous().view(torch.int32).long()
    mixed = _mix(_mix(_mix(place) ^ input_ids) ^ (sampled & _LOW_32_BITS))
    return mixed & _LOW_31_BITS


def _mix(values: Tensor) -> Tensor:
    """Scatter the bits of 64-bit integers; products wrap around."""
    values = (values ^ ((values >> 32) & _LOW_32_BITS)) * 0x2545F4914F6CDD1D + 0x14057B7EF767814F
    values = (values ^ ((values >> 29) & ((1 << 35) - 1))) * 0x369DEA0F31A53F85
    return values ^ ((values >> 32) & _LOW_32_BITS)


def _part_of(mask: Tensor, ratio: float, reduce: Reduce) -> int:
    """max(1, int(ratio N)) for the N trained tokens of all ranks."""
    total = float(reduce(mask.sum().double().reshape(1).cpu())[0])
    return max(1, int(ratio * total))


def _largest(keys: Tensor, eligible: Tensor, count: int, *, reduce: Reduce) -> Tensor:
    """The eligible tokens whose key is among the `count` largest of all ranks, ties at the end included. [T] bool.

    keys [T] int64, not negative. The threshold is found digit by digit, from the histograms of four rounds, so
    that ranks exchange 512 KiB a round and never the keys. All eligible tokens when there are no more than `count`.
    """
    base = 1 << _DIGIT_BITS
    threshold, wanted = 0, float(count)
    undecided = eligible
    for place in reversed(range(_NUM_DIGITS)):
        digits = (keys >> (_DIGIT_BITS * place)) & (base - 1)
        histogram = reduce(torch.bincount(digits[undecided], minlength=base).double().cpu())
        at_least = histogram.flip(0).cumsum(0).flip(0)
        if place == _NUM_DIGITS - 1 and float(at_least[0]) <= wanted:
            wanted = float(at_least[0])
        reached = torch.nonzero(at_least >= wanted)
        digit = int(reached[-1]) if wanted > 0 else base - 1
        wanted -= float(at_least[digit]) - float(histogram[digit])
        threshold |= digit << (_DIGIT_BITS * place)
        undecided = undecided & (digits == digit)
    return eligible & (keys >= threshold)
