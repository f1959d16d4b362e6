"""Owns what is subtracted from a sequence's reward beyond plain means: per group, by id, groups of any size."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.algorithm.aggregate import Reduce, identity_reduce, require_same_shape
from areal.algorithm.normalise import group_index


def length_weighted(rewards: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """r - sum_j n_j r_j / sum_j n_j over the group: the variance-optimal baseline of OPO (arXiv 2505.23585, eq. 8).

    The paper's optimal baseline weighs each answer by its squared gradient norm, and takes the norm to grow with the
    answer's length n. rewards [S] float, lengths [S] int (trained tokens), group_ids [S] int64 -> [S] of rewards'
    dtype, sums in float64. An answer alone in its group has itself as baseline: 0. A group without any trained token
    keeps its rewards. Errors: ValueError on unequal shapes.
    """
    require_same_shape(rewards=rewards, lengths=lengths, group_ids=group_ids)
    groups = group_index(group_ids)
    weight, reward = lengths.double(), rewards.double()
    zeros = torch.zeros(int(groups.max()) + 1 if groups.numel() else 0, dtype=torch.float64, device=rewards.device)
    total = zeros.index_add(0, groups, weight)
    baseline = zeros.index_add(0, groups, weight * reward) / torch.where(total > 0, total, 1.0)
    return (reward - baseline[groups]).to(rewards.dtype)


def best_of_group(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The best answer gets its lead over the second best, the others 0: the gradient of max@k (arXiv 2503.19595).

    rewards [S] float, group_ids [S] int64 -> [S] of rewards' dtype. A tie for the best has no lead: all 0. An answer
    alone in its group has no rival: 0. NaN in a group makes its lead NaN. Errors: ValueError on unequal shapes.
    """
    require_same_shape(rewards=rewards, group_ids=group_ids)
    groups = group_index(group_ids)
    count = int(groups.max()) + 1 if groups.numel() else 0
    lowest = torch.full((count,), float("-inf"), dtype=rewards.dtype, device=rewards.device)
    best = lowest.scatter_reduce(0, groups, rewards, "amax")
    is_best = (rewards == best[groups]) | rewards.isnan()
    rest = torch.where(is_best, float("-inf"), rewards)
    second = lowest.scatter_reduce(0, groups, rest, "amax")
    holders = torch.zeros_like(lowest).index_add(0, groups, is_best.to(rewards.dtype))
    size = torch.zeros_like(lowest).index_add(0, groups, torch.ones_like(rewards))
    lead = torch.where((holders == 1) & (size > 1), best - second, 0.0)
    lead = torch.where(best.isnan(), best, lead)
    return torch.where(is_best, lead[groups], 0.0)


def valid_sample_scale(rewards: Tensor, group_ids: Tensor, *, reduce: Reduce = identity_reduce) -> float:
    """N / N_valid over all ranks, N_valid = answers of groups whose rewards differ (GPG, arXiv 2504.02546, eq. 7).

    Groups whose answers all scored alike have no gradient; without the factor they would shrink the mean of the rest.
    rewards [S] float, group_ids [S] int64; a collective (`reduce` once). 1.0 when no group is valid.
    """
    require_same_shape(rewards=rewards, group_ids=group_ids)
    valid = torch.zeros_like(rewards, dtype=torch.bool) if not rewards.numel() else mixed_group(rewards, group_ids)
    counts = reduce(torch.tensor([float(rewards.numel()), float(valid.sum())], dtype=torch.float64))
    return float(counts[0] / counts[1]) if counts[1] else 1.0


def mixed_group(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Answers whose group has at least two different rewards; the others teach nothing under a group baseline.

    rewards [S] float, group_ids [S] int64 -> [S] bool.
    """
    member = group_index(group_ids)
    highest = torch.full_like(rewards, float("-inf")).scatter_reduce(0, member, rewards, "amax")
    lowest = torch.full_like(rewards, float("inf")).scatter_reduce(0, member, rewards, "amin")
    return (highest != lowest)[member]
