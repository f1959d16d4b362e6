"""Checkpoint files that several ranks write."""

import torch
from safetensors.torch import load_file

from areal.models.checkpoint_files import stored_weights
from areal.weights import weight_files
from areal.weights.weight_files import plan_files, write_index, write_own_files


def test_several_ranks_write_the_files_that_one_would_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "MIN_PART_BYTES", 1)
    weights = {f"w{number}": torch.randn(3, number + 1) for number in range(7)}
    sizes = {name: value.nbytes for name, value in weights.items()}
    files = plan_files(sizes, 3)
    assert [name for names in files.values() for name in names] == list(weights)
    assert len(files) >= 3
    for rank in range(3):
        write_own_files(tmp_path, iter(weights.items()), files, rank, 3)
        assert {path.name for path in tmp_path.iterdir()} == {f for k, f in enumerate(files) if k % 3 <= rank}
    write_index(tmp_path, files, sizes)
    result = stored_weights(tmp_path)
    assert result.keys() == weights.keys()
    read = {name: value for file in files for name, value in load_file(tmp_path / file).items()}
    assert all(torch.equal(read[name], value) for name, value in weights.items())


def test_small_models_are_one_file_and_no_file_exceeds_the_limit():
    assert list(plan_files({"a": 5, "b": 5}, 8)) == ["model.safetensors"]
    files = plan_files({str(number): 10 for number in range(20)}, 2, max_file_bytes=30)
    assert max(map(len, files.values())) == 3
