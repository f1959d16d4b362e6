"""A context rank keeps its part of the activations of a row of 32k and more tokens."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal.engine.mesh import RankGroup
from areal.engine.micro_batch import model_input_of, over_context
from areal.engine.packed_attention import choose_attention
from areal.engine.token_model import PolicyModel

SHAPE = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 2**17,
}  # fmt: skip


class LinearAttention(torch.autograd.Function):
    """Keeps what a fused attention kernel keeps, and returns at once."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = query.clone()
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return upstream[0], *(torch.zeros_like(saved) for saved in ctx.saved_tensors[1:3])


def kept_bytes(lengths: list[int], ranks: RankGroup | None) -> tuple[int, int]:
    """Bytes that autograd keeps of a forward pass of this rank, and the tokens that it computes."""
    config = Qwen3Config(**SHAPE)
    config._attn_implementation = choose_attention("sdpa", torch.device("cpu"), torch.float32)
    model = PolicyModel(Qwen3ForCausalLM(config), 1.0)
    ids = torch.zeros(sum(lengths), dtype=torch.int64)
    inputs = model_input_of(ids, torch.tensor([0, *lengths]).cumsum(0).int(), lengths)
    inputs = inputs if ranks is None else over_context(inputs, ranks)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(inputs)
    assert outputs[0].shape == (sum(lengths),)
    return sum(kept.values()), inputs.input_ids.numel()


@pytest.mark.parametrize("lengths", [[32768], [32768, 7, 1021, 65531]])
def test_a_context_rank_keeps_its_part_of_the_activations(monkeypatch, lengths):
    def attend(query, key, value, **options):
        return LinearAttention.apply(query, key, value)

    def all_to_all(result, values, group=None):
        result.copy_(values)

    def all_gather(parts, values, group=None):
        for part in parts:
            part.copy_(values)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attend)
    monkeypatch.setattr("torch.distributed.all_to_all_single", all_to_all)
    monkeypatch.setattr("torch.distributed.all_gather", all_gather)
    whole, num_tokens = kept_bytes(lengths, None)
    part, own_tokens = kept_bytes(lengths, RankGroup(3, 8, None))
    assert own_tokens == -(-num_tokens // 8)
    assert part < 1.1 * whole / 8
