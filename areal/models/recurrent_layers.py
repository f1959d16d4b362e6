"""Layers of a transformers model that keep a state from token to token: convolutions, linear attention, Mamba.

In a packed row the state would go from one sequence into the next. transformers resets it only with the kernels of
other packages; its own functions refuse such a row, or ignore the borders.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, LinearAttentionCacheLayerMixin
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel

from areal.api.errors import ConfigError
from areal.models.tree_states import Span, StateCalls, cache_parameter, for_each_part, is_one_call, state_calls

_CACHES = {"cache_params", "past_key_values", "state"}
"""Parameters of the forward function of a module that continues a sequence."""
_PROBE = (3, 5)
"""Tokens of the two sequences with which a layer is tested."""


class Branches(Protocol):
    """A row that is a prefix tree."""

    @property
    def spans(self) -> Sequence[Span]: ...


class SequenceBorders(Protocol):
    """The layout of a packed row."""

    @property
    def cu_seqlens(self) -> Tensor: ...
    @property
    def runs(self) -> Sequence[tuple[int, int, int]]:
        """(first token, number of sequences, tokens of each) of neighbours with equal length."""
        ...

    @property
    def tree(self) -> Branches | None: ...
    @property
    def is_probe(self) -> bool: ...


def is_state(kind: str) -> bool:
    """Whether layers of this kind, as configurations name it, have a state in the caches of transformers."""
    return issubclass(DYNAMIC_LAYER_TYPE_MAPPING.get(kind, object), LinearAttentionCacheLayerMixin)


def has_states(config: PretrainedConfig) -> bool:
    return any(map(is_state, getattr(config.get_text_config(), "layer_types", None) or []))


def state_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Name -> module that keeps a state. It takes the cache of its model, has no part that does, and does not call the
    attention function, which has its own cache."""
    candidates: dict[str, nn.Module] = {}
    for name, module in model.get_decoder().named_modules():
        is_block = isinstance(module, GradientCheckpointingLayer)
        if name and not is_block and _takes_cache(module) and not any(_takes_cache(part) for part in _parts(module)):
            candidates[name] = module
    of_attention = {part for module in choosing_layers(model) for part in module.modules()}  # indexers
    return {
        name: layer for name, layer in candidates.items() if layer not in of_attention and not _calls_attention(layer)
    }


def require_native(model: PreTrainedModel) -> None:
    """Raise the ConfigError with which native servers refuse the layers of a model, which may have no weights."""
    outside = [
        f"{type(layer).__name__} keeps its state outside of the caches of transformers"
        for layer in state_layers(model).values()
        if cache_parameter(layer) is None or not isinstance(getattr(layer, "layer_idx", None), int)
    ]
    problems = ["its tokens choose those that they see"] if choosing_layers(model) else outside
    if problems:
        text = f"the native engine cannot serve {type(model).__name__}: {problems[0]}; use sglang or vllm"
        raise ConfigError(text, code="model.unsupported")


def linear_without_call(model: PreTrainedModel) -> set[nn.Module]:
    """Linear layers in which an adapter has no effect or no gradient: layers with a state do not call them, but read
    their weights; an indexer chooses tokens with them."""
    modules: set[nn.Module] = set()
    for module in choosing_layers(model):
        modules |= {part for name, part in module.named_modules() if name.startswith("indexer.")}
    for layer in state_layers(model).values():
        source = inspect.getsource(inspect.unwrap(type(layer).forward))
        parts = {getattr(layer, name) for name in re.findall(r"self\.(\w+)\.weight", source)}
        modules |= {part for part in parts if isinstance(part, nn.Linear)}
    return modules


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if part is not module)


def _takes_cache(module: nn.Module) -> bool:
    return not _CACHES.isdisjoint(inspect.signature(type(module).forward).parameters)


def _calls_attention(module: nn.Module) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names


CHOSEN = {"indexed_attention", "chunked_attention"}
"""Kinds of layers whose tokens see some of those before them: those that an indexer chooses, or those of a chunk."""


