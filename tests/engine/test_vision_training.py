"""Packed rows with images: against transformers one by one, one rank against two, gradients, frozen parts."""

from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from areal.api.batch import IMAGE_INDEX
from areal.api.config import LoRAConfig, MicroBatchSpec, TrainEngineConfig
from areal.api.images import ImageRef
from areal.data.balance import balanced_parts
from areal.data.pack import take
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.lora import Adapters
from areal.engine.mesh import TrainerMesh
from tests.engine import engine_cases
from tests.engine.vision_cases import make_engine, one_by_one, read_case, write_case
from tests.expect import raises_code
from tests.rank_processes import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    write_case(folder, "qwen3_vl")
    return folder


@pytest.mark.parametrize("options", [{}, {"mb_spec": MicroBatchSpec(max_tokens_per_mb=40, max_patches_per_mb=48)}])
def test_a_packed_row_equals_its_sequences_one_by_one(folder, options):
    _, _, batch = read_case(folder)
    expected, gradients = one_by_one(folder)
    engine = make_engine(folder, **options)
    torch.testing.assert_close(engine.forward(batch).logprobs, expected, rtol=0, atol=1e-5)
    for name, actual in engine_cases.gradients(engine, batch).items():
        torch.testing.assert_close(actual, gradients[name], rtol=0, atol=3e-5, msg=name)


def test_parts_are_frozen_or_have_their_own_rate(folder):
    _, _, batch = read_case(folder)
    free = engine_cases.gradients(make_engine(folder), batch)
    frozen = engine_cases.gradients(make_engine(folder, freeze=["visual"]), batch)
    slow = replace(engine_cases.SGD, lr_of={"visual": 0.5})
    slowed = engine_cases.gradients(make_engine(folder, optimizer=slow), batch)
    towers = [name for name in free if "visual" in name]
    assert any(free[name].abs().max() > 1e-3 for name in towers)
    for name, gradient in free.items():
        torch.testing.assert_close(frozen[name], gradient * (name not in towers), rtol=0, atol=1e-6)
        torch.testing.assert_close(slowed[name], gradient * (0.5 if name in towers else 1), rtol=0, atol=1e-6)
    for options in ({"freeze": ["vision"]}, {"optimizer": replace(slow, lr_of={"vision": 0.5})}):
        with raises_code("model.no_such_weight"):
            make_engine(folder, **options)


def test_all_linear_gives_the_vision_tower_no_adapters(folder):
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    adapters = Adapters(model, LoRAConfig(rank=2))
    assert {name.split(".")[1] for name in adapters.layers} == {"language_model"}
    assert len(adapters.layers) == 2 * 7
    assert "q_proj" in adapters.target_names()
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    every = [*adapters.target_names(), "qkv"]
    asked = Adapters(model, LoRAConfig(rank=2, target_modules=every))
    assert {name.split(".")[1] for name in set(asked.layers) - set(adapters.layers)} == {"visual"}


@pytest.mark.parametrize("exclude", [["qkv", "layers.1.mlp.up_proj"], r".*\.visual\..*|.*layers\.1\.mlp\.up_proj"])
def test_excluded_modules_get_no_adapters_as_in_peft(folder, exclude):
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    theirs = peft.get_peft_model(
        AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32),
        peft.LoraConfig(r=2, target_modules=["qkv", "q_proj", "up_proj"], exclude_modules=exclude),
    )
    adapters = Adapters(model, LoRAConfig(rank=2, target_modules=["qkv", "q_proj", "up_proj"], exclude_modules=exclude))
    result = {name.split(".lora_A")[0] for name, _ in theirs.named_parameters() if ".lora_A" in name}
    assert {f"base_model.model.{name}" for name in adapters.layers} == result
    assert len(result) == 3
    with raises_code("adapter.no_target"):
        Adapters(model, LoRAConfig(rank=2, exclude_modules=["absent"]))
    with raises_code("adapter.no_target"):
        Adapters(model, LoRAConfig(rank=2, target_modules=["q_proj"], exclude_modules=".*"))


def test_wrong_images_are_refused(folder, tmp_path):
    layout, _, batch = read_case(folder)
    engine = make_engine(folder)
    with raises_code("data.image_tokens"):
        engine.forward(batch.with_column(IMAGE_INDEX, batch.columns[IMAGE_INDEX].roll(1, 0)))
    ids = batch.input_ids.clone()
    ids[int(batch.loss_mask.nonzero()[0]) + 1] = layout.vision_end_id
    with raises_code("data.image_tokens"):
        engine.forward(replace(batch, input_ids=ids))
    with raises_code("data.image_missing"):
        engine.forward(replace(batch, images=(ImageRef("0" * 64, batch.images[0].grid), *batch.images[1:])))
    config = TrainEngineConfig(path=str(folder / "model"), dtype="float32")
    text = build_fsdp_engine(config, role="ref", total_steps=0, mesh=TrainerMesh.open(None), seed=0)
    with raises_code("model.no_images"):
        text.forward(batch)


# --- two ranks -------------------------------------------------------------------------------------------------------

SHARES = {"balanced": None, "one": ([0, 1, 2, 3], [4]), "none": ([0], [1, 2, 3, 4]), "empty": ([], [0, 1, 2, 3, 4])}
"""Sequences of each rank; `none`: all images are on rank 1."""
VARIANTS = {
    "plain": {},
    "micro": {"mb_spec": MicroBatchSpec(max_tokens_per_mb=40)},
    "frozen": {"freeze": ["visual"]},
    "checkpointed": {"gradient_checkpointing": True},
}
CASES = [("balanced", "plain"), ("one", "micro"), ("none", "plain"), ("none", "frozen"), ("empty", "checkpointed")]


def run_shares(mesh: TrainerMesh, folder: Path) -> None:
    _, _, batch = read_case(folder)
    for share, variant in CASES:
        parts = SHARES[share] or balanced_parts(batch.sequence_lengths, 2)
        engine, mine = make_engine(folder, mesh, **VARIANTS[variant]), take(batch, parts[mesh.rank])
        before = engine.forward(mine).logprobs
        result = engine_cases.gradients(engine, mine)
        text = take(batch, [0])  # no rank has an image
        result |= {"forward": before, "text": engine.forward(text).logprobs}
        save_file(result, folder / f"{share}-{variant}-{mesh.rank}")


@pytest.fixture(scope="module")
def on_two_ranks(folder) -> Path:
    read_case(folder)
    run_ranks(run_shares, folder)
    return folder


@pytest.mark.parametrize(("share", "variant"), CASES)
def test_one_rank_equals_two_with_uneven_images(on_two_ranks, share, variant):
    _, _, batch = read_case(on_two_ranks)
    engine = make_engine(on_two_ranks, **VARIANTS[variant])
    outputs = torch.split(engine.forward(batch).logprobs, batch.sequence_lengths)
    expected = engine_cases.gradients(engine, batch)
    after = engine.forward(take(batch, [0])).logprobs
    parts = SHARES[share] or balanced_parts(batch.sequence_lengths, 2)
    for rank, part in enumerate(parts):
        actual = load_file(on_two_ranks / f"{share}-{variant}-{rank}")
        ours = torch.cat([torch.zeros(0), *(outputs[row] for row in part)])
        torch.testing.assert_close(actual.pop("forward"), ours, rtol=0, atol=1e-5)
        torch.testing.assert_close(actual.pop("text"), after, rtol=0, atol=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=0, atol=3e-6, msg=name)
