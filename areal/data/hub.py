"""Owns the use of the optional `datasets` library: saved folders and datasets of the hub as lists of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal.api.errors import ConfigError, InputError


def load_hub_rows(path: str, *, name: str, split: str) -> list[dict[str, Any]]:
    """The rows of a folder saved by `datasets`, or of a dataset of the hub."""
    try:
        import datasets  # pyright: ignore[reportMissingImports] - optional
    except ImportError as error:
        raise ConfigError(
            f"dataset {path!r} is no .jsonl or .json file and needs the datasets library: pip install 'areal[hub]'"
        ) from error
    try:
        if (Path(path) / "dataset_dict.json").is_file() or (Path(path) / "dataset_info.json").is_file():
            loaded = datasets.load_from_disk(path)
            if isinstance(loaded, datasets.DatasetDict):
                if split not in loaded:
                    raise InputError(f"dataset {path} has no split {split!r}, but {sorted(loaded)}: set split")
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(path, name or None, split=split)
    except InputError:
        raise
    except Exception as error:  # the library raises many kinds for names, networks and files
        first_line = str(error).strip().partition("\n")[0]
        raise InputError(f"dataset {path!r} (split {split!r}) cannot be loaded: {first_line}") from error
    return [dict(row) for row in loaded]
