"""Aggregation of per-token numbers: weights and denominators of a loss, and logged token statistics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from areal.api.errors import ShapeError
from areal.api.metrics import Metric, Metrics

Reduce = Callable[[Tensor], Tensor]
"""Sums a CPU float64 tensor over all data-parallel ranks; `TrainEngine.all_reduce` is one."""

LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
"""How per-token losses l_t of sequences s with n_s trained tokens become one scalar, over the global mini-batch:

token-mean (DAPO)                  sum_t l_t / sum_s n_s
token-sum                          sum_t l_t / L
seq-mean-token-sum                 sum_s sum_t l_t / S
seq-mean-token-mean (GRPO paper)   sum_s (sum_t l_t / n_s) / S
seq-mean-token-sum-norm (Dr.GRPO)  sum_s (sum_t l_t / L) / S

S counts the sequences with at least one trained token, L is a constant number of tokens. With `session_tokens` s is a
session, which may be cut into several sequences. Each is
`loss_scale` * sum_t(`loss_weights` * l_t) / (sum over ranks of `local_denominator`).
"""


def identity_reduce(values: Tensor) -> Tensor:
    """The reduction over ranks when there is one rank."""
    return values


def require_same_shape(**tensors: Tensor) -> None:
    """Raise ShapeError when tensors that must have equal shapes differ (broadcasting would hide it)."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ShapeError(f"per-token tensors must have one shape, got {shapes}")


def trained_counts(mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Trained tokens of each sequence. mask [T] bool, sequence_index [T] int64 -> [S] int64."""
    require_same_shape(mask=mask, sequence_index=sequence_index)
    return torch.bincount(sequence_index[mask], minlength=num_sequences)


def sequence_sums(values: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Sum over the masked tokens of each sequence; differentiable; masked positions have no influence.

    values [T], mask [T] bool, sequence_index [T] int64 -> [S] of values' dtype, 0 for a sequence without such tokens.
    """
    require_same_shape(values=values, mask=mask, sequence_index=sequence_index)
    inside = torch.where(mask, values, 0.0)
    return values.new_zeros(num_sequences).index_add(0, sequence_index, inside)


def sequence_means(values: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
    """Mean over the masked tokens of each sequence [S], and which sequences have any [S] bool; 0 for the others."""
    sums = sequence_sums(values, mask, sequence_index, num_sequences)
    counts = trained_counts(mask, sequence_index, num_sequences)
    return sums / counts.clamp(min=1), counts > 0


def loss_weights(
    mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    aggregation: LossAggregation = "token-mean",
    session_tokens: Tensor | None = None,
) -> Tensor:
    """Weight of each token's loss in the sum that one global denominator divides.

    mask [T] bool, sequence_index [T] int64 -> [T] float32, 0 where the mask is off. A weight depends on its own
    sequence alone, and sequences are never cut, so any split into micro-batches and ranks gives the same sum.
    `session_tokens` [S] int64: trained tokens of the whole session of each sequence; None = each sequence is one.
    """
    weights = mask.float()
    if aggregation == "seq-mean-token-mean":
        counts = session_tokens
        if counts is None:
            counts = trained_counts(mask, sequence_index, num_sequences)
        weights = weights / counts.clamp(min=1)[sequence_index]
    return weights


def local_denominator(
    mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    aggregation: LossAggregation = "token-mean",
    max_tokens: int | None = None,
    session_tokens: Tensor | None = None,
) -> Tensor:
    """This rank's part of the denominator of a mini-batch: its sum over ranks divides the weighted sum of losses.

    mask [T] bool, sequence_index [T] int64 -> [1] float64 on the CPU; 0 over all ranks = nothing to learn from.
    `max_tokens` is the constant L of seq-mean-token-sum-norm; ValueError without it. `session_tokens` as in
    `loss_weights`: the sequences of one session count 1 together.
    """
    if aggregation in ("token-mean", "token-sum"):
        count = mask.sum()
    else:
        counts = trained_counts(mask, sequence_index, num_sequences)
        count = (counts > 0).sum() if session_tokens is None else (counts.double() / session_tokens.clamp(min=1)).sum()
        if aggregation == "seq-mean-token-sum-norm":
            if max_tokens is None:
                raise ValueError("seq-mean-token-sum-norm needs max_tokens, the constant length that divides")
            count = count * max_tokens
    return count.to(device="cpu", dtype=torch.float64).reshape(1)


def loss_scale(aggregation: LossAggregation, denominator: float, max_tokens: int | None = None) -> float:
    """Factor of the weighted sum of losses, in addition to 1 / `denominator`; 1 except for token-sum.

    The denominator of token-sum counts the tokens, to detect an empty mini-batch. This factor replaces it by the
    constant L = `max_tokens`; None = 1.
    """
    return denominator / (max_tokens or 1) if aggregation == "token-sum" else 1.0


@dataclass(frozen=True, slots=True)
class TokenStat:
    """A quantity to log: one value per token or sequence, which of them count, and how they are reduced."""

    values: Tensor  # [N] any real dtype or bool
    mask: Tensor  # [N] bool
    kind: Literal["mean", "sum", "max", "min"] = "mean"


def stats_problem(stats: object) -> str:
    """What is wrong with the statistics that a user's function returned; empty = nothing."""
    if not isinstance(stats, Mapping):
        return f"stats of type {type(stats).__name__}: a mapping of names to TokenStat is expected"
    for name, stat in cast("Mapping[str, object]", stats).items():
        if not isinstance(stat, TokenStat) or not all(
            isinstance(part, Tensor) for part in cast("tuple[object, object]", (stat.values, stat.mask))
        ):
            return f"a {type(stat).__name__} as stats[{name!r}]: TokenStat(values, mask) with two tensors is expected"
        if stat.values.shape != stat.mask.shape:
            shapes = f"{tuple(stat.values.shape)} and mask of shape {tuple(stat.mask.shape)}"
            return f"values of shape {shapes} as stats[{name!r}]: one shape is expected"
    return ""


def to_metrics(stats: Mapping[str, TokenStat]) -> Metrics:
    """Reduce every statistic on its device and copy all of them to the host at once.

    An empty mask gives count 0 and the neutral element (-inf for max, inf for min), which merges with other
    micro-batches and ranks. Sums are in float64. All statistics must be on one device.
    """
    numbers: list[Tensor] = []
    for stat in stats.values():
        require_same_shape(values=stat.values, mask=stat.mask)
        values = stat.values.detach().double()
        if stat.kind in ("mean", "sum"):
            numbers.append(torch.where(stat.mask, values, 0.0).sum())
        else:
            fill = float("-inf") if stat.kind == "max" else float("inf")
            # the extra element keeps the reduction defined when there are no tokens at all
            padded = torch.cat([torch.where(stat.mask, values, fill), values.new_full((1,), fill)])
            numbers.append(padded.amax() if stat.kind == "max" else padded.amin())
        numbers.append(stat.mask.sum().double())
    if not numbers:
        return {}
    host = cast(list[float], torch.stack(numbers).tolist())  # pyright: ignore[reportUnknownMemberType]
    return {name: Metric(host[2 * i], host[2 * i + 1], stat.kind) for i, (name, stat) in enumerate(stats.items())}
