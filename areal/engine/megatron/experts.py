"""The experts of Megatron-Core's layers with the routers of transformers, whose choices may be replayed."""
# pyright: reportMissingImports=false

import importlib
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from areal.engine.routing import Routing

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
