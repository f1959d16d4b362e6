"""Owns what a Hugging Face checkpoint folder says about its weights: in which files they are, their shapes and dtypes.

Reads the index and the headers of the files, no weight: a few milliseconds for a model of any size.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.errors import InputError

INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 * 2**20
"""What safetensors itself takes for a header."""
_WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight of a file."""

    shape: list[int]
    dtype: str
    """As safetensors calls it, for example BF16."""


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint: those its index names, else all. InputError when there are none."""
    places = _index_of(folder)
    found = [folder / name for name in sorted(set(places.values()))] if places else sorted(folder.glob("*.safetensors"))
    if not found:
        raise InputError(f"checkpoint folder {folder} holds no .safetensors file")
    return found


def stored_weights(folder: Path) -> dict[str, StoredWeight]:
    """All weights of a checkpoint by name. InputError when a file is cut short, or not what the index says."""
    by_file = {path.name: _header_of(path) for path in weight_files(folder)}
    for name, file in _index_of(folder).items():
        if name not in by_file[file]:
            raise InputError(f"checkpoint file {folder / file} lacks {name}, which {INDEX} says it holds")
    return {name: weight for weights in by_file.values() for name, weight in weights.items()}


def _index_of(folder: Path) -> dict[str, str]:
    """Name of a weight -> name of its file; empty without an index."""
    index = folder / INDEX
    if not index.exists():
        return {}
    try:
        places = json.loads(index.read_bytes())["weight_map"]
        if not places or any(not isinstance(file, str) or "/" in file for file in places.values()):
            raise ValueError("weight_map does not hold names of files beside it")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"checkpoint index {index} cannot be read: {error}") from error
    return places


def _header_of(path: Path) -> dict[str, StoredWeight]:
    try:
        with open(path, "rb") as file:
            num_bytes = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or length > min(num_bytes - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"its {num_bytes} bytes are no safetensors file, or a part of one")
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            weights = {name: StoredWeight(list(entry["shape"]), entry["dtype"]) for name, entry in entries.items()}
            end = max((_end_of(entry) for entry in entries.values()), default=0)
        if num_bytes != 8 + length + end:
            raise ValueError(f"it has {num_bytes} bytes instead of {8 + length + end}")
    except OSError as error:
        raise InputError(f"checkpoint file {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"checkpoint file {path} cannot be read: {error}") from error
    return weights


def _end_of(entry: dict[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    width = _WIDTHS.get(entry["dtype"])
    if width is not None and end - begin != width * math.prod(entry["shape"]):
        raise ValueError(f"a weight of shape {entry['shape']} has {end - begin} bytes")
    return int(end)
