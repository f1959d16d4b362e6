"""The output of a replay: one line per step, the status line, the result."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from areal.launcher.status import StatusLine
from areal.replay.compare import Comparison, Exactness, Row, compare_step
from areal.replay.order import ReplayOrder, metrics_of
from areal.replay.recorded import RecordedRun, read_metrics


class Report:
    """Compares each step when its line appears in the metrics of the replay."""

    def __init__(self, run: RecordedRun, folder: Path, order: ReplayOrder, *, is_exact: bool) -> None:
        """`is_exact`: the replay must equal the run; otherwise the report is a table of both."""
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

    def look(self) -> None:
        """Report the steps done since the last call."""
        for row in self._new_rows():
            live = self._live.get(row["step"])
            step = compare_step(row["step"], self._run.weights.get(row["step"] - 1, ""), live, row)
            lines = [self._exactness.add(step)] if self._exactness else self._comparison.add(step, live, row)
            sys.stdout.write("".join(line + "\n" for line in lines))
            sys.stdout.flush()
            self._done = row["step"]
            self._seconds.append(row["seconds/step"])
        self._line.show(f"replay: step {self._done}/{self._order.end_step}, {self._pace()}")

    def end(self) -> int:
        """Report the result; returns the exit status of the command."""
        self._line.end(f"replay: {self._done - self._order.start_step} steps done, results in {self._own.parent}")
        if self._exactness is None:
            sys.stdout.write(self._comparison.summary() + "\n")
            return 0
        sys.stdout.write(self._exactness.summary() + "\n")
        if not self._exactness.has_compared:
            return 2
        return 0 if self._exactness.is_equal else 1

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
