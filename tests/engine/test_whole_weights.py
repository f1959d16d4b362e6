"""The recovery state of several ranks is one model again."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from areal.engine.checkpoint import HostCopies, Piece, RecoveryReader, StagedPieces
from tests.expect import raises_code

WHOLE = {
    "weights/uneven": torch.arange(15.0).reshape(5, 3),
    "weights/one_row": torch.arange(4.0).reshape(1, 4),
    "weights/replicated": torch.arange(6.0).reshape(2, 3),
    "optimizer/uneven/exp_avg": torch.arange(15.0).reshape(5, 3).double() / 7,
    "optimizer/uneven/step": torch.tensor(3.0),
}
SHAPES = {name.removeprefix("weights/"): tuple(value.shape) for name, value in WHOLE.items() if "weights" in name}


def parts_of(name: str) -> list[torch.Tensor]:
    """Of three ranks: dimension 0 in chunks, of which the last may be empty."""
    value = WHOLE[name]
    if "replicated" in name or not value.dim():
        return [value] * 3
    chunks = list(value.chunk(3))
    return [part.contiguous() for part in chunks + [value[:0]] * (3 - len(chunks))]


@pytest.fixture
def folder(tmp_path):
    """What three ranks wrote."""
    for rank in range(3):
        pieces = {}
        for name in WHOLE:
            value = parts_of(name)[rank]
            is_copy = "replicated" in name or not value.dim()
            rows = 0 if is_copy else sum(len(part) for part in parts_of(name)[:rank])
            if value.numel() and (rank == 1 or not is_copy):
                pieces[name] = Piece(value, (rows, 0)[: value.dim()])
        StagedPieces(pieces=pieces, rank=rank, world_size=3, num_steps=1).write(tmp_path)
    return tmp_path


def test_the_parts_are_joined(folder):
    reader = RecoveryReader(folder, SHAPES)
    result = {name: torch.full_like(value, -1.0) for name, value in WHOLE.items()}
    kinds = reader.kinds("uneven")
    assert {kind: (tuple(item.size), item.properties.dtype) for kind, item in kinds.items()} == {
        "exp_avg": ((5, 3), torch.float64),
        "step": ((), torch.float32),
    }
    reader.fill(result)
    assert all(torch.equal(result[name], value) for name, value in WHOLE.items())
    assert reader.num_steps == 1


@pytest.mark.parametrize("shapes", [SHAPES | {"uneven": (6, 3)}, SHAPES | {"absent": (1,)}, {"uneven": (5, 3)}])
def test_another_model_is_refused(folder, shapes):
    with raises_code("model.weights_do_not_fit"):
        RecoveryReader(folder, shapes)


def test_another_format_is_refused(folder):
    facts = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(facts | {"format": 3}))
    with raises_code("checkpoint.other_run"):
        RecoveryReader(folder, SHAPES)


def test_a_missing_rank_is_an_error(folder):
    """The planner of torch would leave the tensors as they are."""
    next(folder.glob("rank-00001*")).unlink()
    with raises_code("checkpoint.damaged"):
        RecoveryReader(folder, SHAPES)


def test_torch_alone_reads_the_folder(tmp_path):
    values = torch.randn(4, 2)
    for rank in range(2):
        piece = Piece(values[2 * rank : 2 * rank + 2], (2 * rank, 0))
        StagedPieces(pieces={"weights/a": piece}, rank=rank, world_size=2, num_steps=1).write(tmp_path)
    result = {"weights/a": torch.zeros(4, 2)}
    dcp.load(result, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(result["weights/a"], values)


def test_staged_copies_are_independent_and_their_memory_is_used_again():
    values, copies = torch.ones(3), HostCopies()
    first = copies.of({"a": Piece(values, (0,))})["a"].values
    values.fill_(2.0)
    assert first.tolist() == [1.0] * 3
    second = copies.of({"a": Piece(values, (0,))})["a"].values
    assert (second.data_ptr(), second.tolist()) == (first.data_ptr(), [2.0] * 3)
