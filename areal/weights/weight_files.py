"""Safetensors checkpoints as files: writing weights one by one in bounded memory."""

import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from areal.api.engine import Ranks, WeightSource
from areal.models.checkpoint_files import INDEX
from areal.system.durable import rename

# ----------------------------------------------------------------------------------------------------------------------
# Checksum of a model's weights: integer arithmetic on their bits, equal on every device and for every sharding.
#
# The sum of a tensor is the sum of its words, each multiplied by an odd number that depends on its position, modulo
# 2^64. One changed bit always changes it; any other change is missed with a probability of about 2^-32 at worst.

_COLUMNS = 2**15
"""Positions with separate multipliers; later rows reuse them, times a multiplier per row."""
_CPU_ROWS, _CUDA_ROWS = 8, 2**7
"""Rows per block: temporaries of 2 MiB, which fit the cache, and of 32 MiB."""
_WORDS = {1: torch.uint8, 2: torch.int16}
"""Element size -> integer type; larger elements are words of four bytes, so that their top bits have enough weight."""


class WeightsChecksum:
    """Accumulates full weights one by one, in any order."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._columns: dict[torch.device, Tensor] = {}

    def add(self, name: str, weight: Tensor) -> None:
        """Add one weight, without waiting for the device."""
        shape = ",".join(map(str, weight.shape))
        self._sums[f"{name} {weight.dtype} [{shape}]"] = self._sum_of(weight)

    def totals(self) -> dict[str, int]:
        """The sum of each weight added, for `merge` in another process."""
        return {label: int(total) for label, total in self._sums.items()}

    def merge(self, totals: Mapping[str, int]) -> None:
        """Add the weights of another process."""
        self._sums |= {label: torch.tensor(total) for label, total in totals.items()}

    def hexdigest(self) -> str:
        """Return the checksum of all weights added."""
        sums = torch.stack([total.cpu() for total in self._sums.values()]).tolist() if self._sums else []
        lines = sorted(f"{label} {value}\n" for label, value in zip(self._sums, sums, strict=True))
        return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()

    def _sum_of(self, weight: Tensor) -> Tensor:
        words = weight.detach().contiguous().reshape(-1).view(_WORDS.get(weight.element_size(), torch.int32))
        num_rows = -(-words.numel() // _COLUMNS)
        rows = _multipliers(1, num_rows).to(weight.device)
        if weight.device not in self._columns:
            self._columns[weight.device] = _multipliers(0, _COLUMNS).to(weight.device)
        columns = self._columns[weight.device]
        total = torch.zeros((), dtype=torch.int64, device=weight.device)
        step = _CPU_ROWS if weight.device.type == "cpu" else _CUDA_ROWS
        for first in range(0, num_rows, step):
            block = words[first * _COLUMNS : (first + step) * _COLUMNS]
            whole = block.numel() // _COLUMNS
            if whole:
                sums = _products(block[: whole * _COLUMNS].view(whole, _COLUMNS), columns)
                total += (sums * rows[first : first + whole]).sum()
            if rest := block.numel() % _COLUMNS:
                total += _products(block[None, whole * _COLUMNS :], columns[:rest])[0] * rows[first + whole]
        return total

    def adding(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights` and add each."""
        for name, weight in weights:
            self.add(name, weight)
            yield name, weight


def _products(rows: Tensor, columns: Tensor) -> Tensor:
    """The product of each row of `rows` [r, c] with `columns` [c] int64, modulo 2^64. Returns [r] int64."""
    if rows.device.type == "cpu":  # numpy takes half the time of torch
        return torch.from_numpy(rows.numpy().astype(np.int64) @ columns.numpy())
    return (rows * columns).sum(1)


def checksum_of(engine: WeightSource, ranks: Ranks) -> str:
    """Return the checksum of a model's current weights on rank 0, "" on the other ranks; a collective."""
    checksum = WeightsChecksum()
    for name, weight in engine.named_weights():
        if ranks.rank == 0:
            checksum.add(name, weight)
    return checksum.hexdigest() if ranks.rank == 0 else ""


