"""The trajectories of a run as records to read: which episodes match a question, and what is recorded of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from areal.api.errors import LedgerError
from areal.api.images import ImageRef
from areal.data.prompt_stream import PromptStream, row_stream
from areal.ledger.event_files import PayloadReader, open_reader
from areal.ledger.kept import read_kept
from areal.ledger.payload import images, payload_head, reward_parts, to_columns
from areal.ledger.reading_progress import Progress
from areal.ledger.session_columns import recorded_sessions, session_columns
from areal.ledger.state import Event


@dataclass(slots=True, kw_only=True)
class EpisodeRecord:
    """What the events say of one episode."""

    episode: int
    state: str = "running"
    attempt: int = 0
    reason: str = ""
    """Why it was rejected or failed."""
    step: int | None = None
    """Train step of its batch, counted from 0."""
    payload: tuple[int, int, int] | None = None
    """Where its trajectories are; None = it was not accepted."""
    stats: dict[str, float] = field(default_factory=dict[str, float])
    """Statistics of the workflow."""
    row: int | None = None
    """Index of its dataset row."""
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory of an episode. T tokens."""

    record: EpisodeRecord
    number: int
    """Place of the trajectory in its episode."""
    reward: float
    """NaN when it was not scored."""
    parts: dict[str, float]
    """Score of each reward function."""
    finished: bool
    token_ids: Sequence[int]
    in_loss: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    """Policy version of each token; -1 = not generated."""
    images: Sequence[ImageRef] = ()
    """In the order of their places in the tokens."""
    turns: Sequence[int] = ()
    """Of a session of an agent: the turn of each token, from 0; -1 = not in the loss. Else empty."""
    session: Mapping[str, Any] | None = None
    """What the workflow recorded of the session of an agent."""
    without_reward: Sequence[Mapping[str, Any]] = ()
    """Of the first trajectory: what it recorded of the sessions of the episode that have no trajectory."""

    def spans(self) -> Iterator[tuple[bool, int, int]]:
        """Consecutive tokens that are all generated, in one turn, or all not: (generated, first, end)."""
        made = np.asarray(self.versions) >= 0
        kind = np.where(made, np.asarray(self.turns) if len(self.turns) else -1, -2)
        edges = [0, *(np.flatnonzero(kind[1:] != kind[:-1]) + 1).tolist(), len(made)]
        for first, end in itertools.pairwise(edges):
            yield bool(made[first]), first, end


