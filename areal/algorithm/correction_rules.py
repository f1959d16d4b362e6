"""The quantities that the bounds of an off-policy correction read: log-ratios and KL estimates of tokens or units."""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal.algorithm.aggregate import require_same_shape
from areal.algorithm.importance import LOG_RATIO_LIMIT, kl_of_samples
from areal.api.config import CorrectionRule


@dataclass(frozen=True, slots=True)
class Spans:
    """The trained tokens of packed sequences."""

    mask: Tensor  # [T] bool
    sequence_index: Tensor  # [T] int64 ascending
    num_sequences: int

    def __post_init__(self) -> None:
        require_same_shape(mask=self.mask, sequence_index=self.sequence_index)


def segment_index(spans: Spans) -> Tensor:
    """Number of the segment that each position is in or follows, from 0; a segment is one run of trained tokens.

    -> [T] int64. Runs end at untrained tokens (a prompt, a tool's answer) and at the end of a sequence. Positions
    before the first segment get 0.
    """
    return (first_of_units("segment_sum", spans).cumsum(0) - 1).clamp(min=0)


def first_of_units(level: str, spans: Spans) -> Tensor:
    """The first trained token of each unit (token, segment or sequence) of `level`, to count units. -> [T] bool"""
    mask, index = spans.mask, spans.sequence_index
    if level == "token":
        return mask
    if level.startswith("segment"):
        continues = torch.zeros_like(mask)
        continues[1:] = mask[:-1] & (index[1:] == index[:-1])
        return mask & ~continues
    places = torch.arange(mask.numel(), device=mask.device)
    none = places.new_full((spans.num_sequences,), mask.numel())
    return places == none.scatter_reduce(0, index[mask], places[mask], "amin")[index]


def at_level(values: Tensor, level: str, spans: Spans) -> Tensor:
    """`values` of trained tokens reduced over each unit of `level`, at every token of the unit; 0 outside the mask.

    values [T] float64; level: token, or segment or sequence with _sum, _mean or _max -> [T] float64. Values outside
    the mask are not read. Raises ValueError for an unknown level or unequal shapes.
    """
    mask = spans.mask
    require_same_shape(values=values, mask=mask)
    if level == "token":
        return torch.where(mask, values, 0.0)
    unit, _, how = level.partition("_")
    if unit not in ("segment", "sequence") or how not in ("sum", "mean", "max"):
        raise ValueError(f"unknown level {level!r}: token, or segment or sequence with _sum, _mean or _max")
    index, size = spans.sequence_index, spans.num_sequences
    if unit == "segment":
        index, size = segment_index(spans), int(mask.numel())
    chosen, places = values[mask], index[mask]
    if how == "max":
        reduced = values.new_full((size,), float("-inf")).scatter_reduce(0, places, chosen, "amax")
    else:
        reduced = values.new_zeros(size).index_add(0, places, chosen)
    if how == "mean":
        reduced = reduced / torch.bincount(places, minlength=size).clamp(min=1)
    return torch.where(mask, reduced[index], 0.0)


def ratio_at_level(log_ratio: Tensor, level: str, spans: Spans) -> Tensor:
    """exp of the log-ratios reduced over `level`, the logarithm clamped to +-20 again; 1 outside the mask."""
    return at_level(log_ratio, level, spans).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def outside(values: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Where `values` are below `lower` or above `upper`; NaN is not, so that it stays visible in the loss."""
    found = torch.zeros_like(values, dtype=torch.bool)
    if lower is not None:
        found |= values < lower
    if upper is not None:
        found |= values > upper
    return found


def broken_by(rule: CorrectionRule, log_ratio: Tensor, spans: Spans) -> Tensor:
    """The trained tokens whose metric is outside the bounds of `rule`. log_ratio [T] float64 -> [T] bool."""
    if rule.metric == "ratio":
        values = ratio_at_level(log_ratio, rule.level, spans)
    else:
        values = at_level(kl_of_samples(log_ratio, rule.metric), rule.level, spans)
    return spans.mask & outside(values, rule.lower, rule.upper)
