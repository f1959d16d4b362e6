"""The difference between two versions of a folder of safetensors files, in few bytes.

At the rates of reinforcement learning few 16-bit weights change in a step, most of them by one unit in the last place.
A tensor is compared in blocks, as unsigned integers of the width of its numbers. A changed block is the smallest of:

- gaps between the changed numbers, and their differences (fewer than half have changed), or all differences;
- the new numbers.

Differences are modulo the width and zigzag-coded (0, -1, 1, -2 become 0, 1, 2, 3), so a small change is a small number
in either direction. Gaps and each byte of the differences are compressed separately with zlib: run lengths and Huffman
codes, close to the entropy of such numbers and fast.
"""

import errno
import itertools
import json
import os
import re
import shutil
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
BLOCK_BYTES = 2**21
"""A tensor is compared in blocks of at most this size, on several cores."""
_AHEAD = 64
"""Blocks that are compared before the first of them is written: the most that are in memory."""


def encode(old: Words, new: Words) -> bytes:
    """The difference between two blocks [n] of one unsigned dtype; empty when they are equal.

    `apply` makes `new` from it and `old`. At most one byte longer than `new`.
    """
    width = new.dtype.itemsize
    changed = np.flatnonzero(new != old)
    if not len(changed):
        return b""
    if len(changed) < _DENSE_SHARE * len(new):
        gaps = np.diff(changed, prepend=-1) - 1
        packed = bytes([_SPARSE]) + _packed(_gap_bytes(gaps)) + _packed_planes(_zigzag(new[changed] - old[changed]))
    else:
        packed = bytes([_DENSE]) + _packed_planes(_zigzag(new - old))
    if len(packed) > width * len(new):
        return bytes([_ALL_NEW]) + new.tobytes()
    return packed


def apply(packed: bytes | memoryview, block: Words) -> None:
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
# Files. A delta file has packed blocks, the list of the new folder's files, and eight bytes with the size of the list.


class _Block(NamedTuple):
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
    with open(target, "wb") as file, ThreadPoolExecutor(thread_name_prefix="delta") as pool:
        for name in names:
            size = (new / name).stat().st_size
            is_new = not (old / name).is_file() or (old / name).stat().st_size != size
            with open(new / name, "rb") as after, open(os.devnull if is_new else old / name, "rb") as before:
                layout = _layout(after.fileno(), size) or [(0, size, 1)]
                headers = (
                    () if is_new else [_read(each.fileno(), 0, layout[0][0]).tobytes() for each in (before, after)]
                )
                if len(set(headers)) != 1:
                    is_new, layout = True, [(0, size, 1)]
                blocks: list[_Block] = []
                for piece, data in _compared(pool, None if is_new else before.fileno(), after.fileno(), layout):
                    if data:
                        file.write(data)
                        blocks.append(_Block(*piece, len(data)))
            files.append(_File(name, size, is_new, blocks))
        listed = json.dumps([[each.name, each.num_bytes, each.is_new, each.blocks] for each in files]).encode()
        file.writelines((listed, len(listed).to_bytes(8, "little")))
    return target.stat().st_size


def apply_delta(delta: Path, folder: Path) -> None:
    """Change the files in `folder` from the old version to the new one. InputError when the delta is damaged or does
    not fit: then they may have changed. A delta that fits another version makes other files than the new ones."""
    try:
        start = 0
        with open(delta, "rb", buffering=0) as packed, ThreadPoolExecutor(thread_name_prefix="delta") as pool:
            files = _listed(packed.fileno(), delta.stat().st_size)
            for file in files:
                if not _PLAIN.fullmatch(file.name):
                    raise ValueError(f"{file.name[:100]!r} is no name of a file")
                with open(folder / file.name, "wb" if file.is_new else "ab") as resized:
                    resized.truncate(file.num_bytes)
                begins = list(itertools.accumulate((block.num_packed for block in file.blocks), initial=start))
                with open(folder / file.name, "r+b", buffering=0) as changed:
                    change = partial(_change, changed.fileno(), file.num_bytes, packed.fileno())
                    list(pool.map(change, file.blocks, begins[:-1]))
                start = begins[-1]
        for path in folder.iterdir():
            if path.name not in {file.name for file in files}:
                path.unlink()
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise InputError(
            f"the delta {delta.parent.name} cannot be applied: {error}", code="weights.bad_delta"
        ) from error


