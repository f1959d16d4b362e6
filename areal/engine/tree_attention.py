"""Attention over a prefix tree: a token attends to itself and to those before it in its rows, which are its ancestors.

The tokens are in depth-first order (`areal.data.prefix_tree`), so the tokens that have a token before them follow it.
On the CPU each branch attends to itself, and then all branches that leave another at one place to what is before it,
in one call; sums of exponentials of the parts give the whole (as in FlashAttention, arXiv 2205.14135, section 3.1).
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from areal.data.prefix_tree import PrefixTree

PADDED = 1.5
"""The largest ratio of padded to real tokens in a call for several branches."""
BLOCK = 128
"""Tokens of a block of a mask on CUDA."""
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_SHORT = 256
"""Tokens below which the backward pass of the kernel is slower in half precision than in float32."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Tokens of a call: n sequences, padded to equal length with their last token."""

    index: Tensor | slice  # [n, L] int64; a slice where n = 1
    padding: Tensor | None = None  # [n, L] bool

    def of(self, values: Tensor) -> Tensor:
        """[U, H, ...] -> [n, H, L, ...]"""
        found = values[self.index]
        return (found.unsqueeze(0) if isinstance(self.index, slice) else found).transpose(1, 2)

    def without_padding(self, values: Tensor) -> Tensor:
        """[n, H, L, ...], 0 at the padding."""
        if self.padding is None:
            return values
        return values.masked_fill(self.padding.view(len(values), 1, -1, *[1] * (values.ndim - 3)), 0)

    def flat(self, values: Tensor) -> tuple[Tensor | slice, Tensor]:
        """[n, H, L, ...] -> the places without padding, and their values [m, H, ...]."""
        rows = values.transpose(1, 2)
        if isinstance(self.index, slice):
            return self.index, rows[0]
        if self.padding is None:
            return self.index.flatten(), rows.flatten(0, 1)
        return self.index[~self.padding], rows[~self.padding]

    def add(self, target: Tensor, values: Tensor) -> None:
        """Add [n, H, L, ...] to those of a target [U, H, ...]. Places do not repeat, but for the padding."""
        index, rows = self.flat(values)
        if isinstance(index, slice):
            target[index] += rows
        else:
            target.index_add_(0, index, rows.to(target.dtype))


@dataclass(frozen=True, slots=True)
class _Context:
    """Tokens that attend to all of some others, which are before them."""

    queries: _Places
    keys: _Places


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """A row whose tokens are a prefix tree in depth-first order."""

    branches: tuple[_Places, ...]
    contexts: tuple[_Context, ...]
    spans: tuple[tuple[int, int], ...]
    """First token and number of tokens of each branch, in order."""
    paths: tuple[Tensor, ...]
    """The tokens of a row up to the end of each branch."""
    ends: Tensor  # [U] int64: the first token after those that have this one before them
    positions: Tensor  # [U] int64: in their rows


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Branches that leave another at one place."""

    depth: int
    """Number of branches before them. Those of equal depth have different queries."""
    keys: tuple[int, int]  # the first token, the number of tokens
    queries: tuple[int, int]


def tree_layout(tree: PrefixTree, computed: np.ndarray, starts: np.ndarray, device: torch.device) -> TreeLayout:
    """`computed` [tokens of the tree] bool: false only at the ends of branches. `starts` [S]: of the rows."""
    place = np.append(0, np.cumsum(computed))
    spans = [(int(place[one.first]), int(place[one.first + one.size] - place[one.first])) for one in tree.branches]
    ends = np.concatenate([np.full(size, first + size) for first, size in spans])
    positions = [np.arange(size) + one.shared for (_, size), one in zip(spans, tree.branches, strict=True)]
    leaving = _leaving(tree, spans)
    for one in leaving:
        own = slice(one.keys[0], sum(one.keys))
        ends[own] = np.maximum(ends[own], sum(one.queries))
    alike: dict[tuple[int, int], dict[tuple[int, int], _Leaving]] = defaultdict(dict)
    for one in leaving:
        if one.queries[1]:
            alike[one.depth, one.keys[1]][one.queries] = one
    contexts = [[same[span] for span in part] for _, same in sorted(alike.items()) for part in _alike([*same])]
    rows = [(starts[one.row], one.shared + size) for one, (_, size) in zip(tree.branches, spans, strict=True)]
    return TreeLayout(
        branches=tuple(_places(part, device) for part in _alike([span for span in spans if span[1]])),
        contexts=tuple(
            _Context(_places([one.queries for one in part], device), _places([one.keys for one in part], device))
            for part in contexts
        ),
        spans=tuple(spans),
        paths=tuple(torch.from_numpy(place[tree.places[start : start + size]]).to(device) for start, size in rows),
        ends=torch.from_numpy(ends).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
    )


def _leaving(tree: PrefixTree, spans: Sequence[tuple[int, int]]) -> list[_Leaving]:
    """`spans`: first token and number of computed tokens of each branch."""
    depths: list[int] = []
    for branch in tree.branches:
        depths.append(0 if branch.parent < 0 else depths[branch.parent] + 1)
    last = [first + size for first, size in spans]
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number in reversed(range(len(spans))):
        branch = tree.branches[number]
        if branch.parent >= 0:
            last[branch.parent] = max(last[branch.parent], last[number])
            groups[branch.parent, branch.shared].append(number)
    return [
        _Leaving(
            depths[others[0]],
            (spans[parent][0], shared - tree.branches[parent].shared),
            (spans[others[-1]][0], last[others[0]] - spans[others[-1]][0]),
        )
        for (parent, shared), others in groups.items()
    ]


def _alike(spans: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Spans of about equal length, which share a call."""
    found: list[list[tuple[int, int]]] = []
    total = 0
    for span in sorted(spans, key=lambda span: (span[1], span[0])):
        if found and span[1] * (len(found[-1]) + 1) <= PADDED * (total + span[1]):
            found[-1].append(span)
            total += span[1]
        else:
            found.append([span])
            total = span[1]
    return found


