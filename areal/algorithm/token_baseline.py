"""The optimal token baseline: one baseline per token position of a group, weighted by squared gradient norms."""

import torch
from torch import Tensor

from areal.algorithm.aggregate import identity_reduce, require_same_shape
from areal.algorithm.baselines import best_of_group
from areal.algorithm.correction_rules import Spans, first_of_units
from areal.algorithm.normalise import Scope, group_scope

EPS = 1e-8
"""Added to the sum of weights of a position."""


def score_norms(logprobs: Tensor, squared_sums: Tensor) -> Tensor:
    """1 - 2 p + sum_v p_v^2 of each token: the squared norm of d log p / d logits. Both [T] -> [T]."""
    return 1.0 - 2.0 * logprobs.exp() + squared_sums


def optimal_token_baseline(
    returns: Tensor,
    norms: Tensor,
    group_ids: Tensor,
    spans: Spans,
    *,
    over_trained: bool,
    weights: Tensor | None = None,
) -> Tensor:
    """A_t = G_t - B_t with B_t = sum_j G_j,t W_j,t / (sum_j W_j,t + 1e-8) over the answers j of the group.

    W_t = sum of w_i^2 n_i over the trained tokens i <= t of the answer, n = `norms`, w = `weights` of the off-policy
    correction, None = 1 (verl: optimal_token_baseline, tir_optimal_token_baseline). Only answers with a trained token
    at position t count. Position: tokens since the first trained token of the answer, or with over_trained (TIR,
    multi-turn) the number of trained tokens before, so that the tool outputs of an answer do not shift its turns.
    B_t = 0 in a group of one answer, and for the tokens of the longest answer beyond the second longest.

    returns, norms, weights [T] float, group_ids [S] int64 -> [T] of returns' dtype, 0 where the mask is off; sums in
    float64. Groups are whole on a rank: no exchange. Raises ValueError on unequal shapes.
    """
    mask, index = spans.mask, spans.sequence_index
    require_same_shape(returns=returns, norms=norms, mask=mask, weights=mask if weights is None else weights)
    energy = torch.where(mask, norms, 0.0).double()
    if weights is not None:
        energy = energy * torch.where(mask, weights, 0.0).double().square()
    count = mask.long().cumsum(0) - 1 if over_trained else torch.arange(mask.numel(), device=mask.device)
    first = first_of_units("sequence_sum", spans)
    place = count - _of_sequences(count[first], first, spans)
    total = energy.cumsum(0)
    path = total - _of_sequences((total - energy)[first], first, spans)
    groups = group_scope(group_ids)
    extents = place.new_zeros(spans.num_sequences).scatter_reduce(0, index[mask], place[mask] + 1, "amax")
    width = int(extents.max()) + 1 if extents.numel() else 1
    slots = Scope(groups.index[index] * width + place.clamp(0, width - 1), groups.size * width, identity_reduce)
    gain = torch.where(mask, returns, 0.0).double()
    inside = torch.where(mask, path, 0.0)
    baseline = slots.sums(gain * inside)[0] / (slots.sums(inside)[0] + EPS)
    # tokens of the longest answer beyond the second longest; all tokens of a group of one answer
    lead = best_of_group(extents.double(), group_ids).long()
    size = groups.sums(extents.double())[1][groups.index]
    is_tail = place >= torch.where(size == 1, 0, extents - lead)[index]
    advantage = gain - torch.where(is_tail, 0.0, baseline[slots.index])
    return torch.where(mask, advantage, 0.0).to(returns.dtype)


def _of_sequences(values: Tensor, first: Tensor, spans: Spans) -> Tensor:
    """`values` at the first trained tokens (`first` [T] bool), at every position of their sequences. -> [T]"""
    each = values.new_zeros(spans.num_sequences).index_copy(0, spans.sequence_index[first], values)
    return each[spans.sequence_index]
