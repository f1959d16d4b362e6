"""Owns the bytes of a ledger folder: the format of event files, reading them back, making a folder ready to go on.

    RUN/ledger/events-000001.jsonl    one JSON object per line, in groups
    RUN/ledger/payload-000001.bin     payload records (see payload.py), found by [segment, offset, size]

A group is written at once and is on disk before the next one is written. Its first line says how many bytes follow,
the checksum of the group before it and its own: {"event": "group", "number": 7, "after": CRC-32 of group 6, "at":
seconds, "bytes": 321, "crc": CRC-32 of line and bytes}. So a group counts whole or not at all, and a file that is
missing, of another run, or of a second writer does not fit. A damaged last group was never relied on and is cut; a
damaged group before an intact one means that durable data was harmed, which is an error. Every start of a controller
opens new files. Payload bytes that no event points at are of a group that was not written whole; nothing reads them.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import orjson

from areal.api.errors import LedgerError
from areal.ledger.state import Event, LedgerState
from areal.system.durable import fsync_dir

_GROUP_START = b'{"event":"group","number":'
_CRC_KEY = b',"crc":'
_EVENTS = re.compile(r"events-(\d{6})\.jsonl")
_PAYLOAD = re.compile(r"payload-(\d{6})\.bin")


def events_path(folder: Path, number: int) -> Path:
    return folder / f"events-{number:06d}.jsonl"


def payload_path(folder: Path, number: int) -> Path:
    return folder / f"payload-{number:06d}.bin"


class GroupEnd(NamedTuple):
    """What the next group must follow."""

    number: int
    """Groups so far, over all files."""
    crc: int
    """Checksum of the last one; 0 before the first."""


NO_GROUP = GroupEnd(0, 0)


def encode_group(after: GroupEnd, at: float, events: Sequence[Event]) -> tuple[bytes, GroupEnd]:
    """The bytes of the group that follows `after`, and what follows it."""
    body = b"".join([orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE) for event in events])
    head = _GROUP_START + b'%d,"after":%d,"at":%.3f,"bytes":%d' % (after.number + 1, after.crc, at, len(body))
    crc = zlib.crc32(body, zlib.crc32(head))
    return head + _CRC_KEY + b"%d}\n" % crc + body, GroupEnd(after.number + 1, crc)


def _decode_group(data: bytes, offset: int) -> tuple[list[Event], int] | None:
    """The events of the group at `offset`, its mark first, and the offset behind it; None when it is not whole."""
    end = data.find(b"\n", offset)
    head, key, _ = data[offset : max(end, offset)].rpartition(_CRC_KEY)
    if not key or not head.startswith(_GROUP_START):
        return None
    try:
        mark: Event = orjson.loads(data[offset:end])
        body = data[end + 1 : end + 1 + mark["bytes"]]
        if len(body) != mark["bytes"] or zlib.crc32(body, zlib.crc32(head)) != mark["crc"]:
            return None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return [mark, *map(orjson.loads, body.splitlines())], end + 1 + len(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class TornTail:
    """The end of an events file: a group that was not written whole."""

    path: Path
    offset: int
    size: int


class LedgerReader:
    """One pass over the event files of a folder, in order. Changes nothing, and may run while a controller writes.

    `torn`, `damage` and `end` are known once the pass is over. A missing folder is empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.numbers = _numbers(folder, _EVENTS)
        """Numbers of the event files."""
        self.next_number = max([0, *self.numbers, *_numbers(folder, _PAYLOAD)]) + 1
        """Number for the files of the next writer, above all that exist."""
        self.torn: TornTail | None = None
        self.damage = ""
        """Why the pass ended early: durable lines are harmed."""
        self.end = NO_GROUP

    def groups(self) -> Iterator[list[Event]]:
        """The events of one group after the other, each with its mark first; ends at the first damage."""
        for number in self.numbers:
            path = events_path(self._folder, number)
            try:
                data = path.read_bytes()
            except OSError as error:
                self.damage = f"cannot read {path}: {error.strerror or error}"
                return
            if data and self.torn is not None:
                self.damage = f"{self.torn.path} is damaged at byte {self.torn.offset}, although {path.name} follows it"
                self.torn = None
                return
            yield from self._groups_of(path, data)
            if self.damage:
                return

    def _groups_of(self, path: Path, data: bytes) -> Iterator[list[Event]]:
        offset = 0
        while offset < len(data):
            group = _decode_group(data, offset)
            if group is None:
                if _has_group(data, offset + 1):
                    self.damage = f"{path} is damaged at byte {offset}: a later group is intact, so this was on disk"
                else:
                    self.torn = TornTail(path=path, offset=offset, size=len(data) - offset)
                return
            mark = group[0][0]
            if (mark["number"], mark.get("after")) != (self.end.number + 1, self.end.crc):
                self.damage = (
                    f"{path}: the group at byte {offset} does not follow group {self.end.number}: "
                    "events are missing, or two controllers wrote at once"
                )
                return
            self.end = GroupEnd(mark["number"], mark["crc"])
            yield group[0]
            offset = group[1]

    def events(self) -> Iterator[Event]:
        """All events. LedgerError when durable lines are damaged."""
        for group in self.groups():
            yield from group
        if self.damage:
            raise LedgerError(f"{self.damage}; restore the ledger from a copy, or choose a new trial_name")