def choosing_layers(model: PreTrainedModel) -> dict[nn.Module, int | None]:
    """The attention modules of a model with layers that are CHOSEN, which also look at positions in the row, with the
    tokens of a chunk; None: a mask of all tokens before."""
    config = model.config.get_text_config()
    kinds: list[str] = getattr(config, "layer_types", None) or []
    if CHOSEN.isdisjoint(kinds):
        return {}
    lists = [part for part in model.get_decoder().modules() if isinstance(part, nn.ModuleList)]
    layers = next((part for part in lists if len(part) == len(kinds)), nn.ModuleList())
    return {
        module: config.attention_chunk_size if kind == "chunked_attention" else None
        for kind, layer in zip(kinds, layers, strict=False)
        for module in layer.modules()
        if _calls_attention(module)
    }


def _seen(hidden: Tensor, chunk: int | None) -> Tensor:
    """[n, 1, L, L] bool: the tokens that each token of the sequences [n, L, ...] may see."""
    numbers = torch.arange(hidden.shape[1], device=hidden.device)
    mask = numbers <= numbers[:, None]
    if chunk is not None:
        mask &= numbers // chunk == numbers[:, None] // chunk
    return mask.expand(hidden.shape[0], 1, -1, -1)


class PackedStates:
    """Resets the state of the layers of a model at each sequence of a packed row."""

    def __init__(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype, *, in_compiled: bool) -> None:
        """`dtype` is the compute type, also of the layers' buffers, as in a model that transformers loads in it.
        `in_compiled`: the blocks are compiled, and these layers are left out as attention is."""
        self.layers = list(state_layers(model).values())
        chunk_of = choosing_layers(model)
        self.choosing = list(chunk_of)
        self._layout: SequenceBorders | None = None
        self._tree_calls: StateCalls | None = None
        self._config = model.config.get_text_config()
        if self.layers or chunk_of:
            model.get_decoder().register_forward_pre_hook(self._remember, with_kwargs=True)
        can_reset = {
            kind: device.type != "cpu" and resets_state(kind, self._config, device, dtype)
            for kind in {type(layer) for layer in self.layers}
        }
        for layer, chunk in chunk_of.items():
            forward = functools.partial(self._with_masks, layer.forward, chunk)
            layer.forward = torch.compiler.disable(forward) if in_compiled else forward
        for layer in self.layers:
            for name, buffer in layer._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    layer._buffers[name] = buffer.to(dtype)
            run = _with_borders if can_reset[type(layer)] else _each_sequence
            forward = functools.partial(self._of_row, layer, layer.forward, run)
            layer.forward = torch.compiler.disable(forward) if in_compiled else forward

    def _remember(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Not every block passes the layout of the row to its parts. Blocks that are computed again in the backward
        pass are those of the last row."""
        layout: SequenceBorders | None = kwargs.get("layout")
        self._layout, self._tree_calls = layout, None
        if layout is not None and layout.tree is not None and self.layers:
            self._tree_calls = state_calls(layout.tree.spans, layout.cu_seqlens.device)

    def _of_row(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        run: Callable[..., Any],
        *args: Any,
        layout: object = None,
        **kwargs: Any,
    ) -> Any:
        if self._layout is None or self._layout.is_probe:
            return forward(*args, **kwargs)
        if self._tree_calls is not None:
            return for_each_part(layer, forward, self._tree_calls, args, kwargs, self._config)
        return run(forward, self._layout, args, kwargs)

    def _with_masks(
        self, forward: Callable[..., Any], chunk: int | None, *args: Any, layout: Any = None, **kwargs: Any
    ) -> Any:
        """Call an attention module with the mask of each sequence."""
        layout = self._layout

        def masked(*args: Any, **kwargs: Any) -> Any:
            hidden: Tensor = args[0] if args else kwargs["hidden_states"]
            masks = {} if layout is None else {"layout": dataclasses.replace(layout, is_masked=True)}
            return forward(*args, **kwargs | masks | {"attention_mask": _seen(hidden, chunk)})

        if layout is None or layout.is_probe:
            return masked(*args, **kwargs)
        return for_each_sequence(masked, neighbours(layout.runs), args, kwargs)


def _with_borders(
    forward: Callable[..., Any], layout: SequenceBorders, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return forward(*args, **kwargs, **_borders(layout.cu_seqlens))


def _each_sequence(
    forward: Callable[..., Any], layout: SequenceBorders, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return for_each_sequence(forward, neighbours(layout.runs), args, kwargs)


def neighbours(runs: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """The lengths of the sequences of a row, by call. Those in a call are padded to the longest, which costs less than
    another call: linear attention computes chunks of this size."""
    calls: list[list[int]] = []
    for _, count, length in runs:
        lengths_of_group = [length] * count
        both = [*calls[-1], *lengths_of_group] if calls else lengths_of_group
        if calls and is_one_call(both):
            calls[-1] = both
        else:
            calls.append(lengths_of_group)
    return calls


def for_each_sequence(
    forward: Callable[..., Any], groups: Sequence[Sequence[int]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What `forward` returns of a row [1, T, ...], computed with one call for each group of neighbours, whose lengths
    `groups` has."""
    if len(groups) == 1 and len(groups[0]) == 1:
        return forward(*args, **kwargs)
    values, form = tree_flatten((args, kwargs))
    sizes = [sum(lengths) for lengths in groups]

    def of_groups(value: Any) -> Sequence[Any]:
        is_of_tokens = isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, sum(sizes))
        if not is_of_tokens:
            return [value] * len(sizes)
        # split, because its backward pass is one concatenation
        return [_batched(part[0], lengths) for part, lengths in zip(value.split(sizes, dim=1), groups, strict=True)]

    results: list[list[Any]] = []
    output_form = form
    for lengths, values_of_group in zip(groups, zip(*map(of_groups, values), strict=True), strict=True):
        own_args, own_kwargs = tree_unflatten(list(values_of_group), form)
        outputs, output_form = tree_flatten(forward(*own_args, **own_kwargs))
        results.append([_row(out, lengths) if isinstance(out, Tensor) else out for out in outputs])
    joined = [_joined(each) if isinstance(each[0], Tensor) else each[0] for each in zip(*results, strict=True)]
    return tree_unflatten(joined, output_form)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts of a row. Lists of chosen tokens, which may differ in length, repeat their last one."""
    width = max(part.shape[-1] for part in parts)
    wide = [torch.cat([part, part[..., -1:].expand(*part.shape[:-1], width - part.shape[-1])], -1) for part in parts]
    return torch.cat(wide if len({part.shape[-1] for part in parts}) > 1 else list(parts), dim=1)


def _batched(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """[sum of lengths, ...] -> [sequences, longest, ...]"""
    if len(set(lengths)) == 1:
        return tokens.unflatten(0, (len(lengths), lengths[0]))
    return pad_sequence(list(tokens.split(list(lengths))), batch_first=True)


def _row(batch: Tensor, lengths: Sequence[int]) -> Tensor:
    """[sequences, longest, ...] -> [1, sum of lengths, ...]"""
    if len(set(lengths)) == 1:
        return batch.flatten(0, 1).unsqueeze(0)
    return torch.cat([row[:length] for row, length in zip(batch.unbind(0), lengths, strict=True)]).unsqueeze(0)


def _borders(cu_seqlens: Tensor) -> dict[str, Tensor]:
    """The arguments of transformers for a packed row."""
    lengths = cu_seqlens.diff()
    numbers = torch.arange(lengths.numel(), dtype=torch.int32, device=cu_seqlens.device)
    return {"cu_seq_lens_q": cu_seqlens, "seq_idx": numbers.repeat_interleave(lengths).unsqueeze(0)}


@torch.no_grad()
def resets_state(kind: type[nn.Module], config: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a layer of this kind, with the installed packages, resets its state at the borders of a packed row: the
    outputs of the second sequence have the same bits whatever the first one is."""
    try:
        layer = kind(config, layer_idx=0).to(device, dtype)
        rows = torch.randn(2, 1, sum(_PROBE), config.hidden_size, device=device, dtype=dtype)
        rows[1, :, _PROBE[0] :] = rows[0, :, _PROBE[0] :]
        ends = torch.tensor([0, *_PROBE], device=device).cumsum(0, dtype=torch.int32)
        first, second = (layer(row, **_borders(ends)) for row in rows)
        return torch.equal(first[:, _PROBE[0] :], second[:, _PROBE[0] :])
    except (AttributeError, RuntimeError, TypeError, ValueError):  # of an architecture, or of a missing kernel
        return False
