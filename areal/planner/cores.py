"""Processes that share the CPU cores of a machine: their slowdown in a simulation, and without it a recorded run."""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np


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
        self.timers: dict[Timer, None] = {}
        """The timers that are set."""

    def time(self) -> float:
        return self._worked_s + (self._loop.time() - self._since_s) * self._speed

    def use(self, cores: float) -> None:
        """Add `cores` to the number in use; a negative number subtracts them."""
        if self._count == math.inf:
            return
        self._worked_s, self._since_s = self.time(), self._loop.time()
        self._used += cores
        self._speed = speed(self._used, self._count)
        for timer in self.timers:
            timer.look()

    def when(self, worked_s: float) -> float:
        """The time of the loop at a time of the clock, if nothing changes."""
        return self._since_s + (worked_s - self._worked_s) / self._speed

    async def work(self, seconds: float, cores: float) -> None:
        if seconds <= 0:
            return
        done = asyncio.Event()
        timer = Timer(self, done.set)
        timer.set(self.time() + seconds)
        self.use(cores)
        try:
            await done.wait()
        finally:  # a step that is cancelled uses them no more
            timer.cancel()
            self.use(-cores)


class Timer:
    """Calls a function at a time of the clock of `cores`."""

    def __init__(self, cores: Cores, call: Callable[[], object]) -> None:
        self._cores, self._call, self._loop = cores, call, asyncio.get_running_loop()
        self._at_s = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at_s: float) -> None:
        self._at_s = at_s
        self._cores.timers[self] = None
        self.look()

    def look(self) -> None:
        """Set the timer of the loop again, because the speed of the cores changed."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_at(self._cores.when(self._at_s), self._ring)

    def cancel(self) -> None:
        self._cores.timers.pop(self, None)
        if self._handle is not None:
            self._handle.cancel()

    def _ring(self) -> None:
        self.cancel()
        self._call()


Span = tuple[float, float]


class WorkClock:
    """A clock of a recorded run that is slow while its processes shared too few cores."""

    def __init__(self, busy: Sequence[tuple[float, Sequence[Span]]], cores: float) -> None:
        """`busy`: of each process, the cores that it uses while it computes, and when it does."""
        changes = [
            (at_s, used)
            for each, spans in busy
            for span in spans
            for at_s, used in zip(span, (each, -each), strict=True)
        ]
        self._times, used = np.array(sorted(changes) or [(0.0, 0.0)]).T
        speeds = [speed(each, cores) for each in np.cumsum(used).tolist()]
        self._worked = np.concatenate([[0.0], np.cumsum(np.diff(self._times) * speeds[:-1])])

    def at(self, moment_s: float) -> float:
        outside_s = min(0.0, moment_s - self._times[0]) + max(0.0, moment_s - self._times[-1])
        return float(np.interp(moment_s, self._times, self._worked)) + outside_s

    def speed(self, start_s: float, end_s: float) -> float:
        """The mean relative speed between two times."""
        return (self.at(end_s) - self.at(start_s)) / (end_s - start_s)


def joined(spans: Iterable[Span]) -> list[Span]:
    """The union of the spans, in order."""
    found: list[Span] = []
    for start_s, end_s in sorted(spans):
        if found and start_s <= found[-1][1]:
            found[-1] = found[-1][0], max(end_s, found[-1][1])
        else:
            found.append((start_s, end_s))
    return found
