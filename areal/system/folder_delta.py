"""The difference between two versions of a folder of safetensors files, in few bytes.

At the rates of reinforcement learning few 16-bit weights change in a step, most of them by one unit in the last place.
A tensor is compared in blocks, as unsigned integers of the width of its numbers. A changed block is the smallest of:

- gaps between the changed numbers, and their differences (fewer than half have changed), or all differences;
- the new numbers.

Differences are modulo the width and zigzag-coded (0, -1, 1, -2 become 0, 1, 2, 3), so a small change is a small number
in either direction. Gaps and each byte of the differences are compressed separately with zlib: run lengths and Huffman
codes, close to the entropy of such numbers and fast.
"""

import json
import re
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal.api.errors import InputError
from areal.system.durable import COMPLETE

Words = NDArray[Any]
"""[n], unsigned integers of 1, 2, 4 or 8 bytes."""
_Bytes = NDArray[np.uint8]

_ALL_NEW, _SPARSE, _DENSE = 0, 1, 2
_DENSE_SHARE = 0.5
_LARGEST_GAP = 255
BLOCK_BYTES = 4 * 2**20
"""A tensor is compared in blocks of at most this size, on several cores."""


def encode(old: Words, new: Words) -> bytes:
    """The difference between two blocks [n] of one unsigned dtype; empty when they are equal.

    `apply` makes `new` from it and `old`. At most one byte longer than `new`.
    """
    width = new.dtype.itemsize
    difference = new - old
    changed = np.flatnonzero(difference)
    if not len(changed):
        return b""
    if len(changed) < _DENSE_SHARE * len(new):
        gaps = np.diff(changed, prepend=-1) - 1
        packed = bytes([_SPARSE]) + _packed(_gap_bytes(gaps)) + _packed_planes(_zigzag(difference[changed]))
    else:
        packed = bytes([_DENSE]) + _packed_planes(_zigzag(difference))
    if len(packed) > width * len(new):
        return bytes([_ALL_NEW]) + new.tobytes()
    return packed


def apply(packed: bytes, block: Words) -> None:
    """Make the new block from the old one in `block` [n] and the difference, in place. ValueError when it is damaged,
    or for another size: then `block` may have changed."""
    kind, rest = packed[0], memoryview(packed)[1:]
    width, size = block.dtype.itemsize, len(block)
    if kind == _ALL_NEW and len(rest) == block.nbytes:
        block[:] = np.frombuffer(rest, block.dtype)
        return
    pieces = list(_unpacked(rest))
    if kind == _SPARSE and pieces:
        places = _places(np.frombuffer(pieces.pop(0), np.uint8))
        if not len(places) or places[-1] >= size:
            raise ValueError("a changed number lies outside of its block")
        block[places] += _unzigzag(_from_planes(pieces, width, len(places), block.dtype))
    elif kind == _DENSE:
        block += _unzigzag(_from_planes(pieces, width, size, block.dtype))
    else:
        raise ValueError(f"a block of kind {kind} is damaged")


def _zigzag(difference: Words) -> Words:
    sign = difference >> (8 * difference.dtype.itemsize - 1)
    return (difference << 1) ^ -sign


def _unzigzag(coded: Words) -> Words:
    return (coded >> 1) ^ -(coded & 1)


