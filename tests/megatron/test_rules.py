"""Pure rules of the Megatron engine, which need no Megatron-Core: weight maps, places of layers, sizes, CPU sources."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from areal.api.allocation import AllocationMode, ParallelDims
from areal.api.config.train import MegatronEngineConfig
from areal.engine.megatron.weight_map import Stages, weight_map
from areal.models.mesh_rules import mesh_problem, package_problem
from areal.models.model_shape import ModelShape
from areal.models.stored_form import StoredForm
from tests.megatron.cpu.megatron_on_cpu import rewritten
from tests.test_bad_input import dry_run

SHAPE = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {
    **SHAPE, **EXPERTS, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10,
    "num_key_value_heads": 4, "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "mistral": MistralConfig(**SHAPE, head_dim=8),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, head_dim=8, **EXPERTS, num_experts=4, mlp_only_layers=[0]),
    "qwen2_moe": Qwen2MoeConfig(**SHAPE, **EXPERTS, num_experts=4, shared_expert_intermediate_size=12),
    "glm4_moe": Glm4MoeConfig(**SHAPE, **EXPERTS, n_routed_experts=4, use_qk_norm=True, attention_bias=True),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": DeepseekV2Config(**LATENT, q_lora_rank=None, n_routed_experts=4, n_shared_experts=2),
    "deepseek_v3": DeepseekV3Config(**LATENT, q_lora_rank=8, n_routed_experts=4, n_group=1, topk_group=1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_map_names_every_weight_of_the_checkpoint_with_its_shape(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    tied = {"lm_head.weight"} if CONFIGS[name].tie_word_embeddings else set()
    form = StoredForm(model)
    expected = {part.name: part.shape for key in model.state_dict() if key not in tied for part in form.parts(key)}
    actual = [(part.name, part.shape) for weight in weight_map(CONFIGS[name]) for part in weight.parts]
    assert dict(actual) == expected
    assert len(actual) == len(expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_recovery_state_has_the_parameters_of_transformers(name):
    """Each element of a parameter is in one part of one weight of Megatron-Core."""
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(CONFIGS[name]).state_dict()
    counts = {key: torch.zeros(value.shape, dtype=torch.int) for key, value in state.items()}
    for weight in weight_map(CONFIGS[name]):
        for part in weight.parts:
            offsets = part.state_offsets([slice(0, size) for size in part.shape])
            sizes = [1] * (len(offsets) - len(part.shape)) + [*part.shape]
            region = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            assert part.state_shape == tuple(state[part.state_name].shape)
            counts[part.state_name][region] += 1
    assert {key for key, count in counts.items() if not (count == 1).all()} == (
        {"lm_head.weight"} if CONFIGS[name].tie_word_embeddings else set()
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_of_tensor_ranks_are_joined_and_divided_exactly(name, ranks):
    torch.manual_seed(0)
    for weight in weight_map(CONFIGS[name]):
        whole = [torch.randn(part.shape) for part in weight.parts]
        for rank in range(ranks):
            ours = [value[weight.region(part, rank, ranks)] for part, value in zip(weight.parts, whole, strict=True)]
            again = weight.divided(weight.joined(ours))
            assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True)), weight.name


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
        (ParallelDims(dp=2, ep=2), 1, ["e2", "no experts"]),
    ],
)
def test_sizes_that_do_not_divide_are_named(dims, chunks, words, tmp_path):
    problem = mesh_problem(shape_of("qwen3", tmp_path), dims, backend="megatron", chunks=chunks)
    assert problem is not None
    assert all(word in problem for word in words)


@pytest.mark.parametrize(
    ("name", "mesh", "words"),
    [
        ("qwen3_moe", "(attn:d3|ffn:e3)", ["e3", "4 experts", "e1"]),
        ("qwen3_moe", "(attn:d5|ffn:t5)", ["t5", "12 columns"]),
        ("qwen3_moe", "t4", ["t4", "2 key and value heads"]),
        ("deepseek_v3", "t8", ["t8", "4 attention heads", "4 latents", "12 MLP columns"]),
        ("deepseek_v2", "(attn:d8|ffn:e8)", ["e8", "4 experts", "e4"]),
    ],
)
def test_sizes_that_do_not_divide_experts_are_named(name, mesh, words, tmp_path):
    dims = AllocationMode.parse(f"megatron:{mesh}").train[0].parallel
    problem = mesh_problem(shape_of(name, tmp_path), dims, backend="megatron")
    assert problem is not None
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "glm4_moe", "mixtral", "deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("mesh", ["d2e2", "(attn:d2|ffn:e2)", "(attn:t2|ffn:t2)", "(attn:d2t2|ffn:t2e2)", "t2e2p2"])
def test_experts_are_split_over_data_and_tensor_ranks(name, mesh, tmp_path):
    dims = AllocationMode.parse(f"megatron:{mesh}").train[0].parallel
    assert mesh_problem(shape_of(name, tmp_path), dims, backend="megatron") is None


def test_the_two_forms_of_expert_ranks_are_equal():
    short, long = (AllocationMode.parse(f"megatron:{mesh}").train[0] for mesh in ("d2e2", "(attn:d2|ffn:e2)"))
    assert short.parallel == long.parallel


@pytest.mark.parametrize("family", ["gpt_oss", "gemma"])
def test_families_that_were_not_compared_with_one_process_are_refused(family, tmp_path):
    problem = mesh_problem(replace(shape_of("qwen3", tmp_path), family=family), ParallelDims(), backend="megatron")
    assert problem is not None
    assert family in problem


@pytest.fixture(scope="module")
def bad_input(tmp_path_factory):
    """Models, rows and a configuration in which nothing is wrong before anything starts."""
    folder = tmp_path_factory.mktemp("bad_input")
    for name in ("qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"):
        CONFIGS.get(name, CONFIGS["qwen3"]).save_pretrained(folder / name)
        (folder / name / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    text = (folder / "gpt_oss" / "config.json").read_text().replace('"qwen3"', '"gpt_oss"')
    (folder / "gpt_oss" / "config.json").write_text(text)
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 48)
    (folder / "c.yaml").write_text(
        f"""
