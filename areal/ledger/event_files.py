"""The file format of a ledger folder: encoding and reading of events, and recovery after a crash.

    RUN/ledger/events-000001.jsonl    one JSON object per line, in groups
    RUN/ledger/payload-000001.bin     payload records (see payload.py), located by [segment, offset, size]

A group is one write, and it is on disk before the next one is written. Its first line holds the number of bytes that
follow, the checksum of the previous group and its own: {"event": "group", "number": 7, "after": CRC-32 of group 6,
"at": seconds, "bytes": 321, "crc": CRC-32 of line and bytes}. A group is therefore valid as a whole or not at all, and
a missing file, a file of another run and a second writer are detected. A damaged last group was incomplete, was never
relied on, and is cut. A damaged group before a valid one means that durable data was changed, which is an error. Each
start of a controller opens new files. Payload bytes without an event belong to an incomplete group and are not read.
An events file is created before the payload files of its controller, so a payload file without one shows a lost file.
"""

import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self, TextIO

import orjson

from areal.api.errors import LedgerError
from areal.ledger.state import Event, LedgerState
from areal.system.durable import fsync_path

# ----------------------------------------------------------------------------------------------------------------------
# Progress output of long reads, on standard error.

FIRST_S = 2.0
"""The first line is written after this time."""
BETWEEN_S = 1.0
_STEPS_PER_CHECK = 256  # Steps between two reads of the clock.


class Progress:
    """Counts steps. On a terminal it overwrites one line; otherwise it writes lines at increasing intervals."""

    def __init__(self, what: str, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._stream = stream or sys.stderr
        self._clock = clock
        self._next_s = clock() + FIRST_S
        self._between_s = BETWEEN_S
        self._count = 0
        self._is_shown = False

    def step(self) -> None:
        self._count += 1
        if self._count % _STEPS_PER_CHECK == 0 and self._clock() >= self._next_s:
            self._show()

    def _show(self) -> None:
        is_terminal = self._stream.isatty()
        if not is_terminal:
            self._between_s *= 2  # keeps log files short
        self._next_s = self._clock() + self._between_s
        self._stream.write(f"\r{self._count} {self._what} ..." if is_terminal else f"{self._count} {self._what} ...\n")
        self._stream.flush()
        self._is_shown = is_terminal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


SEGMENT_BYTES = 256 * 2**20
"""A payload segment of this size is closed and the next one is started."""
REMEDY = (
    "restore the ledger folder from a copy, or move it away: training then continues from the newest recovery "
    "checkpoint, with the dataset from its first row"
)

_GROUP_START = b'{"event":"group","number":'
_CRC_KEY = b',"crc":'
_EVENTS = re.compile(r"events-(\d{6})\.jsonl")
_PAYLOAD = re.compile(r"payload-(\d{6})\.bin")


def events_path(folder: Path, number: int) -> Path:
    return folder / f"events-{number:06d}.jsonl"


def payload_path(folder: Path, number: int) -> Path:
    return folder / f"payload-{number:06d}.bin"


def not_writable(folder: Path, error: OSError) -> LedgerError:
    """The error for a ledger folder that cannot be opened, locked or recovered."""
    message = f"cannot open the ledger in {folder}: {error.strerror or error}"
    return LedgerError(message, code="ledger.not_writable")


class GroupEnd(NamedTuple):
    """Identifies the group that the next one follows."""

    number: int
    """Number of groups so far, over all files."""
    crc: int
    """Checksum of the last group; 0 before the first."""


NO_GROUP = GroupEnd(0, 0)


def encode_group(after: GroupEnd, at: float, events: Sequence[Event]) -> tuple[bytes, GroupEnd]:
    """The bytes of the group that follows `after`, and the GroupEnd after it."""
    body = bytearray()
    for event in events:  # one by one: the bytes of orjson take 4 KB each while they exist
        body += orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)
    head = _GROUP_START + b'%d,"after":%d,"at":%.3f,"bytes":%d' % (after.number + 1, after.crc, at, len(body))
    crc = zlib.crc32(body, zlib.crc32(head))
    return b"".join((head, _CRC_KEY, b"%d}\n" % crc, body)), GroupEnd(after.number + 1, crc)


def decode_group(data: bytes, offset: int) -> tuple[list[Event], int] | None:
    """The events of the group at `offset`, its mark first, and the offset of its end; None when it is not valid."""
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
class IncompleteTail:
    """The end of an events file: a group that was not written completely."""

    path: Path
    offset: int
    size: int


