"""Measures how long an event loop was blocked, so that time limits of others do not include that time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from areal.system.stacks import place_of_thread

INTERVAL_S = 0.25
MIN_LATE_S = 0.05
"""Less is the normal latency of a busy loop."""
REPORT_S = 3.0
"""The loop is reported as blocked when it was late by at least this time."""
_LOOK_S = 1.0


class LoopLateness:
    """A timer of one loop that finds out by how much it is late. It runs from `start` to `close`.

    Before `start` nothing is discounted. A thread looks where the loop is while it is late: later nothing shows that.
    """

    def __init__(self, report: Callable[[float, str], None]) -> None:
        """`report(seconds, place)` is called after the loop was blocked for REPORT_S or more. place: file, line and
        function that the loop was in; empty = unknown."""
        self._report = report
        self._late_s = self._due_s = self._ticked_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._place = ""
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the timer in the running loop."""
        self._wait()
        look = threading.Thread(target=self._look, args=(threading.get_ident(),), name="loop lateness", daemon=True)
        look.start()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._ticked_s = time.monotonic()
        self._due_s = loop.time() + INTERVAL_S
        self._timer = loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        late_s = self.total_s - self._late_s
        self._late_s += late_s
        place, self._place = self._place, ""
        self._wait()
        if late_s >= REPORT_S:
            self._report(late_s, place)

    def _look(self, thread_id: int) -> None:
        while not self._closed.wait(_LOOK_S):
            if not self._place and time.monotonic() - self._ticked_s > INTERVAL_S + _LOOK_S:
                self._place = place_of_thread(thread_id)

    @property
    def total_s(self) -> float:
        """Seconds for which the loop was blocked, up to now."""
        return self._total_at(asyncio.get_running_loop().time())

    def _total_at(self, time_s: float) -> float:
        late_s = 0.0 if self._timer is None else time_s - self._due_s
        return self._late_s + (late_s if late_s >= MIN_LATE_S else 0.0)

    @property
    def now_s(self) -> float:
        """The time of the loop without the time for which it was blocked: a clock for deadlines."""
        time_s = asyncio.get_running_loop().time()
        return time_s - self._total_at(time_s)

    def timeout(self, limit_s: float) -> AbstractAsyncContextManager[None]:
        """As `asyncio.timeout`, without the time for which the loop was blocked: what arrived meanwhile is read."""
        return _Limit(self, limit_s)

    def close(self) -> None:
        self._closed.set()
        if self._timer is not None:
            self._timer.cancel()


class _Limit(AbstractAsyncContextManager[None]):
    """The time limit of one `async with` block. Not a generator, because each request pays for it."""

    def __init__(self, lateness: LoopLateness, limit_s: float) -> None:
        self._lateness, self._limit_s = lateness, limit_s
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._deadline_s = self._lateness.now_s + self._limit_s
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._expire)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._timer.cancel()  # and drop `_expire`: a reference cycle would keep the task until a collection
        return await self._scope.__aexit__(kind, error, trace)

    def _expire(self) -> None:
        loop, left_s = asyncio.get_running_loop(), self._deadline_s - self._lateness.now_s
        if left_s > MIN_LATE_S:
            self._timer = loop.call_later(left_s, self._expire)
        else:
            self._scope.reschedule(loop.time())
