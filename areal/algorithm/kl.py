"""The divergence KL(policy || reference) at each token: estimated from samples, or from whole distributions."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from areal.algorithm.aggregate import require_same_shape
from areal.algorithm.importance import LOG_RATIO_LIMIT, kl_of_samples, log_ratio

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
