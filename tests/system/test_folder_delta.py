"""The difference between two versions of weights makes exactly the new one, and is small where little has changed."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from areal.system import folder_delta
from areal.system.folder_delta import BLOCK_BYTES, apply, apply_delta, copy_files, encode, write_delta
from tests.expect import raises_code

GIVEN = {1: 7, 2: 300, 4: 70_000, 8: 2**40}


def remade(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    block = old.copy()
    packed = encode(old, new)
    if packed:
        apply(packed, block)
    return block


def test_the_bytes_of_a_difference_are_those_worked_by_hand() -> None:
    """300 unchanged numbers, +1, one unchanged, -2: gaps 255 + 45 and 1; zigzag 2 and 3; no high byte."""
    old = np.full(600, 1000, np.uint16)
    new = old.copy()
    new[300] += 1
    new[302] -= 2
    packed = encode(old, new)
    planes: list[list[int]] = []
    rest = packed[1:]
    while rest:
        size = int.from_bytes(rest[:4], "little")
        planes.append(list(zlib.decompress(rest[4 : 4 + size], -15)))
        rest = rest[4 + size :]
    assert packed[0] == 1
    assert planes == [[255, 45, 1], [2, 3], [0, 0]]
    assert encode(old, old) == b""


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    size=st.integers(1, 3000),
    share=st.sampled_from([0.0, 0.001, 0.1, 0.49, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**32),
    is_small=st.booleans(),
)
def test_any_new_block_is_made_from_any_old_one(width: int, size: int, share: float, seed: int, is_small: bool) -> None:
    draw = np.random.default_rng(seed)
    dtype = np.dtype(f"<u{width}")
    old = draw.integers(0, 2 ** (8 * width), size, dtype, endpoint=False)
    changed = draw.random(size) < share
    new = old.copy()
    step = draw.integers(0, 5 if is_small else 2 ** (8 * width), size, dtype, endpoint=False)
    new[changed] -= step[changed]
    assert np.array_equal(remade(old, new), new)
    assert len(encode(old, new)) <= 1 + new.nbytes


@pytest.mark.parametrize(("share", "most"), [(0.017, 0.012), (0.108, 0.055), (0.8, 0.2)])
def test_a_difference_is_near_the_entropy_of_the_changes(share: float, most: float) -> None:
    """Of bfloat16 numbers that change by one unit: (H(share) + share) / 16 is 0.9%, 3.8% and 9.5%; with Huffman codes
    of whole bits one for each number that has not changed."""
    draw = np.random.default_rng(1)
    old = draw.integers(0, 2**16, 2**20, np.uint16)
    moves = draw.choice(np.array([1, 2**16 - 1], np.uint16), 2**20)
    new = old + moves * (draw.random(2**20) < share)
    assert 0 < len(encode(old, new)) / new.nbytes < most


def test_unrelated_numbers_are_sent_as_they_are() -> None:
    draw = np.random.default_rng(1)
    old, new = draw.integers(0, 2**16, (2, 5000), np.uint16)
    assert encode(old, new) == b"\0" + new.tobytes()


@pytest.mark.parametrize("cut", [1, 3, 9, -1])
def test_a_damaged_block_is_refused(cut: int) -> None:
    old = np.zeros(1000, np.uint16)
    new = old.copy()
    new[::7] = 5
    packed = encode(old, new)
    with pytest.raises(ValueError, match=r"."):
        apply(packed[:cut], old)
    with pytest.raises(ValueError, match="outside"):
        apply(packed, np.zeros(900, np.uint16))
    with pytest.raises(ValueError, match=r"."):
        apply(b"\0\1\2", old)


def version(folder: Path, seed: int, *, changes: float = 0.0) -> Path:
    """A checkpoint of several dtypes; `changes`: share of the numbers that differ from those of another seed."""
    folder.mkdir()
    torch.manual_seed(0)
    tensors = {
        "large": torch.randn(BLOCK_BYTES // 2 + 1001).to(torch.bfloat16),
        "wide": torch.randn(33, 7),
        "count": torch.tensor(4),
        "none": torch.zeros(0),
        "bytes": torch.arange(99, dtype=torch.uint8),
    }
    torch.manual_seed(seed)
    for name in ("large", "wide"):
        moved = torch.rand(tensors[name].shape) < changes
        tensors[name] = torch.where(moved, tensors[name] * 1.01, tensors[name])
    tensors["count"] += seed
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"seed": seed}))
    (folder / "same.txt").write_text("same")
    (folder / "empty").write_text("")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_two_deltas_in_a_row_make_the_folder_of_the_second(tmp_path: Path) -> None:
    folders = [version(tmp_path / f"v{seed}", seed, changes=0.02) for seed in range(3)]
    (folders[2] / "more.json").write_text("{}")
    (folders[2] / "same.txt").unlink()
    deltas = [tmp_path / "d1", tmp_path / "d2"]
    sizes = [
        write_delta(old, new, names(new), delta) for old, new, delta in zip(folders, folders[1:], deltas, strict=False)
    ]
    full = (folders[0] / "model.safetensors").stat().st_size
    assert 0 < max(sizes) < 0.05 * full
    (folders[0] / "COMPLETE").write_text("{}")
    (folders[0] / ".list").write_text("{}")
    copy_files(folders[0], tmp_path / "made")
    apply_delta(deltas[0], tmp_path / "made")
    assert contents(tmp_path / "made") == contents(folders[1])
    apply_delta(deltas[1], tmp_path / "made")
    assert contents(tmp_path / "made") == contents(folders[2])


def test_a_file_with_other_tensors_is_sent_whole(tmp_path: Path) -> None:
    old, new = version(tmp_path / "old", 1), version(tmp_path / "new", 2)
    tensors = {"other": torch.randn(50), "wide": torch.zeros(33, 7)}
    save_file(tensors, new / "model.safetensors")
    padded = (old / "model.safetensors").read_bytes()[: (new / "model.safetensors").stat().st_size]
    (old / "model.safetensors").write_bytes(padded)  # of equal size, with another header
    write_delta(old, new, names(new), tmp_path / "d")
    copy_files(old, tmp_path / "made")
    apply_delta(tmp_path / "d", tmp_path / "made")
    assert contents(tmp_path / "made") == contents(new)


def test_a_delta_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    old, new = version(tmp_path / "old", 1), version(tmp_path / "new", 2, changes=0.1)
    write_delta(old, new, names(new), tmp_path / "d")
    data = (tmp_path / "d").read_bytes()
    for wrong in (b"", data[:100], data[:-50], data.replace(b'"config.json"', b'"../con.json"')):
        copy_files(old, tmp_path / "made")
        (tmp_path / "d").write_bytes(wrong)
        with raises_code("weights.bad_delta"):
            apply_delta(tmp_path / "d", tmp_path / "made")
        shutil.rmtree(tmp_path / "made")


def test_a_few_blocks_are_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 blocks that share no bytes. Compared ones that are not in the file yet are in memory."""
    size, count = 2**14, 60
    monkeypatch.setattr(folder_delta, "BLOCK_BYTES", size)
    monkeypatch.setattr(folder_delta, "_AHEAD", 3)
    draw = np.random.default_rng(1)
    old, new, delta = tmp_path / "old", tmp_path / "new", tmp_path / "d"
    for folder in (old, new):
        folder.mkdir()
        draw.integers(0, 256, size * count, np.uint8).tofile(folder / "model")
    compare, waiting, read = folder_delta._compare, list[int](), list[int]()

    def noted_compare(*args: object) -> bytes:
        found = compare(*args)  # type: ignore[arg-type]
        waiting.append(len(waiting) + 1 - delta.stat().st_size // (size + 1))
        return found

    monkeypatch.setattr(folder_delta, "_compare", noted_compare)
    assert write_delta(old, new, ["model"], delta) > count * (size + 1)
    assert len(waiting) == count
    assert max(waiting) <= 3 + 1

    preadv, read_bytes = os.preadv, Path.read_bytes

    def noted_read(file: int, buffers: list[memoryview], begin: int) -> int:
        read.append(preadv(file, buffers, begin))
        return read[-1]

    def noted_whole(path: Path) -> bytes:
        read.append(path.stat().st_size)
        return read_bytes(path)

    monkeypatch.setattr(os, "preadv", noted_read)
    monkeypatch.setattr(Path, "read_bytes", noted_whole)
    apply_delta(delta, old)
    assert (len(read), max(read)) == (2 + 2 * count, size + 1)
    assert (old / "model").read_bytes() == (new / "model").read_bytes()


def test_a_block_that_is_written_in_part_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = version(tmp_path / "old", 1), version(tmp_path / "new", 2, changes=0.1)
    write_delta(old, new, names(new), tmp_path / "d")
    monkeypatch.setattr(os, "pwrite", lambda file, data, begin: len(data) - 1)
    with pytest.raises(OSError, match="not written whole"):
        apply_delta(tmp_path / "d", old)
