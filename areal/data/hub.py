"""Rows of folders and hub datasets by the optional `datasets` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal.api.errors import ConfigError, InputError


def load_hub_rows(path: str, *, name: str, split: str) -> list[dict[str, Any]]:
    """Load the rows of a folder that `datasets` saved, or of a hub dataset. Raises ConfigError or InputError."""
    try:
        import datasets  # pyright: ignore[reportMissingImports] - optional
    except ImportError as error:
        raise ConfigError(
            f"dataset {path!r} is not a .jsonl or .json file and needs the datasets library: pip install 'areal[hub]'",
            code="data.no_datasets_library",
        ) from error
    try:
        if (Path(path) / "dataset_dict.json").is_file() or (Path(path) / "dataset_info.json").is_file():
            loaded = datasets.load_from_disk(path)
            if isinstance(loaded, datasets.DatasetDict):
                if split not in loaded:
                    message = f"dataset {path} has no split {split!r}, only {sorted(loaded)}: set split"
                    raise InputError(message, code="data.not_found")
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(path, name or None, split=split)
    except InputError:
        raise
    except Exception as error:  # the library raises many kinds for names, networks and files
        first_line = str(error).strip().partition("\n")[0]
        message = f"dataset {path!r} (split {split!r}) cannot be loaded: {first_line}"
        raise InputError(message, code="data.not_found") from error
    return [dict(row) for row in loaded]
