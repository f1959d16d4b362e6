"""The file of an evaluation: one JSON line for each answer, with its row. Generations made elsewhere are read too."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from areal.api.errors import InputError
from areal.system.durable import write_atomic

OUTPUT_COLUMNS = ("output", "completion", "completions", "response", "responses", "generation", "generations")
"""Columns that hold the answers in a file that was made elsewhere, in the order in which they are tried."""


class SampleKey(NamedTuple):
    """Identifies one answer of an evaluation."""

    mode: str
    """sampled or greedy; for generations made elsewhere `given`."""
    set_name: str
    row: int
    """Index of the row in its set."""
    sample: int
    """From 0 for each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer, or the failure to get one."""

    key: SampleKey
    data: dict[str, Any]
    """The row, without its images."""
    prompt: str = ""
    """With one placeholder for each image."""
    images: list[str] = field(default_factory=list[str])
    """SHA-256 of the image files of the prompt, in order; they are in the folder `images` of the evaluation."""
    output: str = ""
    """The last answer of the episode, without special tokens."""
    source: str = ""
    """Data source of the row; empty = it has none."""
    num_tokens: float = 0.0
    """Generated tokens."""
    finished: bool = True
    """False if a length limit cut the answer."""
    reward: float | None = None
    """None = not scored."""
    answer: str | None = None
    """The final answer, for the majority vote; None = it has none."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Parts of the reward, and other numbers that the reward functions and the workflow report."""
    error: str = ""
    """Why there is no answer or no score; empty when there is one."""

    def line(self) -> bytes:
        """The JSON line, with its end. Equal samples have equal lines."""
        fields = dataclasses.asdict(self)
        key = dict(zip(("mode", "set", "row", "sample"), fields.pop("key"), strict=True))
        if self.reward is None:
            del fields["reward"], fields["answer"], fields["metrics"]
        for name in ("error", "images"):
            if not fields[name]:
                del fields[name]
        return orjson.dumps(key | fields, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)


def read_samples(path: Path, *, with_failed: bool = False) -> dict[SampleKey, Sample]:
    """The samples of a file that areal wrote. A last line that was cut by a kill is left out."""
    found: dict[SampleKey, Sample] = {}
    if not path.is_file():
        return found
    *lines, _ = path.read_bytes().split(b"\n")  # what follows the last line end is empty, or cut
    for number, line in enumerate(lines, start=1):
        sample = _sample(_parsed(line, f"{path}:{number}"), f"{path}:{number}")
        if with_failed or not sample.error:
            found[sample.key] = sample
    return found


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Replace the file, atomically, in the order of the keys."""
    write_atomic(path, b"".join(sample.line() for sample in sorted(samples, key=lambda sample: sample.key)))


def read_generations(path: Path, column: str = "") -> list[Sample]:
    """The generations in a .jsonl file, not scored. `column`: where the answers are; empty = the first of
    OUTPUT_COLUMNS that a line has. A line with a list of answers is one row with several samples.

    Lines belong to one row when they have equal `set` and `row`, or else an equal `prompt` or `messages`; a line with
    none of these is a row. The row is the column `data`, or all other columns of the line. Raises InputError.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}: give a .jsonl file with generations", code="data.not_found")
    rows: dict[bytes, int] = {}
    counts: dict[tuple[str, str, int], int] = {}
    found: list[Sample] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            fields = _parsed(line, place)
            if fields.get("error"):
                continue
            name = column or next((name for name in OUTPUT_COLUMNS if name in fields), OUTPUT_COLUMNS[0])
            row = fields["row"] if isinstance(fields.get("row"), int) else _row_of(fields, number, rows)
            mode, set_name = str(fields.get("mode", "given")), str(fields.get("set", path.stem))
            for output in _outputs(fields, name, place):
                index = counts.get((mode, set_name, row), 0)
                counts[mode, set_name, row] = index + 1
                found.append(_given(fields, name, SampleKey(mode, set_name, row, index), output))
    if not found:
        raise InputError(f"{path} has no generations", code="data.no_rows")
    return found


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        message = f"{place} is not JSON ({error}): fix or remove that line"
        raise InputError(message, code="data.invalid_file") from error
    if not isinstance(fields, dict):
        message = f"{place} is a {type(fields).__name__}: a line must be an object"
        raise InputError(message, code="data.invalid_file")
    return fields


def _sample(fields: dict[str, Any], place: str) -> Sample:
    names = {one.name for one in dataclasses.fields(Sample)} - {"key"}
    try:
        key = SampleKey(fields.pop("mode"), fields.pop("set"), fields.pop("row"), fields.pop("sample"))
        return Sample(key=key, **{name: value for name, value in fields.items() if name in names})
    except (KeyError, TypeError) as error:
        message = f"{place} is not a line of an evaluation ({error}): remove the file, or use another folder"
        raise InputError(message, code="data.invalid_file") from error


def _row_of(fields: dict[str, Any], number: int, rows: dict[bytes, int]) -> int:
    """The number of the row that a line belongs to; the same prompt is the same row."""
    prompt = next((fields[name] for name in ("messages", "prompt") if name in fields), number)
    return rows.setdefault(orjson.dumps(prompt), len(rows))


def _outputs(fields: dict[str, Any], name: str, place: str) -> Sequence[str]:
    given = fields.get(name)
    outputs = [given] if isinstance(given, str) else given
    if not isinstance(outputs, list) or not outputs or not all(isinstance(one, str) for one in outputs):
        message = f"{place} has no text in {name!r}, only the columns {sorted(fields)}: name it with --column NAME"
        raise InputError(message, code="evaluate.no_output_column")
    return outputs


def _given(fields: dict[str, Any], name: str, key: SampleKey, output: str) -> Sample:
    data = fields.get("data")
    prompt = fields.get("prompt", "")
    return Sample(
        key=key,
        data=data if isinstance(data, dict) else {other: value for other, value in fields.items() if other != name},
        prompt=prompt if isinstance(prompt, str) else "",
        output=output,
        source=str(fields.get("source", "")),
        num_tokens=float(fields.get("num_tokens") or 0),
        finished=bool(fields.get("finished", True)),
    )


def source_of(row: Mapping[str, Any], source_key: str) -> str:
    """The data source of a row: its column `source_key`; empty when it has none."""
    return str(row.get(source_key) or "")


def rows_of(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """The samples of each row, in the order of their keys."""
    rows: dict[tuple[str, str, int], list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.key):
        rows.setdefault(sample.key[:3], []).append(sample)
    yield from rows.values()