def _places(spans: Sequence[tuple[int, int]], device: torch.device) -> _Places:
    longest = max(size for _, size in spans)
    if len(spans) == 1:
        return _Places(slice(spans[0][0], spans[0][0] + longest))
    firsts, sizes = torch.tensor(spans).unbind(1)
    steps = torch.arange(longest)
    index = firsts[:, None] + steps.minimum(sizes[:, None] - 1)
    padding = steps >= sizes[:, None]
    return _Places(index.to(device), padding.to(device) if padding.any() else None)


def tree_attention(
    query: Tensor,  # [1, H, U, D]
    key: Tensor,  # [1, H_kv, U, D]
    value: Tensor,
    tree: TreeLayout,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    attend: Callable[..., Tensor] | None,
) -> Tensor:
    """Attention without dropout. -> [1, U, H, D]

    `attend`: for a score that the kernels do not compute, one call of it for each branch. `softcap`: of the scores on
    CUDA.
    """
    if attend is not None or (window is not None and query.device.type == "cpu"):
        return _by_branch(attend or F.scaled_dot_product_attention, (query, key, value), tree, scale, window)
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    if query.device.type != "cpu":
        return _by_mask(query, key, value, tree, scale=factor, window=window, softcap=softcap)
    width, size = max(query.shape[-1], value.shape[-1]), value.shape[-1]
    states = (F.pad(each[0].transpose(0, 1), (0, width - each.shape[-1])) for each in (query, key, value))
    found: Tensor = _Joined.apply(*states, tree, factor)  # pyright: ignore[reportAssignmentType]
    return found[..., :size].unsqueeze(0)


class _Joined(torch.autograd.Function):
    """[U, H, D] of queries, [U, H_kv, D] of keys and values -> [U, H, D]"""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: TreeLayout, scale: float) -> Tensor:
        out = query.new_empty(query.shape, dtype=torch.float32)
        sums = query.new_empty(query.shape[:2], dtype=torch.float32)  # logarithms of sums of exponentials
        for branch in tree.branches:
            found = _KERNEL(branch.of(query), branch.of(key), branch.of(value), 0.0, True, scale=scale)
            for target, values in zip((out, sums), found, strict=True):
                index, rows = branch.flat(values)
                target[index] = rows.to(target.dtype)
        for context in tree.contexts:
            keys, values = (context.keys.of(each) for each in (key, value))
            found = _KERNEL(context.queries.of(query), keys, values, 0.0, False, scale=scale)
            index, own = context.queries.flat(found[0])
            _, more = context.queries.flat(found[1])
            before = sums[index]
            total = torch.logaddexp(before, more)
            part = out[index] * (before - total).exp().unsqueeze(-1)
            out[index] = part.addcmul_(own.to(part.dtype), (more - total).exp().unsqueeze(-1))
            sums[index] = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        totals = [torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value)]
        parts = [(branch, branch, True) for branch in ctx.tree.branches]
        parts += [(context.queries, context.keys, False) for context in ctx.tree.contexts]
        for queries, keys, is_causal in parts:
            given, own = queries.without_padding(queries.of(upstream)), queries.of(query)
            states = [given, own, keys.of(key), keys.of(value), queries.of(out)]
            if query.dtype != torch.float32 and min(own.shape[2], states[2].shape[2]) < _SHORT:
                states = [each.float() for each in states]
            found = _KERNEL_BACKWARD(*states, queries.of(sums), 0.0, is_causal, scale=ctx.scale)
            for target, places, values in zip(totals, (queries, keys, keys), found, strict=True):
                places.add(target, values)
        return *(total.to(each.dtype) for total, each in zip(totals, (query, key, value), strict=True)), None, None


