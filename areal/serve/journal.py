"""The durable record of the service: every training request before it is answered, every result before it is given out.

The files are those of a ledger (`areal.ledger.event_files`): groups of events with checksums, and payload files with
the bodies of requests and results.

A cut keeps them short: a new events file begins with a group, whose first event is "cut", that makes the whole state,
and the files before it are removed once it is on disk. A start reads from the newest cut on. Bodies that are still
needed are copied.
"""

import asyncio
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from areal.api.errors import LedgerError
from areal.ledger.event_files import (
    AppendFile,
    LedgerReader,
    decode_group,
    encode_group,
    event_numbers,
    events_path,
    make_durable,
    not_writable,
    payload_path,
    segment_numbers,
)
from areal.system.durable import fsync_path

CUT_EVENTS = 512
"""A journal is cut when it has this many events, besides twice those that the cut before has left."""
Event = dict[str, Any]
PLACES = ("body", "result")
"""What events name the place of."""
Result = TypeVar("Result")
_TRIES = 5


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


class State(Protocol):
    """What the events make."""

    def apply(self, event: Event) -> None:
        """Change the state by an event that is on disk."""
        ...

    def shortened(self) -> list[Event]:
        """Forget what nobody needs any more, and return events that make the rest from nothing."""
        ...

    def relocate(self, events: Sequence[Event]) -> None:
        """The bodies of these events of `shortened` have new places."""
        ...


class Journal:
    """Appends events of one gateway. One task writes them in groups, with one fsync for each, and applies them."""

    def __init__(self, folder: Path, state: State) -> None:
        """Continue in `folder`, whose events so far are applied. LedgerError when they are damaged."""
        self._folder, self._state = folder, state
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fsync_path(folder.parent)
            reader, events = opened_journal(folder)
            self._num_events = 0
            for event in events:
                state.apply(event)
                self._num_events += 1
            make_durable(folder, reader)
            self._cut_at, self._end = CUT_EVENTS, reader.end
            self._first = min(reader.numbers, default=reader.next_number)
            self.remove_old()
            self._begin(reader.next_number)
        except OSError as error:
            raise not_writable(folder, error) from error
        self._pending: list[_Pending] = []
        self._has_pending = asyncio.Event()

    def _begin(self, number: int) -> None:
        """New files. An events file is made before its payload file."""
        self._number, self._size = number, 0
        self._events = AppendFile(events_path(self._folder, number))
        self._payload = AppendFile(payload_path(self._folder, number))

    async def append(self, event: Event, body: bytes | None = None) -> None:
        """Return when `event` is on disk and applied. With a body the event gets its `Place` as "body"."""
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
                for record in group:
                    if not record.done.done():
                        record.done.set_exception(failure)
                raise failure from error
            for record in group:
                self._state.apply(record.event)
                if not record.done.done():
                    record.done.set_result(None)
            self._num_events += len(group)
            if self._num_events >= self._cut_at:
                events = self._state.shortened()
                await asyncio.to_thread(self.cut, events)
                self._state.relocate(events)
                await asyncio.to_thread(self.remove_old)

    def _write(self, group: Sequence[_Pending]) -> None:
        """The bodies, then the events that name them."""
        bodies = [record for record in group if record.body is not None]
        for record in bodies:
            assert record.body is not None
            record.event["body"] = self._append_body(record.body, zlib.crc32(record.body))
        if bodies:
            self._payload.sync()
        data, self._end = encode_group(self._end, 0.0, [record.event for record in group])
        self._events.write(data)
        self._events.sync()

    def _append_body(self, body: bytes, crc: int) -> list[int]:
        self._payload.write(body)
        self._size += len(body)
        return [self._number, self._size - len(body), len(body), crc]

    def cut(self, events: Sequence[Event]) -> None:
        """Begin new files with `events`, which make the state and get new places. Until `remove_old` has returned,
        nothing is appended. A process that ends meanwhile leaves a journal with the same state."""
        old, after = (self._events, self._payload), self._end
        try:
            self._begin(self._number + 1)
            for event in events:
                for name in PLACES:
                    if event.get(name) is not None:  # not checked: what is damaged stays so
                        place = Place(*event[name])
                        event[name] = self._append_body(_bytes_at(self._folder, place), place.crc)
            self._payload.sync()
            data, self._end = encode_group(after, 0.0, [{"event": "cut"}, *events])
            self._events.write(data)
            self._events.sync()
            for file in old:
                file.close()
        except OSError as error:
            raise not_writable(self._folder, error) from error
        self._first, self._num_events = self._number, len(events)
        self._cut_at = CUT_EVENTS + 2 * len(events)

    def remove_old(self) -> None:
        """Remove the files before the newest cut."""
        events = [events_path(self._folder, number) for number in event_numbers(self._folder) if number < self._first]
        numbers = [number for number in segment_numbers(self._folder) if number < self._first]
        for path in [*events, *(payload_path(self._folder, number) for number in numbers)]:
            path.unlink()
        if events or numbers:
            fsync_path(self._folder)

    def read(self, place: Place) -> bytes:
        """A body. LedgerError when it is not what was written."""
        return read_body(self._folder, place)

    def close(self) -> None:
        self._events.close()
        self._payload.close()


def read_body(folder: Path, place: Place) -> bytes:
    """A body of the journal in `folder`. LedgerError when it is not what was written."""
    data = _bytes_at(folder, place)
    if len(data) != place.size or zlib.crc32(data) != place.crc:
        path = payload_path(folder, place.segment)
        raise LedgerError(f"{path} is damaged at byte {place.offset}", code="ledger.bad_payload")
    return data


def _bytes_at(folder: Path, place: Place) -> bytes:
    with open(payload_path(folder, place.segment), "rb") as file:
        return os.pread(file.fileno(), place.size, place.offset)


def undisturbed(folder: Path, read: Callable[[], Result]) -> Result:
    """The result of `read` on the journal of a service that may run: again after a cut has removed files meanwhile."""
    for _ in range(_TRIES):
        numbers = event_numbers(folder)
        try:
            value = read()
            if event_numbers(folder) == numbers:
                return value
        except (LedgerError, OSError):
            if event_numbers(folder) == numbers:  # no cut has removed anything: the files are damaged
                raise
    return read()


def opened_journal(folder: Path) -> tuple[LedgerReader, Iterator[Event]]:
    """A reader that begins with the newest cut, and its events. LedgerError, also later, when they are damaged."""
    newest = reversed(event_numbers(folder))
    reader = LedgerReader(folder, first=next((number for number in newest if _begins_with_cut(folder, number)), 0))
    first = min(reader.numbers, default=0)
    for number in reader.segments:
        if number > first and number not in reader.numbers:
            text = f"{events_path(folder, number)} is missing: restore the folder from a copy"
            raise LedgerError(text, code="ledger.damaged")
    return reader, (event for event in reader.events() if event["event"] not in ("group", "cut"))


def _begins_with_cut(folder: Path, number: int) -> bool:
    group = decode_group(events_path(folder, number).read_bytes(), 0)
    return group is not None and group[0][1]["event"] == "cut"
