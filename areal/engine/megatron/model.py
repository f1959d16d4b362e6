"""A model chunk of a pipeline stage: packed token ids or hidden states in, hidden states or numbers per token out."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    CheckpointWithoutOutput,
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from areal.api.batch import OutputSpec
from areal.engine.linear_logprobs import linear_logprobs
from areal.engine.megatron.weight_map import window_of
from areal.engine.mesh import RankGroup
from areal.engine.micro_batch import ModelInput
from areal.engine.packed_attention import PackedLayout, all_tokens
from areal.engine.routing import RoutedRow, Routing
from areal.engine.token_model import present_outputs

# ----------------------------------------------------------------------------------------------------------------------
# The experts of Megatron-Core's layers with the routers of transformers, whose choices may be replayed.

# pyright: reportMissingImports=false


_GATES = {
    "qwen2_moe": "Qwen2MoeTopKRouter",
    "qwen3_moe": "Qwen3MoeTopKRouter",
    "glm4_moe": "Glm4MoeTopkRouter",
    "mixtral": "MixtralTopKRouter",
    "deepseek_v2": "DeepseekV2TopkRouter",
    "deepseek_v3": "DeepseekV3TopkRouter",
}
"""Model type -> router of transformers: states [T, h] -> logits [T, E], weights [T, k], chosen experts [T, k]."""


class PackedRouter(nn.Module):
    """A router of transformers in the place of Megatron-Core's."""

    def __init__(
        self, hf: Any, dtype: torch.dtype | None, *, config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        """`dtype`: in which it computes; None = that of the weights."""
        super().__init__()
        modules = importlib.import_module(f"transformers.models.{hf.model_type}.modeling_{hf.model_type}")
        self.gate: nn.Module = getattr(modules, _GATES[hf.model_type])(hf)
        for weight in self.gate.parameters():
            weight.data = weight.data.to(config.params_dtype)
            weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        if dtype is not None:
            self.gate.forward = partial(_computed_in, dtype, self.gate)
        self._num_experts = config.num_moe_experts

    def set_layer_number(self, number: int) -> None:
        """Called by Megatron-Core, whose routers write statistics by layer."""

    def forward(self, states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """States [T, 1, h] -> weights [T, E], 0 for experts that were not chosen, and which were chosen [T, E]."""
        _, weights, chosen = self.gate(states.flatten(0, 1))
        weights = weights.float()
        none = weights.new_zeros(len(weights), self._num_experts)
        return none.scatter(1, chosen, weights), none.bool().scatter(1, chosen, True)


def _computed_in(dtype: torch.dtype, gate: nn.Module, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result of a router with its weight in another type; inside its call, because hooks gather the weight."""
    vars(gate)["weight"] = gate.weight.to(dtype)
    try:
        return type(gate).forward(gate, states.to(dtype))
    finally:
        del vars(gate)["weight"]


def recompute_with_row(layer: MoELayer, routing: Routing) -> None:
    """Let a layer that is recomputed alone use what its router got in the first pass."""
    if not layer.moe_layer_recompute:
        return
    layer.moe_layer_recompute, plain = False, layer.forward

    def forward(hidden_states: Tensor, *unused: Any, **also: Any) -> tuple[Tensor, Tensor | None]:
        row = routing.row

        def compute(states: Tensor) -> tuple[Tensor, Tensor | None]:
            routing.resume(row)
            return plain(states)

        return tensor_parallel.checkpoint(compute, False, hidden_states) if layer.training else plain(hidden_states)

    layer.forward = forward


# ----------------------------------------------------------------------------------------------------------------------
# The layers of a Megatron-Core model for packed rows: rotary positions, attention within each sequence, RMS norm.

# pyright: reportMissingImports=false


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
    """Norm of latents: transformers has no option for its epsilon."""

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
        projected, _ = self.linear_kv_up_proj(latents)
        keys, values = projected.unflatten(-1, (heads, -1)).split([config.qk_head_dim, config.v_head_dim], -1)
        plain, positional = queries.unflatten(-1, (heads, -1)).split(
            [config.qk_head_dim, config.qk_pos_emb_head_dim], -1
        )
        assert row.cos is not None
        assert row.sin is not None
        positional, turned = (
            _turned(self._halves(each), row.cos, row.sin) for each in (positional, turned.unsqueeze(1))
        )
        return torch.cat([plain, positional], -1), torch.cat([keys, turned.expand(-1, heads, -1)], -1), values

    def _latents(self, layer: nn.Module, hidden_states: Tensor, size: int) -> Tensor:
        """[T, 1, h] -> [T, size], of the tokens that this tensor rank has outside tensor-parallel layers."""
        projected, _ = layer(hidden_states)
        if projected.shape[-1] != size:  # the layer is split over tensor ranks, and gathered the tokens
            projected = gather_from_tensor_model_parallel_region(projected)
            if self.config.sequence_parallel:
                projected = scatter_to_sequence_parallel_region(projected)
        return projected.squeeze(1)

    def _halves(self, states: Tensor) -> Tensor:
        """The first elements of all pairs, then the second."""
        return torch.cat([states[..., 0::2], states[..., 1::2]], -1) if self._turns_pairs else states


# pyright: reportMissingImports=false


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlan:
    """What the last stage computes from hidden states."""

    role: str
    """`areal.api.engine.ModelRole`."""
    spec: OutputSpec
    temperature: float
    float32_head: bool
    is_tied: bool
    """The head of a policy is the embedding."""

    @property
    def has_score(self) -> bool:
        return self.role in ("critic", "reward")


class PackedModel(LanguageModule):
    """The layers of one chunk, with the embedding on the first and the head on the last.

    Hidden states between stages: [T, 1, h] of this context rank's tokens, of which tensor ranks hold equal parts under
    sequence parallelism. `forward` of the last chunk returns the outputs of every token of the row, as `TokenModel`.
    Weights are not initialised.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hf: Any,
        head: HeadPlan,
        attend: Attention,
        *,
        router_dtype: torch.dtype | None,
        tensor: RankGroup,
        stage: int,
        chunk: int,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config, pg_collection=groups)
        self.model_type = ModelType.encoder_or_decoder
        chunks = config.virtual_pipeline_model_parallel_size or 1
        self.vp_stage = chunk if chunks > 1 else None
        self.pre_process = stage == 0 and chunk == 0
        self.post_process = stage == config.pipeline_model_parallel_size - 1 and chunk == chunks - 1
        self.share_embeddings_and_output_weights = head.is_tied and not head.has_score
        self._head, self._tensor = head, tensor if tensor.size > 1 else None
        self._padding_id = hf.pad_token_id
        self._rotary = Glm4MoeRotaryEmbedding(hf) if hf.model_type == "glm4_moe" else LlamaRotaryEmbedding(hf)
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=hf.vocab_size,
                max_sequence_length=hf.max_position_embeddings,
                position_embedding_type="none",
                tp_group=groups.tp,
            )
        self._routing: Routing | None = None
        self.decoder = TransformerBlock(
            config=config,
            spec=block_spec(config, hf, attend, stage=stage, chunk=chunk, router_dtype=router_dtype),
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=groups,
            vp_stage=self.vp_stage,
        )
        if self.post_process and head.has_score:
            self.score = nn.Linear(hf.hidden_size, 1, bias=False, dtype=torch.float32)
        elif self.post_process:
            self.output_layer = ColumnParallelLinear(
                hf.hidden_size,
                hf.vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
                tp_group=groups.tp,
            )
        if not head.has_score and (self.pre_process or self.post_process):
            self.setup_embeddings_and_output_layer()

    def gates(self) -> dict[int, nn.Module]:
        """The routers by the number of their layer in the model."""
        return {layer.layer_number - 1: layer.mlp.router.gate for layer in self._sparse_layers()}

    def use_routing(self, routing: Routing) -> None:
        """Let the routers use what `routing` got for the row that they compute, also when they compute it again."""
        self._routing = routing

        def resume(layer: nn.Module, args: Any, named: dict[str, Any]) -> None:
            routing.resume(named["packed_seq_params"].routed)

        for layer in self._sparse_layers():
            recompute_with_row(layer.mlp, routing)
            layer.register_forward_pre_hook(resume, with_kwargs=True)

    def _sparse_layers(self) -> list[Any]:
        return [layer for layer in self.decoder.layers if isinstance(layer.mlp, MoELayer)]

    def set_input_tensor(self, input_tensor: list[Tensor] | Tensor) -> None:
        """The hidden states of the stage before; called by the schedules of Megatron-Core."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def forward(self, inputs: ModelInput) -> Tensor | tuple[Tensor, ...]:
        hidden = None
        if self.pre_process:
            hidden = self._embedded(inputs)
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=self._row(inputs))
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # the head's gradient is whole on every tensor rank
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        outputs, layout = self._outputs(hidden.squeeze(1), inputs), inputs.layout
        if layout.context is None:
            return outputs
        return tuple(all_tokens(values, layout.context, layout.num_tokens) for values in outputs)

    def _embedded(self, inputs: ModelInput) -> Tensor:
        """The embeddings of this rank's tokens; that of the padding token is not trained, as in transformers."""
        ids = inputs.input_ids
        hidden = self.embedding(ids.unsqueeze(0), inputs.position_ids.unsqueeze(0))
        if self._padding_id is None:
            return hidden
        if hidden.shape[0] < ids.numel() and self._tensor is not None:
            ids = ids.chunk(self._tensor.size)[self._tensor.rank]
        return torch.where((ids == self._padding_id).view(-1, 1, 1), hidden.detach(), hidden)

    def _row(self, inputs: ModelInput) -> PackedRow:
        dtype, bounds = self.config.params_dtype, inputs.layout.cu_seqlens
        cos, sin = self._rotary(torch.empty(0, dtype=dtype, device=bounds.device), inputs.position_ids.unsqueeze(0))
        return PackedRow(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=inputs.layout.max_seqlen,
            max_seqlen_kv=inputs.layout.max_seqlen,
            layout=inputs.layout,
            routed=None if self._routing is None else self._routing.row,
            cos=cos[0],
            sin=sin[0],
        )

    def _outputs(self, hidden: Tensor, inputs: ModelInput) -> tuple[Tensor, ...]:
        head = self._head
        if head.has_score:
            values = self.score(hidden.float()).squeeze(-1)
            return (values if head.role == "reward" else torch.where(inputs.has_label, values, 0.0),)
        weight = self.shared_embedding_or_output_weight() if head.is_tied else self.output_layer.weight
        temperatures = inputs.temperatures
        outputs = linear_logprobs(
            hidden,
            weight,
            None,
            inputs.labels,
            temperature=head.temperature
            if temperatures is None
            else torch.where(temperatures.isnan(), head.temperature, temperatures),
            outputs=head.spec,
            candidate_ids=inputs.candidate_ids,
            valid=inputs.has_label,
            float32_head=head.float32_head,
            tensor_ranks=self._tensor,
        )
        return present_outputs(outputs)


def use_chunks(count: int) -> None:
    """Let Megatron-Core build and run a model of `count` chunks on each stage."""
    parallel_state.set_virtual_pipeline_model_parallel_world_size(count if count > 1 else None)
