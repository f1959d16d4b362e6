"""Owns the correction of a policy loss for rollouts of an older policy: weights, tokens left out, what to log."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from areal.algorithm.aggregate import require_same_shape
from areal.algorithm.policy_loss import PolicyLoss


def weighted(loss: PolicyLoss, weights: Tensor | None) -> PolicyLoss:
    """l' = w l with weights [T] that carry no gradient; None = 1. Tokens of weight 0 give 0 whatever their loss is."""
    if weights is None:
        return loss
    require_same_shape(losses=loss.losses, weights=weights)
    # where, not only a product: weight 0 times an infinite loss would be NaN
    return replace(loss, losses=torch.where(weights != 0, weights * loss.losses, 0.0))
