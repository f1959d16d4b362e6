"""Hugging Face checkpoint folders: files, shapes and dtypes of the weights, and whether a server may load the folder.

Reads the index, the configuration and the headers of the weight files, never a weight: milliseconds for any model.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.errors import InputError
from areal.system.durable import COMPLETE, is_complete, open_regular

# ----------------------------------------------------------------------------------------------------------------------
# Files of hub repositories, in the local cache or downloaded.


def hub_file(name: str, file: str, *, key: str = "tokenizer_path") -> Path | None:
    """A file of a hub repository, from the local cache if possible; None when the repository has no such file.

    InputError about the option `key` when the repository does not exist or the hub does not answer.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, file))
    except (HFValidationError, EntryNotFoundError, OSError) as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        # a LocalEntryNotFoundError: nothing is cached, and the hub does not answer
        message = f"{name} is neither a folder nor available from the hub: correct {key}"
        code = "data.no_tokenizer" if key == "tokenizer_path" else "model.not_found"
        raise InputError(message, code=code) from error


def cached_hub_file(name: str, file: str) -> Path | None:
    """A file of a hub repository in the local cache; None when it is not there, or `name` is no repository."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


INDEX = "model.safetensors.index.json"
PUBLISHED_FILE_BYTES = 2**30
"""Largest file with more than one weight of a version that trainer ranks keep together. The files do not depend on the
number of ranks: a server, which keeps all of them, has the same."""
_MAX_HEADER_BYTES = 100 * 2**20  # the limit of safetensors
_DAMAGED = (OSError, ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError)
"""What reading an unreadable or malformed file raises."""
_WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1}
_HEAD = "lm_head.weight"
_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", ".masked_bias")
"""Name endings of buffers in older checkpoints. Every server computes them."""
_CONVERTIBLE = {"F64", "F32", "F16", "BF16"}  # servers convert between these dtypes while they load


@dataclass(frozen=True, slots=True)
class StoredWeight:
    shape: list[int]
    dtype: str
    """Data type in the notation of safetensors, for example BF16."""


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint: those in its index, else all. InputError when there are none."""
    places = _index_of(folder)
    files = [folder / name for name in sorted(set(places.values()))] if places else sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"checkpoint folder {folder} has no .safetensors file", code="checkpoint.incomplete")
    return files


def stored_weights(folder: Path) -> dict[str, StoredWeight]:
    """All weights of a checkpoint by name. InputError when a file is cut short or contradicts the index."""
    by_file = {path.name: file_header(path).weights for path in weight_files(folder)}
    for name, file in _index_of(folder).items():
        if name not in by_file[file]:
            message = f"checkpoint file {folder / file} lacks {name}, which {INDEX} places there"
            raise InputError(message, code="checkpoint.damaged")
    return {name: weight for weights in by_file.values() for name, weight in weights.items()}


def folder_problem(folder: Path, like: Path | None) -> str:
    """Why a server must not load this checkpoint folder; empty when it may.

    Foreign servers crash on some bad folders, and load a folder that lacks weights without an error. `like` is the
    folder that the server loaded first: the weights must have the same names, shapes and kinds of dtype. When it is
    None, or has no safetensors files (a hub name), only the folder itself is checked.
    """
    try:
        if not folder.is_dir():
            return f"checkpoint folder {folder} does not exist"
        is_damaged = (folder / COMPLETE).exists() and not is_complete(folder)
    except OSError as error:  # a long path, or no permission
        return f"checkpoint folder {folder} cannot be read: {error.strerror}"
    if is_damaged:
        return f"checkpoint folder {folder} is incomplete: its {COMPLETE} marker does not match its files"
    try:
        is_tied = _is_tied(folder)
        weights = stored_weights(folder)
        needed = stored_weights(like) if like is not None and any(like.glob("*.safetensors")) else weights
    except InputError as error:
        return str(error)

    def is_optional(name: str) -> bool:
        return (is_tied and name.endswith(_HEAD)) or name.endswith(_BUFFERS)

    if missing := [name for name in needed if name not in weights and not is_optional(name)]:
        return f"checkpoint folder {folder} lacks {_listed(missing)}"
    if unknown := [name for name in weights if name not in needed and not is_optional(name)]:
        return f"checkpoint folder {folder} contains {_listed(unknown)}, which the model does not have"
    for name in weights.keys() & needed.keys():
        stored, model = weights[name], needed[name]
        if stored.shape != model.shape:
            return f"checkpoint folder {folder}: {name} has shape {stored.shape}, the model's has {model.shape}"
        if stored.dtype != model.dtype and not {stored.dtype, model.dtype} <= _CONVERTIBLE:
            return f"checkpoint folder {folder}: {name} is {stored.dtype}, the model's is {model.dtype}"
    return ""


def _is_tied(folder: Path) -> bool:
    """Whether the head is the embedding. InputError without a readable config.json."""
    path = folder / "config.json"
    try:
        with open_regular(path) as file:
            config = json.loads(file.read())
        return bool(config.get("tie_word_embeddings") or config.get("text_config", {}).get("tie_word_embeddings"))
    except FileNotFoundError as error:
        raise InputError(f"checkpoint folder {folder} has no config.json", code="checkpoint.incomplete") from error
    except _DAMAGED as error:
        raise _unreadable(path, error) from error


def _index_of(folder: Path) -> dict[str, str]:
    """Name of a weight -> name of its file; empty without an index."""
    index = folder / INDEX
    try:
        if not index.exists():
            return {}
        with open_regular(index) as file:
            places = json.loads(file.read())["weight_map"]
        if not places or any(not isinstance(file, str) or "/" in file for file in places.values()):
            raise ValueError("weight_map does not contain names of files in the same folder")
    except _DAMAGED as error:
        raise _unreadable(index, error) from error
    return places


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of a weight file."""

    weights: dict[str, StoredWeight]
    places: dict[str, tuple[int, int]]
    """First byte of each weight in the file, and the one after its last."""
    metadata: dict[str, str]


def file_header(path: Path) -> FileHeader:
    """Raises InputError when the file is not whole."""
    try:
        with open_regular(path) as file:
            num_bytes = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or length > min(num_bytes - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"its {num_bytes} bytes are not a safetensors file, or only a part of one")
            entries = json.loads(file.read(length))
            metadata = entries.pop("__metadata__", {})
            weights = {name: StoredWeight(list(entry["shape"]), entry["dtype"]) for name, entry in entries.items()}
            end = max((_end_of(entry) for entry in entries.values()), default=0)
        if num_bytes != 8 + length + end:
            raise ValueError(f"it has {num_bytes} bytes instead of {8 + length + end}")
    except _DAMAGED as error:
        raise _unreadable(path, error) from error
    offsets = {name: entry["data_offsets"] for name, entry in entries.items()}
    return FileHeader(weights, {name: (8 + length + a, 8 + length + b) for name, (a, b) in offsets.items()}, metadata)


def _end_of(entry: dict[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    width = _WIDTHS.get(entry["dtype"])
    if width is not None and end - begin != width * math.prod(entry["shape"]):
        raise ValueError(f"a weight of shape {entry['shape']} has {end - begin} bytes")
    return int(end)


def _unreadable(path: Path, error: Exception) -> InputError:
    cause = getattr(error, "strerror", None) or error
    return InputError(f"checkpoint file {path} cannot be read: {cause}", code="checkpoint.damaged")


def _listed(names: list[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more weights" if len(names) > 3 else "")
