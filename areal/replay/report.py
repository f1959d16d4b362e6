"""The output of a replay: one line per step, the status line, the result."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from areal.launcher.status import StatusLine
from areal.replay.compare import SHOWN, Comparison, Exactness, Row, StepComparison, compare_step
from areal.replay.order import ReplayOrder, metrics_of
from areal.replay.recorded import RecordedRun, read_metrics


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
        """Report the result; returns the exit status of the command."""
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
        """Seconds per step, of the replay and of the run."""
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
    """One step for --json: what the run and the replay measured."""
    names = [name for name in SHOWN if name in own or name in (live or {})]
    values = {name: {"run": (live or {}).get(name), "replay": own.get(name)} for name in names}
    return {"step": step.step, "weights_equal": step.weights, "different": step.different, "metrics": values}
