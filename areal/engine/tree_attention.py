"""Attention over a prefix tree: a token attends to itself and to those before it in its rows, which are its ancestors.

The tokens are in depth-first order (`areal.data.prefix_tree`), so the tokens that have a token before them follow it.
On the CPU small subtrees, and the other branches, each attend to themselves; then all branches that leave another
at one place attend to what is before it, in one call; sums of exponentials of the parts give the whole (as in
FlashAttention, arXiv 2205.14135, section 3.1).
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
from areal.models.tree_states import Span

PADDED = 1.5
"""The largest ratio of padded to real tokens in a call for several branches."""
SMALL = 64
"""The largest number of tokens of a subtree that attends to itself in one call, with a mask."""
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
    kept: Tensor | None = None  # [m] int64: the places of [n * L] without padding; None = all
    tokens: Tensor | None = None  # [m] int64: their tokens, where n > 1

    def of(self, values: Tensor) -> Tensor:
        """[U, H, ...] -> [n, H, L, ...]"""
        if isinstance(self.index, slice):
            return values[self.index].unsqueeze(0).transpose(1, 2)
        return values.index_select(0, self.index.flatten()).unflatten(0, self.index.shape).transpose(1, 2)

    def without_padding(self, values: Tensor) -> Tensor:
        """[n, H, L, ...], 0 at the padding."""
        if self.padding is None:
            return values
        return values.masked_fill(self.padding.view(len(values), 1, -1, *[1] * (values.ndim - 3)), 0)

    def flat(self, values: Tensor) -> tuple[Tensor | slice, Tensor]:
        """[n, H, L, ...] -> the tokens without padding, and their values [m, H, ...]."""
        rows = values.transpose(1, 2).flatten(0, 1)
        if self.tokens is None:
            assert isinstance(self.index, slice)
            return self.index, rows
        return self.tokens, rows if self.kept is None else rows.index_select(0, self.kept)

    def add(self, target: Tensor, values: Tensor) -> None:
        """Add [n, H, L, ...] to those of a target [U, H, ...]. Places do not repeat, but for the padding."""
        index, rows = self.flat(values)
        if isinstance(index, slice):
            target[index] += rows
        else:
            target.index_add_(0, index, rows.to(target.dtype))


@dataclass(frozen=True, slots=True)
class _Call:
    """Tokens that attend to others, which are before them, or to themselves."""

    queries: _Places
    keys: _Places
    is_causal: bool = False
    mask: Tensor | None = None  # [n, 1, L, L] float32, added to scores; padding attends to itself alone


@dataclass(frozen=True, kw_only=True)
class TreeLayout:
    """A row whose tokens are a prefix tree in depth-first order."""

    parts: tuple[_Call, ...]
    """Small subtrees and other branches: each token is among the queries of one."""
    contexts: tuple[_Call, ...]
    """Small subtrees and other branches attend to what is before them."""
    spans: tuple[Span, ...]
    """One for each branch, in order."""
    ends: Tensor  # [U] int64: the first token after those that have this one before them
    positions: Tensor  # [U] int64: in their rows

    @functools.cached_property
    def paths(self) -> list[Tensor]:
        """The tokens of a row up to the end of each branch."""
        ends = [span.first + span.size for span in self.spans]
        return [torch.nonzero(self.ends[:end] >= end)[:, 0] for end in ends]


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Branches that leave another at one place."""

    depth: int
    """Number of branches before them. Those of equal depth have different queries."""
    keys: tuple[int, int]  # the first token, the number of tokens
    queries: tuple[int, int]


