"""Every family of models for images: packed rows against transformers one by one, one rank against two, exports."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from areal.api.allocation import ParallelDims
from areal.api.config import LoRAConfig
from areal.data.pack import take
from areal.engine.hf_model import other_towers
from areal.engine.lora import Adapters
from areal.engine.mesh import TrainerMesh
from areal.models.vision_layout import FAMILIES
from tests.engine import engine_cases
from tests.engine.vision_cases import make_engine, one_by_one, read_case, write_case
from tests.expect import raises_code
from tests.rank_processes import run_ranks

MESHES = {
    "d2": (ParallelDims(dp=2), ([0, 1, 2, 3], [4])),
    "d2none": (ParallelDims(dp=2), ([0], [1, 2, 3, 4])),
    "t2": (ParallelDims(tp=2), ([0, 1, 2, 3, 4],) * 2),
    "c2": (ParallelDims(cp=2), ([0, 1, 2, 3, 4],) * 2),
}
"""Sizes of a mesh and the sequences of each rank; `d2none`: all images are on rank 1."""
TENSOR = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
CASES = [(mesh, family) for mesh in MESHES for family in FAMILIES if mesh != "t2" or family in TENSOR]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        write_case(folder / family, family)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_equals_its_sequences_one_by_one(folders, family):
    _, _, batch = read_case(folders / family)
    expected, gradients = one_by_one(folders / family)
    engine = make_engine(folders / family)
    torch.testing.assert_close(engine.forward(batch).logprobs, expected, rtol=0, atol=1e-5)
    actual = engine_cases.gradients(engine, batch)
    stored = {part: value for name, item in gradients.items() for part, value in engine._model.form.views(name, item)}
    assert actual.keys() == stored.keys()
    for name, exact in stored.items():
        torch.testing.assert_close(actual[name], exact, rtol=0, atol=3e-5, msg=name)
    towers = [name for name in actual if set(name.split(".")) & set(FAMILIES[family].modules)]
    assert max(float(actual[name].abs().max()) for name in towers) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_modules_of_images_are_known_and_get_no_adapters_from_all_linear(folders, family):
    folder = folders / family / "model"
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    children = dict(model.base_model.named_children())
    assert {id(children[name]) for name in FAMILIES[family].modules} == set(map(id, other_towers(model)))
    adapters = Adapters(model, LoRAConfig(rank=2))
    assert not {name.split(".")[1] for name in adapters.layers} & set(FAMILIES[family].modules)
    assert len(adapters.layers) == 2 * 7


@pytest.mark.parametrize("family", ["llava", "internvl", "gemma3"])
def test_an_export_has_the_names_of_the_checkpoint(folders, family, tmp_path):
    engine = make_engine(folders / family)
    engine.save(tmp_path, with_optimizer=False)
    before, after = (load_file(path / "model.safetensors") for path in (folders / family / "model", tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_a_family_without_a_tensor_plan_is_refused(folders, family):
    mesh = TrainerMesh(0, 2, torch.device("cpu"), dims=ParallelDims(tp=2))
    with raises_code("model.cannot_split"):
        make_engine(folders / family, mesh)


# --- two ranks -------------------------------------------------------------------------------------------------------


def run_mesh(name: str, mesh: TrainerMesh, folder: Path) -> None:
    for family in [family for mesh_name, family in CASES if mesh_name == name]:
        _, _, batch = read_case(folder / family)
        mine = take(batch, MESHES[name][1][mesh.rank])
        engine = make_engine(folder / family, mesh)
        before = engine.forward(mine).logprobs
        result = engine_cases.gradients(engine, mine)
        save_file(result | {"forward": before}, folder / f"{name}-{family}-{mesh.rank}")


@pytest.fixture(scope="module")
def on_two_ranks(folders):
    done: set[str] = set()

    def run(mesh: str) -> Path:
        if mesh not in done:
            run_ranks(partial(run_mesh, mesh), folders, MESHES[mesh][0], run_id=len(done))
            done.add(mesh)
        return folders

    for family in FAMILIES:
        read_case(folders / family)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "family"), CASES)
def test_two_ranks_equal_one(on_two_ranks, mesh, family):
    folder = on_two_ranks(mesh)
    _, _, batch = read_case(folder / family)
    engine = make_engine(folder / family)
    outputs = torch.split(engine.forward(batch).logprobs, batch.sequence_lengths)
    expected = engine_cases.gradients(engine, batch)
    for rank, part in enumerate(MESHES[mesh][1]):
        actual = load_file(folder / f"{mesh}-{family}-{rank}")
        ours = torch.cat([outputs[row] for row in part])
        torch.testing.assert_close(actual.pop("forward"), ours, rtol=0, atol=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=0, atol=5e-6, msg=name)
