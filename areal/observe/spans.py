"""Spans of concurrent work in a trace: episodes with their requests, rewards and tools; requests of a server.

`with track("episode", "17"):` begins one piece of work, `with span("reward"):` a part of it, in any task that it
starts. Without an active tracer both do nothing.
"""

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from areal.api.config import PerfTracerConfig
from areal.system.durable import append_whole
from areal.system.run_paths import RunPaths

NO_AMOUNTS: Mapping[str, int] = MappingProxyType({})
_NOTHING = nullcontext()  # It has no state.

# ----------------------------------------------------------------------------------------------------------------------
# One record for each finished episode in trace/sessions.ndjson of the run folder: times, result and parts.


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

    def add_part(
        self, kind: str, track: str, name: str, start_ns: int, end_ns: int, amounts: Mapping[str, int] = NO_AMOUNTS
    ) -> None:
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
            lines, self._lines = self._lines, []
            with open(self._path, "ab", buffering=0) as file:
                append_whole(file, ("\n".join(lines) + "\n").encode())


def open_session_tracer(config: PerfTracerConfig | None, paths: RunPaths) -> SessionTracer | None:
    """The tracer of episodes as configured, None when it is off."""
    options = config.session_tracer if config is not None else None
    if options is None or not options.enabled:
        return None
    return SessionTracer(paths.trace / "sessions.ndjson", flush_threshold=options.flush_threshold)


class PartTracer(Protocol):
    """Receives the parts of concurrent work, between two readings of time.perf_counter_ns."""

    def add_part(
        self, kind: str, track: str, name: str, start_ns: int, end_ns: int, amounts: Mapping[str, int] = NO_AMOUNTS
    ) -> None: ...
    def flush(self) -> None: ...


_TRACERS: ContextVar[tuple[PartTracer, ...]] = ContextVar("areal_tracers", default=())


class _Track(NamedTuple):
    tracers: tuple[PartTracer, ...]
    kind: str
    id: str


_TRACK: ContextVar[_Track | None] = ContextVar("areal_track", default=None)


@contextmanager
def tracing(*tracers: PartTracer | None) -> Iterator[None]:
    """Write the spans of the block to `tracers`, also those of tasks and event loops that it starts. None = nowhere."""
    active = tuple(tracer for tracer in tracers if tracer is not None)
    token = _TRACERS.set(active)
    try:
        yield
    finally:
        _TRACERS.reset(token)
        for tracer in active:
            tracer.flush()


def track(kind: str, name: object) -> AbstractContextManager[None]:
    """One piece of work, for example the episode 17; the spans inside the block are parts of it."""
    tracers = _TRACERS.get()
    return _track(tracers, kind, str(name)) if tracers else _NOTHING


@contextmanager
def _track(tracers: tuple[PartTracer, ...], kind: str, name: str) -> Iterator[None]:
    token, start_ns = _TRACK.set(_Track(tracers, kind, name)), time.perf_counter_ns()
    try:
        yield
    finally:
        _TRACK.reset(token)
        for tracer in tracers:
            tracer.add_part(kind, name, kind, start_ns, time.perf_counter_ns())


def episode_ended(episode_id: int, status: str, reason: str = "") -> None:
    """The episode is over: accepted, rejected, dropped or failed."""
    for tracer in _TRACERS.get():
        if isinstance(tracer, SessionTracer):
            tracer.ended(str(episode_id), status, reason)


def span(name: str) -> AbstractContextManager[None]:
    """A part of the work of the current track."""
    track = _TRACK.get()
    return _NOTHING if track is None else _span(track, name)


@contextmanager
def _span(track: _Track, name: str) -> Iterator[None]:
    start_ns = time.perf_counter_ns()
    try:
        yield
    finally:
        _add(track, name, start_ns, time.perf_counter_ns())


def add_track(
    kind: str,
    name: str,
    start_ns: int,
    end_ns: int,
    parts: Iterable[tuple[str, int, int]],
    amounts: Mapping[str, int] = NO_AMOUNTS,
) -> None:
    """One piece of work that has ended, with its parts (name, start, end); readings of time.perf_counter_ns.

    `amounts`: of the whole, for example its tokens.
    """
    if tracers := _TRACERS.get():
        track = _Track(tracers, kind, name)
        for part in parts:
            _add(track, *part)
        for tracer in tracers:
            tracer.add_part(kind, name, kind, start_ns, end_ns, amounts)


def _add(track: _Track, name: str, start_ns: int, end_ns: int) -> None:
    for tracer in track.tracers:
        tracer.add_part(track.kind, track.id, name, start_ns, end_ns)
