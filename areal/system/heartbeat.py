"""Owns heartbeats: the file in which a process says about once a second that it lives, and what it does.

A trainer rank beats from a thread, so that a long tensor operation is no silence; controller and server beat from
their event loop, so that a blocked loop is one. Whoever reads judges by changes of `beats` against its own clock. A
beat that cannot be written (disk full, folder gone) is silence too: ask about the disk before calling a process hung.
A process that ends in order removes its file first: the teardown is no hang. That of a killed one stays: who starts a
process removes the old one.
The thread and the task wait for nothing but the next second, and end with the block that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths

INTERVAL_S = 1.0
_MAX_CHARACTERS = 400
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a process said last."""

    pid: int
    beats: int
    """Counts up while the process lives; starts at 1 with each process."""
    doing: str
    for_s: float
    """Seconds since it began to do that."""
    step: int | None
    """Train step that it works on, 0 first; None for who has none."""


def read_beat(path: Path) -> Beat | None:
    """The last beat in a file, None when there is none."""
    try:
        return Beat(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


class Heartbeat:
    """One process's signs of life. `doing` may be called often and by any thread: only `beat` writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._beats = 0
        self._state = ("starts", None, time.monotonic())  # replaced as a whole: readers need no lock
        self._is_told = False
        self._has_ended = False
        with contextlib.suppress(OSError):  # told by the first beat
            path.parent.mkdir(exist_ok=True)

    def doing(self, what: str, step: int | None = None) -> None:
        """From now on this process does `what`; saying the same again keeps the time since when."""
        if (what, step) != self._state[:2]:
            self._state = (what, step, time.monotonic())

    def beat(self) -> None:
        """Write a sign of life, whole or not at all. A disk that does not take it is told once and harms nothing."""
        what, step, since_s = self._state
        self._beats += 1
        beat = Beat(
            pid=os.getpid(),
            beats=self._beats,
            doing=what[:_MAX_CHARACTERS],
            for_s=round(time.monotonic() - since_s, 1),
            step=step,
        )
        try:
            self._temporary.write_bytes(json.dumps(asdict(beat)).encode())
            os.replace(self._temporary, self._path)
            if self._has_ended:  # meanwhile
                self._path.unlink(missing_ok=True)
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                _log.warning("no sign of life can be written to %s: %s", self._path, error.strerror or error)

    def end(self) -> None:
        """From here on silence is no bad sign: what is left to do is to end."""
        self._has_ended = True
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def heartbeat_of(context: ProcessContext) -> Heartbeat:
    """The heartbeat of a launched process, where its launcher looks for it."""
    return Heartbeat(RunPaths(Path(context.run_dir)).alive_of(context.name))


def launched_heartbeat() -> Heartbeat | None:
    """That of this process; None without a launcher."""
    context = ProcessContext.from_env()
    return None if context is None else heartbeat_of(context)


@contextlib.contextmanager
def beating_thread(heartbeat: Heartbeat) -> Iterator[Heartbeat]:
    """Beat from a thread of its own while the block runs."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            heartbeat.beat()
            stopped.wait(INTERVAL_S)

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield heartbeat
    finally:
        stopped.set()
        thread.join(INTERVAL_S)
        heartbeat.end()


@contextlib.asynccontextmanager
async def beating_loop(heartbeat: Heartbeat | None, tell: Callable[[], str | None]) -> AsyncIterator[None]:
    """Beat from the running event loop while the block runs; `tell` says before each beat what the process does.

    None withholds the beat: the loop turns, but what the process is there for hangs.
    """
    if heartbeat is None:
        yield
        return

    async def run() -> None:
        while True:
            try:
                what = tell()
            except Exception as error:  # noqa: BLE001 - a sentence that cannot be made is no reason to look dead
                what = f"cannot tell what it does ({type(error).__name__}: {error})"
            if what is not None:
                heartbeat.doing(what)
                await asyncio.to_thread(heartbeat.beat)  # a slow disk must not hold up the loop
            await asyncio.sleep(INTERVAL_S)

    task = asyncio.create_task(run(), name="heartbeat")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        heartbeat.end()
