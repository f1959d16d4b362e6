"""Attention over the paged KV cache, registered with transformers in place of the attention of the models.

A step is one flat row of tokens: first the decode rows with one token each, then prompt chunks. All keys and values
are written before they are read, so a chunk can read what another chunk writes in the same step.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.modeling_utils import AttentionInterface

from areal.api.errors import ConfigError
from areal.inference.paged_kernel import PagedRows
from areal.models.attention import attention_problem, capped_attention

ATTENTION_NAME = "areal_paged"
_TILE = 256
"""Queries that are computed at once on the CPU."""
_KEY_BLOCK = 512
"""Keys that torch's attention on the CPU multiplies at once."""
_EQUAL_KEYS = 192
"""MKL sums up to 256 keys in one order on processors of Intel, and up to 192 on those of AMD."""
_QUERY_ROWS = 16
Counts = TypeVar("Counts", int, np.ndarray)


@cache
def decode_queries(size: int, dtype: torch.dtype) -> int:
    """What the number of query rows of a key head is a multiple of in a decode step on the CPU, for such heads: the
    smallest with the bits of `_QUERY_ROWS`, in a trial. The product of each row with the keys takes time, also that
    of a row that only pads."""
    generator = torch.Generator().manual_seed(0)
    rows, keys, values = torch.randn(3, 1, 2, 512, size, generator=generator).to(dtype)
    for count in (4, 8):
        sizes = (16, _EQUAL_KEYS, 512)
        pairs = (
            [
                scaled_dot_product_attention(rows[:, :, :number], keys[:, :, :width], values[:, :, :width])
                for number in (count, _QUERY_ROWS)
            ]
            for width in sizes
        )
        if all(few.equal(many[:, :, :count]) for few, many in pairs):
            return count
    return _QUERY_ROWS


def padded_keys(count: Counts) -> Counts:
    """The number of keys for which a query that sees at most `count` gets the same bits as with more keys, on the CPU.

    Keys that it does not see count as zeros. Sums over a few of them (`_EQUAL_KEYS`), or over a whole block, are in the
    same order, those over other numbers are not; sums of a multiple of 16 have no rest that vector instructions do not
    cover.
    """
    step = 16 + (count % _KEY_BLOCK > _EQUAL_KEYS) * (_KEY_BLOCK - 16)
    return count + -count % step


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The sizes that one attention layer stores per token."""

    num_kv_heads: int
    key_size: int
    value_size: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Sizes of the keys and of the values of a token."""
        return self.num_kv_heads, self.key_size + self.value_size


class LayerCache:
    """The keys and values of one layer."""

    def __init__(self, blocks: Tensor, shape: LayerShape) -> None:
        self.blocks = blocks  # [num_blocks, block_size, kv heads, key size + value size]
        self.shape = shape
        self._slots = blocks.view(-1, *blocks.shape[2:])

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store new keys and values [tokens, kv heads, size] at slots (block * block_size + offset)."""
        self._slots.index_copy_(0, slots, torch.cat((keys, values), dim=-1))


@dataclass(slots=True, kw_only=True)
class DecodeGroup:
    """Decode rows start..end-1, one token each, of sequences with similar lengths."""

    start: int
    end: int
    blocks: Tensor  # [(end - start) * width] int32, padded with any valid block
    width: int
    lengths: np.ndarray  # per row: tokens to attend to, including its own
    max_length: int
    workspace: Tensor
    """Flat memory for gathered blocks, reused by all layers so that it stays in the cache of the CPU."""
    masks: dict[int | None, Tensor | None] = field(default_factory=dict[int | None, Tensor | None])
    views: dict[LayerShape, tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict[LayerShape, tuple[Tensor, Tensor, Tensor]]
    )

    def gather(self, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv heads, max_length, size] of a layer, valid until the next call."""
        views = self.views.get(cache.shape)
        if views is None:
            shape = (self.blocks.numel(), *cache.blocks.shape[1:])
            target = self.workspace[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape)
            gathered = target.view(-1, self.width * shape[1], *shape[2:])[:, : self.max_length].transpose(1, 2)
            key_size = cache.shape.key_size
            views = self.views[cache.shape] = (target, gathered[..., :key_size], gathered[..., key_size:])
        torch.index_select(cache.blocks, 0, self.blocks, out=views[0])
        return views[1], views[2]

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [rows, 1, 1, max_length] for a sliding window (None = full attention), cached per step."""
        if window is not None and window >= self.max_length:
            window = None
        if window not in self.masks:
            mask = None
            if window is not None or self.lengths.min() < self.max_length:
                places = torch.arange(self.max_length, device=self.blocks.device)
                lengths = torch.from_numpy(self.lengths).to(self.blocks.device)[:, None]
                hidden = places >= lengths
                if window is not None:
                    hidden |= places < lengths - window
                mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
                mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None, :]
            self.masks[window] = mask
        return self.masks[window]


@dataclass(slots=True, kw_only=True)
class PromptGroup:
    """`num_sequences` prompts or first chunks of `count` tokens each, from row `start` on."""

    start: int
    num_sequences: int
    count: int


@dataclass(slots=True, kw_only=True)
class LaterChunk:
    """`count` tokens of one sequence from row `start` on; its first `num_before` tokens are in the cache."""

    start: int
    count: int
    num_before: int
    blocks: Tensor  # [padded_keys(num_before + count) / block size] int64, padded with any valid block
    last_seen: Tensor | None = None
    """[count] int64: the last token that each one attends to; None = itself."""
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict[tuple[int | None, int], Tensor])
    """Keys are the window and the number of query heads of a key head."""

    def mask(self, window: int | None, like: Tensor, times: int, width: int) -> Tensor:
        """Additive mask [times * count and some more, width], cached per step."""
        if (window, times) not in self.masks:
            visible = _causal_mask(self.count, self.num_before, width, window, like, self.last_seen).repeat(times, 1)
            visible = pad(visible, (0, 0, 0, -len(visible) % _QUERY_ROWS), value=True)
            mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
            self.masks[window, times] = mask.masked_fill_(~visible, -torch.inf)
        return self.masks[window, times]


@dataclass(slots=True, kw_only=True)
class AttentionPlan:
    """The inputs of the attention layers for one step."""

    caches: dict[int, LayerCache]
    """Keys are the numbers of the layers with attention."""
    slots: Tensor  # [tokens] int64: block * block_size + offset
    decode: list[DecodeGroup]
    prompts: list[PromptGroup]
    later: list[LaterChunk]
    paged: PagedRows | None = None
    """All decode rows, in place of `decode`."""


@dataclass(slots=True, kw_only=True)
class AttentionProbe:
    """Used in place of a plan to record the shapes of all layers."""

    shapes: dict[int, LayerShape] = field(default_factory=dict[int, LayerShape])
    is_plain: bool = True
    """Whether the kernels of torch compute all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRules:
    """How a layer computes scores, and which it uses."""

    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [heads]

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, is_causal: bool = False
    ) -> Tensor:
        """The queries of head i are those of one head, or one query of each of the heads that share key head i."""
        if self.is_plain:
            return scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=self.scaling
            )
        sinks = None if self.sinks is None else self.sinks.view(queries.shape[1], -1, 1)
        return capped_attention(
            queries, keys, values, mask, is_causal=is_causal, scale=self.scaling, softcap=self.softcap, sinks=sinks
        )


