"""The results of an evaluation: metrics of each mode, held-out set and data source, as JSON and as a table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from areal.evaluate.samples import Sample, rows_of
from areal.rollout.answer_metrics import Estimate, Graded, answer_metrics

_OF_AGENTS = ("num_turns", "tool_calls", "forks", "drifts", "budget_stops")
"""Means in the table of agents; --json has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """The metrics of one mode on one set, or on the rows of one source in it."""

    mode: str
    set: str
    source: str
    """Empty = all rows of the set."""
    rows: int
    samples: int
    """Scored answers."""
    failed: int
    """Answers without a score."""
    metrics: Mapping[str, Estimate]
    """mean@n, pass@k, majority@n (`areal.rollout.answer_metrics`)."""
    means: Mapping[str, float]
    """Mean over the scored answers of `tokens` (generated), `finished`, and each number of the reward functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All results of an evaluation."""

    correct_reward: float
    results: Sequence[SetResult]
    first_error: str = ""
    """Of the first answer that failed, in the order of their keys; empty = none failed."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def num_failed(self) -> int:
        return sum(one.failed for one in self.results if not one.source)

    @property
    def num_answers(self) -> int:
        """With the failed ones."""
        return self.num_failed + sum(one.samples for one in self.results if not one.source)


def make_report(samples: Iterable[Sample], *, correct_reward: float, ks: Sequence[int] = ()) -> Report:
    """The report of scored samples. `ks`: as in `answer_metrics`; those above the number of samples are left out."""
    groups: dict[tuple[str, str, str], list[list[Sample]]] = {}
    first_error = ""
    for row in rows_of(samples):
        first_error = first_error or next((one.error for one in row if one.error), "")
        mode, set_name, source = *row[0].key[:2], row[0].source
        groups.setdefault((mode, set_name, ""), []).append(row)
        if source:
            groups.setdefault((mode, set_name, source), []).append(row)
    results = [_result(*key, rows, correct_reward, ks) for key, rows in sorted(groups.items())]
    return Report(correct_reward=correct_reward, results=results, first_error=first_error)


def _result(
    mode: str, set_name: str, source: str, rows: Sequence[Sequence[Sample]], correct_reward: float, ks: Sequence[int]
) -> SetResult:
    num_samples = max(map(len, rows))
    graded = [
        [Graded(reward=one.reward, answer=one.answer) for one in row if one.reward is not None and not one.error]
        for row in rows
    ]
    scored = [one for row in rows for one in row if one.reward is not None and not one.error]
    used = [k for k in ks if k <= num_samples]
    numbers = [{"tokens": one.num_tokens, "finished": float(one.finished), **one.metrics} for one in scored]
    names = dict.fromkeys(name for found in numbers for name in found)
    return SetResult(
        mode=mode,
        set=set_name,
        source=source,
        rows=len(rows),
        samples=len(scored),
        failed=sum(map(len, rows)) - len(scored),
        metrics=answer_metrics(graded, num_samples=num_samples, correct_reward=correct_reward, ks=used),
        means={name: fmean(found[name] for found in numbers if name in found) for name in names},
    )


def table(report: Report) -> str:
    """A table for each mode, with a line for each set and source. A metric is shown with its standard error. The last
    line is a warning when answers failed."""
    modes = dict.fromkeys(one.mode for one in report.results)
    text = "\n".join(_table(mode, [one for one in report.results if one.mode == mode]) for mode in modes)
    if report.num_failed:
        counts = f"{report.num_failed} of {report.num_answers} answers failed and count in no mean"
        text += f"warning: {counts}; the first: {report.first_error}\n"
    return text


def _table(mode: str, results: Sequence[SetResult]) -> str:
    names = list(dict.fromkeys(name for one in results for name in one.metrics))
    means = ["tokens", "finished", *(name for name in _OF_AGENTS if any(name in one.means for one in results))]
    lines = [[mode, "rows", "failed", *names, *means]]
    for one in results:
        lines.append(
            [
                f"  {one.source}" if one.source else one.set,
                str(one.rows),
                str(one.failed),
                *(_estimate_text(one.metrics.get(name)) for name in names),
                *(f"{one.means[name]:.4g}" if name in one.means else "-" for name in means),
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(text) + "\n"


def _estimate_text(found: Estimate | None) -> str:
    if found is None:
        return "-"
    return f"{found.mean:.4f}" + ("" if found.stderr is None else f" ±{found.stderr:.4f}")