def _listed(delta: int, size: int) -> list[_File]:
    end = size - 8
    start = end - int.from_bytes(_read(delta, max(end, 0), size).tobytes(), "little")
    if start < 0:
        raise ValueError("it is shorter than its list of files")
    return [
        _File(name, num_bytes, is_new, [_Block(*block) for block in blocks])
        for name, num_bytes, is_new, blocks in json.loads(_read(delta, start, end).tobytes())
    ]


def _change(file: int, num_bytes: int, delta: int, block: _Block, begin: int) -> None:
    """Apply the packed block at `begin` of the file `delta`."""
    if not 0 <= block.begin < block.end <= num_bytes:
        raise ValueError("a block lies outside of its file")
    content = _read(file, block.begin, block.end)
    apply(_read(delta, begin, begin + block.num_packed).data, _words(content, block.width))
    if os.pwrite(file, content.data, block.begin) != len(content):
        raise OSError(errno.ENOSPC, "a block of weights was not written whole")


def copy_files(source: Path, target: Path) -> None:
    """Make `target` a folder with copies of the files of the complete folder `source`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in source.iterdir():
        if _PLAIN.fullmatch(path.name) and path.name != COMPLETE:
            shutil.copyfile(path, target / path.name)


_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def _compared(
    pool: ThreadPoolExecutor, old: int | None, new: int, layout: list[tuple[int, int, int]]
) -> Iterator[tuple[tuple[int, int, int], bytes]]:
    """Each piece of two open files with its difference, in their order."""
    waiting: deque[tuple[tuple[int, int, int], Future[bytes]]] = deque()
    for piece in _pieces(layout):
        waiting.append((piece, pool.submit(_compare, old, new, piece)))
        if len(waiting) == _AHEAD:
            first, found = waiting.popleft()
            yield first, found.result()
    for piece, found in waiting:
        yield piece, found.result()


def _compare(old: int | None, new: int, piece: tuple[int, int, int]) -> bytes:
    begin, end, width = piece
    before = np.zeros(end - begin, np.uint8) if old is None else _read(old, begin, end)
    return encode(_words(before, width), _words(_read(new, begin, end), width))


def _read(file: int, begin: int, end: int) -> _Bytes:
    """Bytes of an open file. Not mapped: each page of a mapping costs a fault."""
    content = np.empty(end - begin, np.uint8)
    if len(content) and os.preadv(file, [content.data], begin) != len(content):
        raise ValueError("a file is shorter than it was")
    return content


def _words(content: _Bytes, width: int) -> Words:
    if width not in (1, 2, 4, 8):
        raise ValueError(f"there are no numbers of {width} bytes")
    return content.view(f"<u{width}")


def _layout(file: int, num_bytes: int) -> list[tuple[int, int, int]]:
    """Begin and end in the file, and width in bytes, of each tensor of a safetensors file, in their order; empty when
    the file is none."""
    try:
        start = 8 + int.from_bytes(_read(file, 0, 8).tobytes(), "little")
        if start > num_bytes:
            return []
        entries: dict[str, Any] = json.loads(_read(file, 8, start).tobytes())
        entries.pop("__metadata__", None)
        found = [
            (start + entry["data_offsets"][0], start + entry["data_offsets"][1], _width(entry["dtype"]))
            for entry in entries.values()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return []
    found.sort()
    is_whole = [begin for begin, _, _ in found] + [num_bytes] == [start] + [end for _, end, _ in found]
    return found if is_whole else []


def _width(dtype: str) -> int:
    """Bytes of a number of a safetensors dtype such as BF16 or F8_E4M3."""
    bits = re.match(r"[A-Z]+(\d+)", dtype)
    return int(bits[1]) // 8 if bits and bits[1] in ("16", "32", "64") else 1


def _pieces(layout: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    for begin, end, width in layout:
        for start in range(begin, end, BLOCK_BYTES):
            yield start, min(start + BLOCK_BYTES, end), width
