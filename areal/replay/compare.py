"""Comparison of a replay with its run, step by step: equality of bits, or a table of differences."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from areal.launcher.status import StatusLine
from areal.replay.recorded import RecordedRun, ReplayOrder, metrics_of, read_metrics

EXACT = ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm")
"""Metrics that must be equal in a replay without overrides."""
SHOWN = {
    "actor/loss": "loss", "actor/grad_norm": "grad norm", "actor/clip_ratio": "clip ratio",
    "actor/approx_kl": "approx KL", "batch/ref_kl": "ref KL", "actor/entropy": "entropy", "critic/loss": "value loss",
}  # fmt: skip
"""Metrics that a comparison with overrides shows, if recorded, and their headings."""
_WIDTH = 11

Row = Mapping[str, Any]  # A line of metrics.jsonl.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    step: int  # Steps done.
    weights: bool | None  # Whether the checksums are equal; None = the run recorded none.
    metrics: dict[str, tuple[float | None, float | None]]  # Metrics in EXACT that both have: live, replayed.

    @property
    def different(self) -> list[str]:
        names = [name for name, (live, own) in self.metrics.items() if live != own]
        return names if self.weights is not False else ["weights", *names]

    def line(self) -> str:
        weights = {True: "weights equal", False: f"weights DIFFER at step {self.step}", None: "weights not recorded"}
        equal = [name for name, (live, own) in self.metrics.items() if live == own]
        parts = [weights[self.weights]] + [", ".join(equal) + " equal"] * bool(equal)
        for name, (live, own) in self.metrics.items():
            if live != own:
                parts.append(f"{name} DIFFERS (live {live}, replay {own})")
        return f"step {self.step}: " + "; ".join(parts)


def compare_step(step: int, recorded_weights: str, live: Row | None, own: Row) -> StepComparison:
    """Compare one step. `live` None: the run has no metrics of it."""
    weights = own["weights"] == recorded_weights if recorded_weights else None
    metrics = {name: (live[name], own[name]) for name in EXACT if name in live and name in own} if live else {}
    return StepComparison(step=step, weights=weights, metrics=metrics)


class Exactness:
    """Result of a replay with the run's own options."""

    def __init__(self) -> None:
        self._num_steps = self._num_weights = self._num_metrics = 0
        self._first: StepComparison | None = None

    def add(self, step: StepComparison) -> str:
        self._num_steps += 1
        self._num_weights += step.weights is not None
        self._num_metrics += bool(step.metrics)
        if self._first is None and step.different:
            self._first = step
        return step.line()

    @property
    def is_equal(self) -> bool:
        return self._first is None

    @property
    def has_compared(self) -> bool:
        """Whether the run recorded anything to compare with."""
        return self._num_weights + self._num_metrics > 0

    def summary(self) -> str:
        compared = f"{self._num_steps} steps, {self._num_weights} with checksums, {self._num_metrics} with metrics"
        if self._first is None:
            return f"equal: {compared}" if self.has_compared else f"nothing to compare with: {compared}"
        return f"DIFFERENT from step {self._first.step} on ({', '.join(self._first.different)}): {compared}"


