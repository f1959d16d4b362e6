"""Heartbeats: a record in which a process reports about once a second that it runs, and what it does.

The processes of a node share one file without a name with the process that starts them (`NodeBeats`), so a heartbeat
needs no operation in a folder and no room on a disk. The launcher gets the records of other nodes through its
connection to them and writes all records of a run to RUN/alive.json.
A trainer rank writes from a thread, so that a long tensor operation causes no silence; controller and server write
from their event loop, so that a blocked loop causes one. A reader compares `beats` with its own clock. A process that
ends in order empties its slot. The thread and the task end with the block that started them.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from areal.system.durable import rename

HEARTBEAT = "AREAL_HEARTBEAT"
"""The variable with which a process finds its slot: descriptor, inode and offset."""
INTERVAL_S = 1.0
_MAX_CHARACTERS = 400
_SLOT_BYTES = 2048
_CHECK_BYTES = 4
_HEAD_BYTES = _CHECK_BYTES + 2
"""A slot begins with the CRC-32 of its record and the length of the record in bytes; length 0 = none."""


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
    """Resident memory of the process with all that it started, a few seconds ago, as its node measured it."""
    cpu_s: float | None = None
    """CPU time of these, and of their children that have ended, in seconds since their start, at the same time."""
    node: str = ""
    """The machine on which it runs, which may not be the planned one, as the launcher knows it."""
    silent_s: float = 0.0
    """Seconds without a new heartbeat when the launcher wrote this record."""


def write_beats(path: Path, beats: Mapping[str, Beat]) -> None:
    """Replace the file with the heartbeats of a run by name. Not synced: it is old after a second."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps({name: asdict(beat) for name, beat in beats.items()}))
    rename(temporary, path)


def read_beats(path: Path) -> dict[str, Beat]:
    """The last heartbeat of every running process of a run, from the launcher's file; empty without one."""
    try:
        return {name: Beat(**record) for name, record in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


class NodeBeats:
    """The last heartbeat of each process that this process starts, in a file that they inherit."""

    def __init__(self) -> None:
        self.descriptor = _file_without_name()
        """A process with a slot must inherit it."""
        weakref.finalize(self, os.close, self.descriptor)
        self._inode = os.fstat(self.descriptor).st_ino
        self._slots: dict[str, int] = {}
        self._last: dict[str, Beat] = {}

    def slot(self, name: str) -> dict[str, str]:
        """Empty the slot of a process that is to start. Returns the environment variable that it needs."""
        offset = self._slots.setdefault(name, len(self._slots)) * _SLOT_BYTES
        os.pwrite(self.descriptor, bytes(_SLOT_BYTES), offset)
        return {HEARTBEAT: f"{self.descriptor}:{self._inode}:{offset}"}

    def read(self) -> dict[str, Beat]:
        """The last heartbeat of each process that has one."""
        content = os.pread(self.descriptor, len(self._slots) * _SLOT_BYTES, 0)
        for name, number in self._slots.items():
            start = number * _SLOT_BYTES
            head = content[start : start + _HEAD_BYTES]
            length = int.from_bytes(head[_CHECK_BYTES:])
            record = content[start + _HEAD_BYTES : start + _HEAD_BYTES + length]
            if not length:
                self._last.pop(name, None)
            elif zlib.crc32(record) == int.from_bytes(head[:_CHECK_BYTES]):  # else it is being written
                self._last[name] = Beat(**json.loads(record))
        return dict(self._last)


def _file_without_name() -> int:
    if sys.platform == "linux":
        return os.memfd_create("heartbeats")
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    return descriptor


class Heartbeat:
    """Writes the heartbeats of one process. `doing` is cheap and thread-safe: only `beat` writes."""

    def __init__(self, slot: str = "") -> None:
        """`slot`: the value of AREAL_HEARTBEAT. Without one, or when its file was not inherited, nothing is written."""
        self._descriptor, self._offset = _opened(slot)
        self._beats = 0
        self._state = ("starts", None, time.monotonic())  # replaced as a whole: readers need no lock
        self._writing = threading.Lock()
        self._has_ended = False

    @property
    def is_read(self) -> bool:
        return self._descriptor is not None

    def doing(self, what: str, step: int | None = None) -> None:
        """Report that the process does `what` from now on. A call with the same values keeps the start time."""
        if (what, step) != self._state[:2]:
            self._state = (what, step, time.monotonic())

    def beat(self) -> None:
        """Replace the record in the slot."""
        what, step, since_s = self._state
        self._beats += 1
        for_s = round(time.monotonic() - since_s, 1)
        beat = Beat(pid=os.getpid(), beats=self._beats, doing=what[:_MAX_CHARACTERS], for_s=for_s, step=step)
        record = json.dumps(asdict(beat), ensure_ascii=False).encode(errors="replace")
        self._write(zlib.crc32(record).to_bytes(_CHECK_BYTES) + len(record).to_bytes(2) + record)

    def _write(self, content: bytes) -> None:
        with self._writing:
            if self._descriptor is not None and not self._has_ended:
                os.pwrite(self._descriptor, content, self._offset)

    def end(self) -> None:
        """Empty the slot, so that the launcher does not take the orderly end of the process for a hang."""
        self._write(bytes(_HEAD_BYTES))
        self._has_ended = True


def _opened(slot: str) -> tuple[int | None, int]:
    """Descriptor and offset of a slot. Without the descriptor when the number is now that of another file."""
    if not slot:
        return None, 0
    descriptor, inode, offset = map(int, slot.split(":"))
    try:
        is_inherited = os.fstat(descriptor).st_ino == inode
    except OSError:
        is_inherited = False
    return (descriptor if is_inherited else None), offset


def launched_heartbeat() -> Heartbeat:
    """The heartbeat of this process, which its launcher reads."""
    return Heartbeat(os.environ.get(HEARTBEAT, ""))


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
async def beating_loop(heartbeat: Heartbeat, describe: Callable[[], str | None]) -> AsyncIterator[None]:
    """Write heartbeats from the running event loop while the block runs. `describe` returns what the process does.

    No heartbeat is written when it returns None: the loop runs, but the work of the process hangs.
    """
    if not heartbeat.is_read:
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
                heartbeat.beat()
            await asyncio.sleep(INTERVAL_S)

    task = asyncio.create_task(run(), name="heartbeat")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        heartbeat.end()
