"""A model chunk of a pipeline stage: packed token ids or hidden states in, hidden states or numbers per token out."""
# pyright: reportMissingImports=false

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from areal.api.batch import OutputSpec
from areal.engine.context_parallel import all_tokens
from areal.engine.linear_logprobs import linear_logprobs
from areal.engine.megatron.experts import recompute_with_row
from areal.engine.megatron.layers import Attention, PackedRow, block_spec
from areal.engine.mesh import RankGroup
from areal.engine.micro_batch import ModelInput
from areal.engine.routing import Routing
from areal.engine.token_model import present_outputs


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
        found, layout = self._outputs(hidden.squeeze(1), inputs), inputs.layout
        if layout.context is None:
            return found
        return tuple(all_tokens(values, layout.context, layout.num_tokens) for values in found)

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
        given = inputs.temperatures
        found = linear_logprobs(
            hidden,
            weight,
            None,
            inputs.labels,
            temperature=head.temperature if given is None else torch.where(given.isnan(), head.temperature, given),
            outputs=head.spec,
            candidate_ids=inputs.candidate_ids,
            valid=inputs.has_label,
            float32_head=head.float32_head,
            tensor_ranks=self._tensor,
        )
        return present_outputs(found)


def use_chunks(count: int) -> None:
    """Let Megatron-Core build and run a model of `count` chunks on each stage."""
    parallel_state.set_virtual_pipeline_model_parallel_world_size(count if count > 1 else None)
