"""Owns the bytes of a ledger folder: the format of lines and payload records, reading them back, cutting torn tails.

    RUN/ledger/events-000001.jsonl    one JSON object per line; its last key "crc" is the CRC-32 of all before it
    RUN/ledger/payload-000001.bin     payload records (see payload.py), found by [segment, offset, size]

Lines are written in groups, and each group is on disk before the next one is written. A group begins with a line
{"event": "group"}. So a damaged line in the last group was never relied on and is cut; a damaged line followed by a
later group means that durable data was harmed, which is an error. Every start of a controller opens new files.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import orjson

from areal.api.errors import LedgerError
from areal.rollout.ledger_state import Event
from areal.system.durable import fsync_dir

_CRC_KEY = b',"crc":'
_EVENTS = re.compile(r"events-(\d{6})\.jsonl")
_PAYLOAD = re.compile(r"payload-(\d{6})\.bin")


def events_path(folder: Path, number: int) -> Path:
    return folder / f"events-{number:06d}.jsonl"


def payload_path(folder: Path, number: int) -> Path:
    return folder / f"payload-{number:06d}.bin"


def encode_line(event: Event) -> bytes:
    """One line with its checksum."""
    body = orjson.dumps(event)[:-1]
    return b'%b,"crc":%d}\n' % (body, zlib.crc32(body))


def decode_line(line: bytes) -> Event | None:
    """The event of one line without its line feed; None when the line is damaged."""
    body, key, tail = line.rpartition(_CRC_KEY)
    if not key or not tail.endswith(b"}") or not tail[:-1].isdigit() or int(tail[:-1]) != zlib.crc32(body):
        return None
    return orjson.loads(body + b"}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TornTail:
    """The end of an events file that was not written whole."""

    path: Path
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerContents:
    """Everything the events files say, in order."""

    events: list[Event]
    torn: TornTail | None
    next_number: int
    """Number for the files of the next writer, above all that exist."""


def read_contents(folder: Path) -> LedgerContents:
    """Read all events; changes nothing. LedgerError when durable lines are damaged. A missing folder is empty."""
    numbers = _numbers(folder, _EVENTS)
    events: list[Event] = []
    torn: TornTail | None = None
    for number in numbers:
        path = events_path(folder, number)
        if torn is not None and path.stat().st_size > 0:
            raise LedgerError(f"{torn.path} is damaged at byte {torn.offset}, although {path.name} follows it")
        found, torn_here = _read_file(path)
        events.extend(found)
        torn = torn_here or torn
    highest = max([0, *numbers, *_numbers(folder, _PAYLOAD)])
    return LedgerContents(events=events, torn=torn, next_number=highest + 1)


def cut_torn_tail(torn: TornTail) -> None:
    """Remove a torn tail for good."""
    with open(torn.path, "r+b") as file:
        file.truncate(torn.offset)
        os.fsync(file.fileno())


def _numbers(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for entry in folder.iterdir() if (match := pattern.fullmatch(entry.name)))


def _read_file(path: Path) -> tuple[list[Event], TornTail | None]:
    data = path.read_bytes()
    events: list[Event] = []
    for offset, line in _lines(data):
        event = None if line is None else decode_line(line)
        if event is None:
            return events, _torn_tail(path, data, offset)
        events.append(event)
    return events, None


def _lines(data: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Offset and content of each line; None for a last line without its line feed."""
    offset = 0
    while offset < len(data):
        end = data.find(b"\n", offset)
        if end < 0:
            yield offset, None
            return
        yield offset, data[offset:end]
        offset = end + 1


def _torn_tail(path: Path, data: bytes, offset: int) -> TornTail:
    for later, line in _lines(data[offset:]):
        event = None if line is None else decode_line(line)
        if later > 0 and event is not None and event["event"] == "group":
            raise LedgerError(
                f"{path} is damaged at byte {offset}: a later group of events is intact, so this one was on disk"
            )
    return TornTail(path=path, offset=offset, size=len(data) - offset)


class AppendFile(Protocol):
    """A file that only grows."""

    def write(self, data: bytes) -> None: ...
    def sync(self) -> None:
        """Return when everything written is on disk."""
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

    def close(self) -> None:
        os.close(self._descriptor)


def read_payload(folder: Path, where: tuple[int, int, int]) -> bytes:
    """The bytes of one payload record, unchecked. LedgerError when the segment ends before it."""
    segment, offset, size = where
    path = payload_path(folder, segment)
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(size)
    except OSError as error:
        raise LedgerError(f"cannot read {path}: {error.strerror or error}") from error
    if len(data) != size:
        raise LedgerError(f"{path} ends before byte {offset + size}: a durable payload is missing")
    return data
