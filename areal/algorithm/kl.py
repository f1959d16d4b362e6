"""Owns the per-token estimators of KL(policy || reference) from the log-probabilities of sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.algorithm.importance import log_ratio

KL_LIMIT = 10.0
"""Estimates are cut to +-this, so that one token far from the reference cannot outweigh a batch."""


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    estimator: str = "k1",
    *,
    limit: float | None = KL_LIMIT,
) -> Tensor:
    """Estimate KL(pi || pi_ref) at each token, sampled from pi (Schulman 2020, "Approximating KL divergence").

    With x = log pi - log pi_ref:  k1 = x (unbiased, of either sign);  k2 = x^2 / 2 (biased, low variance);
    k3 = exp(-x) - 1 + x (unbiased, never negative). x is cut to +-20 before, the estimate to +-`limit` after
    (None = not); gradients are 0 beyond the cuts. All [T], mask bool; 0 where the mask is off.
    Errors: ValueError for an unknown estimator or unequal shapes.
    """
    x = log_ratio(logprobs, ref_logprobs, mask)
    if estimator == "k1":
        estimate = x
    elif estimator == "k2":
        estimate = 0.5 * x.square()
    elif estimator == "k3":
        estimate = torch.expm1(-x) + x
    else:
        raise ValueError(f"unknown KL estimator {estimator!r}: choose k1, k2 or k3")
    return estimate if limit is None else estimate.clamp(-limit, limit)
