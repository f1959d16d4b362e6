"""Centring and scaling by batch or by group, of rewards (one per sequence) and of advantages (one per token)."""

from dataclasses import dataclass
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
    """`normalised` without the factors."""
    return normalised(values, config, group_ids, mask=mask, reduce=reduce)[0]


def normalised(
    values: Tensor,
    config: NormConfig,
    group_ids: Tensor,
    *,
    mask: Tensor | None = None,
    reduce: Reduce = identity_reduce,
) -> tuple[Tensor, Tensor]:
    """(x - mean) / (std + eps); mean and std each have their own scope: batch, group or none.

    values [N] float, group_ids [N] int64 (compared by value: groups may be unequal and interleaved), mask [N] bool
    (None = all) -> [N] of values' dtype, 0 where the mask is off; and the factors 1 / (std + eps), [N] of values'
    dtype. Sums are in float64. Over the n elements of a scope:

    mean                 sum / n;  with mean_leave1out (RLOO, arXiv 2402.14740)  (sum - x_i) / (n - 1)
    std                  sqrt(sum (x - m)^2 / (n - 1)), or / n unless std_unbiased; m is the mean of the scope of the
                         std (std_about=own) or the mean that was subtracted from x, 0 if none (std_about=subtracted)
    n = 1                mean = x, so the result is 0;  with leave-one-out no element is left: mean = 0, result x
    n = 1 or std = 0     the scale is unknown: the divisor is 1 (not eps, which would inflate uncentred values)

    Batch scope is over all ranks: `reduce` sums a float64 tensor over them, once for a mean and once for a variance;
    every rank must call with the same config, also a rank without elements. Group scope is local: a group is never
    split over ranks. NaN or infinity inside the mask spreads over its scope. Raises ValueError on unequal shapes.
    """
    keep = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    require_same_shape(values=values, group_ids=group_ids, mask=keep)
    x = values[keep].double()
    scopes = {"batch": Scope(torch.zeros_like(group_ids[keep]), 1, reduce), "group": group_scope(group_ids[keep])}
    result, divisors = x, torch.ones_like(x)
    if config.mean_level is not None:
        result = x - scopes[config.mean_level].means(x, leave_one_out=config.mean_leave1out)
    if config.std_level is not None:
        scope = scopes[config.std_level]
        about = config.std_about or ("subtracted" if config.is_of_areal else "own")
        deviations = result if about == "subtracted" else x - scope.means(x)
        divisors = scope.divisors(deviations, unbiased=config.std_unbiased, eps=config.eps)
        result = result / divisors
    zeros = torch.zeros_like(values)
    factors = zeros.masked_scatter(keep, divisors.reciprocal().to(values.dtype))
    return zeros.masked_scatter(keep, result.to(values.dtype)), factors


@dataclass(frozen=True, slots=True)
class Scope:
    """A partition of N elements, whose parts may extend over ranks."""

    index: Tensor  # [N] int64: the part of each element
    size: int
    """Number of parts."""
    reduce: Reduce

    def sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sum and count of each part over all ranks, from x [N] -> two [size] float64."""
        both = torch.zeros(2, self.size, dtype=torch.float64, device=x.device)
        both[0].index_add_(0, self.index, x)
        both[1].index_add_(0, self.index, torch.ones_like(x))
        sums, counts = self.reduce(both.reshape(-1).cpu()).to(x.device).reshape(2, -1).unbind()
        return sums, counts

    def means(self, x: Tensor, *, leave_one_out: bool = False) -> Tensor:
        """The mean of the part of each element. -> [N]"""
        sums, counts = self.sums(x)
        if not leave_one_out:
            return (sums / counts.clamp(min=1))[self.index]
        others = (counts - 1)[self.index]
        return torch.where(others > 0, (sums[self.index] - x) / others.clamp(min=1), 0.0)

    def divisors(self, deviations: Tensor, *, unbiased: bool, eps: float) -> Tensor:
        """std + eps of the part of each element. deviations [N] -> [N]"""
        squares, counts = self.sums(deviations.square())
        std = (squares / (counts - 1 if unbiased else counts).clamp(min=1)).sqrt()
        # a NaN std is not equal to 0 and stays visible
        return torch.where((std == 0) | (counts == 1), 1.0, std + eps)[self.index]


def group_scope(group_ids: Tensor) -> Scope:
    """The groups of this rank, numbered 0, 1, ... in the order of their ids. group_ids [N] int64."""
    # torch leaves the result type of unique open
    index = cast(Tensor, torch.unique(group_ids, return_inverse=True)[1])  # pyright: ignore[reportUnknownMemberType]
    return Scope(index, int(index.max()) + 1 if index.numel() else 0, identity_reduce)
