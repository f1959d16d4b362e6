"""Names and parts of weights in checkpoints, for models in which transformers joins several stored weights in one
parameter (the experts of a layer) or renames them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging as hf_logging

from areal.api.errors import ConfigError


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """transformers loads weights without a progress bar, of which a log would have every change."""
    is_enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_enabled:
            hf_logging.enable_progress_bar()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """A stored weight, as consecutive elements of a parameter in row-major order."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """First element in the whole parameter."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, parameter: Tensor) -> Tensor:
        """The part as a view of the whole contiguous parameter."""
        return parameter.view(-1)[self.offset : self.offset + self.size].view(self.shape)


class StoredForm:
    """Maps the parameters of one model to the weights of its checkpoints. Made before the model is sharded."""

    def __init__(self, model: nn.Module) -> None:
        """ConfigError for an architecture in which a parameter is not made of whole stored weights."""
        conversions = get_model_conversion_mapping(cast(PreTrainedModel, model), add_legacy=False)
        # A prefix differs in checkpoints without a head only, which are read by both names.
        changes = [
            change.reverse_transform() for change in reversed(conversions) if not isinstance(change, PrefixChange)
        ]
        self._model = model
        self._renamings = [change for change in changes if isinstance(change, WeightRenaming)]
        self._converters = [change for change in changes if isinstance(change, WeightConverter)]
        self._parts: dict[str, tuple[StoredPart, ...]] = {}
        for name, weight in model.state_dict(keep_vars=True).items():
            self._parts[name] = tuple(self._find_parts(name, tuple(weight.shape)))

    def parts(self, name: str) -> tuple[StoredPart, ...]:
        """The stored weights that make up the parameter or buffer `name`."""
        return self._parts[name]

    def views(self, name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Stored names and values of the whole contiguous parameter `name`: views, which share its memory."""
        parts = self._parts[name]
        for part in parts:
            yield part.name, whole if len(parts) == 1 else part.of(whole)

    def _find_parts(self, name: str, shape: tuple[int, ...]) -> Iterator[StoredPart]:
        renamed, pattern = apply_converters(name, self._converters)
        if pattern is None:
            yield StoredPart(name=apply_renamings(name, self._renamings), shape=shape, offset=0)
            return
        converter = deepcopy(next(change for change in self._converters if pattern in change.source_patterns))
        if len(converter.source_patterns) > 1:
            raise self._unsupported(name)  # several parameters make up one stored weight
        # Numbers show where the conversion takes each row from. Rows are never cut, so one number for each is enough.
        rows = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1)
        converter.add_tensor(renamed, name, pattern, rows)  # pyright: ignore[reportArgumentType] - takes tensors too
        converted = converter.convert(renamed, model=self._model, config=self._model.config)
        for stored, values in converted.items():
            value = values[0] if isinstance(values, list) else values
            taken = value.flatten()
            if value.shape[-1] != 1 or not torch.equal(taken, taken[0] + torch.arange(len(taken))):
                raise self._unsupported(name)
            yield StoredPart(
                name=apply_renamings(stored, self._renamings),
                shape=(*value.shape[:-1], shape[-1]),
                offset=int(taken[0]) * shape[-1],
            )

    def _unsupported(self, name: str) -> ConfigError:
        message = f"{type(self._model).__name__} stores {name} in another form than it computes with: not supported"
        return ConfigError(message, code="model.unsupported")