class LedgerReader:
    """One pass over the event files of a folder, in order. It only reads, and may run while a controller writes.

    `incomplete`, `damage` and `end` are final once the pass is complete. A missing folder is empty.
    """

    def __init__(self, folder: Path, *, first: int = 0) -> None:
        """`first`: number of the file to begin with, if its first group does not depend on those before it."""
        self._folder, self._first = folder, first
        self.numbers = [number for number in event_numbers(folder) if number >= first]
        """Numbers of the event files."""
        self.segments = segment_numbers(folder)
        """Numbers of the payload files."""
        self.next_number = max([0, *self.numbers, *self.segments]) + 1
        """Number for the files of the next writer."""
        self.incomplete: IncompleteTail | None = None
        self.damage = ""
        """Why the pass ended early: durable lines are damaged."""
        self.pruned: set[int] = set()
        """Payload segments that were deleted on purpose."""
        self.end = NO_GROUP

    def lost(self, *, newest: bool) -> list[Path]:
        """The events files that no longer exist although the payload file of the same number does.

        `newest`: those after all others; else those before the files of a controller that started without them.
        """
        last = max(self.numbers, default=0)
        missing = [number for number in self.segments if number not in self.numbers and (number > last) == newest]
        return [events_path(self._folder, number) for number in missing if not self._is_next_segment(number)]

    def _is_next_segment(self, number: int) -> bool:
        """Whether the controller with the payload file before this one has filled it."""
        before = payload_path(self._folder, number - 1)
        if number - 1 in self.pruned and number - 1 not in self.segments:
            return True
        return before.exists() and before.stat().st_size >= SEGMENT_BYTES

    def groups(self) -> Iterator[list[Event]]:
        """The events of each group, its mark first. Ends at the first damage."""
        for number in self.numbers:
            path = events_path(self._folder, number)
            try:
                data = path.read_bytes()
            except OSError as error:
                self.damage = f"cannot read {path}: {error.strerror or error}"
                return
            if data and self.incomplete is not None:
                tail = self.incomplete
                self.damage = f"{tail.path} is damaged at byte {tail.offset}, but {path.name} follows it"
                self.incomplete = None
                return
            yield from self._groups_of(path, data)
            if self.damage:
                return

    def _groups_of(self, path: Path, data: bytes) -> Iterator[list[Event]]:
        offset = 0
        while offset < len(data):
            group = decode_group(data, offset)
            if group is None:
                if _has_group(data, offset + 1):
                    self.damage = f"{path} is damaged at byte {offset}, but a later group is valid"
                else:
                    self.incomplete = IncompleteTail(path=path, offset=offset, size=len(data) - offset)
                return
            mark = group[0][0]
            if self._first and self.end == NO_GROUP:
                self.end = GroupEnd(mark["number"] - 1, mark["after"])
            if (mark["number"], mark.get("after")) != (self.end.number + 1, self.end.crc):
                self.damage = (
                    f"{path}: the group at byte {offset} does not follow group {self.end.number}: "
                    "events are missing, or two controllers wrote at the same time"
                )
                return
            self.end = GroupEnd(mark["number"], mark["crc"])
            for event in group[0]:
                if event.get("event") == "pruned":
                    self.pruned.update(event["segments"])
            yield group[0]
            offset = group[1]

    def events(self) -> Iterator[Event]:
        """All events. Raises LedgerError when durable lines are damaged."""
        for group in self.groups():
            yield from group
        if self.damage:
            raise LedgerError(f"{self.damage}; {REMEDY}", code="ledger.damaged")


def open_reader(folder: Path) -> LedgerReader:
    """A reader of an existing ledger folder. Raises LedgerError when it holds no events."""
    if not folder.is_dir():
        raise LedgerError(f"{folder} is not a ledger folder: name the folder of a run", code="ledger.not_found")
    reader = LedgerReader(folder)
    if not reader.numbers:
        message = f"{folder} has no events: its controller has not started, or the training needs none (sft, dpo, rw)"
        raise LedgerError(message, code="ledger.not_found")
    return reader


def _has_group(data: bytes, offset: int) -> bool:
    """Whether a valid group starts at `offset` or later."""
    start = data.find(_GROUP_START, offset)
    while start >= 0:
        if decode_group(data, start) is not None:
            return True
        start = data.find(_GROUP_START, start + 1)
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredLedger:
    """The position at which the next writer of a folder continues."""

    state: LedgerState
    end: GroupEnd
    next_number: int
    lost: tuple[Path, ...] = ()
    """Missing files with the newest events. What they recorded is unknown, unless a trainer depends on it."""


