"""Owns the ledger of a run: every event goes through the state machine and then to the log, in this one place.

python -m areal.ledger audit RUN             proves the conservation equation from the files; else exit status 1
python -m areal.ledger show RUN EPISODE      tells the life of an episode; --step K: how a batch was made
python -m areal.ledger stats RUN             histograms of staleness, lengths, latency; reasons; rates
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from areal.api.errors import LedgerError
from areal.data.prompt_stream import PromptStream
from areal.ledger.event_files import read_payload, recover_folder
from areal.ledger.event_log import EventLog, GroupCommitLog, GroupWriter
from areal.ledger.lock import LedgerLock
from areal.ledger.payload import EncodedEpisode, check_payload
from areal.ledger.state import BatchRecord, Event, LedgerState

MAX_REASON = 400
"""Longest reason kept, in characters."""


class Ledger:
    """The accounts of a run. All changes of an episode's state go through these methods."""

    def __init__(
        self,
        log: EventLog,
        *,
        state: LedgerState | None = None,
        read_payload: Callable[[tuple[int, int, int]], bytes],
        clock: Callable[[], float] = time.time,
        lock: LedgerLock | None = None,
    ) -> None:
        self._log = log
        self._lock = lock
        self._read_payload = read_payload
        self._clock = clock
        self._fresh: dict[int, bytes] = {}  # payloads of episodes that wait for a batch, as far as memory holds them
        self.state = state or LedgerState()
        self._apply, self._append = self.state.apply, log.append  # looked up once: they run for every event

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Go on with the ledger in `folder`, or begin one: read all events, cut a torn tail, write to new files.

        LedgerError when another process writes it.
        """
        lock = LedgerLock(folder)
        try:
            found = recover_folder(folder)
        except LedgerError:
            lock.release()
            raise
        writer = GroupWriter(folder, found.next_number, after=found.end)
        log = GroupCommitLog(writer, first_segment=found.next_number)
        return cls(log, state=found.state, read_payload=lambda where: read_payload(folder, where), lock=lock)

    def start(self, on_failure: Callable[[LedgerError], None]) -> None:
        """Begin writing, on the running loop; `on_failure` hears of a write error at once."""
        self._log.start(on_failure)

    async def durable(self) -> None:
        """Return when all events so far are on disk. LedgerError when they cannot be written."""
        await self._log.durable()

    async def close(self) -> None:
        try:
            await self._log.close()
        finally:
            if self._lock is not None:
                self._lock.release()

    def _record(self, event: Event) -> None:
        self._apply(event)
        self._append(event)

    def started(self, rows: PromptStream[dict[str, Any]], *, total_steps: int) -> None:
        """A controller begins or goes on. LedgerError when its prompts would not be those of the ledger."""
        self._record(
            {
                "event": "started",
                "at": self._clock(),
                "seed": rows.seed,
                "batch_size": rows.batch_size,
                "num_rows": rows.num_rows,
                "rows_per_epoch": rows.rows_per_epoch,
                "shuffle": rows.shuffle,
                "total_steps": total_steps,
            }
        )

    def attached(self, *, step: int, version: int) -> None:
        """A trainer begins or goes on at `step`, holding policy `version`."""
        self._record({"event": "attached", "step": step, "version": version, "at": self._clock()})

    def published(self, *, version: int, kind: str, path: str) -> None:
        """Every serving replica holds policy `version`."""
        self._record({"event": "published", "version": version, "kind": kind, "path": path, "at": self._clock()})

    def admit(self, *, version: int) -> int:
        """The next episode starts; returns its id, which is its place in the prompt stream."""
        episode_id = len(self.state.states)
        self._record({"event": "admitted", "id": episode_id, "attempt": 0, "version": version})
        return episode_id

    def admit_again(self, episode_id: int, *, version: int) -> int:
        """An episode that a dead controller left running starts anew; returns the number of the attempt."""
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
        """A finished, scored episode may be trained on. Its payload is durable no later than this event."""
        where = self._log.append_payload(episode.payload)
        self._fresh[episode_id] = episode.payload
        self._record(
            {
                "event": "accepted",
                "id": episode_id,
                "payload": where,
                "trajectories": episode.num_trajectories,
                "tokens": episode.num_tokens,
                "generated": episode.num_generated,
                "min_version": episode.min_version,
                "max_version": episode.max_version,
                "reward": episode.reward,
                "stats": stats,
                "seconds": seconds,
                "replicas": replicas,
                "interruptions": num_interruptions,
            }
        )

    def reject(self, episode_id: int, reason: str) -> None:
        """An episode is not trained on: the workflow or the filter said so, or it is too old."""
        self._record({"event": "rejected", "id": episode_id, "reason": _clean(reason)})
        self._fresh.pop(episode_id, None)

    def fail(self, episode_id: int, reason: str) -> None:
        """An episode broke."""
        self._record({"event": "failed", "id": episode_id, "reason": _clean(reason)})

    def batched(
        self, *, step: int, version: int, mask_before: int, episode_ids: Sequence[int], stats: dict[str, float]
    ) -> BatchRecord:
        """Fix the composition of a train batch."""
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
        """The trainer has trained on batch `step` and published `version`. A repeated call changes nothing.

        `weights`: checksum of the actor's weights after the step, in hex; empty = unknown.
        """
        if self.state.trained_steps == step + 1 and step in self.state.consumed_steps:
            return
        kind = "trained_again" if step in self.state.consumed_steps else "consumed"
        self._record({"event": kind, "step": step, "version": version, "weights": weights, "at": self._clock()})

    def evaluated(self, *, step: int, mode: str, result: dict[str, float]) -> None:
        """An evaluation is over: all who ask get this result, also after a death."""
        self._record({"event": "evaluated", "step": step, "mode": mode, "result": result, "at": self._clock()})

    def committed(self, *, step: int, path: str) -> None:
        """A recovery checkpoint after `step` train steps is complete."""
        self._record({"event": "committed", "step": step, "path": path, "at": self._clock()})

    def payload(self, episode_id: int, where: tuple[int, int, int]) -> bytes:
        """The trajectories of an accepted episode. LedgerError when they are damaged."""
        fresh = self._fresh.get(episode_id)
        if fresh is not None:
            return fresh
        data = self._read_payload(where)
        check_payload(episode_id, data)
        return data

    def forget(self, episode_ids: Sequence[int]) -> None:
        """Drop payloads from memory; they are read from disk if asked for again."""
        for episode_id in episode_ids:
            self._fresh.pop(episode_id, None)


def _clean(reason: str) -> str:
    return " ".join(reason.encode("utf-8", "replace").decode().split())[:MAX_REASON]
