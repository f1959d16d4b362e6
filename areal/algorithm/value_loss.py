"""Owns the loss of the critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal.algorithm.aggregate import require_same_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Per-token losses of a critic and where the clip took effect."""

    losses: Tensor  # [T] with gradient, 0 where the mask is off
    clipped: Tensor  # [T] bool: the clipped error decides


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, eps_clip: float
) -> ValueLoss:
    """Squared error to the return, pessimistic about moves of more than eps_clip (PPO implementation, Engstrom 2020).

    V' = V_old + clip(V - V_old, -eps_clip, eps_clip);  l = max((V - R)^2, (V' - R)^2) / 2.
    All [T], mask bool; what stands outside the mask reaches neither value nor gradient, NaN inside it stays NaN.
    Errors: ValueError on unequal shapes.
    """
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    value = torch.where(mask, values, 0.0)
    old = torch.where(mask, old_values, 0.0).detach()
    target = torch.where(mask, returns, 0.0).detach()
    plain = 0.5 * (value - target).square()
    bounded = 0.5 * (old + (value - old).clamp(-eps_clip, eps_clip) - target).square()
    return ValueLoss(losses=torch.maximum(plain, bounded), clipped=(mask & (bounded > plain)).detach())
