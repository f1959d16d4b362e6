"""Which tokens the layers of a transformers model attend to: earlier ones, perhaps within a sliding window.

Our attention functions get no masks, only the window that a layer passes. A model whose masks say something else would
compute other numbers without an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.configuration_utils import PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface

_NOT_COMPUTED = ("position_bias", "sinks", "indices", "block_indices")
"""Options of attention layers that change the result."""
_NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """In place of a mask: its function of (row, head, number of the token, number of the token that it may see)."""

    function: Callable[..., Any]
    num_positions: int
    """Maximum tokens of a sequence: a window that is not smaller sees all."""

    def is_window(self, window: int | None) -> bool:
        """Whether a token sees itself and the `window` - 1 tokens before it; None: all before it."""
        try:
            return all(self._is_window(token, window) for token in {1, 2, self.num_positions - 1})
        except (IndexError, RuntimeError):  # a function of tensors that the model made
            return False

    def _is_window(self, token: int, window: int | None) -> bool:
        first = 0 if window is None else max(token - window + 1, 0)
        is_seen = all(self._sees(token, other) for other in {first, (first + token) // 2, token})
        return is_seen and not self._sees(token, token + 1) and not (first and self._sees(token, first - 1))

    def _sees(self, token: int, other: int) -> bool:
        return bool(self.function(*(torch.tensor(number, device="cpu") for number in (0, 0, token, other))))


@contextmanager
def described_masks(name: str) -> Iterator[list[SeenTokens]]:
    """While it is active, layers pass `SeenTokens` to the attention function `name`. Yields all that were made.

    The model needs a two-dimensional attention mask, without which transformers looks for packed sequences.
    """
    made: list[SeenTokens] = []

    def describe(*, mask_function: Callable[..., Any], config: PretrainedConfig, **unused: object) -> SeenTokens:
        limit = getattr(config, "max_position_embeddings", None)  # not every model has one
        made.append(SeenTokens(mask_function, limit or _NO_LIMIT))
        return made[-1]

    AttentionMaskInterface.register(name, describe)  # pyright: ignore[reportArgumentType] - it takes any function
    try:
        yield made
    finally:
        AttentionMaskInterface._global_mapping.pop(name)


def attention_problem(module: nn.Module, mask: object, options: dict[str, Any]) -> str | None:
    """Why no attention function of ours computes a layer that passes this mask and these options."""
    for name in _NOT_COMPUTED:
        if options.get(name) is not None:
            return f"its attention uses {name}"
    if not getattr(module, "is_causal", True):
        return "it has attention layers that are not causal"
    window = options.get("sliding_window")
    if mask.is_window(window) if isinstance(mask, SeenTokens) else mask is None and window is None:
        return None  # without a mask, transformers does not look at the window
    return f"its attention masks are not those of a sliding window of {window} tokens"
