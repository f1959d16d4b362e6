"""One record for each finished episode in trace/sessions.ndjson of the run folder: times, result and parts."""

import json
import threading
import time
from pathlib import Path
from typing import Any

from areal.api.config import PerfTracerConfig
from areal.system.run_paths import RunPaths


class SessionTracer:
    """Adds up the parts of each episode; `ended` makes its record. Thread-safe."""

    def __init__(self, path: Path, *, flush_threshold: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._flush_threshold = max(1, flush_threshold)
        self._wall_ns = time.time_ns() - time.perf_counter_ns()
        self._lock = threading.Lock()
        self._parts: dict[str, dict[str, float]] = {}
        self._times: dict[str, tuple[int, int]] = {}
        self._lines: list[str] = []

    def add_part(self, kind: str, track: str, name: str, start_ns: int, end_ns: int) -> None:
        """A part of an episode between two readings of time.perf_counter_ns; the one named `episode` is the whole."""
        if kind != "episode":
            return
        with self._lock:
            if name == kind:
                self._times[track] = start_ns, end_ns
            else:
                parts = self._parts.setdefault(track, {})
                parts[f"{name}_s"] = parts.get(f"{name}_s", 0.0) + (end_ns - start_ns) / 1e9

    def ended(self, track: str, status: str, reason: str) -> None:
        """The record of an episode. Parts that ran at the same time are added."""
        with self._lock:
            start_ns, end_ns = self._times.pop(track, (0, 0))
            record: dict[str, Any] = {
                "task_id": int(track),
                "status": status,
                "reason": reason,
                "submit_ts": (start_ns + self._wall_ns) / 1e9,
                "finalized_ts": (end_ns + self._wall_ns) / 1e9,
                "total_s": (end_ns - start_ns) / 1e9,
                **self._parts.pop(track, {}),
            }
            self._lines.append(json.dumps(record))
            if len(self._lines) >= self._flush_threshold:
                self._write()

    def flush(self) -> None:
        with self._lock:
            self._write()

    def _write(self) -> None:
        if self._lines:
            with open(self._path, "a") as file:
                file.write("\n".join(self._lines) + "\n")
            self._lines = []


def open_session_tracer(config: PerfTracerConfig | None, paths: RunPaths) -> SessionTracer | None:
    """The tracer of episodes as configured, None when it is off."""
    options = config.session_tracer if config is not None else None
    if options is None or not options.enabled:
        return None
    return SessionTracer(paths.trace / "sessions.ndjson", flush_threshold=options.flush_threshold)
