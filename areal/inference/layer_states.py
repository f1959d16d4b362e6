"""The states of layers that keep one from token to token: of constant size for each running sequence.

They are beside the paged cache of the attention layers. A layer is called for one span of a step after another: the
decode rows, prompts of equal length, later chunks of prompts. A sequence has the same slot in every layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache, LinearAttentionLayer
from transformers.modeling_utils import PreTrainedModel

from areal.inference.prefix_cache import Snapshots
from areal.inference.scheduler import Sequence, Status
from areal.models.recurrent_layers import for_each_sequence, require_native, state_layers
from areal.models.tree_states import cache_parameter

_NO_LIMIT = (0.0, math.inf)
_TRIAL = (3, 2)
"""Tokens of two parts of a sequence with which a layer is tried."""


@dataclass(frozen=True, slots=True)
class Span:
    """`count` tokens of each of some sequences, which are neighbours in the row of a step."""

    sequences: list[Sequence]
    count: int
    is_first: bool
    """The tokens are the first ones of the sequences."""
    border: int = 0
    snapshots: list[int] = field(default_factory=list[int])
    """Slots for the states behind the first `border` tokens; none where it is 0."""


@dataclass(slots=True, eq=False)
class _Layer:
    index: int
    """Number of the layer in the cache of transformers."""
    takes_several: bool
    """One call can continue a state by several tokens; else each call continues it by one token."""
    kept: list[list[Tensor | None]]
    """For each state that the layer has: convolution and recurrence, [slots, ...]. A probe has one slot."""

    def cache(self, slots: Tensor | None, *, is_first: bool = True) -> LinearAttentionLayer:
        """What transformers continues from; without slots an empty one, whose tensors it makes."""
        layer = LinearAttentionLayer(len(self.kept))
        for number, (convolution, recurrence) in enumerate(self.kept if slots is not None else ()):
            layer.has_previous_state[number] = not is_first
            if convolution is not None:
                layer.conv_states[number] = convolution[slots]
                layer.conv_kernel_size[number] = convolution.shape[-1]
                layer.is_conv_states_initialized[number] = True
            if recurrence is not None:
                layer.recurrent_states[number] = recurrence[slots]
                layer.is_recurrent_states_initialized[number] = True
        return layer

    def keep(self, layer: LinearAttentionLayer, slots: Tensor) -> None:
        for number, (convolution, recurrence) in enumerate(self.kept):
            for tensor, new in ((convolution, layer.conv_states[number]), (recurrence, layer.recurrent_states[number])):
                if tensor is not None and new is not None:
                    tensor[slots] = new

    def tensors(self) -> Iterable[Tensor]:
        return (tensor for pair in self.kept for tensor in pair if tensor is not None)


class LayerStates:
    """All states of a model that has such layers. Only the engine thread uses it."""

    def __init__(self, model: PreTrainedModel) -> None:
        """The model computes as before until `begin` is called. ConfigError for one that cannot be served."""
        require_native(model)
        self._device = model.device
        self.num_layers: int = model.config.get_text_config().num_hidden_layers
        self._layers: list[_Layer] = []
        self._slots: dict[Sequence, int] = {}
        self._free: list[int] = []
        self._spans: list[tuple[Tensor, Span]] | None = None
        """Slots of the step's sequences; None: the model is probed."""
        self.span: Span | None = None
        """The one for which a layer is called now."""
        self.parts: set[nn.Module] = set()
        """All modules inside of the layers."""
        number = max(getattr(model.config.get_text_config(), "number_of_conv_states", 1), 1)
        self._caches = Cache(layers=[LinearAttentionLayer() for _ in range(self.num_layers)])
        for module in state_layers(model).values():
            name, index = cache_parameter(module), module.layer_idx
            assert name is not None
            assert isinstance(index, int)
            layer = _Layer(index, False, [[None, None] for _ in range(number)])
            self._layers.append(layer)
            self.parts |= set(module.modules())
            if getattr(module, "time_step_limit", _NO_LIMIT) != _NO_LIMIT:
                module.get_submodule("in_proj").register_forward_hook(functools.partial(_limit_steps, module))
            module.forward = functools.partial(self._forward, layer, module.forward, name)
        self.indices = {layer.index for layer in self._layers}
        """The layers that have a state."""

    @property
    def bytes_per_slot(self) -> int:
        return sum(tensor[:1].nbytes for layer in self._layers for tensor in layer.tensors())

    def allocate(self, max_running: int, num_snapshots: int) -> Snapshots | None:
        """After the probe: memory for this number of running sequences, and for snapshots. None without states."""
        self._free = list(range(max_running - 1, -1, -1))
        num_slots = max_running + num_snapshots
        for layer in self._layers:
            layer.kept = [
                [
                    None
                    if tensor is None
                    else zeroed_memory((num_slots, *tensor.shape[1:]), tensor.dtype, tensor.device)
                    for tensor in pair
                ]
                for pair in layer.kept
            ]
        return Snapshots(range(max_running, num_slots)) if self.indices else None

    def begin(self, spans: list[Span], first: Iterable[Sequence], copied: dict[Sequence, int]) -> None:
        """The next step computes these spans; the sequences `first` begin with it, those of `copied` from a slot."""
        for sequence in [sequence for sequence in self._slots if sequence.status is not Status.RUNNING]:
            self._free.append(self._slots.pop(sequence))
        new = [self._slot_of(sequence) for sequence in first]
        for layer in self._layers if new else ():
            for tensor in layer.tensors():
                tensor[new] = 0
        self._copy(copied.values(), [self._slot_of(sequence) for sequence in copied])
        self._spans = [
            (torch.tensor([self._slot_of(sequence) for sequence in span.sequences], device=self._device), span)
            for span in spans
        ]

    def copy(self, source: Sequence, targets: Iterable[Sequence]) -> None:
        """The targets continue from the state of `source`."""
        slots = [self._slot_of(target) for target in targets]
        self._copy([self._slots[source]] * len(slots), slots)

    def save(self, sequences: Iterable[Sequence]) -> None:
        """Copy states to the slots of the snapshots of these sequences."""
        pairs = [(self._slots[sequence], sequence.snapshot) for sequence in sequences if sequence.snapshot is not None]
        self._copy([source for source, _ in pairs], [target for _, target in pairs])

    def _copy(self, sources: Iterable[int], targets: list[int]) -> None:
        taken = list(sources)
        for layer in self._layers if taken else ():
            for tensor in layer.tensors():
                tensor[targets] = tensor[taken]

    def _slot_of(self, sequence: Sequence) -> int:
        if sequence not in self._slots:
            self._slots[sequence] = self._free.pop()
        return self._slots[sequence]

    def _forward(self, layer: _Layer, forward: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("attention_plan", None)
        kwargs.pop(name, None)
        if self._spans is None:
            return self._probe(layer, functools.partial(forward, **{name: self._caches}), args, kwargs)
        spans = iter(self._spans)

        def run(*args: Any, **kwargs: Any) -> Any:
            slots, self.span = next(spans)
            span = self.span
            self._caches.layers[layer.index] = cached = layer.cache(slots, is_first=span.is_first)
            call = functools.partial(forward, **{name: self._caches})
            if not span.border:
                output = computed(call, span.count, (args, kwargs), at_once=span.is_first)
            else:
                before, after = (_part((args, kwargs), *ends) for ends in ((0, span.border), (span.border, span.count)))
                output = computed(call, span.border, before, at_once=span.is_first)
                layer.keep(cached, torch.tensor(span.snapshots, device=self._device))
                if span.count > span.border:
                    rest = computed(call, span.count - span.border, after, at_once=False)
                    output = torch.cat((output, rest), dim=1)
            layer.keep(cached, slots)
            return output

        def computed(call: Callable[..., Any], count: int, inputs: Any, *, at_once: bool) -> Any:
            if at_once or layer.takes_several or count == 1:
                return call(*inputs[0], **inputs[1])
            return one_by_one(call, count, *inputs)

        groups = [[span.count] * len(slots) for slots, span in self._spans]
        return for_each_sequence(run, groups, args, kwargs)

    def _probe(self, layer: _Layer, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The output for one token. Notes the shapes of the state, and tries to continue one by several tokens."""
        self._caches.layers[layer.index] = cached = layer.cache(None)
        output = forward(*args, **kwargs)
        layer.kept = [[cached.conv_states[i], cached.recurrent_states[i]] for i in range(len(layer.kept))]
        longer = tree_map(_longer, (args, kwargs))
        self._caches.layers[layer.index] = layer.cache(None)
        whole = forward(*longer[0], **longer[1])
        self._caches.layers[layer.index] = layer.cache(None)
        cut, end = _TRIAL[0], sum(_TRIAL)
        with suppress(RuntimeError):  # of a layer that continues a state by one token only
            _, last = (forward(*part[0], **part[1]) for part in (_part(longer, 0, cut), _part(longer, cut, end)))
            layer.takes_several = bool((last - whole[:, cut:]).norm() <= 0.01 * last.norm())
        return output


def one_by_one(forward: Callable[..., Any], count: int, args: Any, kwargs: dict[str, Any]) -> Any:
    """The outputs [n, count, ...] of calls with one token each."""
    parts = [_part((args, kwargs), place, place + 1) for place in range(count)]
    return torch.cat([forward(*part[0], **part[1]) for part in parts], dim=1)


def _part(inputs: tuple[Any, dict[str, Any]], start: int, end: int) -> tuple[Any, dict[str, Any]]:
    return tree_map(
        lambda value: value[:, start:end] if isinstance(value, Tensor) and value.ndim > 1 else value, inputs
    )


def _longer(value: Any) -> Any:
    """A token's input, made that of several tokens that differ."""
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != 1 or not value.is_floating_point():
        return value
    factors = torch.linspace(-1.0, 1.0, sum(_TRIAL), device=value.device, dtype=value.dtype).cos()
    return value * factors.view(1, -1, *[1] * (value.ndim - 2))


def _limit_steps(layer: Any, linear: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Keep time steps, the last outputs of a projection, within the limits of a Mamba layer. transformers does so where
    it computes several tokens at once, but not for one."""
    low, high = (math.log(math.expm1(limit)) if limit else -math.inf for limit in layer.time_step_limit)
    steps = (output[..., -layer.num_heads :] + layer.dt_bias).clamp(low, high) - layer.dt_bias
    return torch.cat((output[..., : -layer.num_heads], steps.to(output.dtype)), dim=-1)


def zeroed_memory(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On CPU, untouched pages use no memory."""
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    # numpy gets zeroed pages from the system, which use no memory before they are touched; torch would write zeros.
    flat = np.zeros(int(np.prod(sizes)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).view(sizes)
