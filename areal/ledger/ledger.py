"""The ledger of a run: the single place where an event is applied to the state and appended to the log."""

import asyncio
import dataclasses
import fcntl
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from areal.api.data import CanaryReport
from areal.api.errors import LedgerError
from areal.data.prompt_stream import PromptStream
from areal.ledger.event_files import not_writable, read_payload, recover_folder, remedy, segment_numbers
from areal.ledger.event_log import EventLog, GroupCommitLog, GroupWriter
from areal.ledger.payload import EncodedEpisode, check_payload
from areal.ledger.retention import Retention, delete_segments, delete_unused_images, prunable
from areal.ledger.state import IDENTITY, BatchRecord, Event, LedgerState
from areal.system.image_files import ImageFiles

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
            found = recover_folder(folder)
            delete_segments(folder, found.state.pruned_segments)
        except (LedgerError, OSError) as error:
            lock.release()
            raise not_writable(folder, error) if isinstance(error, OSError) else error from None
        writer = GroupWriter(folder, found.next_number, after=found.end, keep_rejected=keep_rejected)
        log = GroupCommitLog(writer, first_segment=found.next_number)
        read = partial(read_payload, folder)
        retention = Retention.parse(keep_payloads)
        return cls(
            log, state=found.state, read_payload=read, lock=lock, lost=found.lost, folder=folder, retention=retention
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
        self._record({"event": "started", "at": self._clock(), **identity, "total_steps": total_steps})

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

    def admit(self, *, version: int) -> int:
        """The next episode starts. Returns its id, which is its position in the prompt stream."""
        episode_id = len(self.state.states)
        self._record({"event": "admitted", "id": episode_id, "attempt": 0, "version": version})
        return episode_id

    def admit_again(self, episode_id: int, *, version: int) -> int:
        """A running episode of an earlier attempt starts again. Returns the number of the attempt."""
        attempt = self.state.running[episode_id].attempt + 1
        self._record({"event": "admitted", "id": episode_id, "attempt": attempt, "version": version})
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
        turns = {"turns": episode.turn_ids} if episode.turn_ids else {}
        self._record(
            {
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
                **turns,
            }
        )

    def reject(self, episode_id: int, reason: str, *, payload: bytes = b"") -> None:
        """An episode is not trained on: the workflow or the filter rejected it, or it is stale.

        `payload`: its trajectories, kept for readers within the limit; empty = there are none.
        """
        self._keep(episode_id, payload)
        self._record({"event": "rejected", "id": episode_id, "reason": _clean(reason)})

    def fail(self, episode_id: int, reason: str, *, payload: bytes = b"") -> None:
        """An episode ended with an error. `payload`: its answers so far, as in `reject`."""
        self._keep(episode_id, payload)
        self._record({"event": "failed", "id": episode_id, "reason": _clean(reason)})

    def _keep(self, episode_id: int, payload: bytes) -> None:
        running = self.state.running.get(episode_id)
        if payload and running is not None:  # a stale episode that was accepted has its payload already
            self._log.keep(episode_id, running.attempt, payload)

    def batched(
        self, *, step: int, version: int, mask_before: int, episode_ids: Sequence[int], stats: dict[str, float]
    ) -> BatchRecord:
        """Record the composition of a train batch."""
        self._record(
            {
                "event": "batched",
                "step": step,
                "version": version,
                "mask_before": mask_before,
                "ids": list(episode_ids),
                "stats": stats,
                "at": self._clock(),
            }
        )
        return self.state.batches[step]

    def consumed(self, *, step: int, version: int, weights: str = "") -> None:
        """The trainer has trained on batch `step` and sent `version`. A repeated call changes nothing.

        `weights`: checksum of the actor's weights after the step, in hex; empty = unknown.
        """
        if self.state.trained_steps == step + 1 and step in self.state.consumed_steps:
            return
        kind = "trained_again" if step in self.state.consumed_steps else "consumed"
        self._record({"event": kind, "step": step, "version": version, "weights": weights, "at": self._clock()})

    def evaluated(self, *, step: int, mode: str, result: dict[str, float]) -> None:
        """An evaluation is complete. Its result is final, also after a restart."""
        self._record({"event": "evaluated", "step": step, "mode": mode, "result": result, "at": self._clock()})

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
        """As `delete_unused_images`, unless rollout.keep_payloads=all."""
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
