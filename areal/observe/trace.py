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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal.api.config import PerfTracerConfig
from areal.api.errors import InputError
from areal.observe.trace_table import time_tables
from areal.system.process import run_main
from areal.system.run_paths import RunPaths, existing_run

_FLUSH_EVENTS = 1000
_FLUSH_S = 2.0
"""For processes without train steps."""


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

    def add_part(self, kind: str, track: str, name: str, start_ns: int, end_ns: int) -> None:
        """A part of concurrent work, on the row of `track`, between two readings of time.perf_counter_ns."""
        event = {"name": name, "cat": kind, "id": track, "pid": self._pid, "tid": 0}
        start_us, end_us = (start_ns + self._wall_ns) / 1e3, (end_ns + self._wall_ns) / 1e3
        self._add(event | {"ph": "b", "ts": start_us, "args": {"us": end_us - start_us}})
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
            with open(self._path, "a") as file:
                file.write("\n".join(self._lines) + "\n")
            self._lines = []
        self._written_s = time.monotonic()


def open_tracer(config: PerfTracerConfig | None, paths: RunPaths, process_name: str) -> ChromeTracer | None:
    """The tracer of a process as configured, None when tracing is off."""
    if config is None or not config.enabled:
        return None
    return ChromeTracer(paths.trace / f"{process_name}.jsonl", process_name, save_interval=config.save_interval)


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
