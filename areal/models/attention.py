"""Which tokens the layers of a transformers model attend to: earlier ones, perhaps within a sliding window.

Our attention functions get no masks, only the window that a layer passes. A model whose masks say something else would
compute other numbers without an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.configuration_utils import PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface

_NOT_COMPUTED = ("position_bias", "sinks", "indices", "block_indices")
"""Options of attention layers that change the result."""
_NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """The function of a mask, in its place: (row, head, number of the token, number of the token that it may see)."""

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
    """Let layers pass `SeenTokens` to the attention function `name` inside the block. Yields all that were made.

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


# ----------------------------------------------------------------------------------------------------------------------
# Attention with capped scores or with sinks, which torch's scaled_dot_product_attention does not have.

MAX_SCORES_CPU = 2**20
"""Scores per block of queries on the CPU: 4 MiB in float32, so that a block fits the cache."""
MAX_SCORES = 2**26
"""Scores per block on other devices: 256 MiB in float32."""


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    max_scores: int | None = None,
) -> Tensor:
    """Attention of equally many heads of queries [n, H, L, D], keys and values [n, H, K, ...].

    A score s becomes `softcap` * tanh(s / softcap). `sinks`, broadcastable to [n, H, L, 1], are the score of one more
    key without a value. Blocks of queries are computed one after another, and again in the backward pass, so that
    memory does not grow with L x K. `max_scores`: of a block. Scores are float32, or float64 for such inputs.
    """
    length, num_keys = query.shape[2], key.shape[2]
    limit = max_scores or (MAX_SCORES_CPU if query.device.type == "cpu" else MAX_SCORES)
    step = max(limit // (query.shape[0] * query.shape[1] * num_keys), 1)
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    parts: list[Tensor] = []
    for start in range(0, length, step):
        end = min(start + step, length)
        seen = end if is_causal else num_keys
        mask = attn_mask if attn_mask is None or attn_mask.shape[-2] == 1 else attn_mask[..., start:end, :]
        sinks_of_rows = sinks if sinks is None or sinks.shape[-2] == 1 else sinks[..., start:end, :]
        inputs = (query[:, :, start:end], key[:, :, :seen], value[:, :, :seen], mask, sinks_of_rows)
        options = (start if is_causal else None, factor, softcap, dropout_p)
        if torch.is_grad_enabled():
            parts.append(checkpoint(_block, *inputs, *options, use_reentrant=False, preserve_rng_state=dropout_p > 0))
        else:
            parts.append(_block(*inputs, *options))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def seen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    indices: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """Attention [n, L, H, D] of a layer of transformers to the tokens that are True in `mask` [n, 1, L, L] and, where
    the layer passes them, in `indices` [n, L, k]."""
    if indices is not None:
        chosen = torch.zeros_like(mask[:, 0]).scatter(-1, indices.long(), value=True)
        mask = mask & chosen.unsqueeze(1)
    repeats = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeats, dim=1) if repeats > 1 else each for each in (key, value))
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scaling)
    else:
        sinks = None if s_aux is None else s_aux.view(-1, 1, 1)
        out = capped_attention(query, key, value, mask, dropout, scale=scaling, softcap=softcap, sinks=sinks)
    return out.transpose(1, 2)


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    first: int | None,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """`first`: number of the first query, whose key is the last one that it sees; None: the mask says what is seen."""
    scores = _product(query, key.transpose(-2, -1))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if first is not None:
        numbers = torch.arange(key.shape[2], device=key.device)
        scores = scores.masked_fill(numbers > numbers[first:, None], -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    shares = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return _product(F.dropout(shares, dropout) if dropout else shares, value)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Product whose result a selectively checkpointed block does not keep, unlike those of other products."""
    unused = left.new_empty((1, 1, 1))
    product = torch.baddbmm(unused, left.flatten(0, 1), right.flatten(0, 1), beta=0)
    return product.unflatten(0, left.shape[:2])
