"""Owns safetensors checkpoints as files: writing weights one by one in bounded memory, reading them by name."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from areal.api.errors import InputError
from areal.system.checkpoint_files import INDEX, weight_files

MAX_FILE_BYTES = 4 * 2**30
"""Largest weight file, and so what the writer holds in memory at a time."""
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write one safetensors file through to the disk; returns its CRC-32.

    The checksum is of what was in memory, so it also tells about what went wrong on the way to the file. Tensors come
    to the CPU one by one.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # readers want them aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        facts = {"dtype": _TYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[name] = facts
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
    """Write `weights` as model.safetensors, or as numbered files with an index when one would get too large."""
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
            value = value.clone()  # safetensors refuses two names for one memory
        seen.add(value.data_ptr())
        pending[name] = value
        num_bytes += value.nbytes
        total_bytes += value.nbytes
    flush()
    if len(files) == 1:
        _part(folder, 0).rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for index, names in enumerate(files):
        file = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        _part(folder, index).rename(folder / file)
        places |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": places}, indent=2))


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint folder one by one. InputError when its files cannot be read."""
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InputError(f"weight file {path} cannot be read: {error}") from error


def _part(folder: Path, index: int) -> Path:
    return folder / f"part-{index:05d}"
