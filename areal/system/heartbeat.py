"""Heartbeats: a file in which a process reports about once a second that it runs, and what it does.

A trainer rank writes from a thread, so that a long tensor operation causes no silence; controller and server write from
their event loop, so that a blocked loop causes one. A reader compares `beats` with its own clock. A heartbeat that
cannot be written (disk full, folder removed) looks like a hang: check the disk first. A process that ends in order
removes its file; that of a killed one stays until its launcher removes it.
The thread and the task wait only for the next second, and end with the block that started them.
"""

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

import psutil

from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths

INTERVAL_S = 1.0
_MEMORY_INTERVAL = 10
"""Heartbeats between two measurements of the memory, which look at all processes of the machine."""
_MAX_CHARACTERS = 400
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    pid: int
    beats: int
    """Number of heartbeats since the start of the process."""
    doing: str
    for_s: float
    """Seconds since the process began to do that."""
    step: int | None
    """Train step that it works on, from 0; None for a process without steps."""
    resident_bytes: int | None = None
    """Resident memory of the process with all that it started, a few seconds ago; None = not measured."""
    node: str = ""
    """The machine on which it runs, which may not be the planned one."""


def read_beat(path: Path) -> Beat | None:
    """The last heartbeat in a file; None without one."""
    try:
        return Beat(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def resident_bytes(folder: Path) -> dict[str, int]:
    """Resident memory of every process that writes heartbeats into `folder`, by its name."""
    beats = {path.stem: read_beat(path) for path in sorted(folder.glob("[!.]*.json"))}
    return {name: beat.resident_bytes for name, beat in beats.items() if beat and beat.resident_bytes is not None}


class Heartbeat:
    """Writes the heartbeats of one process. `doing` is cheap and thread-safe: only `beat` writes."""

    def __init__(self, path: Path, node: str = "") -> None:
        self._path = path
        self._node = node
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._beats = 0
        self._state = ("starts", None, time.monotonic())  # replaced as a whole: readers need no lock
        self._resident_bytes: int | None = None
        self._has_warned = False
        self._has_ended = False
        with contextlib.suppress(OSError):  # the first heartbeat reports it
            path.parent.mkdir(exist_ok=True)

    def doing(self, what: str, step: int | None = None) -> None:
        """From now on the process does `what`. A repeated call with the same values keeps the start time."""
        if (what, step) != self._state[:2]:
            self._state = (what, step, time.monotonic())

    def beat(self) -> None:
        """Replace the file by a new heartbeat. A failure is logged once and ignored."""
        what, step, since_s = self._state
        if self._beats % _MEMORY_INTERVAL == 0:
            self._resident_bytes = _own_resident_bytes()
        self._beats += 1
        beat = Beat(
            pid=os.getpid(),
            beats=self._beats,
            doing=what[:_MAX_CHARACTERS],
            for_s=round(time.monotonic() - since_s, 1),
            step=step,
            resident_bytes=self._resident_bytes,
            node=self._node,
        )
        try:
            self._temporary.write_bytes(json.dumps(asdict(beat)).encode())
            os.replace(self._temporary, self._path)
            if self._has_ended:  # during the write
                self._path.unlink(missing_ok=True)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("no heartbeat can be written to %s: %s", self._path, error.strerror or error)

    def end(self) -> None:
        """Remove the file, so that the launcher does not take the orderly end of the process for a hang."""
        self._has_ended = True
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _own_resident_bytes() -> int | None:
    """Resident memory of this process and its descendants; None where the system does not show it."""
    try:
        own = psutil.Process()
        total = own.memory_info().rss
        for process in own.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    except (psutil.Error, OSError):
        return None
    return total


def launched_heartbeat() -> Heartbeat | None:
    """The heartbeat of this process, in the file that its launcher reads; None without a launcher."""
    context = ProcessContext.from_env()
    if context is None:
        return None
    return Heartbeat(RunPaths(Path(context.run_dir)).alive_of(context.name), context.host.node)


@contextlib.contextmanager
def beating_thread(heartbeat: Heartbeat) -> Iterator[Heartbeat]:
    """Write heartbeats from a thread while the block runs."""
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
async def beating_loop(heartbeat: Heartbeat | None, describe: Callable[[], str | None]) -> AsyncIterator[None]:
    """Write heartbeats from the running event loop while the block runs. `describe` returns what the process does.

    No heartbeat is written when it returns None: the loop runs, but the work of the process hangs.
    """
    if heartbeat is None:
        yield
        return

    async def run() -> None:
        while True:
            try:
                what = describe()
            except Exception as error:  # noqa: BLE001 - a failed description must not look like a hang
                what = f"no description ({type(error).__name__}: {error})"
            if what is not None:
                heartbeat.doing(what)
                await asyncio.to_thread(heartbeat.beat)  # a slow disk must not block the loop
            await asyncio.sleep(INTERVAL_S)

    task = asyncio.create_task(run(), name="heartbeat")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        heartbeat.end()
