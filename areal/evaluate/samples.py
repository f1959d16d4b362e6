"""The file of an evaluation: one JSON line for each answer, with its row. Generations made elsewhere are read too."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import orjson

from areal.api.errors import InputError
from areal.rollout.evaluation import Estimate, Graded, answer_metrics
from areal.system.durable import write_atomic

OUTPUT_COLUMNS = ("output", "completion", "completions", "response", "responses", "generation", "generations")
ID_COLUMNS = ("id", "uid", "_id", "row_id", "question_id", "problem_id", "task_id", "unique_id")
_OF_ANSWERS = (*OUTPUT_COLUMNS, "sample", "num_tokens", "finished", "finish_reason", "reward", "score", "error")
"""Columns that may differ between the samples of one row."""
"""Columns that hold the answers in a file that was made elsewhere, in the order in which they are tried."""


class SampleKey(NamedTuple):
    mode: str  # sampled or greedy; for generations made elsewhere `given`.
    set_name: str
    row: int  # Index of the row in its set.
    sample: int  # It counts from 0 for each row.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    key: SampleKey
    data: dict[str, Any]  # The row, without its images.
    prompt: str = ""  # It has one placeholder for each image.
    images: list[str] = field(default_factory=list[str])
    """SHA-256 of the image files of the prompt, in order; they are in the folder `images` of the evaluation."""
    output: str = ""  # The last answer of the episode, without special tokens.
    source: str = ""  # Data source of the row; empty = it has none.
    num_tokens: float = 0.0  # Generated tokens.
    finished: bool = True  # False if a length limit cut the answer.
    reward: float | None = None  # None = not scored.
    answer: str | None = None  # The final answer, for the majority vote; None = it has none.
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Parts of the reward, and other numbers that the reward functions and the workflow report."""
    error: str = ""  # Why there is no answer or no score; empty when there is one.
    by_agent: bool = False  # Whether the agent or the workflow is the cause of the error.

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
    samples: dict[SampleKey, Sample] = {}
    if not path.is_file():
        return samples
    *lines, _ = path.read_bytes().split(b"\n")  # what follows the last line end is empty, or cut
    for number, line in enumerate(lines, start=1):
        sample = _sample(_parsed(line, f"{path}:{number}"), f"{path}:{number}")
        if with_failed or not sample.error:
            samples[sample.key] = sample
    return samples


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Replace the file, atomically, in the order of the keys."""
    write_atomic(path, b"".join(sample.line() for sample in sorted(samples, key=lambda sample: sample.key)))


def read_generations(path: Path, column: str = "") -> list[Sample]:
    """The generations in a .jsonl file, not scored. `column`: where the answers are; empty = the first of
    OUTPUT_COLUMNS that a line has. A line with a list of answers is one row with several samples.

    Lines belong to one row when they have equal `set` and `row`, or else an equal id (ID_COLUMNS), or else an equal
    `prompt` or `messages` and equal other columns; a line with none of these is a row. The row is the column `data`, or
    all other columns of the line. Raises InputError.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}: give a .jsonl file with generations", code="data.not_found")
    rows: dict[bytes, int] = {}
    counts: dict[tuple[str, str, int], int] = {}
    generations: list[Sample] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            fields = _parsed(line, place)
            if fields.get("error"):
                continue
            name = column or next((name for name in OUTPUT_COLUMNS if name in fields), OUTPUT_COLUMNS[0])
            row = fields["row"] if isinstance(fields.get("row"), int) else _row_of(fields, name, number, rows)
            mode, set_name = str(fields.get("mode", "given")), str(fields.get("set", path.stem))
            for output in _outputs(fields, name, place):
                index = counts.get((mode, set_name, row), 0)
                counts[mode, set_name, row] = index + 1
                generations.append(_given(fields, name, SampleKey(mode, set_name, row, index), output))
    if not generations:
        raise InputError(f"{path} has no generations", code="data.no_rows")
    return generations


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
    names = {option.name for option in dataclasses.fields(Sample)} - {"key"}
    try:
        key = SampleKey(fields.pop("mode"), fields.pop("set"), fields.pop("row"), fields.pop("sample"))
        return Sample(key=key, **{name: value for name, value in fields.items() if name in names})
    except (KeyError, TypeError) as error:
        message = f"{place} is not a line of an evaluation ({error}): remove the file, or use another folder"
        raise InputError(message, code="data.invalid_file") from error


def _row_of(fields: dict[str, Any], output_column: str, number: int, rows: dict[bytes, int]) -> int:
    """The number of the row that a line belongs to, by its id or else by its prompt and other columns of the row."""
    identity: Any = next(({name: fields[name]} for name in ID_COLUMNS if fields.get(name) is not None), None)
    if identity is None and not ("messages" in fields or "prompt" in fields):
        identity = number
    elif identity is None:
        identity = {name: value for name, value in fields.items() if name not in (output_column, *_OF_ANSWERS)}
    return rows.setdefault(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS), len(rows))


def _outputs(fields: dict[str, Any], name: str, place: str) -> Sequence[str]:
    value = fields.get(name)
    outputs = [value] if isinstance(value, str) else value
    if not isinstance(outputs, list) or not outputs or not all(isinstance(output, str) for output in outputs):
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
    rows: dict[tuple[str, str, int], list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.key):
        rows.setdefault(sample.key[:3], []).append(sample)
    yield from rows.values()


