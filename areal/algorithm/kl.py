"""The divergence KL(policy || reference) at each token: estimated from samples, or from whole distributions."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from areal.algorithm.aggregate import Reduce, require_same_shape, trained_counts
from areal.algorithm.policy_loss import LOG_RATIO_LIMIT, kl_of_samples, log_ratio
from areal.api.config import KLControlConfig

KL_LIMIT = 10.0
"""Estimates are clamped to +-this, so that one token far from the reference cannot dominate a batch."""
MAX_NUMBERS = 2**26
"""Elements of [T, k] in one block (256 MiB of float32); several blocks are recomputed in the backward pass."""


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    estimator: str = "k1",
    *,
    base_logprobs: Tensor | None = None,
    limit: float | None = KL_LIMIT,
) -> Tensor:
    """Estimate KL(pi || pi_ref) at each token, sampled from pi (Schulman 2020, "Approximating KL divergence").

    With x = log pi - log pi_ref:  k1 = x (unbiased, of either sign);  k2 = x^2 / 2 (biased, low variance);
    k3 = exp(-x) - 1 + x (unbiased, never negative);  abs = |x|.  x is clamped to +-20, then the estimate to +-`limit`
    (None = no limit); gradients are 0 beyond. All [T], mask bool; 0 where the mask is off.

    The suffix `+` (k1+, k2+, k3+, abs+) keeps the value and takes the gradient of x^2 / 2, that is x grad log pi,
    whose mean over tokens sampled from pi is grad KL(pi || pi_ref); only the clamp of x applies to it.
    `base_logprobs` [T], no gradient: the policy that sampled the tokens. The estimate is multiplied by pi / base, with
    gradient, before it is clamped (DeepSeek-V3.2, section 3.1).
    Raises ValueError for an unknown estimator or unequal shapes.
    """
    x = log_ratio(logprobs, ref_logprobs, mask)
    estimate = kl_of_samples(-x, estimator.removesuffix("+"))
    if base_logprobs is not None:
        estimate = estimate * log_ratio(logprobs, base_logprobs.detach(), mask).exp()
    if limit is not None:
        estimate = estimate.clamp(-limit, limit)
    if not estimator.endswith("+"):
        return estimate
    carrier = 0.5 * x.square()
    return estimate.detach() + (carrier - carrier.detach())


def distribution_kl(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, is_whole: bool, limit: float | None = KL_LIMIT
) -> Tensor:
    """KL(pi || pi_ref) of the distributions at each position, from log-probabilities of the same k tokens in both.

    sum_i p_i (log p_i - log q_i) over the k tokens. `is_whole`: they are the whole vocabulary, and this is exact.
    Otherwise all other tokens are one bucket with p = 1 - sum_i p_i, q = 1 - sum_i q_i, and the result is between 0 and
    the exact divergence (data-processing inequality).

    logprobs and ref_logprobs [T, k] float, mask [T] bool -> [T], 0 where the mask is off. Log-ratios are clamped to
    +-20, the bucket's p and q to at least the rounding error of the dtype, the sum to +-`limit` (None = no limit);
    gradients are 0 beyond. A token impossible in both adds nothing. Raises ValueError on unequal shapes.
    """
    require_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    require_same_shape(mask=mask, rows=logprobs[:, 0])
    rows = max(MAX_NUMBERS // logprobs.shape[1], 1)
    parts: list[Tensor] = []
    for first in range(0, max(logprobs.shape[0], 1), rows):
        taken = slice(first, first + rows)
        arguments = (logprobs[taken], ref_logprobs[taken], mask[taken], is_whole)
        if logprobs.requires_grad and logprobs.shape[0] > rows:
            part = cast("Any", checkpoint)(_block_kl, *arguments, use_reentrant=False, preserve_rng_state=False)
            parts.append(part)
        else:
            parts.append(_block_kl(*arguments))
    divergence = torch.cat(parts)
    return divergence if limit is None else divergence.clamp(-limit, limit)


def _block_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, is_whole: bool) -> Tensor:
    """`distribution_kl` without the clamp of the sum."""
    # masked positions, and 0 log 0 with its infinite gradient, must not enter the graph
    is_read = mask.unsqueeze(-1) & (logprobs != float("-inf"))
    policy = torch.where(is_read, logprobs, float("-inf")).exp()
    x = torch.where(is_read, logprobs, 0.0) - torch.where(is_read, ref_logprobs, 0.0)
    divergence = (policy * x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).sum(-1)
    if is_whole:
        return divergence
    reference = torch.where(mask.unsqueeze(-1), ref_logprobs, float("-inf")).exp()
    rest, ref_rest = _rest(policy), _rest(reference)
    return divergence + torch.where(mask, rest * (rest.log() - ref_rest.log()), 0.0)


def _rest(probabilities: Tensor) -> Tensor:
    """1 minus the sum of k probabilities, at least its rounding error. [T, k] -> [T]"""
    return (1.0 - probabilities.sum(-1)).clamp(min=8 * torch.finfo(probabilities.dtype).eps)


# ----------------------------------------------------------------------------------------------------------------------
# The coefficient of the KL penalty during training: fixed, or adapted to a target divergence.

ERROR_LIMIT = 0.2
"""The relative distance from the target counts as at most this."""


def adapted_coefficient(
    coefficient: float, measured: float, *, target: float, num_sequences: int, horizon: float
) -> float:
    """The coefficient after a batch of divergence `measured` (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    e = clip(measured / target - 1, -0.2, 0.2);  beta' = beta (1 + e n / horizon), n sequences in the batch, at most
    `horizon`, so that beta remains positive. NaN does not change beta.
    """
    error = min(max(measured / target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
    if error != error:
        return coefficient
    return coefficient * (1.0 + error * min(num_sequences / horizon, 1.0))


def sequence_kl(kl: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int, measure: str) -> Tensor:
    """Divergence of each sequence from its tokens' estimates. kl [T] float, mask [T] bool -> [S] float64.

    sequence-sum: of the whole answer, what Ziegler et al. measure. token-mean: of a mean token, what verl measures.
    NaN for a sequence without a token under the mask. Errors: ValueError on unequal shapes or another measure.
    """
    require_same_shape(kl=kl, mask=mask, sequence_index=sequence_index)
    counts = trained_counts(mask, sequence_index, num_sequences).double()
    sums = torch.zeros_like(counts).index_add(0, sequence_index, torch.where(mask, kl, 0.0).double())
    if measure == "token-mean":
        return sums / counts
    if measure == "sequence-sum":
        return torch.where(counts > 0, sums, float("nan"))
    raise ValueError(f"unknown measure {measure!r} of a sequence's divergence: choose token-mean or sequence-sum")


class KLController:
    """The coefficient of the KL penalty in the reward. Adaptive ones change after every batch, so they are state."""

    def __init__(self, coefficient: float, config: KLControlConfig) -> None:
        """`coefficient` is the one of the first batch."""
        self.coefficient = coefficient
        self._config = config

    @property
    def is_adaptive(self) -> bool:
        return self._config.type == "adaptive"

    def observe(self, kl: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int, *, reduce: Reduce) -> None:
        """Set the coefficient of the next batch from the divergence of this one; a collective if it is adaptive.

        kl, mask [T] of this rank. The divergence is the mean over the sequences of all ranks with a masked token.
        """
        target = self._config.target
        if not self.is_adaptive or target is None:
            return
        each = sequence_kl(kl, mask, sequence_index, num_sequences, self._config.measure)
        counted = trained_counts(mask, sequence_index, num_sequences) > 0
        facts = torch.stack([torch.where(counted, each, 0.0).sum(), counted.sum().double()])
        share = torch.tensor([float(num_sequences)], dtype=torch.float64)
        sums = reduce(torch.cat([facts.cpu(), share]))
        total, count, size = (float(value) for value in sums.unbind())
        self.coefficient = adapted_coefficient(
            self.coefficient,
            total / count if count else float("nan"),
            target=target,
            num_sequences=int(size),
            horizon=self._config.horizon,
        )