@dataclass(slots=True)
class Samples:
    """The episodes of a ledger, and access to their trajectories."""

    folder: Path
    records: dict[int, EpisodeRecord] = field(default_factory=dict[int, EpisodeRecord])
    batches: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Episodes of each train step."""
    num_rows: int = 0
    """Rows of the dataset."""

    @classmethod
    def read(cls, folder: Path) -> Samples:
        """One pass over the events. Raises LedgerError when there are none, or lines are damaged."""
        found, rows = cls(folder), None
        for event in open_reader(folder).events():
            if event["event"] == "started":
                rows, found.num_rows = row_stream(event), event["num_rows"]
            else:
                found._take(event, rows)
        return found

    def _take(self, event: Event, rows: PromptStream[int] | None) -> None:
        kind = event["event"]
        if kind == "admitted":
            record = self._record(event)
            record.attempt = event["attempt"]
            if rows is not None:
                record.row, record.epoch = rows.index(event["id"]), event["id"] // rows.rows_per_epoch
        elif kind == "accepted":
            record = self._record(event)
            record.state, record.payload, record.stats = "accepted", tuple(event["payload"]), event["stats"]
        elif kind in ("rejected", "failed"):
            record = self._record(event)
            record.state, record.reason = kind, event["reason"]
        elif kind == "batched":
            self.batches[event["step"]] = event["ids"]
            for record in self.of_step(event["step"]):
                record.state, record.step = "batched", event["step"]
        elif kind == "consumed" and event["step"] in self.batches:
            for record in self.of_step(event["step"]):
                record.state = "trained"

    def _record(self, event: Event) -> EpisodeRecord:
        return self.records.setdefault(event["id"], EpisodeRecord(episode=event["id"]))

    def episode(self, episode_id: int) -> EpisodeRecord:
        """LedgerError when there is no such episode."""
        if (found := self.records.get(episode_id)) is None:
            known = f"its ids are 0 to {max(self.records)}" if self.records else "it has no episodes"
            message = f"there is no episode {episode_id} in {self.folder}: {known}"
            raise LedgerError(message, code="ledger.not_found")
        return found

    def of_step(self, step: int) -> list[EpisodeRecord]:
        """The episodes of a batch. LedgerError when there is no batch of this step."""
        if (ids := self.batches.get(step)) is None:
            known = f"batches are recorded for steps {min(self.batches)} to {max(self.batches)}"
            message = f"there is no batch of step {step} in {self.folder}: {known if self.batches else 'it has none'}"
            raise LedgerError(message, code="ledger.not_found")
        return [self._record({"id": episode_id}) for episode_id in ids]

    def newest(self) -> Iterator[EpisodeRecord]:
        """All episodes, the newest first."""
        return (self.records[episode_id] for episode_id in sorted(self.records, reverse=True))

    def not_trained(self, reason: str) -> Iterator[EpisodeRecord]:
        """Rejected and failed episodes whose reason contains `reason`, the newest first."""
        for record in self.newest():
            if record.state in ("rejected", "failed") and reason.lower() in record.reason.lower():
                yield record

    def ranked(self, *, best: bool) -> Iterator[Sample]:
        """The accepted trajectories from the highest reward down, or from the lowest up; of equal ones the newest."""
        sign = -1.0 if best else 1.0
        places: list[tuple[float, int, int]] = []
        with Progress("episodes read") as progress, PayloadReader(self.folder) as reader:
            for record in self.records.values():
                progress.step()
                rewards = _rewards(reader, record)
                places += [(sign * reward, -record.episode, number) for number, reward in enumerate(rewards)]
        for _, episode_id, number in sorted(places):
            yield self.trajectories(self.records[-episode_id])[number]

    def trajectories(self, record: EpisodeRecord) -> list[Sample]:
        """The recorded trajectories of an episode; empty when none are recorded, or they cannot be read."""
        try:
            if record.payload is None:
                is_over = record.state in ("rejected", "failed")
                kept = read_kept(self.folder, record.episode, record.attempt) if is_over else None
                return samples_of(record, kept) if kept is not None else []
            with PayloadReader(self.folder) as reader:
                return samples_of(record, reader.read(record.payload))
        except LedgerError:
            return []


def _rewards(reader: PayloadReader, record: EpisodeRecord) -> list[float]:
    """Rewards of the accepted trajectories; empty when there are none, or they cannot be read."""
    try:
        return (
            [] if record.payload is None else to_columns(record.episode, reader.read(record.payload)).rewards.tolist()
        )
    except LedgerError:
        return []


def samples_of(record: EpisodeRecord, payload: bytes) -> list[Sample]:
    """The trajectories of a payload. Raises LedgerError when it is damaged."""
    columns = to_columns(record.episode, payload)
    names = payload_head(payload).reward_names
    parts = reward_parts([payload], names)
    sessions, pictures = session_columns(payload), images(payload)
    recorded = [] if sessions is None else recorded_sessions(sessions.record)
    numbers: list[int] = [] if sessions is None else sessions.sessions.tolist()
    samples: list[Sample] = []
    end = 0
    for number, size in enumerate(columns.lengths.tolist()):
        begin, end = end, end + size
        scored = zip(names, parts[number].tolist(), strict=True)
        samples.append(
            Sample(
                record=record,
                number=number,
                reward=float(columns.rewards[number]),
                parts={name: score for name, score in scored if score == score},
                finished=bool(columns.finished[number]),
                token_ids=columns.token_ids[begin:end].tolist(),
                in_loss=columns.loss_mask[begin:end].tolist(),
                logprobs=columns.rollout_logprobs[begin:end].tolist(),
                versions=columns.output_versions[begin:end].tolist(),
                images=pictures[number] if pictures else (),
                turns=() if sessions is None else sessions.turns[begin:end].tolist(),
                session=recorded[numbers[number]] if recorded else None,
                without_reward=recorded[max(numbers) + 1 :] if number == 0 and recorded else (),
            )
        )
    return samples
