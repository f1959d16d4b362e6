"""The planned memory of a trainer rank against the allocations of torch, and what is refused."""

import gc
import json
from dataclasses import replace

import pytest
import torch
from torch.autograd.profiler import profile
from transformers import AutoModelForImageTextToText, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from areal.api.allocation import ParallelDims
from areal.api.config import FSDPEngineConfig, GRPOConfig, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.config.train import Float8Config, LoRAConfig
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.hf_model import compute_buffers, other_towers
from areal.engine.mesh import TrainerMesh
from areal.launcher.job import make_plan
from areal.launcher.local import plan_text
from areal.launcher.memory_plan import memory_problems, memory_texts, rank_memory, tower_bytes, trains_tower
from areal.launcher.placement import Machine
from areal.models.model_shape import ModelShape
from areal.models.vision_layout import FAMILIES, read_vision_layout
from tests.engine import vision_cases
from tests.engine.engine_cases import make_batch, policy_loss

SIZES = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000, "tie_word_embeddings": True}
SHAPES = {
    "narrow": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "deep": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4},
}
TOKENS = 1024


def measured_peak(config: TrainEngineConfig) -> int:
    """Peak of torch's CPU allocator over the construction of an engine and two optimiser steps."""
    gc.collect()
    with profile(profile_memory=True) as result:
        engine = build_fsdp_engine(config, role="actor", total_steps=5, mesh=TrainerMesh.open(None), seed=0)
        batch = make_batch([TOKENS // 4] * 4)
        for _ in range(2):
            engine.forward_backward(batch, policy_loss, denominator=float(TOKENS))
            engine.optimizer_step()
    events = [item for item in result.kineto_results.events() if item.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda entry: entry.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def test_blocks_that_are_gathered_in_8_bits_have_one_byte_a_weight(tmp_path):
    Qwen2Config(**SIZES | SHAPES["deep"], max_position_embeddings=64).save_pretrained(tmp_path)
    shape = ModelShape.read(str(tmp_path))
    assert shape is not None
    block = (shape.parameters - 1000 * 128) // 8
    plain = TrainEngineConfig(path="m", optimizer=OptimizerConfig())
    result = [
        rank_memory([(model, shape)], dims=ParallelDims(dp=4), tokens=100, on_gpu=True)
        for model in (plain, replace(plain, fp8=Float8Config(recipe="tensorwise")), replace(plain, fp8=Float8Config()))
    ]
    assert result[0].gathered - result[1].gathered == 2 * block
    assert result[0] == result[2] == replace(result[1], gathered=result[0].gathered)
    fp8 = Float8Config(recipe="tensorwise")
    for model, config, ranks in (
        (shape, replace(fp8, filter_fqns=["down_proj"]), 4),
        (shape, fp8, 3),  # no divisor of the rows: torchao does not pad parts
        (replace(shape, intermediate=shape.intermediate + 8), fp8, 4),  # 16 does not divide it
        (replace(shape, experts=2), fp8, 4),
    ):
        plan = [
            rank_memory([(item, model)], dims=ParallelDims(dp=ranks), tokens=100, on_gpu=True).gathered
            for item in (plain, replace(plain, fp8=config))
        ]
        assert plan[0] == plan[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "checkpointing"),
    [
        ("qwen2", "narrow", "float32", False),
        ("qwen2", "narrow", "bfloat16", True),
        ("qwen3", "deep", "float32", True),
        ("qwen3", "deep", "bfloat16", False),
    ],
)
def test_the_plan_is_within_a_fifth_of_the_measured_peak(tmp_path, kind, shape, dtype, checkpointing):
    classes = {"qwen2": (Qwen2ForCausalLM, Qwen2Config), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}[kind]
    torch.manual_seed(0)
    classes[0](classes[1](**SIZES, **SHAPES[shape])).save_pretrained(tmp_path)
    config = TrainEngineConfig(
        path=str(tmp_path), dtype=dtype, optimizer=OptimizerConfig(), gradient_checkpointing=checkpointing
    )
    size = ModelShape.read(str(tmp_path))
    result = rank_memory([(config, size)], dims=ParallelDims(), tokens=TOKENS, on_gpu=False)
    assert result.peak == pytest.approx(measured_peak(config), rel=0.2)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_tower_is_counted_and_its_patches(tmp_path, family):
    config = vision_cases.config_of(family, 64)
    tower = config.vision_config
    sizes = {"hidden_size": 320, "intermediate_size": 1280, "image_size": 56, "embed_dim": 320, "out_hidden_size": 512}
    for name, size in sizes.items():
        if hasattr(tower, name):
            setattr(tower, name, [size, size] if isinstance(getattr(tower, name), list | tuple) else size)
    text = config.get_text_config()
    text.hidden_size = 512
    if family.startswith("qwen2"):  # which computes it, whatever the file says
        text.head_dim = 512 // text.num_attention_heads
    if family == "qwen2_vl":
        tower.hidden_size, tower.mlp_ratio = 512, 4
    if family == "gemma3":
        config.mm_tokens_per_image = 16
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    shape = ModelShape.read(str(tmp_path))
    exact = sum(weight.numel() for part in other_towers(model) for weight in part.parameters())
    assert shape.vision.parameters == pytest.approx(exact, rel=0.06)
    assert shape.parameters == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=0.06)
    vision_cases.write_processor(tmp_path, family)
    layout = read_vision_layout(str(tmp_path))
    assert shape.vision.merge == layout.merge_size
    actor = replace(GRPOConfig().actor, path=str(tmp_path), dtype="float32", optimizer=OptimizerConfig())
    assert trains_tower(actor, shape)
    assert not trains_tower(replace(actor, freeze=list(FAMILIES[family].modules)), shape)
    model.to_empty(device="cpu")
    compute_buffers(model, torch.device("cpu"))
    kept = kept_bytes(model, layout)
    patches = layout.max_pixels // layout.patch_size**2 if layout.side else 64
    assert tower_bytes(actor, shape, patches) == pytest.approx(kept, rel=0.35)


def kept_bytes(model, layout) -> int:
    """What autograd keeps of the images of a pass in the tower, without weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    seen: dict[int, int] = {}

    def pack(value):
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return value

    inputs = [torch.randn(layout.max_tiles, 3, layout.side, layout.side)] if layout.side else []
    if not inputs:
        inputs = [torch.randn(64, 3 * layout.temporal_patch_size * layout.patch_size**2), torch.tensor([[1, 8, 8]])]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        result = model.base_model.get_image_features(
            inputs[0][None] if layout.is_batched else inputs[0], *inputs[1:], return_dict=True
        )
    del result
    return sum(seen.values())


def write_shape(folder, **sizes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes}))
    return str(folder)


def problems_of(folder, machine, *, card_gib=80, host_gib=2000, **changes):
    actor = replace(GRPOConfig().actor, path=folder, optimizer=OptimizerConfig(), **changes)
    allocation = f"native:d{max(len(machine.gpus) // 2, 1)}+fsdp:d{max(len(machine.gpus) // 2, 1)}"
    config = replace(GRPOConfig(), allocation_mode=allocation, actor=actor)
    config = replace(config, cluster=replace(config.cluster, n_gpus_per_node=16))
    config = replace(config, train_dataset=replace(config.train_dataset, batch_size=512))
    plan = make_plan(config, [machine])
    return list(memory_problems(config, plan, card_bytes=card_gib * 2**30, host_bytes=host_gib * 2**30))


@pytest.fixture
def seven_billion(tmp_path):
    return write_shape(
        tmp_path / "m", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064,
    )  # fmt: skip


def test_a_model_that_does_not_fit_is_refused_with_the_option_to_change(seven_billion):
    eight = Machine(cores=64, gpus=tuple(map(str, range(16))))
    checkpointed = {"gradient_checkpointing": True}
    assert problems_of(seven_billion, eight, **checkpointed) == []
    [tokens] = problems_of(seven_billion, eight)
    assert tokens.startswith("actor.mb_spec.max_tokens_per_mb: ")
    assert problems_of(seven_billion, eight, mb_spec=MicroBatchSpec(max_tokens_per_mb=2048)) == []
    [ranks] = problems_of(seven_billion, Machine(cores=64, gpus=("0", "1")), **checkpointed)
    assert ranks.startswith("allocation_mode: ")
    lower, first = (
        checkpointed | {"mb_spec": MicroBatchSpec(max_tokens_per_mb=2048)},
        Machine(cores=64, gpus=("0", "1")),
    )
    offloads = {"none": {}, "optimizer": {"offload_optimizer": True}, "all": {"offload_params": True}}
    result = {
        name: len(problems_of(seven_billion, first, **lower, fsdp=FSDPEngineConfig(**options)))
        for name, options in offloads.items()
    }
    assert result == {"none": 1, "optimizer": 0, "all": 0}, "the advice helps"
    [host] = problems_of(seven_billion, Machine(cores=64), host_gib=64)
    assert host.startswith("allocation_mode: ")
    assert problems_of(seven_billion, Machine(cores=64)) == []
    assert problems_of("org/model", eight) == [], "a model that is not on this machine"
    cases = [
        ("delta", Machine(cores=64), 120, 1),
        ("delta", eight, 141, 1),
        ("delta", eight, 142, 0),
    ]  # 14.19 GiB for each of eight servers, and for the ranks together, with as much for their differences
    cases += [("delta_xccl", eight, 156, 1), ("delta_xccl", eight, 157, 0)]  # rank 0 keeps differences of all
    for mode, machine, host_gib, count in cases:
        problems = problems_of(seven_billion, machine, host_gib=host_gib, **checkpointed, weight_update_mode=mode)
        assert sum(text.startswith("actor.weight_update_mode: with delta trainer ranks") for text in problems) == count
    for machine, host_gib in ((Machine(cores=64), 160), (eight, 64)):
        [copies] = problems_of(seven_billion, machine, host_gib=host_gib, **checkpointed)
        assert copies.startswith("recover.async_save: ")


def test_a_plan_says_what_processes_need_in_all(tmp_path):
    """SmolLM2-135M, measured: 2.4 GiB for the server before its weights were packed, which adds half a GiB, and 2.7 GiB
    for the trainer with LoRA and 1,200 tokens."""
    model = write_shape(
        tmp_path / "m", hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True, model_type="llama",
    )  # fmt: skip
    actor = replace(GRPOConfig().actor, path=model, dtype="float32", optimizer=OptimizerConfig(), lora=LoRAConfig())
    native = replace(GRPOConfig().native, dtype="float32", context_length=160)
    config = replace(GRPOConfig(), allocation_mode="native:d1+fsdp:d1", actor=actor, native=native)
    config = replace(
        config, train_dataset=replace(config.train_dataset, batch_size=64), gconfig=replace(config.gconfig, n_samples=1)
    )
    plan = make_plan(config, [Machine(cores=2)])
    texts = memory_texts(config, plan)
    assert texts["server-0"] == "about 3.0 GiB in all"
    each = "1.4 GiB for 1,000 tokens of a micro-batch (at most 10,240, those that rows share once)"
    assert texts["trainer-0"] == f"about 1.1 GiB in all and {each}"
    assert texts["trainer-0"] in plan_text(plan, None, memory_of=texts)
    evaluation = replace(config, allocation_mode="native:d1+eval")
    plan_of_evaluation = make_plan(evaluation, [Machine(cores=2)])
    assert memory_texts(evaluation, plan_of_evaluation) == {"server-0": texts["server-0"]}
    assert "numbers:" not in plan_text(plan_of_evaluation, None), "it has no train steps"
    whole = replace(config, actor=replace(actor, lora=None, weight_update_mode="delta"))
    assert memory_texts(whole, plan)["trainer-0"].endswith(
        ", 0.5 GiB of host memory for the weights published last (delta)"
    ), "134.5 million numbers of four bytes"
    whole = replace(config, actor=replace(actor, lora=None, weight_update_mode="delta_xccl"))
    assert ", 1.0 GiB of host memory" in memory_texts(whole, plan)["trainer-0"]
    assert memory_texts(replace(config, actor=replace(actor, path="org/model")), plan).keys() == {"server-0"}


def test_states_of_running_sequences_are_part_of_the_memory_of_a_server(tmp_path):
    linear = {
        "model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    sizes = {
        "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 32000,
    }  # fmt: skip
    each = 2 * 3 * (32 * 128 * 128 + (2 * 16 * 128 + 32 * 128) * 4)  # of a sequence, in bfloat16
    plain, hybrid = (
        write_shape(tmp_path / name, **sizes, **more) for name, more in (("plain", {}), ("linear", linear))
    )
    machine = Machine(cores=2)
    served = []
    for path in (plain, hybrid):
        config = replace(GRPOConfig(), allocation_mode="native:d1+fsdp:d1")
        config = replace(config, actor=replace(config.actor, path=path, optimizer=OptimizerConfig()))
        plan = make_plan(config, [machine])
        served.append(next(process.memory_bytes for process in plan.processes if process.role == "server"))
    norms = 2 * 2 * 4 * 2 * 128 // 2  # of queries and keys, in both copies of the weights
    assert served[1] - served[0] == pytest.approx((256 + 2**28 // each) * each, abs=16 * norms)
    assert problems_of(hybrid, machine, host_gib=24) == []
    (text,) = problems_of(hybrid, machine, host_gib=0.7)[:1]
    assert text.startswith("native.max_running_requests=256: the states of the model's layers take 0.8 GiB")
    assert int(text.rpartition(" ")[2]) == (int(0.7 * 2**30 * 0.95) - 2 * ModelShape.read(hybrid).parameters) // each


@pytest.mark.parametrize(
    ("longest", "weights", "expected"),
    [
        (32, 1, 256 * 32),  # requests of full length
        (8192, 2**20, 256 * 512),
        (8192, 1 << 40, 256 * 512),
        (8192, 538 * 10**6, 2 * 538 * 10**6 // 46080),  # twice the weights: 1.00 GiB
        (65536, 269 * 10**6, 65536),  # a request of full length always fits
    ],
)
def test_the_default_cache_is_limited_by_the_size_of_the_model(longest, weights, expected):
    per_token = 46080 if weights > 2**20 else 1024
    assert GRPOConfig().native.cpu_cache_tokens(longest, weight_bytes=weights, bytes_per_token=per_token) == expected
