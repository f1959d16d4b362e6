"""Cheap checks of all rows of a dataset before anything is tokenised: columns, types, number of characters."""

from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from areal.api.config import BaseExperimentConfig, DatasetConfig
from areal.api.errors import ConfigError, InputError
from areal.data.chat import checked_messages
from areal.data.row_files import READERS, Row, count_rows_of, dataset_files, json_value

# ----------------------------------------------------------------------------------------------------------------------
# Mixes of datasets: how often the rows of each occur in an epoch.

RowT = TypeVar("RowT")


def mixed_counts(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Rows of each dataset in an epoch, in proportion to `weights`: the smallest such epoch that cuts no dataset.

    No weights: the sizes.
    """
    if not weights:
        return list(sizes)
    scale = max(size / weight for size, weight in zip(sizes, weights, strict=True))
    return [max(size, round(scale * weight)) for size, weight in zip(sizes, weights, strict=True)]


def mixed_rows(parts: Sequence[Sequence[RowT]], weights: Sequence[float]) -> list[RowT]:
    """The rows of an epoch, dataset by dataset; a repeated row is the same object. The parts have rows."""
    counts = mixed_counts([len(part) for part in parts], weights)
    return [part[i % len(part)] for part, count in zip(parts, counts, strict=True) for i in range(count)]


MAX_SHOWN = 3
"""Maximum number of rows in a message."""
MAX_FILE_BYTES = 256 * 2**20
"""`file_problem` reads this much of a .jsonl file, and no other file that is larger."""
_TEXTS = ("prompt", "answer", "chosen", "rejected")


class RowProblem(NamedTuple):
    """Why a row cannot be used."""

    code: str
    text: str


def column_problem(row: Row, kind: str) -> RowProblem | None:
    """The first wrong column of a row of dataset type `kind` (rl, sft or rw); None = usable as far as this shows."""
    if "messages" in row:
        if problem := _messages_problem(row["messages"]):
            return problem
    elif kind != "rw":
        if "prompt" not in row:
            return RowProblem("data.missing_column", f"has no column 'messages' or 'prompt', only {sorted(row)}")
        if not isinstance(row["prompt"], str):
            return _wrong_type("prompt", "text", row["prompt"])
    if kind == "sft":
        messages, answer = row.get("messages") or [{"role": "user"}], row.get("answer")
        if messages[-1]["role"] != "assistant" and not isinstance(answer, str):
            return _wrong_type("answer", "text, unless the last message is of the assistant", answer)
    for name in ("chosen", "rejected") if kind == "rw" else ():
        if not isinstance(row.get(name), str | list):
            return _wrong_type(name, "text or messages", row.get(name))
    return None


def size_problem(row: Row, limit: int | None) -> RowProblem | None:
    """A column with more than `limit` characters; None when there is none. Tokenising such a text takes long."""
    if limit is None:
        return None
    for name in (*_TEXTS, "messages"):
        if (size := _num_characters(row.get(name))) > limit:
            return RowProblem("data.too_long", f"column {name!r} has {size} characters, but max_characters={limit}")
    return None


def require_usable(row_problems: Iterable[RowProblem | None], place: str) -> None:
    """Raise InputError that counts and names the rows with a problem. `found`: of every row, in order."""
    problems: list[tuple[int, RowProblem]] = []
    num_rows = 0
    for index, problem in enumerate(row_problems):
        num_rows += 1
        if problem is not None:
            problems.append((index, problem))
    if problems:
        raise InputError(_summary(problems, num_rows, place), code=problems[0][1].code)


def require_prompts(rows: Sequence[Row]) -> None:
    """Raise InputError when a row has no usable `messages` or `prompt`."""
    require_usable((column_problem(row, "rl") for row in rows), "the dataset")


def file_problem(data: DatasetConfig, *, kind: str) -> str:
    """One sentence about unusable rows of local files; empty = none, or another kind of dataset.

    `kind`: rl, sft or rw; empty = the columns are not checked. Nor are those of a dataset with map_fn or columns,
    which are known after the conversion.
    """
    problems = (_problem_of_file(file, data, kind) for path in data.paths for file in dataset_files(path))
    return next(filter(None, problems), "")


def dataset_paths(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    """Option and path of every dataset."""
    for key, data in (("train_dataset.path", config.train_dataset), ("valid_dataset.path", config.valid_dataset)):
        yield from ((key, path) for path in (data.paths if data is not None else ()))
    yield from ((f"evaluator.sets.{name}", path) for name, path in config.evaluator.sets.items())


def count_rows(config: BaseExperimentConfig) -> int | None:
    """Rows per epoch of a training set of local files, before any filter; None for others."""
    data, sizes = config.train_dataset, list[int]()
    for files in map(dataset_files, data.paths):
        if data.curriculum or any(path.suffix not in READERS or not path.is_file() for path in files):
            return None
        try:
            sizes.append(sum(map(count_rows_of, files)))
        except (InputError, ConfigError):  # `file_problem` says what is wrong
            return None
    count = sum(mixed_counts(sizes, data.weights if len(data.weights) == len(sizes) else ()))
    return min(count, data.max_rows or count)


def _problem_of_file(path: Path, data: DatasetConfig, kind: str) -> str:
    if path.suffix not in READERS or not path.is_file():
        return ""
    kind = "" if data.map_fn or data.columns else kind
    limit = None if data.map_fn else data.max_characters
    if path.suffix == ".jsonl":
        problems = (_line_problem(line, kind, limit) for line in _first_lines(path))
    elif path.stat().st_size <= MAX_FILE_BYTES:
        problems = (_row_problem(row, kind, limit) for row in READERS[path.suffix](path))
    else:
        return ""
    try:
        require_usable(problems, str(path))
    except (InputError, ConfigError) as error:
        return str(error)
    return ""


def _first_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            line = line.removeprefix(BOM_UTF8) if file.tell() == len(line) else line
            if line.strip():
                yield line
            if file.tell() > MAX_FILE_BYTES:
                return


def _line_problem(line: bytes, kind: str, limit: int | None) -> RowProblem | None:
    try:
        row = json_value(line)
    except ValueError as error:
        return RowProblem("data.invalid_file", f"is not JSON ({error})")
    if not isinstance(row, dict):
        return RowProblem("data.invalid_file", f"is of type {type(row).__name__}, not an object")
    return _row_problem(row, kind, limit)


def _row_problem(row: Row, kind: str, limit: int | None) -> RowProblem | None:
    return (column_problem(row, kind) if kind else None) or size_problem(row, limit)


def _messages_problem(messages: Any) -> RowProblem | None:
    try:
        checked_messages(messages)
    except InputError as error:
        return RowProblem(error.code, f"is wrong: {error}")
    return None


def _wrong_type(column: str, expected: str, value: Any) -> RowProblem:
    text = repr(value)
    shown = text if len(text) <= 80 else text[:77] + "..."
    what = "nothing" if value is None else f"a value of type {type(value).__name__}: {shown}"
    return RowProblem("data.invalid_column", f"column {column!r} must be {expected}, but contains {what}")


def _num_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(_num_characters(item.get("content")) for item in value if isinstance(item, dict))
    return 0


def _summary(problems: Sequence[tuple[int, RowProblem]], num_rows: int, place: str) -> str:
    shown = "; ".join(f"row {index} {problem.text}" for index, problem in problems[:MAX_SHOWN])
    rest = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
    advice = "fix or remove them, or set columns or map_fn (rows count from 0)"
    return f"{place}: {len(problems)} of {num_rows} rows cannot be used: {shown}{rest}: {advice}"
