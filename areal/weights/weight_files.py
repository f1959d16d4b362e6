"""Safetensors checkpoints as files: writing weights one by one in bounded memory."""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from areal.system.checkpoint_files import INDEX
from areal.system.durable import rename

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
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # readers need alignment
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _TYPE_NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum = 0
    with open(path, "wb") as file:
        for content in _contents(text, ordered):
            for begin in range(0, len(content), _BLOCK_BYTES):
                block = content[begin : begin + _BLOCK_BYTES]
                checksum = zlib.crc32(block, checksum)
                file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return checksum


def _contents(header: bytes, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[memoryview]:
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for _, tensor in tensors:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


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
    sizes: Mapping[str, int], num_writers: int, *, max_file_bytes: int = MAX_FILE_BYTES, min_bytes: int = 0
) -> dict[str, list[str]]:
    """File -> its weights, of a checkpoint that several ranks write. `sizes`: bytes by name, in the order of writing.

    Writer i writes files i, i + `num_writers`, ... `min_bytes`: of a file but the last; 0 = MIN_PART_BYTES.
    """
    limit = min(max_file_bytes, max(min_bytes or MIN_PART_BYTES, -(-sum(sizes.values()) // num_writers)))
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
    own = {name: file for file in list(files)[rank::num_writers] for name in files[file]}
    pending: dict[str, Tensor] = {}
    error: OSError | None = None
    for name, weight in weights:
        if error is not None or name not in own:
            continue
        pending[name] = weight.detach().cpu()
        if len(pending) == len(files[own[name]]):
            try:
                write_tensors(folder / own[name], pending)
            except OSError as failure:
                error = failure
            pending = {}
    if error is not None:
        raise error


def write_index(folder: Path, files: Mapping[str, list[str]], sizes: Mapping[str, int]) -> None:
    """Write the index of several files."""
    if len(files) > 1:
        places = {name: file for file, names in files.items() for name in names}
        facts = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(facts, indent=2))


def _part(folder: Path, index: int) -> Path:
    return folder / f"part-{index:05d}"