def recover_folder(folder: Path) -> RecoveredLedger:
    """Prepare the ledger in `folder` for the next writer, or create it.

    Reads all events, cuts an incomplete tail, and fsyncs what was read: a controller killed between write and fsync
    leaves lines that can be read but would not survive a power failure. Every step may be repeated. Raises LedgerError
    when events are damaged, or payloads that are still needed are missing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fsync_path(folder.parent)
        reader = LedgerReader(folder)
        state = LedgerState.replay(reader.events())
        _require_payloads(folder, state)
        make_durable(folder, reader)
    except OSError as error:
        raise not_writable(folder, error) from error
    lost = tuple(reader.lost(newest=True))
    return RecoveredLedger(state=state, end=reader.end, next_number=reader.next_number, lost=lost)


def make_durable(folder: Path, reader: LedgerReader) -> None:
    """Cut an incomplete tail and fsync what `reader` has read, once its pass is complete. Raises OSError."""
    if reader.incomplete is not None:
        with open(reader.incomplete.path, "r+b") as file:
            file.truncate(reader.incomplete.offset)
            os.fsync(file.fileno())
    if reader.numbers:
        last = reader.numbers[-1]
        newest = [payload_path(folder, number) for number in reader.segments if number >= last]
        for path in [events_path(folder, last), *newest]:
            fsync_path(path)


def _require_payloads(folder: Path, state: LedgerState) -> None:
    """Raise LedgerError when a payload file ends before an episode that waits or may be trained on again."""
    recorded = [batch for step, batch in state.batches.items() if step >= state.committed_step]
    ends = dict[int, int]()
    for batch in recorded:
        for segment, offset, size in batch.payloads:
            ends[segment] = max(ends.get(segment, 0), offset + size)
    for episode in state.waiting.values():
        segment, offset, size = episode.payload
        ends[segment] = max(ends.get(segment, 0), offset + size)
    for segment, end in ends.items():
        path = payload_path(folder, segment)
        present = path.stat().st_size if path.exists() else 0
        if present < end:
            problem = f"{path} has {present} bytes, but the events need {end}" if present else f"{path} is missing"
            raise LedgerError(f"{problem}; {remedy(state)}", code="ledger.bad_payload")


def remedy(state: LedgerState) -> str:
    """What to do about durable data that is lost."""
    return (
        f"{REMEDY}; the newest recorded one is that of step {state.committed_step}" if state.committed_step else REMEDY
    )


def _numbers(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for entry in folder.iterdir() if (match := pattern.fullmatch(entry.name)))


def event_numbers(folder: Path) -> list[int]:
    """The numbers of the event files, ascending."""
    return _numbers(folder, _EVENTS)


def segment_numbers(folder: Path) -> list[int]:
    """The numbers of the payload files, ascending."""
    return _numbers(folder, _PAYLOAD)


class AppendFile:
    """A new file that only grows, except that an incomplete group may be cut. Its directory entry is durable."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        fsync_path(path.parent)

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:  # a nearly full disk accepts a part first
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        """Return when everything written is on disk."""
        os.fsync(self._descriptor)

    def cut(self, size: int) -> None:
        """Keep only the first `size` bytes."""
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        os.close(self._descriptor)


class PayloadReader:
    """Reads payload records without checking them. Keeps the last segment open, since most reads are in order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: tuple[int, int] | None = None  # segment and descriptor
        self._pruned: set[int] | None = None  # read when a segment is missing

    def read(self, where: tuple[int, int, int]) -> bytes:
        """The bytes of one record. Raises LedgerError when the segment is missing or ends before it."""
        segment, offset, size = where
        try:
            if self._open is None or self._open[0] != segment:
                self.close()
                self._open = (segment, os.open(payload_path(self._folder, segment), os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError as error:
            raise self._missing(segment) from error
        except OSError as error:
            raise self._unreadable(segment, error) from error
        try:
            is_there = offset >= 0 and 0 <= size <= os.fstat(self._open[1]).st_size - offset
            data = os.pread(self._open[1], size, offset) if is_there else b""
        except OSError as error:
            raise self._unreadable(segment, error) from error
        if not is_there or len(data) != size:
            path = payload_path(self._folder, segment)
            message = f"{path} ends before byte {offset + size}: a durable payload is missing"
            raise LedgerError(message, code="ledger.bad_payload")
        return data

    def _missing(self, segment: int) -> LedgerError:
        if self._pruned is None:
            reader = LedgerReader(self._folder)
            for _ in reader.groups():
                pass
            self._pruned = reader.pruned
        name = payload_path(self._folder, segment).name
        if segment in self._pruned:
            return LedgerError(f"{name} was pruned (rollout.keep_payloads)", code="ledger.pruned")
        return LedgerError(f"cannot read {self._folder / name}: it does not exist", code="ledger.bad_payload")

    def _unreadable(self, segment: int, error: OSError) -> LedgerError:
        path = payload_path(self._folder, segment)
        return LedgerError(f"cannot read {path}: {error.strerror or error}", code="ledger.bad_payload")

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_payload(folder: Path, where: tuple[int, int, int]) -> bytes:
    """Read one payload, as `PayloadReader.read` does."""
    with PayloadReader(folder) as reader:
        return reader.read(where)
