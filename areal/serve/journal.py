"""The durable record of the service: every training request before it is answered, every result before it is given out.

The files are those of a ledger (`areal.ledger.event_files`): groups of events with checksums, and payload files with
the bodies of requests and results.
"""

import asyncio
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from areal.api.errors import LedgerError
from areal.ledger.event_files import (
    AppendFile,
    LedgerReader,
    encode_group,
    events_path,
    not_writable,
    payload_path,
)
from areal.system.durable import fsync_path

Event = dict[str, Any]


class Place(NamedTuple):
    """Where a body is: payload file, offset, size, CRC-32."""

    segment: int
    offset: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class _Pending:
    event: Event
    body: bytes | None
    done: "asyncio.Future[None]"


class Journal:
    """Appends events of one gateway. One task writes them in groups, with one fsync for each."""

    def __init__(self, folder: Path, number: int, reader: LedgerReader) -> None:
        self._folder, self._number, self._end = folder, number, reader.end
        self._events = AppendFile(events_path(folder, number))
        self._payload = AppendFile(payload_path(folder, number))
        self._size = 0
        self._pending: list[_Pending] = []
        self._has_pending = asyncio.Event()

    @classmethod
    def open(cls, folder: Path) -> tuple[Self, list[Event]]:
        """A journal that continues in `folder`, and its events so far. LedgerError when they are damaged."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fsync_path(folder.parent)
            reader = LedgerReader(folder)
            events = [event for event in reader.events() if event["event"] != "group"]
            if reader.incomplete is not None:
                with open(reader.incomplete.path, "r+b") as file:
                    file.truncate(reader.incomplete.offset)
                    os.fsync(file.fileno())
            return cls(folder, reader.next_number, reader), events
        except OSError as error:
            raise not_writable(folder, error) from error

    async def append(self, event: Event, body: bytes | None = None) -> None:
        """Return when `event` is on disk. With a body the event gets its `Place` as "body"."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append(_Pending(event, body, done))
        self._has_pending.set()
        await done

    async def run(self) -> None:
        """Write what is appended, until this is cancelled. The owner awaits it: a full disk ends the service."""
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            group, self._pending = self._pending, []
            try:
                await asyncio.to_thread(self._write, group)
            except BaseException as error:
                failure = not_writable(self._folder, error) if isinstance(error, OSError) else error
                for one in group:
                    if not one.done.done():
                        one.done.set_exception(failure)
                raise failure from error
            for one in group:
                if not one.done.done():
                    one.done.set_result(None)

    def _write(self, group: Sequence[_Pending]) -> None:
        """The bodies, then the events that name them."""
        bodies = [one for one in group if one.body is not None]
        for one in bodies:
            assert one.body is not None
            one.event["body"] = list(Place(self._number, self._size, len(one.body), zlib.crc32(one.body)))
            self._payload.write(one.body)
            self._size += len(one.body)
        if bodies:
            self._payload.sync()
        data, self._end = encode_group(self._end, 0.0, [one.event for one in group])
        self._events.write(data)
        self._events.sync()

    def read(self, place: Place) -> bytes:
        """A body. LedgerError when it is not what was written."""
        return read_body(self._folder, place)

    def close(self) -> None:
        self._events.close()
        self._payload.close()


def read_body(folder: Path, place: Place) -> bytes:
    """A body of the journal in `folder`. LedgerError when it is not what was written."""
    path = payload_path(folder, place.segment)
    with open(path, "rb") as file:
        data = os.pread(file.fileno(), place.size, place.offset)
    if len(data) != place.size or zlib.crc32(data) != place.crc:
        raise LedgerError(f"{path} is damaged at byte {place.offset}", code="ledger.bad_payload")
    return data
