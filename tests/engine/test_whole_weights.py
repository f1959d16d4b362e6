"""The weights of several ranks are one model again."""

import json

import pytest
import torch
from safetensors.torch import save_file

from areal.api.errors import InputError
from areal.engine.recovery import RecoveryReader

WHOLE = {
    "uneven": torch.arange(15.0).reshape(5, 3),
    "one_row": torch.arange(4.0).reshape(1, 4),
    "replicated": torch.arange(6.0).reshape(2, 3),
}
SHAPES = {name: tuple(value.shape) for name, value in WHOLE.items()}


def read_whole(folder, shapes):
    with RecoveryReader(folder) as reader:
        return {name: reader.weight(name, shape, tuple(map(slice, [0] * 2, shape))) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path):
    """Three ranks; dimension 0 in chunks, of which the last may be empty."""
    for rank in range(3):
        tensors = {"weights/replicated": WHOLE["replicated"]}
        for name in ("uneven", "one_row"):
            chunks = WHOLE[name].chunk(3)
            part = chunks[rank] if rank < len(chunks) else WHOLE[name][:0]
            tensors[f"weights/{name}"] = part.contiguous()
        save_file(tensors, tmp_path / f"rank-{rank:05d}-of-00003.safetensors")
    (tmp_path / "state.json").write_text(json.dumps({"format": 2, "world_size": 3, "num_steps": 1}))
    return tmp_path


def test_the_parts_are_joined(folder):
    found = read_whole(folder, SHAPES)
    assert all(torch.equal(found[name], value) for name, value in WHOLE.items())
    assert list(found) == list(SHAPES)


def test_a_missing_rank_or_another_shape_is_an_error(folder):
    for shapes in ({"uneven": (6, 3)}, {"absent": (1,)}):
        with pytest.raises(InputError) as error:
            read_whole(folder, shapes)
        assert error.value.code == "checkpoint.damaged"
    next(folder.glob("rank-00001*")).unlink()
    with pytest.raises(InputError) as error:
        read_whole(folder, SHAPES)
    assert error.value.code == "checkpoint.damaged"
