"""Baselines of sequence rewards beyond plain means; per group, by id, groups of any size."""

from collections.abc import Sequence

import torch
from torch import Tensor

from areal.algorithm.aggregate import Reduce, identity_reduce, require_same_shape
from areal.algorithm.normalise import group_scope, normalise
from areal.api.config import NormConfig

_GRPO = NormConfig(mean_level="group", std_level="group")


def length_weighted(rewards: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """r - sum_j n_j r_j / sum_j n_j over the group: the variance-optimal baseline of OPO (arXiv 2505.23585, eq. 8).

    The paper weights each answer by its squared gradient norm and assumes that the norm grows with its length n.
    rewards [S] float, lengths [S] int (trained tokens), group_ids [S] int64 -> [S] of rewards' dtype, sums in float64.
    A group of one answer gives 0; a group without a trained token keeps its rewards. Raises ValueError on unequal
    shapes.
    """
    require_same_shape(rewards=rewards, lengths=lengths, group_ids=group_ids)
    scope, weight, reward = group_scope(group_ids), lengths.double(), rewards.double()
    total = scope.sums(weight)[0]
    baseline = scope.sums(weight * reward)[0] / torch.where(total > 0, total, 1.0)
    return (reward - baseline[scope.index]).to(rewards.dtype)


def best_of_group(rewards: Tensor, group_ids: Tensor, *, divide_by_std: bool = False) -> Tensor:
    """Best minus second-best reward for the best answer of a group, 0 for the others: the gradient of max@k.

    Source: Tang, Zheng, Synnaeve and Munos 2025, arXiv 2503.19595. divide_by_std: divided by the unbiased std of the
    group + 1e-6 (verl's default). rewards [S] float, group_ids [S] int64 -> [S] of rewards' dtype. A group of one
    answer, or with several best answers, gives 0; NaN in a group gives NaN. Raises ValueError on unequal shapes.
    """
    require_same_shape(rewards=rewards, group_ids=group_ids)
    scope = group_scope(group_ids)
    groups = scope.index
    lowest = torch.full((scope.size,), float("-inf"), dtype=rewards.dtype, device=rewards.device)
    best = lowest.scatter_reduce(0, groups, rewards, "amax")
    is_best = (rewards == best[groups]) | rewards.isnan()
    second = lowest.scatter_reduce(0, groups, torch.where(is_best, float("-inf"), rewards), "amax")
    holders, size = scope.sums(is_best.double())
    lead = torch.where((holders == 1) & (size > 1), best - second, 0.0)
    lead = torch.where(best.isnan(), best, lead)[groups]
    if divide_by_std:
        deviations = rewards.double() - scope.means(rewards.double())
        lead = (lead / scope.divisors(deviations, unbiased=True, eps=1e-6)).to(rewards.dtype)
    return torch.where(is_best, lead, 0.0)


def decoupled_rewards(parts: Tensor, weights: Sequence[float], group_ids: Tensor) -> Tensor:
    """sum_k w_k (r_k - mean_G r_k) / (std_G r_k + eps): GDPO (arXiv 2601.05242), before its norm over the batch.

    Each reward function is normalised within the group, so that functions of different scale count equally. parts
    [S, K] float, NaN where function k did not score the answer (its term is then 0), weights of length K, group_ids
    [S] int64 -> [S] of parts' dtype. std with n - 1, eps 1e-5 (verl: 1e-6); a function that is constant in a group
    gives 0.
    """
    total = torch.zeros_like(parts[:, 0]) if parts.shape[1] else parts.new_zeros(parts.shape[0])
    for part, weight in zip(parts.unbind(1), weights, strict=True):
        total = total + weight * normalise(part, _GRPO, group_ids, mask=~part.isnan())
    return total


def valid_sample_scale(rewards: Tensor, group_ids: Tensor, *, reduce: Reduce = identity_reduce) -> float:
    """N / N_valid over all ranks, N_valid = answers of groups whose rewards differ (GPG, arXiv 2504.02546, eq. 7).

    Groups of equal rewards have no gradient; the factor removes them from the mean over the answers.
    rewards [S] float, group_ids [S] int64; a collective (`reduce` once). 1.0 when no group is valid.
    """
    require_same_shape(rewards=rewards, group_ids=group_ids)
    valid = mixed_group(rewards, group_ids)
    counts = reduce(torch.tensor([float(rewards.numel()), float(valid.sum())], dtype=torch.float64))
    return float(counts[0] / counts[1]) if counts[1] else 1.0


def mixed_group(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Answers whose group has at least two different rewards; the others have no gradient under a group baseline.

    rewards [S] float, group_ids [S] int64 -> [S] bool.
    """
    scope = group_scope(group_ids)
    extremes = rewards.new_empty(2, scope.size)
    extremes[0].fill_(float("-inf")).scatter_reduce_(0, scope.index, rewards, "amax")
    extremes[1].fill_(float("inf")).scatter_reduce_(0, scope.index, rewards, "amin")
    return (extremes[0] != extremes[1])[scope.index]
