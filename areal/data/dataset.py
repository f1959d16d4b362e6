"""Datasets: rows from files, folders and the hub, mapped to the columns that workflows and rewards read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import orjson

from areal.api.config import DatasetConfig, ValidDatasetConfig
from areal.api.errors import ConfigError, InputError
from areal.api.functions import MAP_FUNCTIONS, load_function, resolve_function
from areal.data.chat import encode_prompt
from areal.data.hub import load_hub_rows
from areal.data.preference_rows import EncodedPair, encode_pair
from areal.data.sft_rows import EncodedRow, encode_sft_row
from areal.data.tokenizer import Tokenizer

__all__ = [
    "EncodedPair",
    "EncodedRow",
    "Row",
    "encode_sft_row",
    "gsm8k_row",
    "load_pairs",
    "load_rows",
    "load_sft_rows",
]

Row = dict[str, Any]
AnyT = TypeVar("AnyT")
EncodedT = TypeVar("EncodedT", EncodedRow, EncodedPair)

_GSM8K_INSTRUCTION = "\n\nThink step by step. End with a line that holds only #### and the final number, like: #### 42"


def load_rows(config: DatasetConfig, *, default_split: str, tokenizer: Tokenizer | None = None) -> list[Row]:
    """Load the rows of a dataset in order and map them. Rows with a prompt above max_length are dropped or refused.

    A row for which map_fn returns None is dropped. InputError names the file and line, or the row, with the error.
    `load_sft_rows` and `load_pairs` load rows for training without rollouts.
    """
    rows = _mapped_rows(config, default_split)
    if config.max_length is not None:
        if config.type != "rl":
            raise ValueError(
                f"max_length of dataset {config.path}: rows of type={config.type} are truncated when encoded"
            )
        if tokenizer is None:
            raise ConfigError(
                f"max_length={config.max_length} of dataset {config.path} needs a tokenizer: pass one to load_rows",
                code="data.no_tokenizer",
            )
        rows = _short_enough(rows, config, tokenizer, config.max_length)
    return _first_rows(rows, config)


def load_sft_rows(
    config: DatasetConfig, tokenizer: Tokenizer, *, default_split: str, train_on: str = "last"
) -> list[EncodedRow]:
    """Load the encoded rows of a dataset of type sft, at most max_length tokens each. Raises InputError."""
    return _encoded(config, default_split, lambda row: encode_sft_row(row, tokenizer, train_on=train_on), _row_length)


def load_pairs(
    config: DatasetConfig, tokenizer: Tokenizer, *, default_split: str, use_margin: bool = False
) -> list[EncodedPair]:
    """Load the encoded pairs of a dataset of type rw, at most max_length tokens per side. Raises InputError."""
    return _encoded(config, default_split, lambda row: encode_pair(row, tokenizer, use_margin=use_margin), _pair_length)


def gsm8k_row(row: Row) -> Row:
    """A row of GSM8K as one user message; the last line of the unchanged `answer` contains the number."""
    return {
        "messages": [{"role": "user", "content": row["question"] + _GSM8K_INSTRUCTION}],
        "answer": row["answer"],
    }


def _raw_rows(config: DatasetConfig, split: str) -> list[Row]:
    path = Path(config.path).expanduser()
    if path.suffix not in (".jsonl", ".json"):
        return load_hub_rows(str(path) if path.exists() else config.path, name=config.name, split=split)
    if not path.is_file():
        raise InputError(f"there is no dataset file {path}: correct the dataset's path", code="data.not_found")
    return list(_lines(path)) if path.suffix == ".jsonl" else _whole(path)


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                message = f"{path}:{number} is not JSON ({error}): fix or remove that line"
                raise InputError(message, code="data.invalid_file") from error
            yield _object(row, f"{path}:{number}")


def _whole(path: Path) -> list[Row]:
    try:
        rows = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        message = f"{path} is not JSON ({error}); a file with one object per line must be called .jsonl"
        raise InputError(message, code="data.invalid_file") from error
    if not isinstance(rows, list):
        message = f"{path} contains a {type(rows).__name__}: it must be a list of objects, one per row"
        raise InputError(message, code="data.invalid_file")
    return [_object(row, f"{path}, row {index}") for index, row in enumerate(rows)]


def _object(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise InputError(f"{place} is a {type(row).__name__}: a row must be an object", code="data.invalid_file")
    return row


def _mapped_rows(config: DatasetConfig, default_split: str) -> list[Row]:
    rows = _raw_rows(config, config.split or default_split)
    return _mapped(rows, config) if config.map_fn else rows


def _mapped(rows: list[Row], config: DatasetConfig) -> list[Row]:
    function: Callable[[Row], Row | None] = load_function(resolve_function(config.map_fn, MAP_FUNCTIONS, key="map_fn"))
    mapped: list[Row] = []
    for index, row in enumerate(rows):
        try:
            result = function(row)
        except KeyError as error:
            raise InputError(
                f"{config.path}, row {index}: map_fn {config.map_fn} needs the column {error}, the row has "
                f"{sorted(row)}: choose another map_fn or dataset",
                code="data.map_fn_failed",
            ) from error
        except Exception as error:  # a user's function on one row
            raise InputError(
                f"{config.path}, row {index}: map_fn {config.map_fn} raised {type(error).__name__}: {error}",
                code="data.map_fn_failed",
            ) from error
        if result is not None:
            mapped.append(_object(result, f"{config.path}, row {index} after map_fn {config.map_fn}"))
    return mapped


def _short_enough(rows: list[Row], config: DatasetConfig, tokenizer: Tokenizer, limit: int) -> list[Row]:
    def length(index: int, row: Row) -> int:
        try:
            return len(encode_prompt(row, tokenizer).token_ids)
        except InputError as error:
            raise InputError(f"{config.path}, row {index}: {error}", code=error.code) from error

    kept: list[Row] = []
    for index, row in enumerate(rows):
        num_tokens = length(index, row)
        if num_tokens <= limit:
            kept.append(row)
        elif config.truncation == "error":
            raise _too_long(config, index, num_tokens, limit)
    return kept


def _encoded(
    config: DatasetConfig, default_split: str, encode: Callable[[Row], EncodedT], length: Callable[[EncodedT], int]
) -> list[EncodedT]:
    """Encode every row and apply `truncation` to those above max_length. Rows without a trained token are dropped."""
    encoded: list[EncodedT] = []
    limit = config.max_length
    for index, row in enumerate(_mapped_rows(config, default_split)):
        try:
            made = encode(row)
        except InputError as error:
            raise InputError(f"{config.path}, row {index}: {error}", code=error.code) from error
        if limit is not None and length(made) > limit:
            if config.truncation == "error":
                raise _too_long(config, index, length(made), limit)
            if config.truncation == "drop":
                continue
            made = made.shortened(limit, keep_end=config.truncation == "left")
        if made.is_trainable:
            encoded.append(made)
    return _first_rows(encoded, config)


def _row_length(row: EncodedRow) -> int:
    return len(row.token_ids)


def _pair_length(pair: EncodedPair) -> int:
    return max(len(pair.chosen.token_ids), len(pair.rejected.token_ids))


def _too_long(config: DatasetConfig, index: int, num_tokens: int, limit: int) -> InputError:
    return InputError(
        f"{config.path}, row {index} has {num_tokens} tokens, more than max_length={limit}: raise it, shorten the row, "
        "or choose another truncation",
        code="data.too_long",
    )


def _first_rows(rows: list[AnyT], config: DatasetConfig) -> list[AnyT]:
    """The first max_rows of a held-out set, else all. Raises InputError when there are none."""
    if isinstance(config, ValidDatasetConfig) and config.max_rows is not None:
        rows = rows[: config.max_rows]
    if not rows:
        limit = f" of at most max_length={config.max_length} tokens" if config.max_length else ""
        raise InputError(f"dataset {config.path} has no rows{limit}", code="data.no_rows")
    return rows
