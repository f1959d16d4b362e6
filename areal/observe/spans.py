"""Spans of concurrent work in a trace: episodes with their requests, rewards and tools; requests of a server.

`with track("episode", "17"):` begins one piece of work, `with span("reward"):` a part of it, in any task that it
starts. Without an active tracer both do nothing.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple

from areal.observe.trace import ChromeTracer

_TRACER: ContextVar[ChromeTracer | None] = ContextVar("areal_tracer", default=None)


class _Track(NamedTuple):
    tracer: ChromeTracer
    kind: str
    id: str


_TRACK: ContextVar[_Track | None] = ContextVar("areal_track", default=None)


@contextmanager
def tracing(tracer: ChromeTracer | None) -> Iterator[None]:
    """Write the spans of the block to `tracer`, also those of tasks and event loops that it starts. None = nowhere."""
    token = _TRACER.set(tracer)
    try:
        yield
    finally:
        _TRACER.reset(token)
        if tracer is not None:
            tracer.flush()


@contextmanager
def track(kind: str, name: str) -> Iterator[None]:
    """One piece of work, for example the episode 17; the spans inside the block are parts of it."""
    tracer = _TRACER.get()
    if tracer is None:
        yield
        return
    token, start_ns = _TRACK.set(_Track(tracer, kind, name)), time.perf_counter_ns()
    try:
        yield
    finally:
        _TRACK.reset(token)
        tracer.add_part(kind, name, kind, start_ns, time.perf_counter_ns())


def span(name: str) -> AbstractContextManager[None]:
    """A part of the work of the current track."""
    found = _TRACK.get()
    return nullcontext() if found is None else _span(found, name)


@contextmanager
def _span(found: _Track, name: str) -> Iterator[None]:
    start_ns = time.perf_counter_ns()
    try:
        yield
    finally:
        found.tracer.add_part(found.kind, found.id, name, start_ns, time.perf_counter_ns())


def add_span(name: str, start_ns: int, end_ns: int) -> None:
    """A part of the current track between two readings of time.perf_counter_ns."""
    if found := _TRACK.get():
        found.tracer.add_part(found.kind, found.id, name, start_ns, end_ns)