experiment_name: bad
trial_name: input
cluster: {{fileroot: {folder}/runs, n_gpus_per_node: 0}}
train_dataset: {{path: {folder}/rows.jsonl, type: sft, batch_size: 24}}
model: {{path: {folder}/qwen3, dtype: float32, gradient_checkpointing: true, optimizer: {{lr: 1.0e-3}}}}
"""
    )
    return folder


@pytest.mark.parametrize(
    ("mesh", "model", "option", "code", "value"),
    [
        ("t4", "qwen3", "", "launch.missing_inputs", "2 key and value heads"),
        ("c3", "qwen3", "", "launch.missing_inputs", "4 attention heads"),
        ("p3", "qwen3", "", "launch.missing_inputs", "2 layers"),
        ("p2", "qwen3", "virtual_pipeline_parallel_size=2", "launch.missing_inputs", "2 layers"),
        ("d1", "qwen3", "virtual_pipeline_parallel_size=2", "launch.missing_inputs", "use p2"),
        ("d2e2", "qwen3", "", "launch.missing_inputs", "no experts"),
        ("(attn:d3|ffn:e3)", "qwen3_moe", "", "launch.missing_inputs", "4 experts"),
        ("(attn:d8|ffn:t8)", "qwen3_moe", "", "launch.missing_inputs", "12 columns"),
        ("t8", "deepseek_v3", "", "launch.missing_inputs", "4 latents"),
        ("d1", "gpt_oss", "", "launch.missing_inputs", "gpt_oss"),
        ("d1", "qwen3", "fp8=hybrid", "launch.missing_inputs", "transformer-engine"),
        ("d1", "qwen3", "use_precision_aware_optimizer=true", "launch.missing_inputs", "transformer-engine"),
        ("d1", "qwen3", "moe_permute_fusion=true", "launch.missing_inputs", "transformer-engine"),
        ("d1", "qwen3", "moe_token_dispatcher_type=flex", "launch.missing_inputs", "deep_ep"),
        (
            "d1",
            "qwen3",
            "{recompute_granularity: selective, recompute_modules: [layernorm]}",
            "launch.missing_inputs",
            "transformer-engine",
        ),
        (
            "d1",
            "qwen3",
            "{recompute_granularity: selective, recompute_modules: [attention]}",
            "config.not_a_choice",
            "core_attn",
        ),
        (
            "d2p2",
            "qwen3",
            "{overlap_param_gather_with_optimizer_step: true,"
            " ddp: {overlap_grad_reduce: true, overlap_param_gather: true}}",
            "config.missing_requirement",
            "virtual_pipeline_parallel_size",
        ),
        ("(attn:d2|ffn:e4)", "qwen3_moe", "", "allocation.invalid", "2 devices cannot be split"),
        ("d1", "qwen3", "ddp.overlap_param_gather=true", "config.missing_requirement", "overlap_grad_reduce"),
        (
            "d1",
            "qwen3",
            "{use_precision_aware_optimizer: true, offload_optimizer: true}",
            "config.conflict",
            "use_precision_aware_optimizer",
        ),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(bad_input, capsys, monkeypatch, mesh, model, option, code, value):
    """Where Megatron-Core is installed, without Transformer Engine and deep_ep."""
    result = importlib.util.find_spec
    missing = ("transformer_engine", "deep_ep")
    monkeypatch.setattr(
        "areal.models.mesh_rules.importlib.util.find_spec",
        lambda name: None if name in missing else object() if name.startswith("megatron") else result(name),
    )
    words = [f"allocation_mode=megatron:{mesh}", f"model.path={bad_input}/{model}"]
    if option:
        words.append(f"model.megatron={option}" if option.startswith("{") else f"model.megatron.{option}")
    text = dry_run(bad_input, capsys, *words)
    [line] = [each for each in text.strip().splitlines() if not each.startswith("areal: warning: ")]  # of few cores
    assert line.endswith(f"[{code}]")
    assert value in line
    assert not (bad_input / "runs").exists()


def test_sizes_that_divide_are_no_problem(tmp_path):
    dims = ParallelDims(dp=2, tp=2, pp=2, cp=2)
    assert mesh_problem(shape_of("qwen3", tmp_path), dims, backend="megatron") is None


def test_packages_matter_to_megatron_only():
    assert package_problem("fsdp", MegatronEngineConfig(use_precision_aware_optimizer=True)) is None


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
