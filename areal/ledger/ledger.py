"""The ledger of a run: the single place where an event is applied to the state and appended to the log."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, Self

from areal.api.data import CanaryReport
from areal.api.errors import LedgerError
from areal.api.table import images_of
from areal.data.image_files import ImageFiles
from areal.data.prompt_stream import PromptStream
from areal.ledger.event_files import (
    NO_GROUP,
    SEGMENT_BYTES,
    AppendFile,
    GroupEnd,
    LedgerReader,
    PayloadReader,
    encode_group,
    events_path,
    not_writable,
    payload_path,
    read_payload,
    recover_folder,
    remedy,
    segment_numbers,
)
from areal.ledger.kept import KeptPayloads, kept_names, read_kept
from areal.ledger.payload import EncodedEpisode, check_payload, record_of, table_of
from areal.ledger.state import FORMAT, IDENTITY, BatchRecord, Event, LedgerState
from areal.system.durable import fsync_path

# ----------------------------------------------------------------------------------------------------------------------
# Which payload segments and image files of a run are deleted (rollout.keep_payloads), and how.
#
# The `pruned` event is durable before the first file is deleted: files that a crash leaves are deleted at the next
# start.

_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")


@dataclass(frozen=True, slots=True)
class Retention:
    """What stays besides waiting episodes and the batches since the second newest recovery checkpoint."""

    is_all: bool = True
    num_steps: int = 0
    """Batches of the newest train steps that stay too."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """all, recover, or a number of steps. ValueError for other texts."""
        if text in ("all", "recover"):
            return cls(is_all=text == "all")
        return cls(is_all=False, num_steps=int(text))

    def first_kept_step(self, state: LedgerState) -> int:
        """The first train step whose batch stays; 0 = all stay."""
        if self.is_all or state.trained_steps is None:
            return 0
        second = max((step for step in state.committed_steps if step < state.committed_step), default=0)
        return max(0, min(second, state.trained_steps - self.num_steps)) if self.num_steps else second


def prunable(state: LedgerState, first_kept_step: int, segments: Collection[int]) -> list[int]:
    """The existing segments that hold nothing which must stay, ascending. The newest always stays."""
    if first_kept_step <= 0:
        return []
    needed = state.needed_segments(first_kept_step)
    return sorted(
        segment
        for segment in segments
        if segment < state.last_segment and segment not in needed | state.pruned_segments
    )


def delete_segments(folder: Path, segments: Collection[int]) -> None:
    """Delete the files of pruned segments that still exist. Raises OSError."""
    numbers = [number for number in segment_numbers(folder) if number in segments]
    for number in numbers:
        payload_path(folder, number).unlink(missing_ok=True)
    if numbers:
        fsync_path(folder)


def delete_unused_images(folder: Path, files: ImageFiles) -> int:
    """Delete the images that no existing payload of the ledger in `folder` refers to; returns their number.

    Call it before the first episode: an image is stored before the payload that refers to it. Raises OSError, and
    LedgerError when a payload is damaged; then all images stay.
    """
    if not files.unreachable(()):
        return 0
    used = {digest for payload in _existing_payloads(folder) for digest in _images_of(payload)}
    unused = files.unreachable(used)
    for path in unused:
        path.unlink(missing_ok=True)
    return len(unused)


def _existing_payloads(folder: Path) -> Iterator[bytes]:
    """The payloads of accepted episodes, and those kept for readers. LedgerError for a damaged one of the former."""
    segments = set(segment_numbers(folder))
    with PayloadReader(folder) as reader:
        for event in LedgerReader(folder).events():
            if event["event"] == "accepted" and event["payload"][0] in segments:
                segment, offset, size = event["payload"]
                payload = reader.read((segment, offset, size))
                check_payload(event["id"], payload)
                yield payload
    for episode_id, attempt in kept_names(folder):
        with suppress(LedgerError):  # no reader can show a damaged one
            if (kept := read_kept(folder, episode_id, attempt)) is not None:
                yield kept


def _images_of(payload: bytes) -> Iterator[str]:
    """Digests of the images of the trajectories, and of those in the messages of recorded sessions."""
    table = table_of(payload)
    yield from (image.sha256 for row in images_of(table) for image in row)
    yield from _DIGEST.findall(record_of(table))


# ----------------------------------------------------------------------------------------------------------------------
# Group commit: one background task makes buffered events and payloads durable together.
#
# Its loop waits for a call of `durable`, a full buffer, the linger time or `close`. It writes one group at a time in a
# thread: first the payloads, then the event lines that refer to them.

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
        if self._failure is not None:
            raise self._failure
        self._group.events.append(event)
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(self._linger_s, self._wake.set)

    def append_payload(self, data: bytes) -> tuple[int, int, int]:
        if self._failure is not None:
            raise self._failure
        if self._segment_size >= SEGMENT_BYTES:
            self._segment, self._segment_size = self._segment + 1, 0
        size, group = len(data), self._group
        where = (self._segment, self._segment_size, size)
        self._segment_size += size
        group.payloads.append((self._segment, data))
        group.num_bytes += size
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


MAX_REASON = 400
"""Maximum length of a recorded reason, in characters."""


class LedgerLock:
    """The lock of the one process that writes a ledger folder, also while it is stopped (SIGSTOP).

    It is released when the process ends, in any way.
    """

    def __init__(self, folder: Path) -> None:
        """LedgerError with pid and host of the holder when another process writes this ledger."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / "writer.lock", "a+")  # noqa: SIM115 - open is what holds the lock
        except OSError as error:
            raise not_writable(folder, error) from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by children, unlike flock
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read() or "another controller"
            self._file.close()
            if not isinstance(error, BlockingIOError | PermissionError):
                raise not_writable(folder, error) from error
            message = f"{folder} is being written by {holder}: end that process first"
            raise LedgerError(message, code="ledger.locked") from None
        self._file.truncate(0)
        self._file.write(f"the controller with pid {os.getpid()} on host {socket.gethostname()}")
        self._file.flush()

    def release(self) -> None:
        self._file.close()