# The results of an evaluation: metrics of each mode, held-out set and data source, as JSON and as a table.

_OF_AGENTS = ("num_turns", "tool_calls", "forks", "drifts", "budget_stops")
"""Means in the table of agents; --json has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """The metrics of one mode on one set, or on the rows of one source in it."""

    mode: str
    set: str
    source: str  # Empty = all rows of the set.
    rows: int
    samples: int  # Scored answers.
    failed: int  # Answers without a score.
    metrics: Mapping[str, Estimate]
    """mean@n, pass@k, majority@n (`areal.rollout.evaluation`); empty = no result (evaluator.missing_reward)."""
    means: Mapping[str, float]
    """Mean over the scored answers of `tokens` (generated), `finished`, and each number of the reward functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    correct_reward: float
    results: Sequence[SetResult]
    first_error: str = ""  # That of the first failed answer in the order of keys; empty = none failed.

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def num_failed(self) -> int:
        return sum(result.failed for result in self.results if not result.source)

    @property
    def num_answers(self) -> int:
        return self.num_failed + sum(result.samples for result in self.results if not result.source)


def make_report(
    samples: Iterable[Sample], *, correct_reward: float, ks: Sequence[int] = (), missing_reward: str = "leave_out"
) -> Report:
    """The report of scored samples. `ks`: as in `answer_metrics`; those above the number of samples are left out.

    `missing_reward`: as evaluator.missing_reward.
    """
    groups: dict[tuple[str, str, str], list[list[Sample]]] = {}
    first_error = ""
    for row in rows_of(samples):
        first_error = first_error or next((sample.error for sample in row if sample.error), "")
        mode, set_name, source = *row[0].key[:2], row[0].source
        groups.setdefault((mode, set_name, ""), []).append(row)
        if source:
            groups.setdefault((mode, set_name, source), []).append(row)
    results = [_result(*key, rows, correct_reward, ks, missing_reward) for key, rows in sorted(groups.items())]
    return Report(correct_reward=correct_reward, results=results, first_error=first_error)


def _result(
    mode: str,
    set_name: str,
    source: str,
    rows: Sequence[Sequence[Sample]],
    correct_reward: float,
    ks: Sequence[int],
    missing_reward: str,
) -> SetResult:
    num_samples, counts_zero = max(map(len, rows)), missing_reward == "zero"
    scored = [sample for row in rows for sample in row if sample.reward is not None and not sample.error]
    missing = [sample for row in rows for sample in row if sample.error]
    graded = [
        [
            Graded(reward=0.0 if sample.error else sample.reward or 0.0, answer=sample.answer)
            for sample in row
            if (counts_zero and sample.by_agent if sample.error else sample.reward is not None)
        ]
        for row in rows
    ]
    refused = missing_reward == "refuse" or (counts_zero and not all(sample.by_agent for sample in missing))
    used = [k for k in ks if k <= num_samples]
    numbers = [{"tokens": sample.num_tokens, "finished": float(sample.finished), **sample.metrics} for sample in scored]
    names = dict.fromkeys(name for row in numbers for name in row)
    return SetResult(
        mode=mode,
        set=set_name,
        source=source,
        rows=len(rows),
        samples=len(scored),
        failed=sum(map(len, rows)) - len(scored),
        metrics={}
        if missing and refused
        else answer_metrics(graded, num_samples=num_samples, correct_reward=correct_reward, ks=used),
        means={name: fmean(row[name] for row in numbers if name in row) for name in names},
    )


def table(report: Report) -> str:
    """A table for each mode, with a line for each set and source. A metric is shown with its standard error. The last
    lines point out one sampled answer a row, and answers that failed."""
    modes = dict.fromkeys(result.mode for result in report.results)
    text = "\n".join(_table(mode, [result for result in report.results if result.mode == mode]) for mode in modes)
    if any(result.mode == "sampled" and result.samples + result.failed == result.rows for result in report.results):
        text += "one answer a row: two such evaluations of one model differ by up to 1.4 times this error (-n 8)\n"
    if report.num_failed:
        counts = f"{report.num_failed} of {report.num_answers} answers have no reward (evaluator.missing_reward)"
        text += f"warning: {counts}; the first: {report.first_error}\n"
    return text


def _table(mode: str, results: Sequence[SetResult]) -> str:
    names = list(dict.fromkeys(name for result in results for name in result.metrics))
    means = ["tokens", "finished", *(name for name in _OF_AGENTS if any(name in result.means for result in results))]
    lines = [[mode, "rows", "failed", *names, *means]]
    for result in results:
        lines.append(
            [
                f"  {result.source}" if result.source else result.set,
                str(result.rows),
                str(result.failed),
                *(_estimate_text(result.metrics.get(name)) for name in names),
                *(f"{result.means[name]:.4g}" if name in result.means else "-" for name in means),
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(text) + "\n"


def _estimate_text(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate.mean:.4f}" + ("" if estimate.stderr is None else f" ±{estimate.stderr:.4f}")
