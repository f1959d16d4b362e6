"""Sizes of a mesh that a model cannot be split in are refused before anything starts, with sizes that work."""

import json

import pytest

from areal.api.allocation import AllocationMode
from areal.models.mesh_rules import mesh_problem
from areal.models.model_shape import ModelShape

SIZES = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 152,
}  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "changes", "words"),
    [
        ("fsdp:d3", {}, None),
        ("fsdp:d2t2", {}, None),
        ("fsdp:t4", {}, None),
        ("fsdp:c2", {}, None),
        ("fsdp:c12", {"num_key_value_heads": 1}, None),  # repeated key and value heads
        ("fsdp:t4c3", {}, None),
        ("fsdp:d2", {"model_type": "deepseek_v3"}, None),
        ("fsdp:c2", {"model_type": "deepseek_v3"}, None),
        ("fsdp:t2", {"model_type": "deepseek_v3"}, ["deepseek_v3", "qwen3"]),
        ("fsdp:d4e2", {"num_experts": 6}, None),
        ("fsdp:d2c2e4", {"n_routed_experts": 8}, None),
        ("fsdp:d2e2", {}, ["qwen3", "no experts", "leave e out"]),
        ("fsdp:d8e4", {"num_local_experts": 6}, ["e4", "6 experts", "e1 or e2"]),
        ("fsdp:d2t2e2", {"num_experts": 4}, ["e2", "leave t out"]),
        ("fsdp:t3", {}, ["t3", "4 key and value heads", "152 tokens of the vocabulary", "t1 or t2 or t4"]),
        ("fsdp:t8", {}, ["12 attention heads", "4 key and value heads", "t1 or t2 or t4"]),
        ("fsdp:t2", {"vocab_size": 151}, ["151 tokens of the vocabulary", "use t1"]),
        ("fsdp:t4", {"intermediate_size": 98}, ["98 MLP columns", "t1 or t2"]),
        ("fsdp:c5", {}, ["c5", "12 attention heads", "c1 or c2 or c3 or c4 or c6 or c12"]),
        ("fsdp:t4c2", {}, ["c2", "3 attention heads of a tensor rank", "c1 or c3"]),
    ],
)
def test_a_model_that_a_mesh_cannot_split(tmp_path, mesh, changes, words):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | changes))
    shape = ModelShape.read(str(tmp_path))
    assert shape is not None
    problem = mesh_problem(shape, AllocationMode.parse(mesh).train[0].parallel)
    if words is None:
        assert problem is None
    else:
        assert problem is not None
        assert all(word in problem for word in words)
        assert "\n" not in problem
