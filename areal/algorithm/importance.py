"""Owns the ratios between policies: the ratio a loss is clipped by, and the weight that corrects for stale rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal.algorithm.aggregate import require_same_shape

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut to +-this before exp: e^20 = 4.9e8 is far outside every clip range and safe in float32."""


def log_ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log(pi / pi_base) of each token, cut to +-LOG_RATIO_LIMIT, 0 where the mask is off.

    All [T]; float32 or float64, mask bool. Whatever stands outside the mask (NaN and infinity too) reaches neither
    the value nor the gradient. Inside it NaN stays NaN and an infinite log-probability is cut like a large one.
    Errors: ValueError on unequal shapes.
    """
    require_same_shape(logprobs=logprobs, base_logprobs=base_logprobs, mask=mask)
    difference = torch.where(mask, logprobs, 0.0) - torch.where(mask, base_logprobs, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviourWeights:
    """The correction of each token for having been sampled by an older policy (or another numerics)."""

    weights: Tensor  # [T] exp(prox - rollout), 0 for tokens left out, no gradient
    log_ratio: Tensor  # [T] prox - rollout, cut to +-LOG_RATIO_LIMIT
    kept: Tensor  # [T] bool: trained and not above the cap
    above_cap: Tensor  # [T] bool: trained and left out of the loss


def behaviour_weights(
    prox_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cap: float | None = None
) -> BehaviourWeights:
    """w = pi_prox / pi_rollout of each token, without gradient; tokens with w > cap get weight 0.

    The decoupled objective of AReaL (arXiv 2505.24298) weights the clipped objective around pi_prox by w.
    A token above the cap leaves the numerator of the loss; the denominator keeps it, so that the step size does not
    depend on how many tokens were left out. All [T]; mask bool. NaN inside the mask stays NaN (and is not kept).
    """
    ratio_log = log_ratio(prox_logprobs.detach(), rollout_logprobs.detach(), mask)
    weights = ratio_log.exp()
    above = mask & (weights > cap) if cap is not None else torch.zeros_like(mask)
    kept = mask & ~above
    return BehaviourWeights(weights=torch.where(kept, weights, 0.0), log_ratio=ratio_log, kept=kept, above_cap=above)
