"""PF-PPO: sequences of a train batch are resampled with probabilities that depend on their rewards."""

import torch
from torch import Tensor

from areal.algorithm.aggregate import Reduce
from areal.algorithm.covariance import largest_keys, mixed_bits, ordered_bits
from areal.api.config import ResamplingConfig

_MIN_WEIGHT = 1e-8


def resampling_weights(rewards: Tensor, options: ResamplingConfig, *, reduce: Reduce) -> Tensor:
    """Unnormalised probability of each sequence (PF-PPO, arXiv 2409.06957; verl `pf_ppo`), plus 1e-8.

    pow: |r|^power. max_min: 1 where r is the largest or the smallest reward of the batch on all ranks, else 0.
    max_random: 0.4 where r is the largest, else 0.1. rewards [S] float -> [S] float64; extremes are compared in
    float32. A collective: `reduce` is called equally on all ranks.
    """
    if options.method == "pow":
        return rewards.double().abs().pow(options.power) + _MIN_WEIGHT
    everyone = torch.ones_like(rewards, dtype=torch.bool)
    is_max = largest_keys(ordered_bits(rewards), everyone, 1, reduce=reduce)
    if options.method == "max_random":
        return 0.1 + 0.3 * is_max.double() + _MIN_WEIGHT
    is_min = largest_keys(ordered_bits(-rewards), everyone, 1, reduce=reduce)
    return (is_max | is_min).double() + _MIN_WEIGHT


def resampled_counts(weights: Tensor, draws: Tensor, *, reduce: Reduce) -> Tensor:
    """How often each sequence is trained on: N w / sum w over the N sequences of all ranks, rounded at random.

    The mean is that of N draws with replacement (verl), the variance is smaller. Each count is rounded up if its draw
    and its fraction sum to 1 or more, so ranks need no exchange and a replay repeats it.
    weights [S] float64, draws [S] in [0, 1) -> [S] int64. A collective (`reduce` once).
    """
    facts = torch.stack([weights.sum(), weights.new_tensor(float(weights.numel()))])
    total, count = reduce(facts.cpu()).unbind()
    expected = weights * float(count / total) if float(total) else torch.ones_like(weights)
    return (expected + draws).floor().long()


def sequence_draws(token_draws: Tensor, sequence_index: Tensor, num_sequences: int, *, seed: int, step: int) -> Tensor:
    """A uniform number of each sequence from the numbers of its tokens, the run's seed and the step; -> [S] float64.

    token_draws [T] int64, see `covariance.token_draws`: the result does not depend on how the batch is cut.
    """
    sums = token_draws.new_zeros(num_sequences).index_add(0, sequence_index, token_draws)
    salt = mixed_bits(mixed_bits(token_draws.new_tensor(seed)) ^ step)
    return (mixed_bits(sums ^ salt) & 0x7FFFFFFF).double() / 2.0**31
