"""Processes that share the CPU cores of a machine: their slowdown in a simulation, and without it a recorded run."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from areal.observe.trace import Interval


def speed(used: float, cores: float) -> float:
    """Relative speed of processes that need `used` cores together and share `cores`; 1 = as with enough cores."""
    return 1.0 if used <= cores else cores / used


class Cores:
    """CPU cores that servers and trainer ranks share, with a clock that is slow while they are too few. Where there are
    GPUs none are shared, and it is the clock of the loop."""

    def __init__(self, count: float) -> None:
        """`count`: infinite = none are shared."""
        self._count, self._loop = count, asyncio.get_running_loop()
        self._used, self._speed = 0.0, 1.0
        self._since_s = self._worked_s = self._loop.time()
        self._calls: dict[Callable[[], object], tuple[float, asyncio.TimerHandle]] = {}

    def time(self) -> float:
        return self._worked_s + (self._loop.time() - self._since_s) * self._speed

    def use(self, cores: float) -> None:
        """Add `cores` to the number in use; a negative number subtracts them."""
        if self._count == math.inf:
            return
        self._worked_s, self._since_s = self.time(), self._loop.time()
        self._used += cores
        self._speed = speed(self._used, self._count)
        for call, (worked_s, _) in list(self._calls.items()):
            self.call_at(worked_s, call)

    def call_at(self, worked_s: float, call: Callable[[], object]) -> None:
        """Call a function at a time of this clock, in place of the time given before."""
        self.cancel(call)
        at_s = self._since_s + (worked_s - self._worked_s) / self._speed
        self._calls[call] = worked_s, self._loop.call_at(at_s, self._ring, call)

    def cancel(self, call: Callable[[], object]) -> None:
        """Do not call it."""
        if (planned := self._calls.pop(call, None)) is not None:
            planned[1].cancel()

    def _ring(self, call: Callable[[], object]) -> None:
        self.cancel(call)
        call()

    async def work(self, seconds: float, cores: float) -> None:
        """Return after this time of the clock, in which `cores` are in use."""
        if seconds <= 0:
            return
        done = asyncio.Event()
        self.call_at(self.time() + seconds, done.set)
        self.use(cores)
        try:
            await done.wait()
        finally:  # a step that is cancelled uses them no more
            self.cancel(done.set)
            self.use(-cores)


class WorkClock:
    """A clock of a recorded run that is slow while its processes shared too few cores."""

    def __init__(self, busy: Sequence[tuple[float, Sequence[Interval]]], cores: float) -> None:
        """`busy`: of each process, the cores that it uses while it computes, and when it does."""
        starts = [(start_s, used) for used, spans in busy for start_s, _ in spans]
        ends = [(end_s, -used) for used, spans in busy for _, end_s in spans]
        self._times, used = np.array(sorted(starts + ends) or [(0.0, 0.0)]).T
        speeds = [speed(each, cores) for each in np.cumsum(used).tolist()]
        self._worked = np.concatenate([[0.0], np.cumsum(np.diff(self._times) * speeds[:-1])])

    def at(self, moment_s: Any) -> Any:
        """The time of this clock at a moment, or at those of an array."""
        return np.interp(moment_s, self._times, self._worked) + moment_s - np.clip(moment_s, *self._times[[0, -1]])

    def speed(self, start_s: float, end_s: float) -> float:
        """The mean relative speed between two times."""
        return float((self.at(end_s) - self.at(start_s)) / (end_s - start_s))
