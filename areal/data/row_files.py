"""Files of rows: JSON lines, JSON, CSV, Parquet and Arrow."""

import csv
import glob
import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from areal.api.config.data import is_environment_path
from areal.api.errors import ConfigError, InputError

Row = dict[str, Any]
_LONG_NUMBER = re.compile(rb"\d{19}")


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                row = json_value(line)
            except ValueError as error:
                message = f"{path}:{number} is not JSON ({error}): fix or remove that line"
                raise InputError(message, code="data.invalid_file") from error
            yield object_row(row, f"{path}:{number}")


def json_value(text: bytes) -> Any:
    """The value of JSON. Raises ValueError, also for an integer of more than 64 bits, which orjson reads as a float."""
    value = orjson.loads(text)  # first, because it refuses nesting that json.loads cannot read
    if _LONG_NUMBER.search(text):
        json.loads(text, parse_int=_whole_number)
    return value


def _whole_number(text: str) -> int:
    if not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"the integer {text} has more than 64 bits; write it as text")
    return int(text)


def _json(path: Path) -> Iterator[Row]:
    try:
        rows = json_value(path.read_bytes().removeprefix(BOM_UTF8))
    except ValueError as error:
        message = f"{path} is not JSON ({error}); a file with one object per line must be called .jsonl"
        raise InputError(message, code="data.invalid_file") from error
    if not isinstance(rows, list):
        message = f"{path} contains a {type(rows).__name__}: it must be a list of objects, one per row"
        raise InputError(message, code="data.invalid_file")
    yield from (object_row(row, f"{path}, row {index}") for index, row in enumerate(rows))


def _separated(path: Path) -> Iterator[Row]:
    """Every value is text: an answer such as 007 stays as it is."""
    csv.field_size_limit(2**31 - 1)  # of the process; a dataset's max_characters limits the text of a row
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        try:
            names = list(reader.fieldnames or ())
            _require_different(names, f"{path}:1")
            for row in reader:
                if None in row or None in row.values():
                    message = f"{path}:{reader.line_num} has not the {len(names)} values of the header"
                    raise InputError(f"{message}: fix or remove that line", code="data.invalid_file")
                yield row
        except UnicodeDecodeError as error:
            message = f"{path}:{_line_that_is_not_utf8(path)} is not UTF-8 ({error.reason}): save the file as UTF-8"
            raise InputError(message, code="data.invalid_file") from error
        except csv.Error as error:
            message = f"{path}:{reader.line_num} is not CSV ({error}): fix or remove that line"
            raise InputError(message, code="data.invalid_file") from error


def _line_that_is_not_utf8(path: Path) -> int:
    """Number of the first such line, from 1. The CSV reader cannot tell it: text is decoded in blocks."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    raise AssertionError(f"{path} is UTF-8")


def _columns(path: Path) -> Iterator[Row]:
    """Parquet, or Arrow as `datasets` and Feather write it."""
    for batch in _batches(path):
        yield from batch.to_pylist()


def _batches(path: Path, columns: list[str] | None = None) -> Iterator[Any]:
    """The record batches of a file of columns. Raises InputError, and ConfigError without pyarrow.

    `columns`: those of a Parquet file that are read; None = all.
    """
    try:
        import pyarrow as pa  # pyright: ignore[reportMissingImports] - optional
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports] - optional
    except ImportError:
        message = f"{path} needs the package pyarrow: pip install -e '.[parquet]'"
        raise ConfigError(message, code="data.no_pyarrow") from None
    try:
        if path.suffix == ".parquet":
            with parquet.ParquetFile(path) as file:
                _require_different(file.schema_arrow.names, path)
                yield from file.iter_batches(columns=columns)
            return
        with pa.memory_map(str(path)) as source:
            try:
                batches = opened = pa.ipc.open_stream(source)
            except pa.ArrowInvalid:
                source.seek(0)
                opened = pa.ipc.open_file(source)
                batches = map(opened.get_batch, range(opened.num_record_batches))
            _require_different(opened.schema.names, path)
            yield from batches
    except (pa.ArrowException, OSError) as error:
        first_line = str(error).partition("\n")[0]
        raise InputError(f"{path} cannot be read: {first_line}", code="data.invalid_file") from error


def _require_different(names: list[str], place: str | Path) -> None:
    """InputError for two columns with one name, of which a row could have one only."""
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        message = f"{place} names the column {repeated[0]!r} more than once: rename one of them"
        raise InputError(message, code="data.invalid_file")


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _separated,
    ".tsv": _separated,
    ".parquet": _columns,
    ".arrow": _columns,
    ".feather": _columns,
}
"""End of a file's name -> its reader, which raises InputError with the file and the line or row."""


def count_rows_of(path: Path) -> int:
    """The number of rows of a file with one of these ends, without making them if that is possible."""
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    if READERS[path.suffix] is _columns:
        return sum(batch.num_rows for batch in _batches(path, columns=[]))
    return sum(1 for _ in READERS[path.suffix](path))


def dataset_files(path: str) -> list[Path]:
    """The local files that the path of a dataset names, in the order of their names: itself, or those of a pattern."""
    name = os.path.expanduser(path)
    if is_environment_path(path) or not glob.has_magic(name) or Path(name).exists():
        return [Path(name)]
    return [Path(file) for file in sorted(glob.glob(name, recursive=True)) if Path(file).suffix in READERS]


def object_row(row: Any, place: str) -> Row:
    """`row` if it is an object, else InputError."""
    if not isinstance(row, dict):
        raise InputError(f"{place} is a {type(row).__name__}: a row must be an object", code="data.invalid_file")
    return row