@lru_cache(maxsize=16)  # a model has few sizes of weights
def _multipliers(stream: int, count: int) -> Tensor:
    """`count` pseudo-random odd 64-bit numbers: a hash of the position and of `stream`. Returns [count] int64."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream << 32)
    for shift, factor in ((32, 0xD6E8FEB86659FD93), (29, 0xA0761D6478BD642F), (32, 0xE7037ED1A0B428DB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    return torch.from_numpy((mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64))


MAX_FILE_BYTES = 4 * 2**30
"""Largest weight file, which the writer holds in memory."""
MIN_PART_BYTES = 256 * 2**20
"""Several ranks write files of at least this size."""
_BLOCK_BYTES = 2**20
_TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> int:
    """Write and fsync one safetensors file; returns its CRC-32.

    The checksum is computed from memory, so it also detects errors between memory and file. Tensors are copied to the
    CPU one by one.
    """
    header, places = layout(tensors, metadata)
    checksum = 0
    with open(path, "wb") as file:
        for content in itertools.chain([header], (content_of(tensors[name]).data for name in places)):
            for begin in range(0, len(content), _BLOCK_BYTES):
                block = content[begin : begin + _BLOCK_BYTES]
                checksum = zlib.crc32(block, checksum)
                file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return checksum


def layout(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The first bytes of a safetensors file, and the begin and end of each tensor in the file, in their order there.
    The tensors may be on the device meta."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # readers need alignment
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    ends = [0, *itertools.accumulate(tensor.nbytes for _, tensor in ordered)]
    for (name, tensor), place in zip(ordered, itertools.pairwise(ends), strict=True):
        entries[name] = {"dtype": _TYPE_NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": place}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = ((len(header) + begin, len(header) + end) for begin, end in itertools.pairwise(ends))
    return header, dict(zip((name for name, _ in ordered), places, strict=True))


def tensors_of(content: NDArray[np.uint8]) -> Iterator[tuple[str, Tensor]]:
    """The weights in a whole safetensors file that is in memory, without a copy."""
    begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
    entries = json.loads(content[8:begin].tobytes())
    entries.pop("__metadata__", None)
    dtypes = {name: dtype for dtype, name in _TYPE_NAMES.items()}
    for name, entry in entries.items():
        first, end = entry["data_offsets"]
        data = torch.from_numpy(content[begin + first : begin + end])
        yield name, data.view(dtypes[entry["dtype"]]).view(entry["shape"])


def content_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Its bytes, without a copy if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write `weights` as model.safetensors, or as numbered files with an index when one file would be too large."""
    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    num_bytes = total_bytes = 0

    def flush() -> None:
        save_file(pending, _part(folder, len(files)), metadata={"format": "pt"})
        files.append(list(pending))
        pending.clear()

    seen: set[int] = set()
    for name, weight in weights:
        value = weight.detach().cpu().contiguous()
        if pending and num_bytes + value.nbytes > max_file_bytes:
            flush()
            seen.clear()
            num_bytes = 0
        if value.data_ptr() in seen:
            value = value.clone()  # safetensors refuses two names for the same memory
        seen.add(value.data_ptr())
        pending[name] = value
        num_bytes += value.nbytes
        total_bytes += value.nbytes
    flush()
    if len(files) == 1:
        rename(_part(folder, 0), folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for index, names in enumerate(files):
        file = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        rename(_part(folder, index), folder / file)
        places |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": places}, indent=2))


def plan_files(
    sizes: Mapping[str, int], num_writers: int, *, max_file_bytes: int = MAX_FILE_BYTES
) -> dict[str, list[str]]:
    """File -> its weights, of a checkpoint that several ranks write. `sizes`: bytes by name, in the order of writing.

    Writer i writes files i, i + `num_writers`, ...
    """
    limit = min(max_file_bytes, max(MIN_PART_BYTES, -(-sum(sizes.values()) // num_writers)))
    parts: list[list[str]] = [[]]
    num_bytes = 0
    for name, size in sizes.items():
        if parts[-1] and num_bytes + size > limit:
            parts.append([])
            num_bytes = 0
        parts[-1].append(name)
        num_bytes += size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, start=1)}


def write_own_files(
    folder: Path, weights: Iterable[tuple[str, Tensor]], files: Mapping[str, list[str]], rank: int, num_writers: int
) -> None:
    """Write the files of this rank. All `weights` are read, also after an OSError: they may come from collectives."""
    file_of = {name: file for file in list(files)[rank::num_writers] for name in files[file]}
    pending: dict[str, Tensor] = {}
    error: OSError | None = None
    for name, weight in weights:
        if error is not None or name not in file_of:
            continue
        pending[name] = weight.detach().cpu()
        if len(pending) == len(files[file_of[name]]):
            try:
                write_tensors(folder / file_of[name], pending)
            except OSError as failure:
                error = failure
            pending = {}
    if error is not None:
        raise error


def write_index(folder: Path, files: Mapping[str, list[str]], sizes: Mapping[str, int]) -> None:
    """Write the index of several files."""
    if len(files) > 1:
        (folder / INDEX).write_bytes(index_of(files, sizes))


def index_of(files: Mapping[str, list[str]], sizes: Mapping[str, int]) -> bytes:
    places = {name: file for file, names in files.items() for name in names}
    return json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}, indent=2).encode()


def _part(folder: Path, index: int) -> Path:
    return folder / f"part-{index:05d}"