def tree_layout(tree: PrefixTree, computed: np.ndarray, bounds: np.ndarray, device: torch.device) -> TreeLayout:
    """`computed` [tokens of the tree] bool: false only at the ends of branches. `bounds` [S + 1]: of the rows."""
    place = np.append(0, np.cumsum(computed))
    _, shared, parents, firsts, sizes = np.array(tree.branches).T
    firsts, sizes = place[firsts], place[firsts + sizes] - place[firsts]
    spans = [*zip(firsts.tolist(), sizes.tolist(), strict=True)]
    last = place[tree.places[bounds[1:] - 1] + 1]
    ends = np.zeros(len(computed), dtype=np.int64)
    np.maximum.at(ends, tree.places, np.repeat(last, np.diff(bounds)))
    ends = ends[computed]
    in_row = np.arange(len(tree.places)) - np.repeat(bounds[:-1], np.diff(bounds))
    after = _after_subtrees(tree)
    small: list[tuple[int, int]] = []
    single: list[tuple[int, int]] = []
    outer: list[int] = []  # branches that are not inside of a small subtree
    number = 0
    while number < len(spans):
        outer.append(number)
        first, size = spans[number][0], sum(spans[after[number] - 1]) - spans[number][0]
        if is_small := after[number] > number + 1 and 0 < size <= SMALL:
            small.append((first, size))
        elif spans[number][1]:
            single.append(spans[number])
        number = after[number] if is_small else number + 1
    alike: dict[tuple[int, int], dict[tuple[int, int], _Leaving]] = defaultdict(dict)
    for call in _leaving(tree, spans, after, outer):
        if call.queries[1]:
            alike[call.depth, call.keys[1]][call.queries] = call
    contexts = [[same[span] for span in part] for _, same in sorted(alike.items()) for part in _alike([*same])]
    masked = [_places(part, device) for part in _alike(small)]
    causal = [_places(part, device) for part in _alike(single)]
    seen = torch.from_numpy(ends).to(device)
    return TreeLayout(
        parts=(
            *(_Call(places, places, mask=_mask(places, seen)) for places in masked),
            *(_Call(places, places, is_causal=True) for places in causal),
        ),
        contexts=tuple(
            _Call(_places([call.queries for call in part], device), _places([call.keys for call in part], device))
            for part in contexts
        ),
        spans=tuple(map(Span, *(column.tolist() for column in (firsts, sizes, shared, parents)))),
        ends=seen,
        positions=torch.from_numpy(in_row[tree.source[computed]]).to(device),
    )


def _mask(places: _Places, ends: Tensor) -> Tensor:
    """`ends`: as in TreeLayout. -> [n, 1, L, L] float32, 0 where a query sees a key"""
    index = torch.arange(len(ends), device=ends.device)[places.index]
    keys = index.view(-1, 1, index.shape[-1])
    queries = keys.transpose(1, 2)
    is_seen = (keys <= queries) & (queries < ends[keys])
    if places.padding is not None:
        is_seen &= ~(places.padding.view(keys.shape) | places.padding.view(queries.shape))
        is_seen |= torch.eye(index.shape[-1], dtype=torch.bool, device=ends.device)
    return torch.zeros(is_seen.shape, device=ends.device).masked_fill(~is_seen, -torch.inf).unsqueeze(1)


def _after_subtrees(tree: PrefixTree) -> list[int]:
    """The first branch after each one and those that leave it, which follow it."""
    after = [number + 1 for number in range(len(tree.branches))]
    for number in reversed(range(len(after))):
        parent = tree.branches[number].parent
        if parent >= 0 and after[parent] < after[number]:
            after[parent] = after[number]
    return after


def _leaving(
    tree: PrefixTree, spans: Sequence[tuple[int, int]], after: Sequence[int], outer: Sequence[int]
) -> list[_Leaving]:
    """`spans`: first token and number of computed tokens of each branch; `outer`: branches with all before them."""
    depths: dict[int, int] = {}
    for number in outer:
        depths[number] = depths.get(tree.branches[number].parent, -1) + 1
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number in reversed(outer):
        branch = tree.branches[number]
        if branch.parent >= 0:
            groups[branch.parent, branch.shared].append(number)
    return [
        _Leaving(
            depths[others[0]],
            (spans[parent][0], shared - tree.branches[parent].shared),
            (spans[others[-1]][0], sum(spans[after[others[0]] - 1]) - spans[others[-1]][0]),
        )
        for (parent, shared), others in groups.items()
    ]


