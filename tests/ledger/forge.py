"""Writes ledger files with any events that a test needs, also ones that no controller would write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal.api.data import BASELINE, Trajectory, TrajectoryGroup
from areal.ledger.event_files import NO_GROUP, GroupEnd, encode_group, events_path, payload_path
from areal.ledger.payload import encode_episode
from areal.ledger.state import FORMAT, Event


class Forge:
    """A ledger written by hand. A batch has two of eight rows; a trajectory has one generated token."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.payloads = b""
        self.group_size = 3
        self.baseline: float | None = None
        """Of every trajectory from now on."""
        self.answers: dict[int, TrajectoryGroup] = {}
        """The trajectories of episodes that have others than one with two tokens."""

    def started(self, **changes: Any) -> None:
        identity = {"format": FORMAT, "seed": 1, "batch_size": 2, "num_rows": 8, "rows_per_epoch": 8, "shuffle": True}
        self.events.append({"event": "started", "at": 1.0, "total_steps": 9} | identity | changes)

    def attached(self, step: int, version: int) -> None:
        self.events.append({"event": "attached", "step": step, "version": version, "at": 1.0})

    def published(self, version: int) -> None:
        self.events.append({"event": "published", "version": version, "kind": "disk", "path": "v", "at": 1.0})

    def admitted(self, *ids: int, version: int = 0, attempt: int = 0) -> None:
        for number in ids:
            self.events.append({"event": "admitted", "id": number, "attempt": attempt, "version": version})

    def accepted(self, *ids: int, version: int = 0, **changes: Any) -> None:
        for number in ids:
            group = self.answers.get(number) or self._short_answer(number, version)
            episode = encode_episode(number, group)
            where = (1, len(self.payloads), len(episode.payload))
            self.payloads += episode.payload
            event = {
                "event": "accepted",
                "id": number,
                "payload": where,
                "trajectories": episode.counts.num_trajectories,
                "tokens": episode.num_tokens,
                "generated": episode.num_generated,
                "min_version": version,
                "max_version": version,
                "reward": episode.reward,
                "sessions": episode.counts.num_sessions,
                "finished": episode.counts.num_finished,
                "longest": episode.counts.longest,
                "by_version": [list(entry) for entry in episode.counts.by_version],
                "stats": {"num_turns": 1.0},
                "seconds": 0.25,
                "replicas": ["server-0"],
                "interruptions": 0,
            }
            self.events.append(event | changes)

    def _short_answer(self, number: int, version: int) -> TrajectoryGroup:
        trajectory = Trajectory(
            token_ids=[number, 7],
            loss_mask=[0, 1],
            rollout_logprobs=[0.0, -0.5],
            output_versions=[-1, version],
            reward=float(number),
            finished=True,
            columns={} if self.baseline is None else {BASELINE: self.baseline},
        )
        return TrajectoryGroup(trajectories=[trajectory])

    def rejected(self, number: int, reason: str = "workflow") -> None:
        self.events.append({"event": "rejected", "id": number, "reason": reason})

    def failed(self, number: int, reason: str = "ValueError: no") -> None:
        self.events.append({"event": "failed", "id": number, "reason": reason})

    def batched(self, step: int, *ids: int, version: int | None = None) -> None:
        at = step if version is None else version
        event = {"event": "batched", "step": step, "version": at, "mask_before": 0, "ids": list(ids), "stats": {}}
        self.events.append(event | {"at": 1.0})

    def consumed(self, step: int, *, version: int | None = None, weights: str = "", again: bool = False) -> None:
        kind, version = "trained_again" if again else "consumed", step + 1 if version is None else version
        self.events.append({"event": kind, "step": step, "version": version, "weights": weights, "at": 1.0})

    def trained(self, step: int, *, weights: str = "", again: bool = False) -> None:
        self.published(step + 1)
        self.consumed(step, weights=weights, again=again)

    def skipped(self, step: int, *ids: int) -> None:
        self.events.append({"event": "skipped", "step": step, "ids": list(ids), "at": 1.0})

    def committed(self, step: int) -> None:
        self.events.append({"event": "committed", "step": step, "path": f"recover/step{step}", "at": 1.0})

    def evaluated(self, step: int, mode: str, rewards: dict[str, list[tuple[int, float]]]) -> None:
        facts = {"step": step, "mode": mode, "result": {}, "rewards": rewards}
        self.events.append({"event": "evaluated", "at": 1.0} | facts)

    def two_steps(self) -> None:
        """Admits 0 to 5, trains on 0 to 3 in two steps, and leaves 4 waiting and 5 running."""
        self.started()
        self.attached(0, 0)
        self.admitted(0, 1, 2, 3, 4, 5)
        self.accepted(0, 1, 2, 3, 4)
        self.batched(0, 0, 1)
        self.trained(0, weights="aa")
        self.batched(1, 2, 3)
        self.trained(1, weights="bb")
        self.committed(2)

    def write(self, *, number: int = 1, after: GroupEnd = NO_GROUP, at: Callable[[int], float] = float) -> GroupEnd:
        """Write what was said so far, in small groups, as the files `number`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = b""
        for begin in range(0, len(self.events), self.group_size):
            events = self.events[begin : begin + self.group_size]
            group, after = encode_group(after, at(after.number), events)
            whole += group
        events_path(self.folder, number).write_bytes(whole)
        payload_path(self.folder, number).write_bytes(self.payloads)
        return after
