"""LoRA adapters by request: loading, and the low-rank products that a step adds to those of the base model.

The products of all rows of a step are computed at once, for groups of adapters side by side, from the first to the last
that a row has; the parts of a row that belong to other adapters are set to zero before the second product. So a step
with several adapters has as many operations as one with one, adapters without requests cost little, and the bits of a
row do not depend on the adapters of the others: in float32 on the CPU the sums of these products are in one order for
any number of rows from 16 on and any number of columns, as long as their parts are at most `_PART` long and the ranks
are multiples of 16.
"""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_utils import PreTrainedModel

from areal.api.config.train import LoRAConfig
from areal.api.errors import InputError, RequestError
from areal.inference.layer_states import LayerStates
from areal.inference.request_parser import RequestLimits
from areal.inference.scheduler import Sequence
from areal.inference.weight_update import AdapterChanges
from areal.models.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE_COPY,
    DOWN,
    PREFIX,
    UP,
    adapter_weights,
    is_of_experts,
)
from areal.models.recurrent_layers import linear_without_call

_RANK_STEP = 16
_GROUP_RANKS = 256
"""Ranks of the adapters of a group, unless one of them has more."""
_PART = 512


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The weights of an adapter in the dtype of the model."""

    number: int
    """Never used again, from 1 on."""
    rank: int
    """A multiple of 16; the weights of the ranks behind those of the file are zeros."""
    weights: dict[nn.Linear, tuple[Tensor, Tensor]]  # [inputs, rank], and [rank, outputs] multiplied by the scale


class _Group:
    """Adapters whose products are computed at once."""

    def __init__(self, adapters: Items[Adapter], minus: Adapter | None) -> None:
        """`minus`: an adapter with number 0 that is added to the products of each of them."""
        self.adapters, self.minus = adapters, minus
        self.numbers = {adapter.number for adapter in adapters}
        self.rank = sum(adapter.rank for adapter in adapters)
        self.weights: dict[nn.Linear, tuple[Tensor, Tensor]] = {}
        parts = [part for adapter in adapters for part in (adapter, minus) if part is not None]
        for module in dict.fromkeys(module for part in parts for module in part.weights):
            pairs = [self._pair(part, module) for part in parts]
            self.weights[module] = torch.cat([down for down, _ in pairs], 1), torch.cat([up for _, up in pairs])
        more = 0 if minus is None else minus.rank
        columns = [number for adapter in adapters for number in [adapter.number] * (adapter.rank + more)]
        self.columns = torch.tensor(columns, device=next(iter(self.weights.values()))[0].device)
        """The adapter of each rank."""
        self.spans = {
            number: (columns.index(number), columns.index(number) + columns.count(number)) for number in self.numbers
        }
        """Adapter -> the first of its ranks, and their end."""

    @staticmethod
    def _pair(adapter: Adapter, module: nn.Linear) -> tuple[Tensor, Tensor]:
        if module in adapter.weights:
            return adapter.weights[module]
        like = module.weight
        return like.new_zeros(module.in_features, adapter.rank), like.new_zeros(adapter.rank, module.out_features)


_Masks = list[tuple[_Group, slice, Tensor]]
"""Groups, the ranks of the adapters that rows have, and which belong to others than that of a row: bool [rows, ranks].
"""


class AdapterProducts:
    """What the linear layers of a model add for the rows of a step. Only the engine thread uses it, but for
    `changed`."""

    def __init__(self, model: PreTrainedModel, states: LayerStates) -> None:
        self.groups: list[_Group] = []
        self._states = states
        self._of_rows: _Masks = []
        self._of_kept: _Masks = []
        """Masks of the rows whose logits are computed."""
        self._head = model.get_output_embeddings()
        self._model = model
        self._wrapped: set[nn.Linear] = set()
        self._numbers = itertools.count(1)
        self.merged: AdapterChanges | None = None
        """The adapter that is merged into the weights of the model."""
        self._minus: Adapter | None = None  # The negative of `merged`, once a request can name an adapter.

    def numbers(self, sequences: Items[Sequence], counts: Items[int]) -> list[int] | None:
        """The adapter of each row of a step, which has `counts` tokens of each sequence; None: no row has one."""
        if not self.groups or not any(sequence.adapter for sequence in sequences):
            return None
        return [sequence.adapter for sequence, count in zip(sequences, counts, strict=True) for _ in range(count)]

    def begin(self, numbers: list[int] | None, size: int, kept: Tensor | None) -> None:
        """The next pass has `size` rows, whose adapters `numbers` has as far as there are any, and computes the logits
        of the rows `kept`, None = all."""
        self._of_rows, self._of_kept = [], []
        if numbers is not None:
            rows = torch.tensor(numbers)
            rows = pad(rows, (0, size - len(rows))).to(self._model.device)
            self._of_rows = self._masks(rows)
            self._of_kept = self._of_rows if kept is None else self._masks(rows[kept])

    def _masks(self, rows: Tensor) -> _Masks:
        members, masks = set(rows.tolist()), list[tuple[_Group, slice, Tensor]]()
        for group in self.groups:
            if spans := [span for number, span in group.spans.items() if number in members]:
                ranks = slice(min(first for first, _ in spans), max(end for _, end in spans))
                masks.append((group, ranks, rows[:, None] != group.columns[ranks]))
        return masks

    @property
    def is_active(self) -> bool:
        """Some rows of the pass have an adapter."""
        return bool(self._of_rows)

    def add(self, modules: Items[nn.Linear], inputs: Tensor, outputs: Items[Tensor]) -> None:
        """Add to the outputs [rows, size] of some layers with equal inputs [rows, size]."""
        self._add(self._of_kept if modules[0] is self._head else self._of_rows, modules, inputs, outputs)

    def _add(self, masks: _Masks, modules: Items[nn.Linear], inputs: Tensor, outputs: Items[Tensor]) -> None:
        for group, ranks, others in masks:
            for module, output in zip(modules, outputs, strict=True):
                if module not in group.weights:
                    continue
                down, up = group.weights[module]
                down, up = down[:, ranks], up[ranks]
                inner = torch.mm(inputs[:, :_PART], down[:_PART])
                for first in range(_PART, len(down), _PART):
                    inner.addmm_(inputs[:, first : first + _PART], down[first : first + _PART])
                inner.masked_fill_(others, 0.0)  # not a product: another row's values may not be finite
                if output.dtype == up.dtype:
                    output.addmm_(inner, up)
                else:
                    output.add_(inner.to(output.dtype) @ up.to(output.dtype))

    def _forward(self, module: nn.Linear, forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        """The forward function of a layer that transformers calls."""
        output = forward(input)
        if self.is_active:
            masks, (inputs, flat) = self._of_rows, (input.flatten(0, -2), output.view(-1, output.shape[-1]))
            if module is self._head:
                masks = self._of_kept
            elif module in self._states.parts and self._states.span is not None:
                numbers = torch.tensor(
                    [sequence.adapter for sequence in self._states.span.sequences], device=input.device
                )
                masks = self._masks(numbers.repeat_interleave(len(inputs) // len(numbers)))
            self._add(masks, [module], inputs, [flat])
        return output

    # ---- called one at a time, in any thread

    def read(self, folder: Path, base: Path | None, max_rank: int) -> Adapter:
        """The adapter in a folder in the format of peft. `base`: the checkpoint that it must have been trained on, None
        = not checked. RequestError when it cannot be served."""
        try:
            config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
            lora = LoRAConfig(rank=config["r"], alpha=config["lora_alpha"], rslora=bool(config.get("use_rslora")))
            modules = self._layers()
            shapes = {f"{name}.weight": [*module.weight.shape] for name, module in modules.items()}
            names = adapter_weights(folder, lora, base, shapes)
            if lora.rank > max_rank:
                message = f"the adapter in {folder} has rank {lora.rank}: at most {max_rank} is served, raise "
                raise RequestError(f"{message}native.max_adapter_rank", code="adapter.rank")
            weights: dict[nn.Linear, tuple[Tensor, Tensor]] = {}
            rank = _padded(lora.rank)
            with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
                for name in sorted({name.removesuffix(DOWN).removesuffix(UP) for name in names}):
                    if name.endswith(BASE_COPY):
                        continue
                    module = modules.get(name.removeprefix(PREFIX))
                    if module is None or name in names:
                        message = f"the adapter in {folder} trains {name} whole: publish it merged with its base model"
                        raise RequestError(message, code="adapter.not_servable")
                    down, up = file.get_tensor(name + DOWN), file.get_tensor(name + UP)
                    if not len(down) == up.shape[1] == lora.rank:
                        raise ValueError(f"{name} has rank {len(down)}, and the configuration {lora.rank}")
                    first, second = _factors(module, down, up, lora.scale)
                    if not (first.isfinite().all() and second.isfinite().all()):
                        message = f"the adapter in {folder} has numbers that are not finite, in {name}"
                        raise RequestError(message, code="adapter.not_finite")
                    weights[module] = first, second
        except RequestError:
            raise
        except InputError as error:
            raise RequestError(str(error), code=error.code) from error
        except Exception as error:  # one request: a file can be wrong in any way
            message = f"the adapter in {folder} cannot be read: {str(error) or type(error).__name__}"
            raise RequestError(message, code="adapter.not_readable") from error
        return Adapter(next(self._numbers), rank, weights)

    def _layers(self) -> dict[str, nn.Linear]:
        """The layers that can have adapters: those of the decoder, and the output head."""
        inside = {self._head, *self._model.get_decoder().modules()} - linear_without_call(self._model)
        every = self._model.named_modules()
        return {
            name: module
            for name, module in every
            if isinstance(module, nn.Linear) and module in inside and not is_of_experts(name)
        }

    def changed(self, *, added: Adapter | None = None, removed: int = 0) -> Callable[[], None]:
        """Make groups with other adapters; what is returned lets the engine use them, between two steps."""
        groups = [group for group in self.groups if removed not in group.numbers]
        for group in self.groups:
            if removed in group.numbers and len(group.adapters) > 1:
                groups.append(_Group([adapter for adapter in group.adapters if adapter.number != removed], self._minus))
        if added is not None:
            roomy = next((group for group in groups if group.rank + added.rank <= _GROUP_RANKS), None)
            groups = [group for group in groups if group is not roomy]
            groups.append(_Group([*(roomy.adapters if roomy else ()), added], self._minus))
        return partial(self._use, groups)

    def take_out(self, merged: AdapterChanges | None) -> None:
        """The weights now contain `merged`: rows with an adapter, of the base model, are computed without it."""
        self.merged, self._minus = merged, None
        self._use(self.groups)

    def _use(self, groups: list[_Group]) -> None:
        if groups and self._minus is None and self.merged is not None:
            self._minus = self._negative(self.merged)
        groups = [group if group.minus is self._minus else _Group(group.adapters, self._minus) for group in groups]
        self.groups, self._of_rows, self._of_kept = groups, [], []
        new = {module for group in groups for module in group.weights} - self._wrapped
        for module in new:
            module.forward = partial(self._forward, module, module.forward)
        self._wrapped |= new

    def _negative(self, changes: AdapterChanges) -> Adapter:
        values, weights = changes.values, dict[nn.Linear, tuple[Tensor, Tensor]]()
        for name, module in self._layers().items():
            if (down := values.get(name + DOWN)) is not None:
                weights[module] = _factors(module, down, values[name + UP], -changes.scale)
        return Adapter(0, max((down.shape[1] for down, _ in weights.values()), default=0), weights)


def _padded(rank: int) -> int:
    return rank + -rank % _RANK_STEP


def _factors(module: nn.Linear, down: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The factors of peft as an `Adapter` has them."""
    like, more = module.weight, _padded(len(down)) - len(down)
    pair = pad(down.float(), (0, 0, 0, more)).T, pad(up.float() * scale, (0, more)).T
    first, second = (factor.to(like.device, like.dtype).contiguous() for factor in pair)
    return first, second


