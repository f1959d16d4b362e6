"""Owns attention over the paged KV cache: the function that transformers' models call instead of their own.

One flat row of tokens goes through the model per step: first the rows of one token each (decoding), then chunks of
prompts. Keys and values of all tokens are written first, so every chunk may read what the same step writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from areal.api.errors import ConfigError

ATTENTION_NAME = "areal_paged"
_REFUSED = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one attention layer stores per token."""

    num_kv_heads: int
    key_size: int
    value_size: int


class LayerCache:
    """Memory for the keys and values of one layer."""

    def __init__(self, blocks: Tensor, shape: LayerShape) -> None:
        self.blocks = blocks  # [num_blocks, block_size, kv heads, key size + value size]
        self.shape = shape
        self._slots = blocks.view(1, -1, *blocks.shape[2:])

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store new keys and values [1, kv heads, tokens, size] at slots (block * block_size + offset)."""
        self._slots.index_copy_(1, slots, torch.cat((key, value), dim=-1).transpose(1, 2))


@dataclass(slots=True, kw_only=True)
class DecodeGroup:
    """Rows start..end-1, one token each, of sequences of similar length."""

    start: int
    end: int
    blocks: Tensor  # [(end - start) * width] int64, padded with any valid block
    width: int
    lengths: list[int]  # per row: tokens to attend to, its own included
    max_length: int
    workspace: Tensor
    """Flat memory that blocks are gathered into layer after layer, so that it stays in the CPU's cache."""
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
            found = target.view(-1, self.width * shape[1], *shape[2:])[:, : self.max_length].transpose(1, 2)
            key_size = cache.shape.key_size
            views = self.views[cache.shape] = (target, found[..., :key_size], found[..., key_size:])
        torch.index_select(cache.blocks, 0, self.blocks, out=views[0])
        return views[1], views[2]

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [rows, 1, 1, max_length] for a sliding window (None = full attention); made once a step."""
        if window is not None and window >= self.max_length:
            window = None
        if window not in self.masks:
            mask = None
            if window is not None or min(self.lengths) < self.max_length:
                places = torch.arange(self.max_length, device=self.blocks.device)
                lengths = torch.tensor(self.lengths, device=self.blocks.device)[:, None]
                hidden = places >= lengths
                if window is not None:
                    hidden |= places < lengths - window
                mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
                mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None, :]
            self.masks[window] = mask
        return self.masks[window]


@dataclass(slots=True, kw_only=True)
class PromptGroup:
    """`num_sequences` prompts of `count` tokens each, whole or their first chunks, from row `start` on."""

    start: int
    num_sequences: int
    count: int


@dataclass(slots=True, kw_only=True)
class LaterChunk:
    """`count` tokens of one sequence from row `start` on, `num_before` tokens of which are in the cache already."""

    start: int
    count: int
    num_before: int
    blocks: Tensor  # [width] int64


@dataclass(slots=True, kw_only=True)
class AttentionPlan:
    """One step as the attention layers see it."""

    caches: list[LayerCache]
    slots: Tensor  # [tokens] int64: block * block_size + offset
    decode: list[DecodeGroup]
    prompts: list[PromptGroup]
    later: list[LaterChunk]


@dataclass(slots=True, kw_only=True)
class AttentionProbe:
    """In place of a plan: writes down what the layers of a model look like."""

    shapes: dict[int, LayerShape] = field(default_factory=dict[int, LayerShape])


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers. There is no mask function of that name, so no mask is made."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, key size]
    key: Tensor,  # [1, kv heads, tokens, key size]
    value: Tensor,  # [1, kv heads, tokens, value size]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attention_plan: AttentionPlan | AttentionProbe | None = None,
    **options: object,  # transformers passes what a model's author thought of
) -> tuple[Tensor, None]:
    """One layer's attention: store new keys and values, then attend per group. Gives [1, tokens, heads, size]."""
    if isinstance(attention_plan, AttentionProbe):
        return _probe(attention_plan, module, query, key, value, options), None
    assert attention_plan is not None, "the model was called by somebody else than the model runner"
    cache = attention_plan.caches[_layer_of(module)]
    cache.write(attention_plan.slots, key, value)
    rows = query.transpose(1, 2)
    groups = attention_plan.decode
    if len(groups) == 1 and groups[0].end == rows.shape[1]:
        return _attend_decode(groups[0], cache, rows, scaling, sliding_window), None
    output = torch.empty((*rows.shape[:3], value.shape[-1]), dtype=value.dtype, device=value.device)
    for group in groups:
        mine = rows[:, group.start : group.end]
        output[:, group.start : group.end] = _attend_decode(group, cache, mine, scaling, sliding_window)
    for prompts in attention_plan.prompts:
        _attend_prompts(prompts, query[0], key[0], value[0], output[0], scaling, sliding_window)
    for chunk in attention_plan.later:
        _attend_later(chunk, cache, query[0], output[0], scaling, sliding_window)
    return output, None