def _alike(spans: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Spans of about equal length, which share a call."""
    groups: list[list[tuple[int, int]]] = []
    total = 0
    for span in sorted(spans, key=lambda span: (span[1], span[0])):
        if groups and span[1] * (len(groups[-1]) + 1) <= PADDED * (total + span[1]):
            groups[-1].append(span)
            total += span[1]
        else:
            groups.append([span])
            total = span[1]
    return groups


def _places(spans: Sequence[tuple[int, int]], device: torch.device) -> _Places:
    longest = max(size for _, size in spans)
    if len(spans) == 1:
        return _Places(slice(spans[0][0], spans[0][0] + longest))
    firsts, sizes = torch.tensor(spans).unbind(1)
    steps = torch.arange(longest)
    index = (firsts[:, None] + steps.minimum(sizes[:, None] - 1)).to(device)
    if all(size == longest for _, size in spans):
        return _Places(index, tokens=index.flatten())
    padding = (steps >= sizes[:, None]).to(device)
    kept = torch.nonzero(~padding.flatten())[:, 0]
    return _Places(index, padding, kept, index.flatten()[kept])


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
    attended: Tensor = _Joined.apply(*states, tree, factor)  # pyright: ignore[reportAssignmentType]
    return attended[..., :size].unsqueeze(0)


class _Joined(torch.autograd.Function):
    """[U, H, D] of queries, [U, H_kv, D] of keys and values -> [U, H, D]"""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: TreeLayout, scale: float) -> Tensor:
        out = query.new_empty(query.shape, dtype=torch.float32)
        sums = query.new_empty(query.shape[:2], dtype=torch.float32)  # logarithms of sums of exponentials
        for call in tree.parts:
            states = (call.queries.of(query), call.keys.of(key), call.keys.of(value))
            results = _KERNEL(*states, 0.0, call.is_causal, attn_mask=call.mask, scale=scale)
            for target, values in zip((out, sums), results, strict=True):
                index, rows = call.queries.flat(values)
                target[index] = rows.to(target.dtype)
        for context in tree.contexts:
            keys, values = (context.keys.of(each) for each in (key, value))
            results = _KERNEL(context.queries.of(query), keys, values, 0.0, False, scale=scale)
            index, attended = context.queries.flat(results[0])
            _, more = context.queries.flat(results[1])
            before = sums[index]
            total = torch.logaddexp(before, more)
            part = out[index] * (before - total).exp().unsqueeze(-1)
            out[index] = part.addcmul_(attended.to(part.dtype), (more - total).exp().unsqueeze(-1))
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
        for call in (*ctx.tree.parts, *ctx.tree.contexts):
            queries, keys = call.queries, call.keys
            gradient, queries_of_call = queries.of(upstream), queries.of(query)
            if call.mask is None:  # padding does not attend to itself alone
                gradient = queries.without_padding(gradient)
            states = [gradient, queries_of_call, keys.of(key), keys.of(value), queries.of(out)]
            if query.dtype != torch.float32 and min(queries_of_call.shape[2], states[2].shape[2]) < _SHORT:
                states = [each.float() for each in states]
            rules = {"attn_mask": call.mask, "scale": ctx.scale}
            gradients = _KERNEL_BACKWARD(*states, queries.of(sums), 0.0, call.is_causal, **rules)
            for target, places, values in zip(totals, (queries, keys, keys), gradients, strict=True):
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
    sizes = [span.size for span in tree.spans]
    for size, path, q in zip(sizes, tree.paths, query.split(sizes, dim=2), strict=True):
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
        seen = (k <= q) & (q < ends[k])
        return seen if window is None else seen & (positions[q] - positions[k] < window)

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
    padding = torch.arange(count, size, device=query.device)
    ends = torch.cat([tree.ends, padding + 1])  # padding sees itself
    positions = torch.cat([tree.positions, torch.zeros_like(padding)])
    some, whole = seen_blocks(ends, positions, window)
    lists = [_lists(each) for each in (some & ~whole, whole)]
    mask = BlockMask.from_kv_blocks(*lists[0], *lists[1], BLOCK_SIZE=BLOCK, mask_mod=sees(ends, positions, window))
    states = (F.pad(each, (0, 0, 0, size - count)) for each in (query, key, value))
    attended = _compiled()(
        *states, score_mod=None if softcap is None else _capped(softcap), block_mask=mask, scale=scale, enable_gqa=True
    )
    return attended[:, :, :count].transpose(1, 2)


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