def register_attention() -> None:
    """Register `ATTENTION_NAME` with transformers. It has no mask function, so transformers creates no mask."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, key size]
    key: Tensor,  # [1, kv heads, tokens, key size]
    value: Tensor,  # [1, kv heads, tokens, value size]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_plan: AttentionPlan | AttentionProbe | None = None,
    **options: object,  # transformers passes model-specific options
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it. Returns [1, tokens, heads, size]."""
    rules = ScoreRules(scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    if isinstance(attention_plan, AttentionProbe):
        attention_plan.is_plain &= rules.is_plain
        options["sliding_window"] = sliding_window
        return _probe(attention_plan, module, query, key, value, attention_mask, options), None
    assert attention_plan is not None, "only the model runner may call the model"
    cache = attention_plan.caches[_layer_of(module)]
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(attention_plan, cache, queries, keys, values, rules)[None], None


def attend(
    plan: AttentionPlan, cache: LayerCache, queries: Tensor, keys: Tensor, values: Tensor, rules: ScoreRules
) -> Tensor:
    """Attention of one layer: write the new keys and values, then attend. All tensors are [tokens, heads, size]."""
    cache.write(plan.slots, keys, values)
    groups = plan.decode
    if len(groups) == 1 and groups[0].end == len(queries):
        return _attend_decode(groups[0], cache, queries, rules)
    output = torch.zeros((*queries.shape[:2], values.shape[-1]), dtype=values.dtype, device=values.device)
    if (paged := plan.paged) is not None:
        mine = queries[: len(paged.lengths)]
        output[: len(mine)] = paged.attend(mine, cache.blocks, cache.shape.key_size, rules.scaling, rules.window)
    for group in groups:
        mine = queries[group.start : group.end]
        output[group.start : group.end] = _attend_decode(group, cache, mine, rules)
    if plan.prompts or plan.later:
        query, key, value = (states.transpose(0, 1) for states in (queries, keys, values))
        for prompts in plan.prompts:
            _attend_prompts(prompts, query, key, value, output, rules)
        for chunk in plan.later:
            _attend_later(chunk, cache, query, output, rules)
    return output


def _probe(
    probe: AttentionProbe,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    options: dict[str, object],
) -> Tensor:
    if (problem := attention_problem(module, mask, options)) is not None:
        message = f"the native engine cannot serve this model: {problem}; use sglang or vllm"
        raise ConfigError(message, code="model.unsupported")
    probe.shapes[_layer_of(module)] = LayerShape(
        num_kv_heads=key.shape[1], key_size=key.shape[3], value_size=value.shape[3]
    )
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _layer_of(module: nn.Module) -> int:
    layer = module.layer_idx  # all attention modules of transformers have it
    assert isinstance(layer, int)
    return layer


def _attend_decode(group: DecodeGroup, cache: LayerCache, rows: Tensor, rules: ScoreRules) -> Tensor:
    """Output [rows, heads, size]. Query heads that share a key head are treated as query tokens of that head."""
    keys, values = group.gather(cache)
    queries = rows.reshape(keys.shape[0], keys.shape[1], -1, rows.shape[-1])
    count = queries.shape[2]
    if rules.is_plain and rows.device.type == "cpu":
        queries = pad(queries, (0, 0, 0, -count % decode_queries(rows.shape[-1], rows.dtype)))
    result = rules.attend(queries, keys, values, group.mask(rules.window, rows.dtype))
    return result[:, :, :count].reshape(*rows.shape[:2], values.shape[-1])


def _attend_prompts(
    group: PromptGroup, query: Tensor, key: Tensor, value: Tensor, output: Tensor, rules: ScoreRules
) -> None:
    end = group.start + group.num_sequences * group.count

    def split(states: Tensor) -> Tensor:  # [heads, tokens, size] -> [sequences, heads, count, size]
        return states[:, group.start : end].unflatten(1, (group.num_sequences, group.count)).transpose(0, 1)

    queries, keys, values = split(query), _repeat(split(key), query), _repeat(split(value), query)
    if query.device.type == "cpu":
        more = (0, 0, 0, padded_keys(group.count) - group.count)
        result = _tiled(queries, pad(keys, more), pad(values, more), 0, rules)
    else:
        is_full = rules.window is None or rules.window >= group.count
        mask = None if is_full else _causal_mask(group.count, 0, group.count, rules.window, query)
        result = rules.attend(queries, keys, values, mask, is_causal=is_full)
    output[group.start : end] = result.transpose(1, 2).reshape(end - group.start, query.shape[0], -1)


def _attend_later(chunk: LaterChunk, cache: LayerCache, query: Tensor, output: Tensor, rules: ScoreRules) -> None:
    states = cache.blocks.index_select(0, chunk.blocks).flatten(0, 1).transpose(0, 1)[None]
    keys, values = states[..., : cache.shape.key_size], states[..., cache.shape.key_size :]
    mine = query[None, :, chunk.start : chunk.start + chunk.count]
    width, times = keys.shape[2], query.shape[0] // keys.shape[1]
    if rules.is_plain and times * chunk.count <= _TILE:  # query heads that share a key head are tokens of that head
        count = times * chunk.count
        queries = pad(mine.reshape(1, keys.shape[1], count, -1), (0, 0, 0, -count % _QUERY_ROWS))
        result = rules.attend(queries, keys, values, chunk.mask(rules.window, query, times, width))[:, :, :count]
        result = result.reshape(1, query.shape[0], chunk.count, -1)
    else:
        result = _tiled(mine, _repeat(keys, query), _repeat(values, query), chunk.num_before, rules, chunk.last_seen)
    output[chunk.start : chunk.start + chunk.count] = result[0].transpose(0, 1)


def _tiled(
    queries: Tensor,  # [sequences, heads, count, size]
    keys: Tensor,  # [sequences, heads, padded_keys(num_before + count) or more, size]
    values: Tensor,
    num_before: int,
    rules: ScoreRules,
    last_seen: Tensor | None = None,
) -> Tensor:
    """Attention of the tokens from number `num_before` on to themselves and earlier ones, some queries at a time: then
    the scores of most keys that a query does not see are not computed."""
    count, parts = queries.shape[2], list[Tensor]()
    for first in range(0, count, _TILE):
        size = min(_TILE, count - first)
        seen = None if last_seen is None else last_seen[first : first + size]
        width = keys.shape[2] if last_seen is not None else padded_keys(num_before + first + size)
        mask = _causal_mask(size, num_before + first, width, rules.window, queries, seen)
        more = -size % _QUERY_ROWS if rules.is_plain else 0
        mine = pad(queries[:, :, first : first + size], (0, 0, 0, more))
        mask = pad(mask, (0, 0, 0, more), value=True)
        parts.append(rules.attend(mine, keys[:, :, :width], values[:, :, :width], mask)[:, :, :size])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _repeat(states: Tensor, query: Tensor) -> Tensor:
    """Key or value heads [sequences, kv heads, ...], repeated for the query heads that share them."""
    times = query.shape[0] // states.shape[1]
    return states if times == 1 else states.repeat_interleave(times, dim=1)


def _causal_mask(
    count: int, num_before: int, width: int, window: int | None, like: Tensor, last_seen: Tensor | None = None
) -> Tensor:
    """Boolean [count, width]: token i attends to itself and earlier tokens within the window, and to those up to
    `last_seen`."""
    positions = torch.arange(num_before, num_before + count, device=like.device)
    places = torch.arange(width, device=like.device)
    visible = places <= (positions if last_seen is None else last_seen)[:, None]
    return visible if window is None else visible & (places > positions[:, None] - window)