Submit = Callable[[Callable[[], Any]], Future[Any]]


class LoadedAdapters:
    """The adapters that requests can name. Only the asyncio thread uses it."""

    def __init__(
        self, products: AdapterProducts, call: Submit, in_thread: Submit, base: Path | None, limits: RequestLimits
    ) -> None:
        """`call` runs a command in the engine thread, `in_thread` in another one. `base`: folder of the base model."""
        self._products, self._call, self._in_thread, self._base = products, call, in_thread, base
        self._max_adapters, self._max_rank = limits.max_adapters, limits.max_adapter_rank
        self._by_name: dict[str, int] = {}
        self._num_held = 0
        """It includes those that leave after the end of their last request."""
        self._users: Counter[int] = Counter()
        self._unused: dict[int, asyncio.Event] = {}
        """Events of those that leave."""
        self._lock = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def number_of(self, name: str) -> int:
        """The number of an adapter for a new request; empty = 0, the base model."""
        if name and name not in self._by_name:
            known = ", ".join(self.names[:8]) or "none"
            raise RequestError(f"there is no adapter {name[:60]!r}: load it first ({known})", code="adapter.unknown")
        return self._by_name.get(name, 0)

    def use(self, number: int, change: int) -> None:
        """A request with an adapter begins (+1) or has ended (-1)."""
        if number:
            self._users[number] += change
            if not self._users[number]:
                del self._users[number]
                if number in self._unused:
                    self._unused[number].set()

    async def load(self, name: str, folder: Path) -> None:
        """RequestError when the name is in use, or the adapter cannot be served."""
        async with self._lock:
            if name in self._by_name:
                message = f"adapter {name!r} is loaded already: load another version under another name"
                raise RequestError(message, code="adapter.loaded")
            if self._num_held >= self._max_adapters:
                message = f"{self._num_held} adapters are loaded, the maximum: unload one, or raise native.max_adapters"
                raise RequestError(message, code="adapter.limit")

            def read() -> tuple[int, Callable[[], None]]:
                adapter = self._products.read(folder, self._base, self._max_rank)
                return adapter.number, self._products.changed(added=adapter)

            number, change = await asyncio.wrap_future(self._in_thread(read))
            await asyncio.wrap_future(self._call(change))
            self._by_name[name] = number
            self._num_held += 1

    async def unload(self, name: str) -> None:
        """Refuse new requests at once, and free the memory when the last running one has ended."""
        number = self.number_of(name)
        del self._by_name[name]
        if self._users[number]:
            self._unused[number] = asyncio.Event()
            await self._unused[number].wait()
            del self._unused[number]
        async with self._lock:
            change = await asyncio.wrap_future(self._in_thread(partial(self._products.changed, removed=number)))
            await asyncio.wrap_future(self._call(change))
            self._num_held -= 1
