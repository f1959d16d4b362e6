"""Owns centring and scaling: by batch or by group, for rewards (one a sequence) and advantages (one a token) alike."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from areal.algorithm.aggregate import Reduce, identity_reduce, require_same_shape
from areal.api.config import NormConfig


def normalise(
    values: Tensor,
    config: NormConfig,
    group_ids: Tensor,
    *,
    mask: Tensor | None = None,
    reduce: Reduce = identity_reduce,
) -> Tensor:
    """(x - mean) / (std + eps), with the scope of mean and std chosen separately: batch, group or none.

    values [N] float, group_ids [N] int64 (compared by value: groups may be unequal and interleaved), mask [N] bool
    (None = all) -> [N] of values' dtype, 0 where the mask is off; sums in float64. Over the n elements of a scope:

    mean                 sum / n;  with mean_leave1out (RLOO, arXiv 2402.14740)  (sum - x_i) / (n - 1)
    std                  sqrt(sum (x - own scope's mean)^2 / (n - 1)), or / n unless std_unbiased
    n = 1                mean = x, so the result is 0;  left out of its own mean nothing is left: mean = 0, result x
    n = 1 or std = 0     no scale can be told: the divisor is 1 (never eps, which would blow up uncentred values)

    Batch scope is over all ranks: `reduce` sums a float64 tensor over them, once for the mean and twice for the std;
    every rank must call with the same config, an empty rank too. Group scope is local: a group is never split
    over ranks. NaN or infinity inside the mask spreads over its scope. Errors: ValueError on unequal shapes.
    """
    keep = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    require_same_shape(values=values, group_ids=group_ids, mask=keep)
    x = values[keep].double()
    groups = group_index(group_ids[keep])
    scopes = {
        "batch": (torch.zeros_like(groups), 1, reduce),
        "group": (groups, int(groups.max()) + 1 if groups.numel() else 0, identity_reduce),
    }
    result = x
    if config.mean_level is not None:
        result = x - _means(x, *scopes[config.mean_level], leave_one_out=config.mean_leave1out)
    if config.std_level is not None:
        result = result / _divisors(x, *scopes[config.std_level], unbiased=config.std_unbiased, eps=config.eps)
    return torch.zeros_like(values).masked_scatter(keep, result.to(values.dtype))


def group_index(group_ids: Tensor) -> Tensor:
    """Number the groups 0, 1, ... in the order of their ids. group_ids [N] int64 -> [N] int64."""
    # torch leaves the result type of unique open
    return cast(Tensor, torch.unique(group_ids, return_inverse=True)[1])  # pyright: ignore[reportUnknownMemberType]


def _sums(x: Tensor, scope: Tensor, num_scopes: int, reduce: Reduce) -> Tensor:
    """Sum of x over each scope and all ranks. x [N], scope [N] -> [num_scopes] float64."""
    local = torch.zeros(num_scopes, dtype=torch.float64, device=x.device).index_add(0, scope, x)
    return reduce(local.cpu()).to(x.device)


def _means(x: Tensor, scope: Tensor, num_scopes: int, reduce: Reduce, *, leave_one_out: bool) -> Tensor:
    """The mean that is subtracted from each element. -> [N]"""
    sums, counts = _sums_and_counts(x, scope, num_scopes, reduce)
    if not leave_one_out:
        return (sums / counts.clamp(min=1))[scope]
    others = (counts - 1)[scope]
    return torch.where(others > 0, (sums[scope] - x) / others.clamp(min=1), 0.0)


def _divisors(x: Tensor, scope: Tensor, num_scopes: int, reduce: Reduce, *, unbiased: bool, eps: float) -> Tensor:
    """What each element is divided by. -> [N]"""
    sums, counts = _sums_and_counts(x, scope, num_scopes, reduce)
    deviation = x - (sums / counts.clamp(min=1))[scope]
    squares = _sums(deviation.square(), scope, num_scopes, reduce)
    std = (squares / (counts - 1 if unbiased else counts).clamp(min=1)).sqrt()
    # one element has std 0 too; a NaN std is not equal to 0 and shows itself
    return torch.where(std == 0, 1.0, std + eps)[scope]


def _sums_and_counts(x: Tensor, scope: Tensor, num_scopes: int, reduce: Reduce) -> tuple[Tensor, Tensor]:
    both = _sums(torch.cat([x, torch.ones_like(x)]), torch.cat([scope, scope + num_scopes]), 2 * num_scopes, reduce)
    return both[:num_scopes], both[num_scopes:]