def _probe(
    probe: AttentionProbe, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, object]
) -> Tensor:
    for name in _REFUSED:
        if options.get(name) is not None:
            raise ConfigError(f"the native engine does not support this model: its attention uses {name}; use sglang")
    probe.shapes[_layer_of(module)] = LayerShape(
        num_kv_heads=key.shape[1], key_size=key.shape[3], value_size=value.shape[3]
    )
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _layer_of(module: nn.Module) -> int:
    layer = module.layer_idx  # every attention module of transformers has one
    assert isinstance(layer, int)
    return layer


def _attend_decode(
    group: DecodeGroup, cache: LayerCache, rows: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """Output of a group's rows [1, rows, heads, size]. Query heads that share a key head act as its query tokens."""
    keys, values = group.gather(cache)
    queries = rows.reshape(keys.shape[0], keys.shape[1], -1, rows.shape[-1])
    mask = group.mask(window, rows.dtype)
    result = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
    return result.reshape(1, *rows.shape[1:3], values.shape[-1])


def _attend_prompts(
    group: PromptGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    scaling: float | None,
    window: int | None,
) -> None:
    end = group.start + group.num_sequences * group.count

    def split(states: Tensor) -> Tensor:  # [heads, tokens, size] -> [sequences, heads, count, size]
        return states[:, group.start : end].unflatten(1, (group.num_sequences, group.count)).transpose(0, 1)

    queries, keys, values = split(query), _repeat(split(key), query), _repeat(split(value), query)
    if window is None or window >= group.count:
        result = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling)
    else:
        mask = _causal_mask(group.count, 0, window, query)
        result = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
    output[group.start : end] = result.transpose(1, 2).reshape(end - group.start, query.shape[0], -1)


def _attend_later(
    chunk: LaterChunk,
    cache: LayerCache,
    query: Tensor,
    output: Tensor,
    scaling: float | None,
    window: int | None,
) -> None:
    total = chunk.num_before + chunk.count
    found = cache.blocks.index_select(0, chunk.blocks).flatten(0, 1)[:total].transpose(0, 1)[None]
    keys, values = found[..., : cache.shape.key_size], found[..., cache.shape.key_size :]
    mask = _causal_mask(chunk.count, chunk.num_before, window, query)
    mine = query[None, :, chunk.start : chunk.start + chunk.count]
    result = scaled_dot_product_attention(
        mine, _repeat(keys, query), _repeat(values, query), attn_mask=mask, scale=scaling
    )
    output[chunk.start : chunk.start + chunk.count] = result[0].transpose(0, 1)


def _repeat(states: Tensor, query: Tensor) -> Tensor:
    """Key or value heads [sequences, kv heads, ...], each as often as query heads share it."""
    times = query.shape[0] // states.shape[1]
    return states if times == 1 else states.repeat_interleave(times, dim=1)


def _causal_mask(count: int, num_before: int, window: int | None, like: Tensor) -> Tensor:
    """Boolean [count, num_before + count]: token i sees everything up to itself, within the window."""
    last = torch.arange(num_before, num_before + count, device=like.device)[:, None]
    places = torch.arange(num_before + count, device=like.device)
    visible = places <= last
    return visible if window is None else visible & (places > last - window)