def _gap_bytes(gaps: NDArray[np.int64]) -> _Bytes:
    """Each gap as bytes of 255 and one smaller byte, whose sum it is."""
    ends = np.cumsum(gaps // _LARGEST_GAP + 1) - 1
    found = np.full(int(ends[-1]) + 1, _LARGEST_GAP, np.uint8)
    found[ends] = gaps % _LARGEST_GAP
    return found


def _places(gaps: _Bytes) -> NDArray[np.int64]:
    """Positions of the changed numbers, from `_gap_bytes` of the unchanged ones before each."""
    before = np.cumsum(gaps, dtype=np.int64)[gaps != _LARGEST_GAP]
    return before + np.arange(len(before))


def _packed_planes(values: Words) -> bytes:
    """First the lowest byte of every value, then the next, ..."""
    columns = values.view(np.uint8).reshape(-1, values.itemsize)
    return b"".join(_packed(np.ascontiguousarray(columns[:, place])) for place in range(values.itemsize))


def _from_planes(planes: list[bytes], width: int, size: int, dtype: np.dtype[Any]) -> Words:
    if len(planes) != width or any(len(plane) != size for plane in planes):
        raise ValueError("the differences of a block do not fit it")
    return np.stack([np.frombuffer(plane, np.uint8) for plane in planes], axis=1).reshape(-1).view(dtype)


def _packed(content: _Bytes) -> bytes:
    """Compressed, after four bytes with the compressed size."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    data = compressor.compress(content.data) + compressor.flush()
    return len(data).to_bytes(4, "little") + data


def _unpacked(rest: memoryview) -> Iterator[bytes]:
    while rest:
        size = int.from_bytes(rest[:4], "little")
        try:
            yield zlib.decompress(rest[4 : 4 + size], -zlib.MAX_WBITS)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        rest = rest[4 + size :]


# ----------------------------------------------------------------------------------------------------------------------
# Files. A delta file has eight bytes with the size of a list, the list of the new folder's files, and packed blocks.


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes `begin` to `end` of a file, and the size of their packed difference."""

    begin: int
    end: int
    width: int
    num_packed: int


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    num_bytes: int
    is_new: bool
    """The old content is not used: the blocks that have not changed are zero."""
    blocks: list[_Block]
    """That have changed."""


def write_delta(old: Path, new: Path, names: list[str], target: Path) -> int:
    """Write what makes the files `names` of folder `new` from those of folder `old`; returns the size in bytes.

    A file with other tensors, or none, is written whole.
    """
    files: list[_File] = []
    packed: list[bytes] = []
    with ThreadPoolExecutor(thread_name_prefix="delta") as pool:
        for name in names:
            before, after = _bytes_of(old / name), _bytes_of(new / name)
            layout = _layout(after) or [(0, len(after), 1)]
            first = layout[0][0]
            if is_new := len(before) != len(after) or not np.array_equal(before[:first], after[:first]):
                before, layout = np.zeros(len(after), np.uint8), [(0, len(after), 1)]
            pieces = list(_pieces(layout))
            found = list(
                pool.map(
                    lambda piece, before=before, after=after: encode(_words(before, piece), _words(after, piece)),
                    pieces,
                )
            )
            blocks = [_Block(*piece, len(data)) for piece, data in zip(pieces, found, strict=True) if data]
            files.append(_File(name, len(after), is_new, blocks))
            packed += [data for data in found if data]
    head = json.dumps([asdict(file) for file in files]).encode()
    with open(target, "wb") as file:
        file.writelines((len(head).to_bytes(8, "little"), head, *packed))
    return target.stat().st_size


def apply_delta(delta: Path, folder: Path) -> None:
    """Change the files in `folder` from the old version to the new one. InputError when the delta is damaged or does
    not fit: then they may have changed. A delta that fits another version makes other files than the new ones."""
    try:
        data = memoryview(delta.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        files = [
            _File(**entry | {"blocks": [_Block(**block) for block in entry["blocks"]]})
            for entry in json.loads(bytes(data[8:start]))
        ]
        with ThreadPoolExecutor(thread_name_prefix="delta") as pool:
            for file in files:
                if not _PLAIN.fullmatch(file.name):
                    raise ValueError(f"{file.name[:100]!r} is no name of a file")
                with open(folder / file.name, "wb" if file.is_new else "ab") as resized:
                    resized.truncate(file.num_bytes)
                ends = np.cumsum([start, *(block.num_packed for block in file.blocks)])
                content = _bytes_of(folder / file.name, "r+")
                jobs = [
                    pool.submit(apply, bytes(data[ends[i] : ends[i + 1]]), _words(content, (b.begin, b.end, b.width)))
                    for i, b in enumerate(file.blocks)
                ]
                for job in jobs:
                    job.result()
                start = int(ends[-1])
        for path in folder.iterdir():
            if path.name not in {file.name for file in files}:
                path.unlink()
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise InputError(
            f"the delta {delta.parent.name} cannot be applied: {error}", code="weights.bad_delta"
        ) from error


def copy_files(source: Path, target: Path) -> None:
    """Make `target` a folder with copies of the files of the complete folder `source`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in source.iterdir():
        if _PLAIN.fullmatch(path.name) and path.name != COMPLETE:
            shutil.copyfile(path, target / path.name)


_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def _bytes_of(path: Path, mode: Any = "r") -> _Bytes:
    """The content of a file, mapped; no bytes when it does not exist or is empty."""
    if not path.is_file() or not path.stat().st_size:
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, mode)


def _layout(content: _Bytes) -> list[tuple[int, int, int]]:
    """Begin and end in the file, and width in bytes, of each tensor of a safetensors file, in their order; empty when
    the file is none."""
    try:
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        if not 8 < start <= len(content):
            return []
        entries: dict[str, Any] = json.loads(content[8:start].tobytes())
        entries.pop("__metadata__", None)
        found = [
            (start + entry["data_offsets"][0], start + entry["data_offsets"][1], _width(entry["dtype"]))
            for entry in entries.values()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return []
    found.sort()
    is_whole = [begin for begin, _, _ in found] + [len(content)] == [start] + [end for _, end, _ in found]
    return found if is_whole else []


def _width(dtype: str) -> int:
    """Bytes of a number of a safetensors dtype such as BF16 or F8_E4M3."""
    bits = re.match(r"[A-Z]+(\d+)", dtype)
    return int(bits[1]) // 8 if bits and bits[1] in ("16", "32", "64") else 1


def _pieces(layout: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    for begin, end, width in layout:
        for start in range(begin, end, BLOCK_BYTES):
            yield start, min(start + BLOCK_BYTES, end), width


def _words(content: _Bytes, piece: tuple[int, int, int]) -> Words:
    begin, end, width = piece
    if not 0 <= begin <= end <= len(content) or width not in (1, 2, 4, 8):
        raise ValueError("a block lies outside of its file")
    return content[begin:end].view(f"<u{width}")
