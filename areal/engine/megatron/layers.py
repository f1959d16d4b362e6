"""The layers of a Megatron-Core model for packed rows: rotary positions, attention within each sequence, RMS norm."""
# pyright: reportMissingImports=false

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from areal.engine.packed_attention import PackedLayout

Attention = Callable[..., tuple[Tensor, None]]
"""A function of `areal.engine.packed_attention`."""


@dataclass
class PackedRow(PackedSeqParams):
    """A packed row, as Megatron-Core passes it through its layers to the attention."""

    layout: PackedLayout | None = None
    cos: Tensor | None = None  # [T, d] of the tokens that this rank computes
    sin: Tensor | None = None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight with the roundings of transformers."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        exact = states.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * exact.to(states.dtype)


class PackedAttention(nn.Module):
    """The core attention: turns queries and keys by their positions, then attends within each sequence."""

    def __init__(self, attend: Attention, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__()
        self.is_causal = True
        self._attend, self._scale = attend, softmax_scale

    def forward(
        self,
        query: Tensor,  # [T, H, D]
        key: Tensor,  # [T, H_kv, D]
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedRow,
        **unused: Any,
    ) -> Tensor:
        row = packed_seq_params
        if row.cos is not None and row.sin is not None:
            query, key = (_turned(states, row.cos, row.sin) for states in (query, key))
        states = [each.transpose(0, 1).unsqueeze(0) for each in (query, key, value)]
        out, _ = self._attend(self, *states, None, layout=row.layout, scaling=self._scale)
        return out[0].flatten(1)


def _turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, as in transformers: the halves of a head are the real and imaginary parts."""
    left, right = states.chunk(2, dim=-1)
    return states * cos.unsqueeze(1) + torch.cat([-right, left], dim=-1) * sin.unsqueeze(1)


def block_spec(config: TransformerConfig, attend: Attention, *, stage: int, chunk: int) -> TransformerBlockSubmodules:
    """The layers of a model chunk. Linear layers and norms are those of Transformer Engine where it is installed."""
    virtual = chunk if config.virtual_pipeline_model_parallel_size else None
    first = get_transformer_layer_offset(config, vp_stage=virtual, pp_rank=stage)
    count = get_num_layers_to_build(config, vp_stage=virtual, pp_rank=stage)
    kinds = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    assert isinstance(kinds, list)
    specs = [_layer_spec(config, attend, has_experts=bool(kinds[first + place])) for place in range(count)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, attend: Attention, *, has_experts: bool) -> ModuleSpec:
    build = get_gpt_layer_with_transformer_engine_spec if HAVE_TE else get_gpt_layer_local_spec
    spec = build(
        num_experts=config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        **({} if HAVE_TE else {"normalization": "RMSNorm"}),
    )
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = partial(PackedAttention, attend)
    if not HAVE_TE:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if config.qk_layernorm and hasattr(attention, name):
                setattr(attention, name, RMSNorm)
    return spec
