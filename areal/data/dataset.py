"""Owns datasets: rows from files, folders and the hub, mapped to the columns that workflows and rewards read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from areal.api.config import DatasetConfig, ValidDatasetConfig
from areal.api.errors import ConfigError, InputError
from areal.api.functions import FunctionRef, load_function, resolve_function
from areal.data.chat import encode_prompt
from areal.data.hub import load_hub_rows
from areal.data.sft import EncodedRow, encode_sft_row
from areal.data.tokenizer import Tokenizer

__all__ = ["EncodedRow", "Row", "encode_sft_row", "gsm8k_row", "load_rows"]

Row = dict[str, Any]

MAP_FUNCTIONS: dict[str, FunctionRef] = {"gsm8k": FunctionRef(name="gsm8k_row", module="areal.data.dataset")}

_GSM8K_INSTRUCTION = "\n\nThink step by step. End with a line that holds only #### and the final number, like: #### 42"


def load_rows(config: DatasetConfig, *, default_split: str, tokenizer: Tokenizer | None = None) -> list[Row]:
    """The rows of a dataset in their order, mapped and filtered by length.

    A row that its map_fn turns into None is left out. InputError names the file and line, or the row, that is wrong.
    """
    rows = _raw_rows(config, config.split or default_split)
    if config.map_fn:
        rows = _mapped(rows, config)
    if config.max_length is not None:
        if tokenizer is None:
            raise ConfigError(f"max_length={config.max_length} of dataset {config.path} needs a tokenizer: give one")
        rows = _short_enough(rows, config, tokenizer, config.max_length)
    if isinstance(config, ValidDatasetConfig) and config.max_rows is not None:
        rows = rows[: config.max_rows]
    if not rows:
        limit = f" of at most max_length={config.max_length} tokens" if config.max_length else ""
        raise InputError(f"dataset {config.path} has no rows{limit}")
    return rows


def gsm8k_row(row: Row) -> Row:
    """A row of GSM8K as one user message; `answer` stays, its last line holds the number."""
    return {
        "messages": [{"role": "user", "content": row["question"] + _GSM8K_INSTRUCTION}],
        "answer": row["answer"],
    }


def _raw_rows(config: DatasetConfig, split: str) -> list[Row]:
    path = Path(config.path).expanduser()
    if path.suffix not in (".jsonl", ".json"):
        return load_hub_rows(str(path) if path.exists() else config.path, name=config.name, split=split)
    if not path.is_file():
        raise InputError(f"there is no dataset file {path}: correct the dataset's path")
    return list(_lines(path)) if path.suffix == ".jsonl" else _whole(path)


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise InputError(f"{path}:{number} is not JSON ({error}): mend or remove that line") from error
            yield _object(row, f"{path}:{number}")


def _whole(path: Path) -> list[Row]:
    try:
        rows = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON ({error}); for one object a line call it .jsonl") from error
    if not isinstance(rows, list):
        raise InputError(f"{path} holds a {type(rows).__name__}: it must be a list of objects, one a row")
    return [_object(row, f"{path}, row {index}") for index, row in enumerate(rows)]


def _object(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise InputError(f"{place} holds a {type(row).__name__}: a row must be an object with columns")
    return row


def _mapped(rows: list[Row], config: DatasetConfig) -> list[Row]:
    function: Callable[[Row], Row | None] = load_function(resolve_function(config.map_fn, MAP_FUNCTIONS, key="map_fn"))
    mapped: list[Row] = []
    for index, row in enumerate(rows):
        try:
            result = function(row)
        except KeyError as error:
            raise InputError(
                f"{config.path}, row {index}: map_fn {config.map_fn} needs the column {error}, the row has "
                f"{sorted(row)}: choose another map_fn or dataset"
            ) from error
        except Exception as error:  # a user's function on one row
            raise InputError(
                f"{config.path}, row {index}: map_fn {config.map_fn} raised {type(error).__name__}: {error}"
            ) from error
        if result is not None:
            mapped.append(_object(result, f"{config.path}, row {index} after map_fn {config.map_fn}"))
    return mapped


def _short_enough(rows: list[Row], config: DatasetConfig, tokenizer: Tokenizer, limit: int) -> list[Row]:
    def length(index: int, row: Row) -> int:
        try:
            if config.type == "sft":
                return len(encode_sft_row(row, tokenizer).token_ids)
            return len(encode_prompt(row, tokenizer).token_ids)
        except InputError as error:
            raise InputError(f"{config.path}, row {index}: {error}") from error

    return [row for index, row in enumerate(rows) if length(index, row) <= limit]
