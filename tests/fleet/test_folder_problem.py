"""A folder that a foreign server would not survive, or would load in part, is told from a good one by its headers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from areal.models.checkpoint_files import INDEX, folder_problem
from areal.system.durable import publish_folder
from areal.weights.weight_files import write_weights


def weights() -> dict[str, Tensor]:
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.norm.weight", "lm_head.weight"]
    return {name: torch.ones(4, 3) for name in names}


def write(folder: Path, tensors: dict[str, Tensor], *, max_file_bytes: int = 2**20, is_tied: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    write_weights(folder, tensors.items(), max_file_bytes)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": is_tied}))
    return folder


@pytest.fixture
def like(tmp_path: Path) -> Path:
    return write(tmp_path / "like", weights())


@pytest.mark.parametrize("max_file_bytes", [2**20, 60])
def test_a_good_folder_has_no_problem(tmp_path: Path, like: Path, max_file_bytes: int) -> None:
    folder = write(tmp_path / "new", weights(), max_file_bytes=max_file_bytes)
    assert (folder / INDEX).exists() == (max_file_bytes == 60)
    assert folder_problem(folder, like) == folder_problem(folder, None) == ""
    publish_folder(folder, tmp_path / "published")
    assert folder_problem(tmp_path / "published", like) == ""


def cut(folder: Path) -> None:
    path = folder / "model-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def cut_in_the_header(folder: Path) -> None:
    path = folder / "model-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:40])


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


OF_ITSELF: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "broken configuration": (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
    "a file is gone": (lambda folder: (folder / "model-00002-of-00004.safetensors").unlink(), "No such file"),
    "a file is cut": (cut, "cannot be read: it has \\d+ bytes instead of"),
    "a header is cut": (cut_in_the_header, "not a safetensors file, or only a part"),
    "garbage": (
        lambda folder: (folder / "model-00001-of-00004.safetensors").write_bytes(b"x" * 99),
        "not a safetensors",
    ),
    "empty": (lambda folder: (folder / "model-00001-of-00004.safetensors").write_bytes(b""), "its 0 bytes"),
    "broken index": (lambda folder: (folder / INDEX).write_text("{}"), "index.json cannot be read"),
    "index of elsewhere": (
        lambda folder: change_index(folder, lambda places: places.update(x="../like/model.safetensors")),
        "names of files in the same folder",
    ),
    "index names too much": (
        lambda folder: change_index(folder, lambda places: places.update(x="model-00001-of-00004.safetensors")),
        "lacks x, which model.safetensors.index.json",
    ),
    "no weights": (lambda folder: [path.unlink() for path in folder.glob("model*")], r"no \.safetensors file"),
}


@pytest.mark.parametrize(("spoil", "message"), OF_ITSELF.values(), ids=OF_ITSELF)
def test_an_incomplete_folder_is_refused(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    folder = write(tmp_path / "new", weights(), max_file_bytes=60)
    spoil(folder)
    assert re.search(message, folder_problem(folder, None))


def test_an_absent_folder_and_a_wrong_marker_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in folder_problem(tmp_path / "none", None)
    publish_folder(write(tmp_path / "new", weights()), tmp_path / "v1")
    (tmp_path / "v1" / "config.json").write_text("{}")
    assert "is incomplete: its COMPLETE marker" in folder_problem(tmp_path / "v1", None)


UNLIKE: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "one is missing": ({"model.norm.weight": None}, "lacks model.norm.weight"),
    "the head is missing": ({"lm_head.weight": None}, "lacks lm_head.weight"),
    "one too many": (
        {"model.layers.1.mlp.weight": torch.ones(1)},
        "contains model.layers.1.mlp.weight, which the model",
    ),
    "another shape": ({"model.norm.weight": torch.ones(4, 4)}, r"norm.weight has shape \[4, 4\], the model's has"),
    "another kind": ({"model.norm.weight": torch.ones(4, 3).to(torch.int32)}, "is I32, the model's is F32"),
    "another float": ({"model.norm.weight": torch.ones(4, 3).to(torch.bfloat16)}, ""),
    "what is computed": ({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, ""),
}


@pytest.mark.parametrize(("change", "message"), UNLIKE.values(), ids=UNLIKE)
def test_weights_are_those_of_the_model(
    tmp_path: Path, like: Path, change: dict[str, Tensor | None], message: str
) -> None:
    changed = {name: value for name, value in (weights() | change).items() if value is not None}
    folder = write(tmp_path / "new", changed)
    problem = folder_problem(folder, like)
    assert bool(problem) == bool(message)
    assert re.search(message, problem)
    assert folder_problem(folder, None) == ""
    assert folder_problem(folder, tmp_path) == "", "a folder without safetensors files says nothing"


def test_a_tied_head_is_optional(tmp_path: Path) -> None:
    without = {name: value for name, value in weights().items() if name != "lm_head.weight"}
    full, short = write(tmp_path / "a", weights(), is_tied=True), write(tmp_path / "b", without, is_tied=True)
    assert folder_problem(full, short) == folder_problem(short, full) == ""
    (short / "config.json").write_text('{"text_config": {"tie_word_embeddings": true}}')
    assert folder_problem(short, full) == ""
    (short / "config.json").write_text("{}")
    assert "lacks lm_head.weight" in folder_problem(short, full)


def test_safetensors_own_files_are_read(tmp_path: Path) -> None:
    tensors = weights() | {
        "half": torch.ones(3).half(),
        "flag": torch.ones(3).bool(),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert folder_problem(tmp_path, None) == ""
    assert set(load_file(tmp_path / "model.safetensors")) == set(tensors)
