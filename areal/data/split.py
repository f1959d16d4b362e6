"""Partition of a packed batch: which sequences form a micro-batch under a token limit, and selection of sequences.

Only lengths decide, so a replay makes the same partition.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from areal.api.batch import TrainBatch
from areal.api.errors import InputError
from areal.data.balance import balanced_parts


def split_by_tokens(
    lengths: Sequence[int], max_tokens: int | None, min_parts: int = 1, divisor: int = 1, granularity: int = 1
) -> list[list[int]]:
    """Partition the indices of `lengths` into lists of at most `max_tokens` tokens each (None: no limit).

    The number of lists is at least `min_parts` and a multiple of `divisor`; it starts from the count that first-fit
    decreasing needs. The lists are then balanced as far as the limit allows; some may be empty. Each run of
    `granularity` neighbours stays together. Raises InputError when one such unit exceeds the limit, or when
    `granularity` does not divide the number of sequences.
    """
    if len(lengths) % granularity:
        message = f"{len(lengths)} sequences cannot be divided into units of granularity={granularity}"
        raise InputError(message, code="data.uneven_units")
    units = [sum(lengths[i : i + granularity]) for i in range(0, len(lengths), granularity)]
    if max_tokens is not None and units and max(units) > max_tokens:
        message = f"a unit of {max(units)} tokens exceeds max_tokens={max_tokens}: raise the limit"
        raise InputError(message, code="data.too_long")
    bins = [list(range(len(units)))]
    if max_tokens is not None and sum(units) > max_tokens:
        bins = _first_fit_decreasing(units, max_tokens)
    num_parts = -(-max(len(bins), min_parts) // divisor) * divisor
    level = balanced_parts(units, num_parts)
    if max_tokens is not None and max(sum(units[i] for i in part) for part in level) > max_tokens:
        level = _split_further(bins, units, num_parts)
    return [[unit * granularity + k for unit in part for k in range(granularity)] for part in level]


def _first_fit_decreasing(units: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(units)), key=lambda i: (-units[i], i)):
        place = next((i for i, free in enumerate(room) if free >= units[index]), None)
        if place is None:
            bins.append([index])
            room.append(max_tokens - units[index])
        else:
            bins[place].append(index)
            room[place] -= units[index]
    return [sorted(members) for members in bins]


def _split_further(bins: list[list[int]], units: Sequence[int], num_parts: int) -> list[list[int]]:
    """Halve the fullest bins until there are `num_parts`. A bin of one unit is kept; empty bins complete the number."""
    parts = [list(members) for members in bins]
    while len(parts) < num_parts:
        fullest = max(parts, key=lambda part: (len(part) > 1, sum(units[i] for i in part)), default=[])
        if len(fullest) < 2:
            return parts + [[] for _ in range(num_parts - len(parts))]
        parts.remove(fullest)
        for half in balanced_parts([units[i] for i in fullest], 2):
            parts.append([fullest[i] for i in half])
    return parts


def token_positions(cu_seqlens: Tensor, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Positions of the tokens of the sequences `indices` in a packed batch, in that order, and their new boundaries.

    cu_seqlens [S + 1] int32 -> positions [T'] int64, new cu_seqlens [len(indices) + 1] int32.
    """
    chosen = torch.as_tensor(indices, dtype=torch.int64, device=cu_seqlens.device)
    starts, ends = cu_seqlens[:-1].long()[chosen], cu_seqlens[1:].long()[chosen]
    lengths = ends - starts
    bounds = torch.zeros(len(indices) + 1, dtype=torch.int64, device=cu_seqlens.device)
    torch.cumsum(lengths, 0, out=bounds[1:])
    shift = torch.repeat_interleave(starts - bounds[:-1], lengths)
    return shift + torch.arange(shift.numel(), device=cu_seqlens.device), bounds.int()


def take(batch: TrainBatch, indices: Sequence[int]) -> TrainBatch:
    """Select the sequences `indices` of a batch, in that order. `indices` may be empty."""
    positions, cu_seqlens = token_positions(batch.cu_seqlens, indices)
    chosen = torch.as_tensor(indices, dtype=torch.int64, device=batch.cu_seqlens.device)
    new_index = torch.arange(len(indices), device=chosen.device)

    return batch.mapped(
        token=lambda values: values[positions],
        sequence=lambda values: values[chosen],
        cu_seqlens=cu_seqlens,
        sequence_index=torch.repeat_interleave(new_index, cu_seqlens.diff().long()),
    )