def _has_group(data: bytes, offset: int) -> bool:
    """Whether a whole group begins anywhere from `offset` on."""
    found = data.find(_GROUP_START, offset)
    while found >= 0:
        if _decode_group(data, found) is not None:
            return True
        found = data.find(_GROUP_START, found + 1)
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredLedger:
    """Where the next writer of a folder goes on."""

    state: LedgerState
    end: GroupEnd
    next_number: int


def recover_folder(folder: Path) -> RecoveredLedger:
    """Make the ledger in `folder` ready to be written, beginning one where there is none.

    Reads all events, cuts a torn tail and makes sure of what was read: a controller killed between writing and
    fsyncing leaves lines that can be read but would not survive a power cut. Any part of this may be done twice.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fsync_dir(folder.parent)
        reader = LedgerReader(folder)
        state = LedgerState.replay(reader.events())
        if reader.torn is not None:
            _cut(reader.torn)
        if reader.numbers:
            last = reader.numbers[-1]
            _fsync_file(events_path(folder, last))
            for number in _numbers(folder, _PAYLOAD):
                if number >= last:
                    _fsync_file(payload_path(folder, number))
    except OSError as error:
        raise LedgerError(f"cannot open the ledger in {folder}: {error.strerror or error}") from error
    return RecoveredLedger(state=state, end=reader.end, next_number=reader.next_number)


def _cut(torn: TornTail) -> None:
    """Remove a torn tail for good."""
    with open(torn.path, "r+b") as file:
        file.truncate(torn.offset)
        os.fsync(file.fileno())


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _numbers(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for entry in folder.iterdir() if (match := pattern.fullmatch(entry.name)))


class AppendFile(Protocol):
    """A file that only grows, but for a group that could not be made durable."""

    def write(self, data: bytes) -> None: ...
    def sync(self) -> None:
        """Return when everything written is on disk."""
        ...

    def cut(self, size: int) -> None:
        """Take back all but the first `size` bytes."""
        ...

    def close(self) -> None: ...


class OsAppendFile:
    """An append-only file of the operating system, made durable together with its name."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        fsync_dir(path.parent)

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:  # a nearly full disk takes a part first and refuses the rest
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def cut(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        os.close(self._descriptor)


class PayloadReader:
    """Reads payload records, unchecked. Keeps the newest segment open: records are mostly asked for in order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: tuple[int, int] | None = None  # segment and descriptor

    def read(self, where: tuple[int, int, int]) -> bytes:
        """The bytes of one record. LedgerError when the segment is not there or ends before it."""
        segment, offset, size = where
        try:
            if self._open is None or self._open[0] != segment:
                self.close()
                self._open = (segment, os.open(payload_path(self._folder, segment), os.O_RDONLY | os.O_CLOEXEC))
            is_there = offset >= 0 and 0 <= size <= os.fstat(self._open[1]).st_size - offset
            data = os.pread(self._open[1], size, offset) if is_there else b""
        except OSError as error:
            path = payload_path(self._folder, segment)
            raise LedgerError(f"cannot read {path}: {error.strerror or error}") from error
        if not is_there or len(data) != size:
            path = payload_path(self._folder, segment)
            raise LedgerError(f"{path} ends before byte {offset + size}: a durable payload is missing")
        return data

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_payload(folder: Path, where: tuple[int, int, int]) -> bytes:
    """The bytes of one payload record, unchecked. LedgerError when the segment ends before it."""
    with PayloadReader(folder) as reader:
        return reader.read(where)
