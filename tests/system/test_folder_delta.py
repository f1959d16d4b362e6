"""The difference between two versions of weights makes exactly the new one, and is small where little has changed."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from areal.system import folder_delta
from areal.system.durable import COMPLETE
from areal.system.folder_delta import BLOCK_BYTES, Piece, apply, encode, pieces, rebuild, words, write_delta
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


def changes(old: Path, new: Path) -> Iterator[tuple[str, Piece, bytes]]:
    """Of files with equal names and sizes, as of numbers of two bytes."""
    for path in (path for path in new.iterdir() if path.name != COMPLETE):
        before, after = (np.fromfile(folder / path.name, np.uint8) for folder in (old, new))
        for piece in pieces(0, len(after), 2 if len(after) % 2 == 0 else 1):
            left, right = (words(data[piece.begin : piece.end], piece.width) for data in (before, after))
            if packed := encode(left, right):
                yield path.name, piece, packed


def made(folder: Path, deltas: list[Path], sizes: dict[str, int], block_bytes: int = BLOCK_BYTES) -> Path:
    """The version after `deltas`; its checksums are compared."""
    new = folder.with_name("made")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    sums = rebuild(folder, deltas, new, sizes, block_bytes)
    assert sums == {
        name: [zlib.crc32(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)]
        for name, data in contents(new).items()
    }
    return new


def sizes_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_the_blocks_of_a_tensor_end_at_multiples_of_their_size_in_the_file() -> None:
    size = BLOCK_BYTES
    assert list(pieces(8, 8, 2)) == []
    assert list(pieces(8, 100, 2)) == [(8, 100, 2)]
    assert list(pieces(8, 2 * size + 2, 2)) == [(8, size, 2), (size, 2 * size, 2), (2 * size, 2 * size + 2, 2)]
    assert list(pieces(size - 1, size + 1, 2)) == [(size - 1, size, 1), (size, size + 1, 1)], "no number is cut"


def test_two_deltas_in_a_row_make_the_folder_of_the_second(tmp_path: Path) -> None:
    folders = [version(tmp_path / f"v{seed}", seed, changes=0.02) for seed in range(3)]
    deltas, sizes = [tmp_path / "d1", tmp_path / "d2"], sizes_of(folders[0])
    for old, new, delta in zip(folders, folders[1:], deltas, strict=False):
        assert 0 < write_delta(delta, changes(old, new)) < 0.05 * sizes["model.safetensors"]
    assert contents(made(folders[0], deltas[:1], sizes)) == contents(folders[1])
    assert contents(made(folders[1], deltas[1:], sizes)) == contents(folders[2])
    assert contents(made(folders[0], deltas, sizes, 2 * BLOCK_BYTES)) == contents(folders[2])


def test_a_delta_that_cannot_be_read_or_does_not_fit_is_refused(tmp_path: Path) -> None:
    old, new = version(tmp_path / "old", 1), version(tmp_path / "new", 2, changes=0.1)
    delta, sizes = tmp_path / "d", sizes_of(new)
    write_delta(delta, changes(old, new))
    data = delta.read_bytes()
    wrong = [b"", data[:100], data[:-50], data.replace(b'"config.json"', b'"../con.json"'), data[:-8] + bytes(8)]
    for begin, end in ((-8, 8), (8, 8), (0, BLOCK_BYTES + 8), (2**40, 2**40 + 8)):
        text = json.dumps({"model.safetensors": [[[begin, end, 2], 0, 1]]}).encode()
        wrong.append(data[:50] + text + len(text).to_bytes(8, "little"))
    for content in wrong:
        delta.write_bytes(content)
        with raises_code("weights.bad_delta"):
            made(old, [delta], sizes)
    delta.write_bytes(data)
    with raises_code("weights.bad_delta"):
        made(old, [delta], {**sizes, "model.safetensors": sizes["model.safetensors"] + 1})


def test_one_block_for_each_thread_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 blocks that share no bytes."""
    size, count = 2**14, 60
    monkeypatch.setattr(folder_delta, "BLOCK_BYTES", size)
    draw = np.random.default_rng(1)
    old, new, delta = tmp_path / "old", tmp_path / "new", tmp_path / "d"
    for folder in (old, new):
        folder.mkdir()
        draw.integers(0, 256, size * count, np.uint8).tofile(folder / "model")
    assert write_delta(delta, changes(old, new)) > count * (size + 1)
    preadv, read = os.preadv, list[int]()

    def noted_read(file: int, buffers: list[memoryview], begin: int) -> int:
        read.append(preadv(file, buffers, begin))
        return read[-1]

    monkeypatch.setattr(os, "preadv", noted_read)
    assert contents(made(old, [delta], sizes_of(new), 4 * size)) == contents(new)
    sized = [num_bytes for num_bytes in read if num_bytes in (size, size + 1)]
    assert (len(sized), len(read), max(sized)) == (2 * count, 2 + 2 * count, max(sized))


def test_a_block_that_is_written_in_part_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = version(tmp_path / "old", 1), version(tmp_path / "new", 2, changes=0.1)
    write_delta(tmp_path / "d", changes(old, new))
    monkeypatch.setattr(os, "pwrite", lambda file, data, begin: len(data) - 1)
    with pytest.raises(OSError, match="not written whole"):
        made(old, [tmp_path / "d"], sizes_of(new))
