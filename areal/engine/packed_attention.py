"""Attention over packed rows: causal within each sequence, none between sequences, no padding.

transformers calls the registered function for every layer; the layout of the row is passed as a keyword argument.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from areal.api.errors import ConfigError
from areal.engine.mesh import RankGroup
from areal.engine.tree_attention import TreeLayout, tree_attention
from areal.models.attention import attention_problem, capped_attention, described_masks, seen_attention
from areal.models.recurrent_layers import CHOSEN, is_state

# ----------------------------------------------------------------------------------------------------------------------
# Packed rows over context ranks (Ulysses): each rank computes every c-th token, and some heads of all tokens.
#
# Token t of a row belongs to rank t mod c, so each rank has an equal part, to one token, of every prompt and answer.


def own_tokens(values: Tensor, ranks: RankGroup, fill: float = 0) -> Tensor:
    """The values of this rank's tokens, [ceil(T / c), ...] of [T, ...]; missing ones at the end are `fill`."""
    local = values[ranks.rank :: ranks.size]
    missing = -(-values.shape[0] // ranks.size) - local.shape[0]
    return torch.cat([local, local.new_full((missing, *local.shape[1:]), fill)]) if missing else local


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
    for state in states:
        heads = repeated_heads(queries, state.shape[1], c)
        state = state if heads == state.shape[1] else state.repeat_interleave(heads // state.shape[1], dim=1)
        sent.append(state[0].unflatten(0, (c, heads // c)))  # [c, H/c, T/c, D]
    received = _exchange(sent, ranks)
    return [part.permute(1, 2, 0, 3).flatten(1, 2).unsqueeze(0) for part in received]


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
    flat = torch.cat([state.flatten(1) for state in states], dim=1)
    received: Tensor = _AllToAll.apply(flat, ranks)  # pyright: ignore[reportAssignmentType]
    parts = received.split([math.prod(state.shape[1:]) for state in states], dim=1)
    return [part.unflatten(1, state.shape[1:]) for part, state in zip(parts, states, strict=True)]


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


SDPA = "areal_packed_per_sequence"  # transformers looks for support of torch's attention behind "sdpa" in a name
VARLEN = "areal_packed_varlen"
SHORT_ON_CPU = 256
"""Tokens of a sequence below which the backward pass of attention on the CPU is slower in half precision than in
float32: 10 times with 16 tokens."""
LONG = 1024
"""Tokens of a sequence from which a sliding window is computed in blocks, without a mask of the whole sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Boundaries of the sequences of one packed row."""

    cu_seqlens: Tensor  # [S + 1] int32, on the model's device
    max_seqlen: int
    runs: tuple[tuple[int, int, int], ...]
    """(first token, number of sequences, tokens of each) of neighbours with equal length: they share one call."""
    context: RankGroup | None = None
    """Set when this rank computes only its part of the row's tokens."""
    num_tokens: int = 0
    """Tokens of the row without padding, when `context` is set."""
    tree: TreeLayout | None = None
    """Set when the row is a prefix tree; the other fields are those of the rows of the tree."""
    blocks: Tensor | None = None
    """[T] int64: tokens of a sequence with equal numbers from 0 attend to each other, also forwards. Only for sdpa."""
    is_probe: bool = False
    """Set by `require_packed_attention`."""
    is_masked: bool = False
    """Set where sequences are a batch [n, H, L, D], and the layer passes the mask of what its tokens see."""


def packed_layout(cu_seqlens: Tensor, lengths: list[int]) -> PackedLayout:
    """The layout of a row whose sequences have `lengths`. Neighbours of equal length make attention faster."""
    counts = [(length, len(list(same))) for length, same in groupby(lengths)]
    starts = accumulate((length * count for length, count in counts), initial=0)
    runs = tuple((start, count, length) for start, (length, count) in zip(starts, counts, strict=False))
    return PackedLayout(cu_seqlens=cu_seqlens, max_seqlen=max(lengths), runs=runs)


def choose_attention(attn_impl: str, device: torch.device, dtype: torch.dtype, *, in_compiled: bool = False) -> str:
    """Register the attention functions with transformers and return the name of the one that `attn_impl` selects.

    `in_compiled`: for blocks that torch.compile compiles. The function is then not compiled, because it would be again
    for every layout of a row.
    """
    suffix = "_in_compiled" if in_compiled else ""
    for name, attention in ((SDPA, _sdpa_per_sequence), (VARLEN, _varlen)):
        attend = _over_context(attention)
        AttentionInterface.register(name + suffix, torch.compiler.disable(attend) if in_compiled else attend)
    can_use_kernel = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if attn_impl == "varlen" and not can_use_kernel:
        message = f"attn_impl=varlen needs CUDA and bfloat16, not {device.type} and {dtype}: use attn_impl=auto"
        raise ConfigError(message, code="model.attention_unavailable")
    return (VARLEN if attn_impl != "sdpa" and can_use_kernel else SDPA) + suffix


class _AttentionReached(Exception):
    """Ends a probe of `require_packed_attention`, or a block in it."""


def require_packed_attention(model: PreTrainedModel, states: Sequence[nn.Module] = ()) -> None:
    """Raise ConfigError unless the attention layers call the registered function, as packed rows need it.

    What a model declares about attention functions is not always true. The model may be without memory: its blocks end
    at their attention. Where that fails, layers remain unseen, which is safe if all tokens see all before them.
    `states`: the modules that keep a state, which run for each sequence.
    """
    decoder = model.get_decoder()
    device = next(model.get_input_embeddings().parameters()).device
    ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
    layout = replace(packed_layout(torch.tensor([0, 2], dtype=torch.int32), [2]), is_probe=True)
    config = model.config.get_text_config()
    blocks = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    reached: list[nn.Module] = []
    reason, is_enough, is_whole = "it calls none", False, False
    with torch.no_grad(), described_masks(str(config._attn_implementation)) as masks, _cut(blocks, reached):
        try:
            places = torch.arange(2, device=device).unsqueeze(0)
            mask = torch.ones(1, 2, dtype=torch.int64, device="cpu")  # with values, which masks of states look at
            tokens = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
            outputs = decoder(**tokens, use_cache=False, layout=layout)
            if reached or states:
                reason = "its decoder returns no hidden states"
                is_whole = getattr(outputs, "last_hidden_state", None) is not None
        except _AttentionReached:
            reason, is_enough = "its layers cannot be seen one by one", True
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            # of tensors without memory, to choose experts, whose grouped product takes bfloat16 alone on "meta"
            says = str(error).lower()
            needs_values = (
                device.type == "meta" and isinstance(error, RuntimeError) and ("meta" in says or "bf16" in says)
            )
            reason, is_enough = (str(error).splitlines() or [type(error).__name__])[0], bool(reached) or needs_values
    has_windows = bool(getattr(config, "sliding_window", None)) or not all(mask.is_window(None) for mask in masks)
    if is_whole or (is_enough and not has_windows):
        return
    message = f"{type(model).__name__} cannot use the attention function for packed rows: {reason}"
    raise ConfigError(message, code="model.unsupported")


_PLAIN = {"full_attention", "sliding_attention", "mlp", "moe"}
"""Kinds of layers whose tokens see others in attention alone, or not at all."""


def require_known_layers(model: PreTrainedModel, states: Sequence[nn.Module]) -> None:
    """Raise ConfigError for a kind of layers, as the configuration names it, that lets tokens see others by something
    else than attention, full or in a window, and a state that transformers caches."""
    kinds: list[str] = getattr(model.config.get_text_config(), "layer_types", None) or []
    layers = [part for part in model.get_decoder().modules() if isinstance(part, nn.ModuleList)]
    layers = next((part for part in layers if len(part) == len(kinds)), [None] * len(kinds))
    for kind, layer in zip(kinds, layers, strict=True):
        if kind in _PLAIN | CHOSEN or (
            is_state(kind) and layer is not None and not set(layer.modules()).isdisjoint(states)
        ):
            continue
        text = (
            "have states that no cache of transformers holds"
            if is_state(kind)
            else "see other tokens than all before, or those in a window"
        )
        message = f"{type(model).__name__} cannot use packed rows: its {kind} layers {text}"
        raise ConfigError(message, code="model.unsupported")


@contextmanager
def _cut(blocks: Sequence[nn.Module], reached: list[nn.Module]) -> Iterator[None]:
    """Let blocks return their input when attention is reached, inside the block. `reached` gets these blocks."""

    def forward(block: nn.Module, whole: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return whole(hidden, *args, **kwargs)
        except _AttentionReached:
            reached.append(block)
            return hidden

    for block in blocks:
        block.forward = functools.partial(forward, block, block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def attention_function(attn_impl: str, device: torch.device, dtype: torch.dtype) -> Callable[..., tuple[Tensor, None]]:
    """The attention function that `choose_attention` selects."""
    return AttentionInterface()[choose_attention(attn_impl, device, dtype)]


def _over_context(attention: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """The same function for a rank that has a part of the row's tokens."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        layout: PackedLayout,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if layout.is_probe:
            if not layout.is_masked and (problem := attention_problem(module, attention_mask, options)) is not None:
                raise ConfigError(problem, code="model.unsupported")
            raise _AttentionReached
        if layout.is_masked and isinstance(attention_mask, Tensor):
            return seen_attention(module, query, key, value, attention_mask, **options), None
        if (ranks := layout.context) is None:
            return attention(module, query, key, value, attention_mask, layout=layout, **options)
        query, key, value = heads_of_all_tokens((query, key, value), ranks)
        if (sinks := options.get("s_aux")) is not None:
            options["s_aux"] = sinks.chunk(ranks.size)[ranks.rank]
        out, _ = attention(module, query, key, value, attention_mask, layout=layout, **options)
        return tokens_of_all_heads(out, ranks), None

    return attend


def _sdpa_per_sequence(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H_kv, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H], sinks
    **unused: Any,  # transformers also passes position_ids and others
) -> tuple[Tensor, None]:
    """One call of an attention function per run of sequences with equal length. Returns [1, T, H, D]."""
    _require_causal(module, attention_mask)
    repeats = query.shape[1] // key.shape[1]
    attend = functools.partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=scaling)
    if has_rules := softcap is not None or s_aux is not None:
        sinks = None if s_aux is None else s_aux.view(-1, 1, 1)
        attend = functools.partial(capped_attention, dropout_p=dropout, scale=scaling, softcap=softcap, sinks=sinks)
    if layout.tree is not None:
        in_parts = attend if has_rules or query.device.type != "cpu" else None
        rules: dict[str, Any] = {"scale": scaling, "window": sliding_window, "softcap": None, "attend": in_parts}
        return tree_attention(query, key, value, layout.tree, **rules), None
    shapes = [(count, length) for _, count, length in layout.runs]
    # split, because its backward pass is one concatenation; that of a slice fills a gradient of the whole row
    sizes = [count * length for count, length in shapes]
    runs = zip(*(states[0].split(sizes, dim=1) for states in (query, key, value)), strict=True)
    parts: list[Tensor] = []
    for run, shape, states in zip(layout.runs, shapes, runs, strict=True):
        q, k, v = (each.unflatten(1, shape).transpose(0, 1) for each in states)
        if repeats > 1:  # enable_gqa would take the slow path on the CPU
            k, v = (each.repeat_interleave(repeats, dim=1) for each in (k, v))
        is_long = sliding_window is not None and shape[1] >= max(2 * sliding_window, LONG)
        if is_long and layout.blocks is None:
            parts.append(_within_window(attend, (q, k, v), sliding_window or 0).transpose(1, 2).flatten(0, 1))
            continue
        mask = _mask(layout, run, sliding_window)
        is_slow = q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.shape[2] < SHORT_ON_CPU
        if is_slow and not dropout and not has_rules and torch.is_grad_enabled():
            out = _Float32Gradients.apply(q, k, v, mask, scaling)
        else:
            out = attend(q, k, v, attn_mask=mask, is_causal=mask is None)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined.unsqueeze(0), None


def _within_window(attend: Callable[..., Tensor], states: tuple[Tensor, ...], window: int) -> Tensor:
    """Attention of sequences that are longer than two windows, [n, H, L, D] of each: without a mask of L x L, because
    each block of `window` tokens sees no more than itself and the block before it."""
    length = states[0].shape[2]
    missing = -length % window
    q, k, v = (F.pad(each, (0, 0, 0, missing)).unflatten(2, (-1, window)).transpose(1, 2) for each in states)
    first = attend(q[:, 0], k[:, 0], v[:, 0], is_causal=True)
    keys, values = (torch.cat([each[:, :-1], each[:, 1:]], dim=3).flatten(0, 1) for each in (k, v))
    seen = torch.ones(window, 2 * window, dtype=torch.bool, device=q.device).tril(window).triu(1)
    rest = attend(q[:, 1:].flatten(0, 1), keys, values, attn_mask=seen).unflatten(0, (len(q), -1))
    return torch.cat([first.unsqueeze(1), rest], dim=1).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _mask(layout: PackedLayout, run: tuple[int, int, int], window: int | None) -> Tensor | None:
    """What the tokens of a run see where that is more or less than those before: [length, length], or one for each
    sequence [n, 1, length, length]. None: causal.
    """
    start, count, length = run
    is_cut = window is not None and window < length
    if layout.blocks is None and not is_cut:
        return None
    mask = torch.ones(length, length, dtype=torch.bool, device=layout.cu_seqlens.device).tril()
    if layout.blocks is not None:
        numbers = layout.blocks[start : start + count * length].view(count, 1, length)
        is_one = (numbers[..., None] == numbers[..., None, :]) & (numbers[..., None] >= 0)
        if is_one.any():
            mask = mask | is_one
        elif not is_cut:
            return None
    return mask.triu(1 - window) if is_cut and window is not None else mask


class _Float32Gradients(torch.autograd.Function):
    """Attention in half precision with gradients that are computed in float32."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.options = {"is_causal": mask is None, "scale": scale}
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **ctx.options)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        *states, mask = ctx.saved_tensors
        with torch.enable_grad():
            exact = [each.detach().float().requires_grad_() for each in states]
            out = F.scaled_dot_product_attention(*exact, attn_mask=mask, **ctx.options)
        gradients = torch.autograd.grad(out, exact, upstream.float())
        return *(each.to(upstream.dtype) for each in gradients), None, None


def _varlen(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H_kv, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,  # transformers also passes position_ids and others
) -> tuple[Tensor, None]:
    """torch's variable-length kernel on the whole row (CUDA, half precision). Returns [1, T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"layout": layout, "scaling": scaling, "dropout": dropout}
    if layout.tree is not None and s_aux is None:
        rules: dict[str, Any] = {"scale": scaling, "window": sliding_window, "softcap": softcap, "attend": None}
        return tree_attention(query, key, value, layout.tree, **rules), None
    if softcap is not None or s_aux is not None:  # the kernel has no gradient of these
        options |= {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        return _sdpa_per_sequence(module, query, key, value, attention_mask, **options)
    _require_causal(module, attention_mask)
    if dropout:
        message = "the variable-length kernel has no dropout: set disable_dropout=true or attn_impl=sdpa"
        raise ConfigError(message, code="model.attention_unavailable")
    q, k, v = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    grouped: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if _has_grouped_heads(varlen_attn):
            grouped["enable_gqa"] = True
        else:  # torch 2.11 wants equal numbers of heads
            k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
    bounds, longest = layout.cu_seqlens, layout.max_seqlen
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # (-1, 0) means causal
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=window, **grouped)
    return out.unsqueeze(0), None  # pyright: ignore[reportAttributeAccessIssue] - a tensor, as return_aux is not given


@functools.cache
def _has_grouped_heads(kernel: Callable[..., object]) -> bool:
    """Whether torch's kernel reads the keys and values of a group of heads once."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _require_causal(module: nn.Module, attention_mask: Tensor | None) -> None:
    """A mask would make transformers ignore the packing without an error."""
    if attention_mask is not None:
        raise RuntimeError("packed rows accept no attention mask")
    if not getattr(module, "is_causal", True):
        message = "the model has attention layers that are not causal, which the FSDP engine does not support"
        raise ConfigError(message, code="model.unsupported")
