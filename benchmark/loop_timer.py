"""How late the loop of a benchmark is, the CPU time of its longest callback, and how late an idle loop is meanwhile.

    python benchmark/loop_timer.py

does nothing but wait 2 ms again and again until stdin is closed, and prints the 99th percentile of its lag and the
maximum, in ms. What it finds is the share of other processes and of the operating system in the lag of any loop of that
time.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

WAIT_S = 0.002


class TimedLoop(uvloop.Loop):
    """Notes the CPU time of its longest callback, so of one step of a task: other processes do not lengthen it."""

    longest_ms = 0.0
    longest = ""
    """Its name."""

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        return super().call_soon(self._timed, callback, args, context=context)

    def _timed(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        began_s = time.thread_time()
        callback(*args)
        used_ms = (time.thread_time() - began_s) * 1e3
        if used_ms > self.longest_ms:
            task = getattr(callback, "__self__", None)
            self.longest_ms = used_ms
            self.longest = task.get_name() if isinstance(task, asyncio.Task) else repr(callback)


@dataclass
class LoopTimer:
    """By how many ms a timer of WAIT_S is late."""

    late_ms: list[float] = field(default_factory=list[float])

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + WAIT_S
            await asyncio.sleep(WAIT_S)
            self.late_ms.append(max(0.0, loop.time() - due_s) * 1e3)

    def at(self, share: float) -> float:
        return sorted(self.late_ms)[min(len(self.late_ms) - 1, int(share * len(self.late_ms)))]


@contextmanager
def idle_loop() -> Iterator[list[float]]:
    """A process that only waits, while the block runs. The list then has the 99th percentile and the maximum of its
    lag, in ms."""
    late = list[float]()
    argv = [sys.executable, str(Path(__file__))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()  # it runs
            yield late
        finally:
            process.stdin.close()
            late += map(float, process.stdout.readline().split())


async def wait_idly() -> LoopTimer:
    """The lag of this loop until stdin is closed."""
    timer, end = LoopTimer(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def read() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(end.set)

    threading.Thread(target=read, name="stdin", daemon=True).start()
    watching = asyncio.create_task(timer.watch(), name="loop timer")
    print("runs", flush=True)
    await end.wait()
    await asyncio.sleep(2 * WAIT_S)  # at least one figure
    watching.cancel()
    return timer


if __name__ == "__main__":
    late = uvloop.run(wait_idly())
    print(late.at(0.99), max(late.late_ms))
