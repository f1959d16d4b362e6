"""Pure rules of the Megatron engine, which need no Megatron-Core: weight maps, places of layers, sizes, CPU sources."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from areal.api.allocation import ParallelDims
from areal.engine.megatron.cpu_mode import rewritten
from areal.engine.megatron.weight_map import Stages, weight_map
from areal.system.mesh_rules import mesh_problem, package_problem
from areal.system.model_shape import ModelShape

SHAPE = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "mistral": MistralConfig(**SHAPE, head_dim=8),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_map_names_every_weight_of_the_model_with_its_shape(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    tied = {"lm_head.weight"} if CONFIGS[name].tie_word_embeddings else set()
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items() if key not in tied}
    found = [(part.name, part.shape) for weight in weight_map(CONFIGS[name]) for part in weight.parts]
    assert dict(found) == expected
    assert len(found) == len(expected)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_of_tensor_ranks_are_joined_and_divided_exactly(name, ranks):
    torch.manual_seed(0)
    for weight in weight_map(CONFIGS[name]):
        whole = [torch.randn(part.shape) for part in weight.parts]
        for rank in range(ranks):
            own = [value[weight.region(part, rank, ranks)] for part, value in zip(weight.parts, whole, strict=True)]
            again = weight.divided(weight.joined(own))
            assert all(torch.equal(a, b) for a, b in zip(again, own, strict=True)), weight.name


def test_rows_of_queries_keys_and_values_are_grouped_by_key_head():
    weight = next(each for each in weight_map(CONFIGS["qwen3"]) if each.name.endswith("linear_qkv.weight"))
    parts = [torch.full(part.shape, float(place)) for place, part in enumerate(weight.parts)]
    assert weight.joined(parts)[:, 0].tolist() == ([0.0] * 16 + [1.0] * 8 + [2.0] * 8) * 2


def test_layers_of_virtual_stages_alternate():
    stages = Stages(8, 2, 2)
    places = [stages.place(layer) for layer in range(8)]
    assert [place.stage for place in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [place.chunk for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place.number for place in places] == [0, 1] * 4


def shape_of(name: str, tmp_path) -> ModelShape:
    CONFIGS[name].save_pretrained(tmp_path)
    shape = ModelShape.read(str(tmp_path))
    assert shape is not None
    return shape


@pytest.mark.parametrize(
    ("dims", "chunks", "words"),
    [
        (ParallelDims(pp=3), 1, ["p3", "2 layers", "p1 or p2"]),
        (ParallelDims(pp=2), 2, ["p2", "2 parts", "2 layers"]),
        (ParallelDims(), 2, ["virtual_pipeline_parallel_size=2"]),
        (ParallelDims(tp=4), 1, ["t4", "2 key and value heads"]),
        (ParallelDims(cp=3), 1, ["c3", "4 attention heads"]),
        (ParallelDims(dp=2, ep=2), 1, ["e2", "fsdp"]),
    ],
)
def test_sizes_that_do_not_divide_are_named(dims, chunks, words, tmp_path):
    problem = mesh_problem(shape_of("qwen3", tmp_path), dims, backend="megatron", chunks=chunks)
    assert problem is not None
    assert all(word in problem for word in words)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gemma"])
def test_families_that_were_not_compared_with_one_process_are_refused(family, tmp_path):
    problem = mesh_problem(replace(shape_of("qwen3", tmp_path), family=family), ParallelDims(), backend="megatron")
    assert problem is not None
    assert family in problem


def test_sizes_that_divide_are_no_problem(tmp_path):
    dims = ParallelDims(dp=2, tp=2, pp=2, cp=2)
    assert mesh_problem(shape_of("qwen3", tmp_path), dims, backend="megatron") is None


def test_packages_matter_to_megatron_only():
    assert package_problem("fsdp", wanted=["ddp.fp8_param_gather"]) is None


def test_sources_for_the_cpu_name_no_cuda_device():
    source = (
        "from torch.cuda import _lazy_call, _lazy_init\n"
        "x = torch.empty(1, device=torch.cuda.current_device())\n"
        "y = torch.zeros([], device='cuda').cuda()\n"
        "ok = x.type() == 'torch.cuda.FloatTensor'\n"
    )
    text = rewritten(source)
    assert "torch.cuda" not in text
    assert "'cuda'" not in text
    assert "'torch.FloatTensor'" in text
    compile(text, "source", "exec")
