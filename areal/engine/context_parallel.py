"""Packed rows over context ranks (Ulysses): each rank computes every c-th token, and some heads of all tokens.

Token t of a row belongs to rank t mod c, so each rank has an equal part, to one token, of every prompt and answer.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.mesh import RankGroup


def own_tokens(values: Tensor, ranks: RankGroup, fill: float = 0) -> Tensor:
    """The values of this rank's tokens, [ceil(T / c), ...] of [T, ...]; missing ones at the end are `fill`."""
    own = values[ranks.rank :: ranks.size]
    missing = -(-values.shape[0] // ranks.size) - own.shape[0]
    return torch.cat([own, own.new_full((missing, *own.shape[1:]), fill)]) if missing else own


def all_tokens(values: Tensor, ranks: RankGroup, num_tokens: int) -> Tensor:
    """The outputs of all tokens of the row, [T, ...], from those of this rank's tokens.

    Every rank computes the same loss from them: the gradient of this rank's tokens is its part of the whole gradient.
    """
    return _Gather.apply(values, ranks, num_tokens)  # pyright: ignore[reportReturnType]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: RankGroup, num_tokens: int) -> Tensor:
        ctx.ranks = ranks
        parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(ranks.size)]
        dist.all_gather(parts, values.contiguous(), group=ranks.group)
        ctx.set_materialize_grads(False)
        return torch.stack(parts, dim=1).flatten(0, 1)[:num_tokens].clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, None, None]:
        (whole,) = upstream
        return None if whole is None else own_tokens(whole, ctx.ranks), None, None


def heads_of_all_tokens(states: Sequence[Tensor], ranks: RankGroup) -> list[Tensor]:
    """[1, H, T/c, D] of each -> [1, H/c, T, D]: this rank's heads, of all tokens in order.

    Keys and values with fewer heads than ranks, or a number that c does not divide, are repeated as often as needed.
    """
    c, queries = ranks.size, states[0].shape[1]
    sent: list[Tensor] = []
    for one in states:
        heads = repeated_heads(queries, one.shape[1], c)
        one = one if heads == one.shape[1] else one.repeat_interleave(heads // one.shape[1], dim=1)
        sent.append(one[0].unflatten(0, (c, heads // c)))  # [c, H/c, T/c, D]
    received = _exchange(sent, ranks)
    return [one.permute(1, 2, 0, 3).flatten(1, 2).unsqueeze(0) for one in received]


def tokens_of_all_heads(states: Tensor, ranks: RankGroup) -> Tensor:
    """[1, T, H/c, D] -> [1, T/c, H, D]: the inverse, for the output of attention."""
    parts = states[0].unflatten(0, (-1, ranks.size)).transpose(0, 1)  # [c, T/c, H/c, D]
    (received,) = _exchange([parts], ranks)
    return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def repeated_heads(queries: int, keys: int, ranks: int) -> int:
    """The least number of key and value heads, a multiple of `keys` that divides `queries`, which `ranks` divides.

    Raises ValueError when `ranks` does not divide `queries`.
    """
    if queries % ranks:
        raise ValueError(f"{queries} attention heads cannot be distributed over {ranks} ranks")
    group = queries // keys
    return keys * next(n for n in range(1, group + 1) if group % n == 0 and keys * n % ranks == 0)


def _exchange(states: list[Tensor], ranks: RankGroup) -> list[Tensor]:
    """One all-to-all: part i of each goes to rank i, part i of the results came from rank i."""
    flat = torch.cat([one.flatten(1) for one in states], dim=1)
    received: Tensor = _AllToAll.apply(flat, ranks)  # pyright: ignore[reportAssignmentType]
    parts = received.split([math.prod(one.shape[1:]) for one in states], dim=1)
    return [part.unflatten(1, one.shape[1:]) for part, one in zip(parts, states, strict=True)]


class _AllToAll(torch.autograd.Function):
    """[c, N] -> [c, N]. Its gradient is the same exchange in the other direction."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        return _all_to_all(values, ranks)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(upstream[0], ctx.ranks), None


def _all_to_all(values: Tensor, ranks: RankGroup) -> Tensor:
    result = torch.empty_like(values, memory_format=torch.contiguous_format)
    dist.all_to_all_single(result, values.contiguous(), group=ranks.group)
    return result
