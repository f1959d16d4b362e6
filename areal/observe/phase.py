"""Owns the timing of named phases: `with phase("update"):` wherever work happens, a clock where it is collected."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from areal.observe.trace import ChromeTracer

_ACTIVE: ContextVar[PhaseClock | None] = ContextVar("areal_phase_clock", default=None)


class PhaseClock:
    """Collects the seconds of every phase that runs while it is active, and passes spans to its tracer."""

    def __init__(self, tracer: ChromeTracer | None = None) -> None:
        self._tracer = tracer
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the clock of the calling task or thread and of the tasks it starts."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    def record(self, name: str, start_ns: int, end_ns: int) -> None:
        """Count one phase between two readings of time.perf_counter_ns."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + (end_ns - start_ns) / 1e9
        if self._tracer is not None:
            self._tracer.add_span(name, start_ns, end_ns)

    def end_step(self) -> dict[str, float]:
        """A train step ended: seconds per phase since the last call; a phase inside another counts in both."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        if self._tracer is not None:
            self._tracer.end_step()
        return seconds


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Time the block under `name`; costs next to nothing when no clock is active. A failing block counts too."""
    clock = _ACTIVE.get()
    if clock is None:
        yield
        return
    start_ns = time.perf_counter_ns()
    try:
        yield
    finally:
        clock.record(name, start_ns, time.perf_counter_ns())
