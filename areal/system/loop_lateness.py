"""Measures how long an event loop was blocked, so that time limits of others do not include that time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

INTERVAL_S = 0.25
_MIN_LATE_S = 0.05
"""Less is the normal latency of a busy loop."""


class LoopLateness:
    """The monitor of the running loop: a timer that finds out by how much it is late. It runs until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._late_s = 0.0
        self._due_s = 0.0
        self._timer = self._start()

    def _start(self) -> asyncio.TimerHandle:
        self._due_s = self._loop.time() + INTERVAL_S
        return self._loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        self._late_s = self.total_s
        self._timer = self._start()

    @property
    def total_s(self) -> float:
        """Seconds for which the loop was blocked, up to now."""
        late_s = self._loop.time() - self._due_s
        return self._late_s + (late_s if late_s >= _MIN_LATE_S else 0.0)

    @contextlib.asynccontextmanager
    async def timeout(self, limit_s: float) -> AsyncIterator[None]:
        """As `asyncio.timeout`, without the time for which the loop was blocked: what arrived meanwhile is read."""
        began_s, before_s = self._loop.time(), self.total_s

        def expire() -> None:
            nonlocal timer
            left_s = limit_s + (self.total_s - before_s) - (self._loop.time() - began_s)
            if left_s > _MIN_LATE_S:
                timer = self._loop.call_later(left_s, expire)
            else:
                scope.reschedule(self._loop.time())

        async with asyncio.timeout(None) as scope:
            timer = self._loop.call_later(limit_s, expire)
            try:
                yield
            finally:
                timer.cancel()

    def close(self) -> None:
        self._timer.cancel()