def _by_branch(
    attend: Callable[..., Tensor],
    states: tuple[Tensor, Tensor, Tensor],
    tree: TreeLayout,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """One call for each branch, with the keys of its whole path within the window."""
    query, key, value = states
    repeats = query.shape[1] // key.shape[1]
    columns = [each[0].transpose(0, 1) for each in (key, value)]  # [U, H_kv, D]
    parts: list[Tensor] = []
    for (_, size), path, q in zip(tree.spans, tree.paths, query.split([n for _, n in tree.spans], dim=2), strict=True):
        if not size:
            continue
        if window is not None:
            path = path[max(len(path) - size - window + 1, 0) :]
        # an embedding, because the backward pass of an index adds one row at a time
        seen = [F.embedding(path, each.flatten(1)).unflatten(1, each.shape[1:]) for each in columns]
        k, v = (each.transpose(0, 1).unsqueeze(0).repeat_interleave(repeats, dim=1) for each in seen)
        before = len(path) - size
        mask = torch.ones(size, len(path), dtype=torch.bool, device=query.device).tril(before)
        if window is not None:
            mask = mask.triu(before - window + 1)
        parts.append(attend(q, k, v, attn_mask=mask, scale=scale))
    return torch.cat(parts, dim=2).transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------------------
# CUDA: flex_attention with a mask in blocks. Query q sees key k if k <= q < ends[k], and is within the window.


def sees(ends: Tensor, positions: Tensor, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as a function of (batch, head, query, key)."""

    def is_seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = (k <= q) & (q < ends[k])
        return found if window is None else found & (positions[q] - positions[k] < window)

    return is_seen


def seen_blocks(ends: Tensor, positions: Tensor, window: int | None, size: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Which blocks of `size` queries see some keys of a block (perhaps more than do), and which see all. -> [n, n] bool

    `size` divides the number of tokens.
    """
    last, first = ends.view(-1, size).amax(1), ends.view(-1, size).amin(1)
    begin = torch.arange(len(last), device=ends.device) * size
    some = (begin[:, None] > begin) & (last > begin[:, None])
    whole = (begin[:, None] > begin) & (first >= begin[:, None] + size)
    if window is not None:
        low, high = positions.view(-1, size).amin(1), positions.view(-1, size).amax(1)
        some &= low[:, None] - high < window
        whole &= high[:, None] - low < window
    return some | torch.eye(len(last), dtype=torch.bool, device=ends.device), whole


def bucket(num_tokens: int) -> int:
    """The number of tokens to which a row is padded: eight sizes for each power of two, so that few are compiled."""
    step = max(BLOCK, 1 << max(num_tokens.bit_length() - 4, 0))
    return -(-num_tokens // step) * step


def _by_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: TreeLayout,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    from torch.nn.attention.flex_attention import BlockMask

    count = query.shape[2]
    size = bucket(count)
    own = torch.arange(count, size, device=query.device)
    ends = torch.cat([tree.ends, own + 1])  # padding sees itself
    positions = torch.cat([tree.positions, torch.zeros_like(own)])
    some, whole = seen_blocks(ends, positions, window)
    lists = [_lists(each) for each in (some & ~whole, whole)]
    mask = BlockMask.from_kv_blocks(*lists[0], *lists[1], BLOCK_SIZE=BLOCK, mask_mod=sees(ends, positions, window))
    states = (F.pad(each, (0, 0, 0, size - count)) for each in (query, key, value))
    found = _compiled()(
        *states, score_mod=None if softcap is None else _capped(softcap), block_mask=mask, scale=scale, enable_gqa=True
    )
    return found[:, :, :count].transpose(1, 2)


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[n, n] bool -> the number of true ones of each row, and their places first, [1, 1, n] and [1, 1, n, n] int32."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None].contiguous()


def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
