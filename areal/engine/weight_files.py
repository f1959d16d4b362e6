"""Owns safetensors checkpoints as files: writing weights one by one in bounded memory, reading them by name, and
whether a server may be given a folder."""

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
from areal.system.checkpoint_files import INDEX, StoredWeight, stored_weights, weight_files
from areal.system.durable import COMPLETE, is_complete

MAX_FILE_BYTES = 4 * 2**30
"""Largest weight file, and so what the writer holds in memory at a time."""
_BLOCK_BYTES = 2**20
_HEAD = "lm_head.weight"
_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", ".masked_bias")
"""Endings of what older checkpoints hold besides weights; every server computes it."""
_CONVERTIBLE = {"F64", "F32", "F16", "BF16"}
"""Servers convert these into one another while they load."""
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


def folder_problem(folder: Path, like: Path | None) -> str:
    """Why a server must not be asked to load this checkpoint folder, "" when it may. Reads headers only.

    Foreign servers do not survive every bad folder, and load one that lacks a weight without a word. `like` is a folder
    they have loaded: the weights must be the same, by name, shape and kind of dtype. Without it, or where it holds no
    safetensors files, only what the folder says of itself is checked.
    """
    if not folder.is_dir():
        return f"checkpoint folder {folder} does not exist"
    if (folder / COMPLETE).exists() and not is_complete(folder):
        return f"checkpoint folder {folder} is incomplete: its {COMPLETE} marker does not match its files"
    try:
        is_tied = _is_tied(folder)
        found = stored_weights(folder)
        needed = stored_weights(like) if like is not None and any(like.glob("*.safetensors")) else found
    except InputError as error:
        return str(error)
    missing = [name for name in needed if name not in found and not _may_differ(name, is_tied)]
    strange = [name for name in found if name not in needed and not _may_differ(name, is_tied)]
    if missing:
        return f"checkpoint folder {folder} lacks {_listed(missing)}"
    if strange:
        return f"checkpoint folder {folder} holds {_listed(strange)}, which the model does not have"
    for name in found.keys() & needed.keys():
        if difference := _difference(found[name], needed[name]):
            return f"checkpoint folder {folder}: {name} {difference}"
    return ""


def _may_differ(name: str, is_tied: bool) -> bool:
    """Whether a checkpoint may have this weight or leave it out: a head that is the embedding, what is computed."""
    return (is_tied and name.endswith(_HEAD)) or name.endswith(_BUFFERS)


def _is_tied(folder: Path) -> bool:
    """What config.json says of the head. InputError without one that can be read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
        return bool(config.get("tie_word_embeddings") or config.get("text_config", {}).get("tie_word_embeddings"))
    except FileNotFoundError as error:
        raise InputError(f"checkpoint folder {folder} has no config.json") from error
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"checkpoint configuration {path} cannot be read: {error}") from error


def _difference(found: StoredWeight, needed: StoredWeight) -> str:
    if found.shape != needed.shape:
        return f"has shape {found.shape}, the model's has {needed.shape}"
    if found.dtype != needed.dtype and not {found.dtype, needed.dtype} <= _CONVERTIBLE:
        return f"is {found.dtype}, the model's is {needed.dtype}"
    return ""


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more weights"


def _part(folder: Path, index: int) -> Path:
    return folder / f"part-{index:05d}"