def skip_batch(folder: Path) -> BatchRecord:
    """Leave the newest batch out of the training, which no trainer has consumed: its episodes become rejected.

    Another batch is made for its step. LedgerError when there is none, or another process writes the ledger.
    """
    lock = LedgerLock(folder)
    try:
        recovered = recover_folder(folder)
        state = recovered.state
        record = state.batches.get(state.next_step - 1)
        if record is None or record.step in state.consumed_steps:
            text = f"{folder} records no batch that a trainer has not consumed: there is nothing to skip"
            raise LedgerError(text, code="ledger.no_open_batch")
        event = {"event": "skipped", "step": record.step, "ids": list(record.episode_ids), "at": time.time()}
        state.apply(event)
        writer = GroupWriter(folder, recovered.next_number, after=recovered.end)
        try:
            writer.write([event], [])
        except OSError as error:
            raise not_writable(folder, error) from error
        finally:
            writer.close()
    finally:
        lock.release()
    return record


class Ledger:
    """Records all events of a run. The state of an episode changes only through these methods."""

    def __init__(
        self,
        log: EventLog,
        *,
        state: LedgerState | None = None,
        read_payload: Callable[[tuple[int, int, int]], bytes],
        clock: Callable[[], float] = time.time,
        lock: LedgerLock | None = None,
        lost: Sequence[Path] = (),
        folder: Path | None = None,
        retention: Retention | None = None,
    ) -> None:
        """`lost`: missing files with the newest events. `folder` and `retention`: of the payloads, None = all stay."""
        self._log = log
        self._lock = lock
        self.lost = lost
        self._read_payload = read_payload
        self._clock = clock
        self.state = state or LedgerState()
        self._folder = folder
        self._retention = retention or Retention()

    @classmethod
    def open(cls, folder: Path, *, keep_rejected: int = 0, keep_payloads: str = "all") -> Self:
        """Continue the ledger in `folder`, or create it. New events go to new files.

        `keep_rejected`: number of rejected or failed episodes whose payload stays for readers. `keep_payloads`: see
        `Retention.parse`.

        Raises LedgerError when another process writes this ledger.
        """
        lock = LedgerLock(folder)
        try:
            recovered = recover_folder(folder)
            delete_segments(folder, recovered.state.pruned_segments)
        except (LedgerError, OSError) as error:
            lock.release()
            raise not_writable(folder, error) if isinstance(error, OSError) else error from None
        writer = GroupWriter(folder, recovered.next_number, after=recovered.end, keep_rejected=keep_rejected)
        log = GroupCommitLog(writer, first_segment=recovered.next_number)
        read = partial(read_payload, folder)
        retention = Retention.parse(keep_payloads)
        return cls(
            log,
            state=recovered.state,
            read_payload=read,
            lock=lock,
            lost=recovered.lost,
            folder=folder,
            retention=retention,
        )

    def start(self, on_failure: Callable[[LedgerError], None]) -> None:
        """Start writing, on the running loop. `on_failure` is called with a write error immediately."""
        self._log.start(on_failure)

    async def durable(self) -> None:
        """Return when all events so far are on disk. Raises LedgerError when they cannot be written."""
        await self._log.durable()

    async def close(self) -> None:
        try:
            await self._log.close()
        finally:
            if self._lock is not None:
                self._lock.release()

    def _record(self, event: Event) -> None:
        self.state.apply(event)
        self._log.append(event)

    def started(self, rows: PromptStream[dict[str, Any]], *, total_steps: int) -> None:
        """A controller starts. Raises LedgerError when its data settings differ from those of the ledger."""
        identity = {name: getattr(rows, name) for name in IDENTITY}
        self._record(
            {"event": "started", "format": FORMAT, "at": self._clock(), **identity, "total_steps": total_steps}
        )

    def attached(self, *, step: int, version: int) -> None:
        """A trainer starts or continues at `step` with policy `version`."""
        self._record({"event": "attached", "step": step, "version": version, "at": self._clock()})

    def published(self, *, version: int, kind: str, path: str, canary: CanaryReport | None = None) -> None:
        """Every serving replica holds policy `version`. `canary` None: no answers to the probe were compared."""
        event: Event = {"event": "published", "version": version, "kind": kind, "path": path, "at": self._clock()}
        if canary is not None:
            event["canary"] = dataclasses.asdict(canary)
        self._record(event)

    def compared(self, version: int, report: CanaryReport) -> None:
        """The answer of the servers to the canary probe of `version` was compared with the trainer's score."""
        self._record({"event": "compared", "version": version, "canary": dataclasses.asdict(report)})

    def admit(self, *, version: int, ahead: int | None = None) -> int:
        """The next episode starts. Returns its id, which is its position in the prompt stream.

        `ahead`: see `RunningEpisode.ahead`.
        """
        episode_id = len(self.state.states)
        event: Event = {"event": "admitted", "id": episode_id, "attempt": 0, "version": version}
        if ahead is not None:
            event["ahead"] = ahead
        self._record(event)
        return episode_id

    def admit_again(self, episode_id: int, *, version: int, ahead: int | None = None) -> int:
        """A running episode of an earlier attempt starts again. Returns the number of the attempt."""
        attempt = self.state.running[episode_id].attempt + 1
        event: Event = {"event": "admitted", "id": episode_id, "attempt": attempt, "version": version}
        if ahead is not None:
            event["ahead"] = ahead
        self._record(event)
        return attempt

    def accept(
        self,
        episode_id: int,
        episode: EncodedEpisode,
        *,
        stats: dict[str, float],
        seconds: float,
        replicas: Sequence[str],
        num_interruptions: int,
    ) -> None:
        """A finished episode may be trained on. Its payload is durable no later than this event."""
        where, counts = self._log.append_payload(episode.payload), episode.counts
        event: Event = {
            "event": "accepted",
            "id": episode_id,
            "payload": where,
            "trajectories": counts.num_trajectories,
            "tokens": episode.num_tokens,
            "generated": episode.num_generated,
            "min_version": episode.min_version,
            "max_version": episode.max_version,
            "reward": counts.reward,
            "sessions": counts.num_sessions,
            "finished": counts.num_finished,
            "longest": counts.longest,
            "by_version": counts.by_version,
            "stats": stats,
            "seconds": seconds,
            "replicas": replicas,
            "interruptions": num_interruptions,
        }
        if episode.turn_ids:
            event["turns"] = episode.turn_ids
        self._record(event)

    def reject(self, episode_id: int, reason: str, *, payload: bytes = b"") -> None:
        """An episode is not trained on: the workflow or the filter rejected it, or it is stale.

        `payload`: its trajectories, kept for readers within the limit; empty = there are none.
        """
        self._keep(episode_id, payload)
        self._record({"event": "rejected", "id": episode_id, "reason": _clean(reason)})

    def fail(self, episode_id: int, reason: str, *, kind: str, payload: bytes = b"") -> None:
        """An episode ended with an error. `kind`: equal for errors that are counted together. `payload`: its answers
        so far, as in `reject`."""
        self._keep(episode_id, payload)
        self._record({"event": "failed", "id": episode_id, "reason": _clean(reason), "kind": kind})

    def _keep(self, episode_id: int, payload: bytes) -> None:
        running = self.state.running.get(episode_id)
        if payload and running is not None:  # a stale episode that was accepted has its payload already
            self._log.keep(episode_id, running.attempt, payload)

    def batched(
        self,
        *,
        step: int,
        version: int,
        mask_before: int,
        episode_ids: Sequence[int],
        stats: dict[str, float],
        by_tree: bool = False,
    ) -> BatchRecord:
        """Record the composition of a train batch. `by_tree`: as in BatchRecord."""
        event: Event = {
            "event": "batched",
            "step": step,
            "version": version,
            "mask_before": mask_before,
            "ids": list(episode_ids),
            "stats": stats,
            "at": self._clock(),
        }
        self._record(event | {"by_tree": True} if by_tree else event)
        return self.state.batches[step]

    def consumed(self, *, step: int, version: int, weights: str = "", ess: float | None = None) -> None:
        """The trainer has trained on batch `step` and sent `version`. A repeated call changes nothing.

        `weights`: checksum of the actor's weights after the step, in hex; empty = unknown. `ess`: effective sample size
        of its importance weights before the update, as a share of the tokens; None = not measured.
        """
        if self.state.trained_steps == step + 1 and step in self.state.consumed_steps:
            return
        kind = "trained_again" if step in self.state.consumed_steps else "consumed"
        event: Event = {"event": kind, "step": step, "version": version, "weights": weights, "at": self._clock()}
        self._record(event if ess is None else event | {"ess": ess})

    def evaluated(
        self, *, step: int, mode: str, result: dict[str, float], rewards: dict[str, list[tuple[int, float]]]
    ) -> None:
        """An evaluation is complete. Its result is final, also after a restart. `rewards`: set -> row, mean reward."""
        facts = {"step": step, "mode": mode, "result": result, "rewards": rewards}
        self._record({"event": "evaluated", **facts, "at": self._clock()})

    def committed(self, *, step: int, path: str) -> None:
        """A recovery checkpoint after `step` train steps is complete."""
        self._record({"event": "committed", "step": step, "path": path, "at": self._clock()})

    async def prune(self) -> None:
        """Delete the payload segments that rollout.keep_payloads does not keep. Call it after a recovery checkpoint.

        Raises LedgerError when the ledger cannot be written.
        """
        first_step = self._retention.first_kept_step(self.state)
        if self._folder is None or first_step <= 0:
            return
        existing = await asyncio.to_thread(segment_numbers, self._folder)
        segments = prunable(self.state, first_step, existing)
        if segments:
            self._record({"event": "pruned", "segments": segments, "first_step": first_step, "at": self._clock()})
            await self.durable()
            try:
                await asyncio.to_thread(delete_segments, self._folder, segments)
            except OSError as error:
                raise not_writable(self._folder, error) from error

    def prune_images(self, files: ImageFiles) -> int:
        """Delete unused images, unless rollout.keep_payloads=all."""
        if self._folder is None or self._retention.is_all:
            return 0
        return delete_unused_images(self._folder, files)

    def payload(self, episode_id: int, where: tuple[int, int, int]) -> bytes:
        """The payload of an accepted episode, which must be durable. Raises LedgerError when it is damaged."""
        try:
            data = self._read_payload(where)
            check_payload(episode_id, data)
        except LedgerError as error:
            raise LedgerError(f"{error}; {remedy(self.state)}", code=error.code) from error
        return data


def _clean(reason: str) -> str:
    return " ".join(reason.encode("utf-8", "replace").decode().split())[:MAX_REASON]
