"""Owns what the bounds of an off-policy correction look at: log-ratios and KL estimates of tokens, turns, sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.algorithm.aggregate import require_same_shape
from areal.algorithm.importance import LOG_RATIO_LIMIT, kl_of_samples
from areal.api.config import CorrectionRule


def segment_index(mask: Tensor, sequence_index: Tensor) -> Tensor:
    """Number of the segment that each position lies in or follows, from 0; a segment is one run of trained tokens.

    mask [T] bool, sequence_index [T] int64 -> [T] int64. Runs end at untrained tokens (a prompt, a tool's answer) and
    at the end of a sequence. Positions before the first segment get 0.
    """
    require_same_shape(mask=mask, sequence_index=sequence_index)
    goes_on = torch.zeros_like(mask)
    goes_on[1:] = mask[:-1] & (sequence_index[1:] == sequence_index[:-1])
    return ((mask & ~goes_on).cumsum(0) - 1).clamp(min=0)


def first_trained(mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """The first trained token of each sequence that has one, to count sequences by. mask [T] bool -> [T] bool."""
    places = torch.arange(mask.numel(), device=mask.device)
    none = places.new_full((num_sequences,), mask.numel())
    first = none.scatter_reduce(0, sequence_index[mask], places[mask], "amin")
    return places == first[sequence_index]


def at_level(values: Tensor, level: str, mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """`values` of trained tokens taken together over `level`, given back to every token of it; 0 outside the mask.

    values [T] float64; mask [T] bool; level: token, or segment or sequence with _sum, _mean or _max -> [T] float64.
    What stands outside the mask reaches nothing. Errors: ValueError for an unknown level or unequal shapes.
    """
    require_same_shape(values=values, mask=mask, sequence_index=sequence_index)
    if level == "token":
        return torch.where(mask, values, 0.0)
    unit, _, how = level.partition("_")
    if unit not in ("segment", "sequence") or how not in ("sum", "mean", "max"):
        raise ValueError(f"unknown level {level!r}: token, or segment or sequence with _sum, _mean or _max")
    index, size = sequence_index, num_sequences
    if unit == "segment":
        index, size = segment_index(mask, sequence_index), int(mask.numel())
    chosen, places = values[mask], index[mask]
    if how == "max":
        lowest = values.new_full((size,), float("-inf"))
        together = lowest.scatter_reduce(0, places, chosen, "amax")
    else:
        together = values.new_zeros(size).index_add(0, places, chosen)
    if how == "mean":
        together = together / torch.bincount(places, minlength=size).clamp(min=1)
    return torch.where(mask, together[index], 0.0)


def ratio_at_level(log_ratio: Tensor, level: str, mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """exp of the log-ratios taken together over `level`, the logarithm cut to +-20 again; 1 outside the mask."""
    together = at_level(log_ratio, level, mask, sequence_index, num_sequences)
    return together.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def outside(values: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Where `values` are below `lower` or above `upper`; NaN is not, so that it stays in the loss and shows itself."""
    found = torch.zeros_like(values, dtype=torch.bool)
    if lower is not None:
        found |= values < lower
    if upper is not None:
        found |= values > upper
    return found


def broken_by(
    rule: CorrectionRule, log_ratio: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int
) -> Tensor:
    """The trained tokens whose metric lies outside the bounds of `rule`. log_ratio [T] float64 -> [T] bool."""
    if rule.metric == "ratio":
        values = ratio_at_level(log_ratio, rule.level, mask, sequence_index, num_sequences)
    else:
        estimates = kl_of_samples(log_ratio, rule.metric)
        values = at_level(estimates, rule.level, mask, sequence_index, num_sequences)
    return mask & outside(values, rule.lower, rule.upper)
