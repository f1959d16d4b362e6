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
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal.api.errors import InputError
from areal.system.device import cpu_count

Words = NDArray[Any]
"""[n], unsigned integers of 1, 2, 4 or 8 bytes."""
_Bytes = NDArray[np.uint8]

_ALL_NEW, _SPARSE, _DENSE = 0, 1, 2
_DENSE_SHARE = 0.5
_LARGEST_GAP = 255
_MOST_THREADS = 32
_DAMAGED = (ValueError, TypeError, KeyError, IndexError, AttributeError)
"""Errors of what a delta file says."""
BLOCK_BYTES = 2**21
"""Blocks end at multiples of this size in a file, and where a tensor ends."""


def byte_threads() -> ThreadPoolExecutor:
    """Threads for the bytes of weights: at most half of the CPUs, because a server computes answers meanwhile."""
    return ThreadPoolExecutor(min(max(1, cpu_count() // 2), _MOST_THREADS), thread_name_prefix="weights")


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
    stored = np.full(int(ends[-1]) + 1, _LARGEST_GAP, np.uint8)
    stored[ends] = gaps % _LARGEST_GAP
    return stored


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
# Files. A delta file has packed blocks, the list of them by file, and eight bytes with the size of the list.


class Piece(NamedTuple):
    """Bytes `begin` to `end` of a file, which are numbers of `width` bytes."""

    begin: int
    end: int
    width: int


Change = tuple[str, Piece, bytes]
"""A file, a piece of it that has changed, and its packed difference."""


class _Block(NamedTuple):
    """A piece that has changed, and the place of its packed difference in the delta file."""

    piece: Piece
    start: int
    size: int


def pieces(begin: int, end: int, width: int) -> Iterator[Piece]:
    """The blocks of a tensor."""
    width = width if begin % width == 0 else 1  # a block must not end inside a number
    while begin < end:
        stop = min(end, (begin // BLOCK_BYTES + 1) * BLOCK_BYTES)
        yield Piece(begin, stop, width)
        begin = stop


def words(content: _Bytes, width: int) -> Words:
    if width not in (1, 2, 4, 8):
        raise ValueError(f"there are no numbers of {width} bytes")
    return content.view(f"<u{width}")


def write_delta(target: Path, changes: Iterable[Change]) -> int:
    """Write the packed differences of pieces of files; returns the size in bytes."""
    with open(target, "wb") as file:
        pack(file, changes)
        return file.tell()


def pack(file: BinaryIO, changes: Iterable[Change]) -> None:
    """Write a delta file."""
    blocks: dict[str, list[_Block]] = {}
    for name, piece, packed in changes:
        blocks.setdefault(name, []).append(_Block(piece, file.tell(), len(packed)))
        file.write(packed)
    listed = json.dumps(blocks).encode()
    file.writelines((listed, len(listed).to_bytes(8, "little")))


def unpack(delta: memoryview) -> Iterator[Change]:
    """The changes of a delta file that `pack` of another process of this run wrote."""
    for name, blocks in _list_in(delta).items():
        for piece, at, size in blocks:
            yield name, piece, bytes(delta[at : at + size])


def change(contents: Mapping[str, _Bytes], delta: memoryview) -> None:
    """Make the files of the next version from `contents`, in place. InputError when the delta is damaged or does not
    fit: then some have changed. A delta that fits another version makes other files."""

    def make(content: _Bytes, block: _Block) -> None:
        (begin, end, width), at, size = block
        apply(delta[at : at + size], words(content[begin:end], width))

    try:
        listed = _list_in(delta)
        with byte_threads() as pool:
            for name, blocks in listed.items():
                for _ in pool.map(partial(make, contents[name]), blocks):
                    pass
    except _DAMAGED as error:
        raise InputError(f"a difference cannot be applied: {error!r}", code="weights.bad_delta") from error


def rebuild(
    old: Path, deltas: Sequence[Path], new: Path, sizes: Mapping[str, int], block_bytes: int
) -> dict[str, list[int]]:
    """Make the files of a version in the folder `new` from those of an earlier one and the deltas since then.

    `sizes`: bytes of each file, in all of these versions. One pass reads, changes, sums and writes: returns the CRC-32
    of each block of `block_bytes`, a multiple of BLOCK_BYTES, by file. InputError when a delta is damaged or does not
    fit, or a file cannot be read; OSError when one cannot be written. A delta that fits another version makes other
    files.
    """
    made: dict[str, list[int]] = {}
    try:
        with ExitStack() as stack, byte_threads() as pool:
            opened = [stack.enter_context(_opened(delta)) for delta in deltas]
            lists = [(file.fileno(), _listed(file.fileno())) for file in opened]
            if not all(blocks.keys() <= sizes.keys() for _, blocks in lists):
                raise ValueError("it changes files that the version does not have")
            for name, size in sizes.items():
                with _opened(old / name) as before, open(new / name, "wb", buffering=0) as after:
                    after.truncate(size)
                    changes = [(delta, _by_place(blocks.get(name, []), size)) for delta, blocks in lists]
                    make = partial(_make, before.fileno(), after.fileno(), changes, size, block_bytes)
                    made[name] = list(pool.map(make, range(0, size, block_bytes)))
    except _DAMAGED as error:
        names = ", ".join(delta.parent.name for delta in deltas)
        raise InputError(f"{names} cannot be applied: {error}", code="weights.bad_delta") from error
    return made


_Changes = list[tuple[int, dict[int, list[_Block]]]]
"""Open delta file, and its blocks of one file by the multiple of BLOCK_BYTES before them."""


def _make(old: int, new: int, changes: _Changes, size: int, block_bytes: int, start: int) -> int:
    checksum = 0
    for begin in range(start, min(start + block_bytes, size), BLOCK_BYTES):
        content = _read(old, begin, min(begin + BLOCK_BYTES, size))
        for delta, blocks in changes:
            for piece, at, packed in blocks.get(begin, ()):
                changed = content[piece.begin - begin : piece.end - begin]
                apply(_read(delta, at, at + packed).data, words(changed, piece.width))
        checksum = zlib.crc32(content.data, checksum)
        if os.pwrite(new, content.data, begin) != len(content):
            raise OSError(errno.ENOSPC, "a block of weights was not written whole")
    return checksum


def _listed(delta: int) -> dict[str, list[_Block]]:
    end = os.fstat(delta).st_size - 8
    start = end - int.from_bytes(_read(delta, max(end, 0), end + 8).tobytes(), "little")
    if start < 0:
        raise ValueError("it is shorter than its list of files")
    return _parsed(_read(delta, start, end).data)


def _list_in(delta: memoryview) -> dict[str, list[_Block]]:
    end = len(delta) - 8
    return _parsed(delta[end - int.from_bytes(delta[end:], "little") : end])


def _parsed(listed: memoryview) -> dict[str, list[_Block]]:
    blocks_by_name: dict[str, Any] = json.loads(bytes(listed))
    return {
        name: [_Block(Piece(*piece), at, packed) for piece, at, packed in blocks]
        for name, blocks in blocks_by_name.items()
    }


def _by_place(blocks: list[_Block], size: int) -> dict[int, list[_Block]]:
    by_place: dict[int, list[_Block]] = {}
    for block in blocks:
        begin, end, _ = block.piece
        place = begin // BLOCK_BYTES * BLOCK_BYTES
        if not 0 <= begin < end <= min(place + BLOCK_BYTES, size):
            raise ValueError("a block lies outside of its file")
        by_place.setdefault(place, []).append(block)
    return by_place


def _opened(path: Path) -> io.FileIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise ValueError(str(error)) from error


def _read(file: int, begin: int, end: int) -> _Bytes:
    """Bytes of an open file. Not mapped: each page of a mapping costs a fault."""
    content = np.empty(end - begin, np.uint8)
    try:
        size = os.preadv(file, [content.data], begin) if len(content) else 0
    except OSError as error:
        raise ValueError(f"a file cannot be read: {error}") from error
    if size != len(content):
        raise ValueError("a file is shorter than it was")
    return content