class Comparison:
    """Table of a replay with overrides and its run: the same data, another update."""

    def __init__(self) -> None:
        self._columns: list[str] = []
        self._values: dict[str, list[tuple[float, float]]] = {}
        self._num_steps = 0
        self._first_other: int | None = None

    def add(self, step: StepComparison, live: Row | None, own: Row) -> list[str]:
        lines: list[str] = []
        if not self._num_steps:
            self._columns = [name for name in SHOWN if name in own or name in (live or {})]
            titles = [f"{SHOWN[name]:^{2 * _WIDTH + 1}}" for name in self._columns]
            below = [f"{'live':>{_WIDTH}} {'replay':>{_WIDTH}}" for _ in self._columns]
            lines = ["      | " + " | ".join(titles), " step | " + " | ".join(below)]
        self._num_steps += 1
        if self._first_other is None and step.weights is False:
            self._first_other = step.step
        cells: list[str] = []
        for name in self._columns:
            pair = (live or {}).get(name), own.get(name)
            cells.append(" ".join(f"{_number(value):>{_WIDTH}}" for value in pair))
            if pair[0] is not None and pair[1] is not None:
                self._values.setdefault(name, []).append((pair[0], pair[1]))
        return [*lines, f"{step.step:5} | " + " | ".join(cells)]

    def summary(self) -> str:
        """Means over the steps that both have, and the first step with different weights."""
        lines = [f"means over {self._num_steps} steps:"]
        for name, pairs in self._values.items():
            live, own = fmean(pair[0] for pair in pairs), fmean(pair[1] for pair in pairs)
            lines.append(f"  {SHOWN[name]}: live {live:.6g}, replay {own:.6g} ({own - live:+.3g})")
        equal = "equal at every step" if self._first_other is None else f"different from step {self._first_other} on"
        return "\n".join([*lines, f"weights: {equal}"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


# The output of a replay: one line per step, the status line, the result.


class Report:
    """Compares each step when its line appears in the metrics of the replay."""

    def __init__(self, run: RecordedRun, folder: Path, order: ReplayOrder, *, is_exact: bool, as_json: bool) -> None:
        """`is_exact`: the replay must equal the run; otherwise the report is a table of both.

        `as_json`: one JSON object at the end in place of lines.
        """
        self._run = run
        self._live = read_metrics(run.paths.metrics)
        self._own = metrics_of(folder)
        self._order = order
        self._line = StatusLine()
        self._seconds: list[float] = []
        self._offset = 0
        self._done = order.start_step
        self._exactness = Exactness() if is_exact else None
        self._comparison = Comparison()
        self._steps: list[dict[str, Any]] | None = [] if as_json else None

    def look(self) -> None:
        """Report the steps done since the last call."""
        for row in self._new_rows():
            live = self._live.get(row["step"])
            step = compare_step(row["step"], self._run.weights.get(row["step"] - 1, ""), live, row)
            lines = [self._exactness.add(step)] if self._exactness else self._comparison.add(step, live, row)
            if self._steps is None:
                sys.stdout.write("".join(line + "\n" for line in lines))
                sys.stdout.flush()
            else:
                self._steps.append(_facts(step, live, row))
            self._done = row["step"]
            self._seconds.append(row["seconds/step"])
        self._line.show(f"replay: step {self._done}/{self._order.end_step}, {self._pace()}")

    def end(self) -> int:
        self._line.end(f"replay: {self._done - self._order.start_step} steps done, results in {self._own.parent}")
        exactness = self._exactness
        if self._steps is None:
            sys.stdout.write((self._comparison if exactness is None else exactness).summary() + "\n")
        else:
            is_equal = exactness.is_equal if exactness is not None and exactness.has_compared else None
            facts = {"folder": str(self._own.parent), "is_equal": is_equal, "steps": self._steps}
            sys.stdout.write(json.dumps(facts) + "\n")
        if exactness is None:
            return 0
        return 2 if not exactness.has_compared else 0 if exactness.is_equal else 1

    def _pace(self) -> str:
        if not self._seconds:
            return "the models are loading"
        live = [row["seconds/step"] for step, row in self._live.items() if step > self._order.start_step]
        live_part = f" (live {fmean(live):.2f})" if live else ""
        return f"{fmean(self._seconds):.2f} s a step{live_part}"

    def _new_rows(self) -> Iterator[Row]:
        if not self._own.exists():
            return
        with open(self._own, "rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        yield from map(json.loads, whole.splitlines())


def _facts(step: StepComparison, live: Row | None, own: Row) -> dict[str, Any]:
    names = [name for name in SHOWN if name in own or name in (live or {})]
    values = {name: {"run": (live or {}).get(name), "replay": own.get(name)} for name in names}
    return {"step": step.step, "weights_equal": step.weights, "different": step.different, "metrics": values}
