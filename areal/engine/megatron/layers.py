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
from megatron.core.tensor_parallel import (
    CheckpointWithoutOutput,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from areal.engine.megatron.experts import PackedRouter
from areal.engine.megatron.families import window_of
from areal.engine.packed_attention import PackedLayout
from areal.engine.routing import RoutedRow

Attention = Callable[..., tuple[Tensor, None]]
"""A function of `areal.engine.packed_attention`."""


@dataclass
class PackedRow(PackedSeqParams):
    """A packed row, as Megatron-Core passes it through its layers to the attention."""

    layout: PackedLayout | None = None
    routed: RoutedRow | None = None
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

    def __init__(
        self, attend: Attention, config: TransformerConfig, softmax_scale: float | None = None, **unused: Any
    ) -> None:
        super().__init__()
        self.is_causal = True
        self._turns = not config.multi_latent_attention
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
        if self._turns and row.cos is not None and row.sin is not None:
            query, key = (_turned(states, row.cos, row.sin) for states in (query, key))
        states = [each.transpose(0, 1).unsqueeze(0) for each in (query, key, value)]
        out, _ = self._attend(self, *states, None, layout=row.layout, scaling=self._scale)
        return out[0].flatten(1)


def _turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, as in transformers: the halves of a head are the real and imaginary parts.

    `cos`, `sin` [T, d]: of the first d elements of a head; the rest has no position.
    """
    turned, rest = states.split([cos.shape[-1], states.shape[-1] - cos.shape[-1]], dim=-1)
    left, right = turned.chunk(2, dim=-1)
    turned = turned * cos.unsqueeze(1) + torch.cat([-right, left], dim=-1) * sin.unsqueeze(1)
    return turned if not rest.shape[-1] else torch.cat([turned, rest], dim=-1)


def block_spec(
    config: TransformerConfig, hf: Any, attend: Attention, *, stage: int, chunk: int, router_dtype: torch.dtype | None
) -> TransformerBlockSubmodules:
    """The layers of a model chunk. Linear layers and norms are those of Transformer Engine where it is installed."""
    virtual = chunk if config.virtual_pipeline_model_parallel_size else None
    first = get_transformer_layer_offset(config, vp_stage=virtual, pp_rank=stage)
    count = get_num_layers_to_build(config, vp_stage=virtual, pp_rank=stage)
    kinds = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    assert isinstance(kinds, list)
    specs: list[ModuleSpec] = []
    for place in range(first, first + count):
        within = partial(attend, sliding_window=window_of(hf, place))
        spec = _layer_spec(config, hf, within, has_experts=bool(kinds[place]))
        if kinds[place]:
            spec.submodules.mlp.submodules.router = partial(PackedRouter, hf, router_dtype)
        specs.append(spec)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, hf: Any, attend: Attention, *, has_experts: bool) -> ModuleSpec:
    build = get_gpt_layer_with_transformer_engine_spec if HAVE_TE else get_gpt_layer_local_spec
    spec = build(
        num_experts=config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        **({} if HAVE_TE else {"normalization": "RMSNorm"}),
    )
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(module=PackedAttention, params={"attend": attend})
    if not HAVE_TE:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
        if config.qk_layernorm and not config.multi_latent_attention:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.multi_latent_attention:
        spec.submodules.self_attention.module = LatentAttention
        spec.submodules.self_attention.params["turns_pairs"] = getattr(hf, "rope_interleave", True)
        if not HAVE_TE:
            attention.q_layernorm = attention.kv_layernorm = _LatentNorm
    return spec


class _LatentNorm(RMSNorm):
    """Of latents: transformers has no option for its epsilon."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **unused: Any) -> None:
        super().__init__(config, hidden_size, 1e-6)


class LatentAttention(MLASelfAttention):
    """DeepSeek's attention with the rotary positions of a packed row in place of Megatron-Core's."""

    def __init__(self, config: MLATransformerConfig, *args: Any, turns_pairs: bool, **options: Any) -> None:
        """`turns_pairs`: neighbouring elements are turned together, otherwise those of the two halves."""
        vars(multi_latent_attention)["HAVE_TE"] = HAVE_TE  # Megatron-Core 0.16 has True there in each case
        super().__init__(config, *args, **options)
        self._turns_pairs = turns_pairs

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: None, position_ids: None, row: PackedRow, **unused: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """States [T, 1, h] -> queries and keys [T, H, D], values [T, H, D_v], and the latents of both."""
        config = self.config
        latent_queries = hidden_states.squeeze(1)
        if config.q_lora_rank is not None:
            latent_queries = self.q_layernorm(self._latents(self.linear_q_down_proj, hidden_states, config.q_lora_rank))
        size = config.kv_lora_rank + config.qk_pos_emb_head_dim
        joint = self._latents(self.linear_kv_down_proj, hidden_states, size)
        latents, turned = joint.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        latents = self.kv_layernorm(latents)
        if config.sequence_parallel:
            turned = gather_from_sequence_parallel_region(turned)
        compute = partial(self._from_latents, row)
        if self.recompute_up_proj:
            self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=config.fp8)
            compute = partial(self.qkv_up_checkpoint.checkpoint, compute)
        queries, keys, values = compute(latent_queries, latents, turned)
        return queries, keys, values, latent_queries, latents

    def _from_latents(
        self, row: PackedRow, latent_queries: Tensor, latents: Tensor, turned: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`turned` [T, d]: the part of the keys that is turned by its position."""
        config, heads = self.config, self.num_attention_heads_per_partition
        queries, _ = (self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj)(latent_queries)
        found, _ = self.linear_kv_up_proj(latents)
        keys, values = found.unflatten(-1, (heads, -1)).split([config.qk_head_dim, config.v_head_dim], -1)
        plain, own = queries.unflatten(-1, (heads, -1)).split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        assert row.cos is not None
        assert row.sin is not None
        own, turned = (_turned(self._halves(each), row.cos, row.sin) for each in (own, turned.unsqueeze(1)))
        return torch.cat([plain, own], -1), torch.cat([keys, turned.expand(-1, heads, -1)], -1), values

    def _latents(self, layer: nn.Module, hidden_states: Tensor, size: int) -> Tensor:
        """[T, 1, h] -> [T, size], of the tokens that this tensor rank has outside tensor-parallel layers."""
        found, _ = layer(hidden_states)
        if found.shape[-1] != size:  # the layer is split over tensor ranks, and gathered the tokens
            found = gather_from_tensor_model_parallel_region(found)
            if self.config.sequence_parallel:
                found = scatter_to_sequence_parallel_region(found)
        return found.squeeze(1)

    def _halves(self, states: Tensor) -> Tensor:
        """The first elements of all pairs, then the second."""
        return torch.cat([states[..., 0::2], states[..., 1::2]], -1) if self._turns_pairs else states
