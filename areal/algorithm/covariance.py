"""Clip-Cov and KL-Cov: the tokens of a batch whose update reduces the entropy most.

Both (Cui et al. 2025, arXiv 2505.22617) treat the tokens differently whose covariance

    Cov_t = (log pi(t) - mean of log pi) * (A_t - mean of A)

is high, with means over the N tokens of the batch. The choice is made once per batch over all ranks, with the policy
before the update and hashes as random numbers, so it does not depend on micro-batches and a replay repeats it. (verl
chooses within a micro-batch, with the policy in training.)
"""

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

    `draw` [T] int64 below 2^31 decides among covariances that are equal in float32.
    """
    return largest_keys((ordered_bits(covariances) << 31) | draw, mask, _part_of(mask, ratio, reduce), reduce=reduce)


def drawn_between(
    covariances: Tensor, draw: Tensor, mask: Tensor, *, low: float, high: float, ratio: float, reduce: Reduce
) -> Tensor:
    """Clip-Cov: max(1, int(ratio N)) of the trained tokens with low < Cov < high on all ranks, [T] bool.

    Those with the largest `draw`, [T] int64 below 2^31, see `token_draws`.
    """
    eligible = mask & (covariances > low) & (covariances < high)
    return largest_keys(draw, eligible, _part_of(mask, ratio, reduce), reduce=reduce)


def token_draws(input_ids: Tensor, rollout_logprobs: Tensor, cu_seqlens: Tensor, sequence_index: Tensor) -> Tensor:
    """A pseudo-random number from 0 to 2^31 - 1 for each token, [T] int64.

    A hash of its position in its sequence, of the token before it and of its rollout log-probability, so it does not
    depend on the partition of the batch, and a replay repeats it.
    """
    place = torch.arange(input_ids.numel(), device=input_ids.device) - cu_seqlens.long()[sequence_index]
    sampled = rollout_logprobs.float().contiguous().view(torch.int32).long()
    mixed = mixed_bits(mixed_bits(mixed_bits(place) ^ input_ids) ^ (sampled & _LOW_32_BITS))
    return mixed & _LOW_31_BITS


def ordered_bits(values: Tensor) -> Tensor:
    """Integers from 0 to 2^32 - 1 in the order of `values` as float32; 0 and -0 are equal. [N] float -> [N] int64."""
    bits = (values.float() + 0.0).view(torch.int32).long() & _LOW_32_BITS
    return torch.where(bits > _LOW_31_BITS, ~bits & _LOW_32_BITS, bits + _LOW_31_BITS + 1)


def mixed_bits(values: Tensor) -> Tensor:
    """Hash of 64-bit integers; products wrap around."""
    values = (values ^ ((values >> 32) & _LOW_32_BITS)) * 0x2545F4914F6CDD1D + 0x14057B7EF767814F
    values = (values ^ ((values >> 29) & ((1 << 35) - 1))) * 0x369DEA0F31A53F85
    return values ^ ((values >> 32) & _LOW_32_BITS)


def _part_of(mask: Tensor, ratio: float, reduce: Reduce) -> int:
    """max(1, int(ratio N)) for the N trained tokens of all ranks."""
    total = float(reduce(mask.sum().double().reshape(1).cpu())[0])
    return max(1, int(ratio * total))


def largest_keys(keys: Tensor, eligible: Tensor, count: int, *, reduce: Reduce) -> Tensor:
    """The eligible entries whose key is among the `count` largest of all ranks, with ties at the end. [N] bool.

    keys [N] int64, not negative. The threshold is found digit by digit from histograms: ranks exchange 512 KiB in each
    of four rounds. All eligible entries when there are at most `count`.
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
