"""Timing of named phases: `with phase("update"):` around work, and a clock that collects the times.

The clock also writes the current phase to the heartbeat, so that the launcher can name a phase that does not end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol

from areal.observe.trace import ChromeTracer
from areal.system.heartbeat import Heartbeat

_ACTIVE: ContextVar[PhaseClock | None] = ContextVar("areal_phase_clock", default=None)


class DeviceClock(Protocol):
    """Times the work of an accelerator, which runs later than the calls that start it."""

    def mark(self) -> object:
        """A point in the device's queue of work, without waiting for it."""
        ...

    def seconds(self, start: object, end: object) -> float:
        """Device time between two marks; waits until the device has reached the second."""
        ...


class StepProfiler(Protocol):
    """Records what a process does in chosen train steps."""

    def begin_step(self, step: int) -> None: ...
    def region(self, name: str) -> AbstractContextManager[object]:
        """Name the block in the record, if one is made."""
        ...

    def end_step(self) -> None: ...


class PhaseClock:
    """Collects the seconds of every phase while it is active, and passes spans to its tracer.

    With a device clock, the seconds of a phase are those in which the device does the work that the phase started: the
    host's clock would count them in the next phase that waits for the device. Spans of the tracer are host time.
    """

    def __init__(
        self,
        tracer: ChromeTracer | None = None,
        heartbeat: Heartbeat | None = None,
        device: DeviceClock | None = None,
        profiler: StepProfiler | None = None,
    ) -> None:
        self._tracer = tracer
        self._heartbeat = heartbeat
        self._device = device
        self._profiler = profiler
        self._marks: list[tuple[str, object, object]] = []
        self._step: int | None = None
        self._inside: list[str] = []
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the clock of the calling task or thread and of the tasks that it starts."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    def begin_step(self, step: int) -> None:
        """The next phases belong to train step `step`."""
        self._step = step
        if self._profiler is not None:
            self._profiler.begin_step(step)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block as phase `name`, also when it fails. Phases may be nested."""
        with self._lock:
            self._inside.append(name)
            self._show(name)
        start = None if self._device is None else self._device.mark()
        start_ns = time.perf_counter_ns()
        try:
            with nullcontext() if self._profiler is None else self._profiler.region(name):
                yield
        finally:
            end_ns = time.perf_counter_ns()
            with self._lock:
                self._inside.remove(name)
                self._show(self._inside[-1] if self._inside else f"after {name}")
                if self._device is None:
                    self._seconds[name] = self._seconds.get(name, 0.0) + (end_ns - start_ns) / 1e9
                else:
                    self._marks.append((name, start, self._device.mark()))
            if self._tracer is not None:
                self._tracer.add_span(name, start_ns, end_ns)

    def _show(self, what: str) -> None:
        if self._heartbeat is not None:
            self._heartbeat.doing(what, self._step)

    def end_step(self) -> dict[str, float]:
        """Seconds per phase since the last call, at the end of a train step. A nested phase counts in both."""
        if self._profiler is not None:
            self._profiler.end_step()
        with self._lock:
            seconds, self._seconds = self._seconds, {}
            marks, self._marks = self._marks, []
        for name, start, end in marks:
            assert self._device is not None
            seconds[name] = seconds.get(name, 0.0) + self._device.seconds(start, end)
        if self._tracer is not None:
            self._tracer.end_step()
        return seconds


def phase(name: str) -> AbstractContextManager[None]:
    """Time a block under `name`, also when it fails. Without an active clock it does nothing."""
    clock = _ACTIVE.get()
    return nullcontext() if clock is None else clock.span(name)
