"""Chrome traces: one file of JSON lines per process, and the command that joins the files of a run.

`areal trace RUN -o trace.json` makes one file for chrome://tracing or ui.perfetto.dev, and prints where the time goes.
"""

import argparse
import dataclasses
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from areal.api.config import PerfTracerConfig
from areal.api.errors import InputError
from areal.observe.spans import NO_AMOUNTS
from areal.system.durable import append_whole
from areal.system.process import run_main
from areal.system.run_paths import RunPaths, existing_run

# ----------------------------------------------------------------------------------------------------------------------
# Where the time of train steps, episodes and server requests goes, from the events of a trace. Pure.

Event = Mapping[str, Any]
Interval = tuple[float, float]
"""Start and end."""
OTHER = "other"
_SHOWN = 0.0005  # Smallest share of a part in the text.


WAIT = "wait_"
"""Begins the names of phases in which a trainer does nothing but wait."""


def waits_text(shares: Mapping[str, float]) -> str:
    """The shares of the time of each kind of wait: `5.1% (batch 4.0%, servers 1.1%)`."""
    kinds = ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share >= _SHOWN)
    return f"{sum(shares.values()):.1%}" + (f" ({kinds})" if kinds else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTable:
    """How the time of one kind of work divides into parts, over all of it."""

    kind: str
    """step, episode or request."""
    process: str
    """Whose work it is, for example trainer-0."""
    count: int
    mean_s: float
    longest_s: float
    parts: Mapping[str, float]
    """Part -> mean seconds per piece of work in which at least one such part ran; `other` = none did. Parts may
    overlap, for example requests and rewards of one episode."""
    busy_share: float
    """Share of the time from the first to the last piece of work in which at least one ran."""

    def lines(self) -> list[str]:
        head = f"{self.process}: {self.count} {self.kind}s of {self.mean_s:.3g} s (longest {self.longest_s:.3g} s)"
        head += f", one or more during {self.busy_share:.0%} of the time"
        width = max(map(len, self.parts), default=0)
        whole = self.mean_s or 1.0
        rows = sorted(self.parts.items(), key=lambda part: -part[1])
        rows = [(name, spent) for name, spent in rows if spent >= _SHOWN * whole]
        waits = {name.removeprefix(WAIT): spent / whole for name, spent in rows if name.startswith(WAIT)}
        text = [f"  waits {waits_text(waits)}"] if waits else []
        return [head, *text, *(f"  {name:<{width}}  {spent:9.4f} s  {spent / whole:4.0%}" for name, spent in rows)]


def time_tables(events: Iterable[Event]) -> list[TimeTable]:
    """One table for the steps of each trainer, the episodes of the controller and the requests of each server."""
    names: dict[int, str] = {}
    phases: dict[int, list[Event]] = defaultdict(list)
    tracks: dict[tuple[int, str], dict[str, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event["ph"] == "M":
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            phases[event["pid"]].append(event)
        elif event["ph"] == "b":
            tracks[event["pid"], event["cat"]][event["id"]].append(event)
    tables = [_steps(names.get(pid, str(pid)), spans) for pid, spans in phases.items()]
    for (pid, kind), by_id in tracks.items():
        tables += _tracks(names.get(pid, str(pid)), kind, list(by_id.values()))
    return sorted((table for table in tables if table is not None), key=lambda table: (table.kind, table.process))


def _steps(process: str, spans: Sequence[Event]) -> TimeTable | None:
    """A train step begins with its phase `rollout`, or with its first phase in a run without rollouts."""
    ordered = sorted(spans, key=lambda event: event["ts"])
    first = "rollout" if any(event["name"] == "rollout" for event in ordered) else ordered[0]["name"]
    starts = [event["ts"] for event in ordered if event["name"] == first]
    end = max(event["ts"] + event["dur"] for event in ordered)
    edges = [*starts, end]
    inside = [event for event in ordered if event["ts"] >= starts[0]]
    parts: dict[str, float] = defaultdict(float)
    for name in {event["name"] for event in inside}:
        parts[name] = _length(interval_of(event) for event in inside if event["name"] == name) / 1e6 / len(starts)
    covered = _length(map(interval_of, inside)) / 1e6 / len(starts)
    lengths = [(after - before) / 1e6 for before, after in pairwise(edges)]
    parts[OTHER] = max(0.0, fmean(lengths) - covered)
    return TimeTable(
        kind="step",
        process=process,
        count=len(starts),
        mean_s=fmean(lengths),
        longest_s=max(lengths),
        parts=dict(parts),
        busy_share=covered / fmean(lengths) if fmean(lengths) else 0.0,
    )


def _tracks(process: str, kind: str, works: Sequence[Sequence[Event]]) -> list[TimeTable]:
    """`works`: the events of each piece of work; the one named as its kind is the whole."""
    wholes = [event for work in works for event in work if event["name"] == kind]
    if not wholes:
        return []
    seconds: dict[str, float] = defaultdict(float)
    for work in works:
        parts = [event for event in work if event["name"] != kind]
        for name in {event["name"] for event in parts}:
            seconds[name] += _length(interval_of(event) for event in parts if event["name"] == name) / 1e6
        whole = sum(event["args"]["us"] for event in work if event["name"] == kind)
        seconds[OTHER] += max(0.0, whole - _length(map(interval_of, parts))) / 1e6
    lengths = [event["args"]["us"] / 1e6 for event in wholes]
    intervals = [interval_of(event) for event in wholes]
    passed = max(end for _, end in intervals) - min(start for start, _ in intervals)
    table = TimeTable(
        kind=kind,
        process=process,
        count=len(wholes),
        mean_s=fmean(lengths),
        longest_s=max(lengths),
        parts={name: spent / len(wholes) for name, spent in seconds.items()},
        busy_share=_length(intervals) / passed if passed else 1.0,
    )
    return [table]


def interval_of(event: Event) -> Interval:
    """The interval of an event that has a length."""
    return event["ts"], event["ts"] + (event["dur"] if event["ph"] == "X" else event["args"]["us"])


def _length(intervals: Iterable[Interval]) -> float:
    """Length of the union."""
    return sum(end - start for start, end in joined(intervals))


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of the intervals, in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    return union


_FLUSH_EVENTS = 1000
_FLUSH_S = 2.0  # Limits for processes without train steps.


class ChromeTracer:
    """Writes spans as Chrome trace events, one JSON object per line, with wall-clock times."""

    def __init__(self, path: Path, process_name: str, *, save_interval: int = 1) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._save_interval = max(1, save_interval)
        self._steps = 0
        self._pid = os.getpid()
        self._written_s = time.monotonic()
        self._wall_ns = time.time_ns() - time.perf_counter_ns()
        # A killed process may have left an incomplete line: start a new one.
        self._lines: list[str] = [""] if path.exists() and not path.read_bytes().endswith(b"\n") else []
        self._lock = threading.Lock()
        self._add({"name": "process_name", "ph": "M", "pid": self._pid, "tid": 0, "args": {"name": process_name}})

    def add_span(self, name: str, start_ns: int, end_ns: int) -> None:
        """A span between two readings of time.perf_counter_ns, on the row of the calling thread."""
        times = {"ts": (start_ns + self._wall_ns) / 1e3, "dur": (end_ns - start_ns) / 1e3}
        thread = {"pid": self._pid, "tid": threading.get_native_id()}
        self._add({"name": name, "cat": "phase", "ph": "X"} | times | thread)

    def add_part(
        self, kind: str, track: str, name: str, start_ns: int, end_ns: int, amounts: Mapping[str, int] = NO_AMOUNTS
    ) -> None:
        """A part of concurrent work, on the row of `track`, between two readings of time.perf_counter_ns."""
        event = {"name": name, "cat": kind, "id": track, "pid": self._pid, "tid": 0}
        start_us, end_us = (start_ns + self._wall_ns) / 1e3, (end_ns + self._wall_ns) / 1e3
        self._add(event | {"ph": "b", "ts": start_us, "args": {"us": end_us - start_us, **amounts}})
        self._add(event | {"ph": "e", "ts": end_us})
        if time.monotonic() - self._written_s >= _FLUSH_S:
            self.flush()

    def end_step(self) -> None:
        """A train step ended: write the buffered events every `save_interval` steps."""
        self._steps += 1
        if self._steps % self._save_interval == 0:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            self._write()

    def _add(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._lines.append(json.dumps(event))
            if len(self._lines) >= _FLUSH_EVENTS:  # a process without steps must write too
                self._write()

    def _write(self) -> None:
        if self._lines:
            lines, self._lines = self._lines, []
            with open(self._path, "ab", buffering=0) as file:
                append_whole(file, ("\n".join(lines) + "\n").encode())
        self._written_s = time.monotonic()


def open_tracer(config: PerfTracerConfig | None, paths: RunPaths, process_name: str) -> ChromeTracer | None:
    """The tracer of a process as configured, None when tracing is off."""
    if config is None or not config.enabled:
        return None
    return ChromeTracer(paths.trace / f"{process_name}.jsonl", process_name, save_interval=config.save_interval)


def read_spans(path: Path, *, newest_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The events with a length in the trace of one process; none without the file. Incomplete lines, of a killed
    process, are skipped. `newest_bytes`: read the end of the file only."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        if newest_bytes is not None:
            lines.seek(max(0, path.stat().st_size - newest_bytes))
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event["ph"] in ("X", "b"):
                yield event


def join_traces(folder: Path) -> dict[str, Any]:
    """One Chrome trace of all `*.jsonl` files in `folder`.

    Process ids are renumbered, because processes on different machines may have the same one. Incomplete lines, from
    killed processes, are skipped and counted.
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise InputError(f"no trace files in {folder}: run with perf_tracer.enabled=true", code="data.no_traces")
    events: list[dict[str, Any]] = []
    ids: dict[tuple[str, int], int] = {}
    skipped = 0
    for file in files:
        for line in file.read_text(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                skipped += 1
                continue
            event["pid"] = ids.setdefault((file.name, event["pid"]), len(ids) + 1)
            events.append(event)
    events.sort(key=lambda event: event.get("ts", 0.0))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"skipped_lines": skipped}}


def run_command(words: Sequence[str]) -> int:
    """`areal trace RUN [-o FILE] [--json]`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="areal trace",
        description="Print where the time of train steps, episodes and server requests went, and join the traces of "
        "all processes in one file for chrome://tracing. The run needs perf_tracer.enabled=true.",
    )
    parser.add_argument("run", metavar="RUN", type=existing_run, help="folder of the run, or its trace folder")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), help="default: trace.json")
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")
    arguments = parser.parse_args(words)
    # Not the run folder itself, which contains other .jsonl files.
    folder = arguments.run if arguments.run.name == "trace" else RunPaths(arguments.run).trace
    trace = join_traces(folder)
    arguments.output.write_text(json.dumps(trace))
    tables = time_tables(trace["traceEvents"])
    if arguments.json:
        facts = {"output": str(arguments.output), "tables": [dataclasses.asdict(table) for table in tables]}
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        lines = [line for table in tables for line in (*table.lines(), "")]
        sys.stdout.write(
            "\n".join([*lines, f"{arguments.output}: open it in chrome://tracing or ui.perfetto.dev"]) + "\n"
        )
    return 0


if __name__ == "__main__":
    run_main(lambda: sys.exit(run_command(sys.argv[1:])))
