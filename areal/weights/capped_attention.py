"""Attention with capped scores or with sinks, which torch's scaled_dot_product_attention does not have."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
    """As scaled_dot_product_attention, of equally many heads of queries [n, H, L, D], keys and values [n, H, K, ...].

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
        own = sinks if sinks is None or sinks.shape[-2] == 1 else sinks[..., start:end, :]
        inputs = (query[:, :, start:end], key[:, :, :seen], value[:, :, :seen], mask, own)
        options = (start if is_causal else None, factor, softcap, dropout_p)
        if torch.is_grad_enabled():
            parts.append(checkpoint(_block, *inputs, *options, use_reentrant=False, preserve_rng_state=dropout_p > 0))
        else:
            parts.append(_block(*inputs, *options))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


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
    """By an operator whose result a selectively checkpointed block does not keep, unlike those of other products."""
    unused = left.new_empty((1, 1, 1))
    found = torch.baddbmm(unused, left.flatten(0, 1), right.flatten(0, 1), beta=0)
    return found.unflatten(0, left.shape[:2])
