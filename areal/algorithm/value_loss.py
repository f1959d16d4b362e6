"""The loss of the critic."""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal.algorithm.aggregate import require_same_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Per-token losses of a critic and where the clip took effect."""

    losses: Tensor  # [T] with gradient, 0 where the mask is off
    clipped: Tensor  # [T] bool: the clipped error decides


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    eps_clip: float | None,
    huber_delta: float | None = None,
) -> ValueLoss:
    """Error to the return, the larger of the plain and the clipped one (PPO implementation, Engstrom 2020).

    V' = V_old + clip(V - V_old, -eps_clip, eps_clip);  l = max(h(V - R), h(V' - R)); eps_clip None: l = h(V - R).
    h(e) = e^2 / 2, or with huber_delta d (Huber 1964)  e^2 / 2 where |e| <= d, else d (|e| - d / 2).
    All [T], mask bool; values outside the mask change neither value nor gradient, NaN inside it stays NaN.
    Raises ValueError on unequal shapes.
    """
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    value = torch.where(mask, values, 0.0)
    target = torch.where(mask, returns, 0.0).detach()
    plain = _error_loss(value - target, huber_delta)
    if eps_clip is None:
        return ValueLoss(losses=plain, clipped=torch.zeros_like(mask))
    old = torch.where(mask, old_values, 0.0).detach()
    bounded = _error_loss(old + (value - old).clamp(-eps_clip, eps_clip) - target, huber_delta)
    return ValueLoss(losses=torch.maximum(plain, bounded), clipped=(mask & (bounded > plain)).detach())


def _error_loss(error: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return 0.5 * error.square()
    size = error.abs()
    inner = size.clamp(max=huber_delta)
    return inner * (size - 0.5 * inner)
