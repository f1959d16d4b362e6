"""Owns the bytes of a ledger folder: the format of event files, reading them back, cutting torn tails.

    RUN/ledger/events-000001.jsonl    one JSON object per line, in groups
    RUN/ledger/payload-000001.bin     payload records (see payload.py), found by [segment, offset, size]

A group is written at once and is on disk before the next one is written. Its first line says how many bytes follow
and their checksum: {"event": "group", "number": 7, "at": seconds, "bytes": 321, "crc": CRC-32 of line and bytes}. So a
group counts whole or not at all. A damaged last group was never relied on and is cut; a damaged group before an
intact one means that durable data was harmed, which is an error. Every start of a controller opens new files.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import orjson

from areal.api.errors import LedgerError
from areal.rollout.ledger_state import Event
from areal.system.durable import fsync_dir

_GROUP_START = b'{"event":"group","number":'
_CRC_KEY = b',"crc":'
_EVENTS = re.compile(r"events-(\d{6})\.jsonl")
_PAYLOAD = re.compile(r"payload-(\d{6})\.bin")


def events_path(folder: Path, number: int) -> Path:
    return folder / f"events-{number:06d}.jsonl"


def payload_path(folder: Path, number: int) -> Path:
    return folder / f"payload-{number:06d}.bin"


def encode_group(number: int, at: float, events: Sequence[Event]) -> bytes:
    """The bytes of one group."""
    body = b"".join([orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE) for event in events])
    head = _GROUP_START + b'%d,"at":%.3f,"bytes":%d' % (number, at, len(body))
    return head + _CRC_KEY + b"%d}\n" % zlib.crc32(body, zlib.crc32(head)) + body


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
    offset = num_groups = 0
    while offset < len(data):
        group = _decode_group(data, offset)
        if group is None:
            _require_last(path, data, offset)
            return events, TornTail(path=path, offset=offset, size=len(data) - offset)
        num_groups += 1
        if group[0][0]["number"] != num_groups:
            raise LedgerError(f"{path} lacks group {num_groups} of events before byte {offset}")
        events.extend(group[0])
        offset = group[1]
    return events, None


def _require_last(path: Path, data: bytes, offset: int) -> None:
    later = data.find(_GROUP_START, offset + 1)
    while later >= 0:
        if _decode_group(data, later) is not None:
            raise LedgerError(
                f"{path} is damaged at byte {offset}: a later group of events is intact, so this one was on disk"
            )
        later = data.find(_GROUP_START, later + 1)


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
