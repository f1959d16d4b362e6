"""Group commit: one background task makes buffered events and payloads durable together.

Its loop waits for a call of `durable`, a full buffer, the linger time or `close`. It writes one group at a time in a
thread: first the payloads, then the event lines that refer to them.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Protocol

from areal.api.errors import LedgerError
from areal.ledger.event_files import (
    NO_GROUP,
    SEGMENT_BYTES,
    AppendFile,
    GroupEnd,
    encode_group,
    events_path,
    payload_path,
)
from areal.ledger.kept import KeptPayloads
from areal.ledger.state import Event

LINGER_S = 0.05
"""Maximum time that an event stays in memory while no caller waits for it."""
GROUP_BYTES = 4 * 2**20
"""A buffer of this size is written at once."""


_BLOCK_BYTES = 2**18


class EventLog(Protocol):
    """The destination of the events and payloads of a ledger."""

    def start(self, on_failure: Callable[[LedgerError], None]) -> None: ...
    def append(self, event: Event) -> None: ...
    def append_payload(self, data: bytes) -> tuple[int, int, int]:
        """Returns segment, offset and size."""
        ...

    def keep(self, episode_id: int, attempt: int, data: bytes) -> None:
        """Keep the payload of an episode that is not trained on, for readers; the oldest ones are removed."""
        ...

    async def durable(self) -> None:
        """Return when everything appended so far is on disk. Raises LedgerError when that failed."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Group:
    events: list[Event] = field(default_factory=list[Event])
    payloads: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    kept: list[tuple[int, int, bytes]] = field(default_factory=list[tuple[int, int, bytes]])
    """Episode, attempt and payload."""
    num_bytes: int = 0


class GroupWriter:
    """The files of one writer. For one thread at a time, and unusable after an error."""

    def __init__(
        self,
        folder: Path,
        number: int,
        *,
        after: GroupEnd = NO_GROUP,
        open_file: Callable[[Path], AppendFile] = AppendFile,
        keep_rejected: int = 0,
    ) -> None:
        """`keep_rejected`: number of rejected or failed episodes whose payload stays."""
        self.folder = folder
        self.kept = KeptPayloads(folder, keep_rejected)
        self._number = number
        self._end = after
        self._open_file = open_file
        self._events: AppendFile | None = None
        self._durable_bytes = 0
        self._segment: tuple[int, AppendFile] | None = None

    def write(
        self, events: list[Event], payloads: list[tuple[int, bytes]], kept: Sequence[tuple[int, int, bytes]] = ()
    ) -> None:
        """Make one group durable. After an error the file may end with an incomplete group; the next writer cuts it."""
        data, end = encode_group(self._end, time.time(), events)
        if self._events is None:
            self._events = self._open_file(events_path(self.folder, self._number))
        for segment, pieces in groupby(payloads, key=itemgetter(0)):
            file = self._segment_file(segment)
            for block in _blocks(payload for _, payload in pieces):
                file.write(block)
            file.sync()
        if kept:
            self.kept.write(kept)
        try:
            self._events.write(data)
            self._events.sync()
        except OSError:
            # After a failed fsync the lines can be read until a power failure removes them. The next writer must not
            # continue after them; no caller was promised that they are durable.
            with contextlib.suppress(OSError):
                self._events.cut(self._durable_bytes)
            raise
        self._durable_bytes += len(data)
        self._end = end

    def _segment_file(self, segment: int) -> AppendFile:
        if self._segment is None or self._segment[0] != segment:
            if self._segment is not None:
                self._segment[1].close()
            self._segment = (segment, self._open_file(payload_path(self.folder, segment)))
        return self._segment[1]

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
        if self._segment is not None:
            self._segment[1].close()


def _blocks(payloads: Iterable[bytes]) -> Iterator[bytes]:
    """Payloads joined to blocks, so that small ones do not cost a call each and a large group is not copied whole."""
    block, size = list[bytes](), 0
    for payload in payloads:
        block.append(payload)
        size += len(payload)
        if size >= _BLOCK_BYTES:
            yield b"".join(block)
            block, size = [], 0
    yield b"".join(block)


class GroupCommitLog:
    """An EventLog on files. Everything except the writing runs on the event loop, so it needs no locks."""

    def __init__(self, writer: GroupWriter, *, first_segment: int, linger_s: float = LINGER_S) -> None:
        self._writer = writer
        self._linger_s = linger_s
        self._segment = first_segment
        self._segment_size = 0
        self._group = _Group()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger-writer")
        self._waiters: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._failure: LedgerError | None = None
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._on_failure: Callable[[LedgerError], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()

    def start(self, on_failure: Callable[[LedgerError], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_failure = on_failure
        self._task = asyncio.create_task(self._run(), name="ledger-commit")
        if self._group.events:
            self._wake.set()

    def append(self, event: Event) -> None:
        self._raise_failure()
        self._group.events.append(event)
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(self._linger_s, self._wake.set)

    def append_payload(self, data: bytes) -> tuple[int, int, int]:
        self._raise_failure()
        if self._segment_size >= SEGMENT_BYTES:
            self._segment, self._segment_size = self._segment + 1, 0
        where = (self._segment, self._segment_size, len(data))
        self._segment_size += len(data)
        group = self._group
        group.payloads.append((self._segment, data))
        group.num_bytes += len(data)
        if group.num_bytes >= GROUP_BYTES:
            self._wake.set()
        return where

    def keep(self, episode_id: int, attempt: int, data: bytes) -> None:
        self._raise_failure()
        kept, limit = self._group.kept, self._writer.kept.limit
        if limit:
            kept.append((episode_id, attempt, data))
            del kept[:-limit]

    async def durable(self) -> None:
        self._raise_failure()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake.set()
        await waiter

    async def close(self) -> None:
        """Write the remaining buffer and close the files. Raises the failure of the last write."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown()
        with contextlib.suppress(OSError):  # all promised data is on disk; `_raise_failure` reports the rest
            self._writer.close()
        self._raise_failure()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not (self._closing and not self._group.events and not self._waiters):
            await self._wake.wait()
            self._wake.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            group, self._group = self._group, _Group()
            waiters, self._waiters = self._waiters, []
            try:
                if group.events:
                    await loop.run_in_executor(
                        self._thread, self._writer.write, group.events, group.payloads, group.kept
                    )
            except Exception as error:  # noqa: BLE001 - all waiting callers must receive any error of the writer
                self._fail(error, waiters)
                return
            del group  # its payloads
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _fail(self, error: Exception, waiters: list[asyncio.Future[None]]) -> None:
        cause = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        failure = LedgerError(
            f"cannot write the ledger in {self._writer.folder}: {cause}. The run stops and no recorded data is lost: "
            "free disk space or restore access, then start the same command again",
            code="ledger.not_writable",
        )
        failure.__cause__ = error
        self._failure = failure
        for waiter in waiters + self._waiters:
            if not waiter.done():
                waiter.set_exception(failure)
        self._waiters = []
        if self._on_failure is not None:
            self._on_failure(failure)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
