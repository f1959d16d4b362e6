"""The history of one episode, or of one train batch, from the files of the ledger."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from areal.api.columns import ColumnSpec
from areal.api.data import TURNS, reward_parts
from areal.api.errors import LedgerError
from areal.api.images import ImageRef
from areal.api.table import SESSION, images_of
from areal.data.prompt_stream import PromptStream, row_stream
from areal.ledger.event_files import PayloadReader, Progress, open_reader
from areal.ledger.kept import read_kept
from areal.ledger.payload import columns_of_row, read_table, record_of, recorded_sessions, to_table
from areal.ledger.state import Event

# ----------------------------------------------------------------------------------------------------------------------
# The trajectories of a run as records to read: which episodes match a question, and what is recorded of each.


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
    """Place of its trajectories; None = it was not accepted."""
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
    columns: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Further columns of the workflow: those per token over the tokens in the loss, None without any."""
    images: Sequence[ImageRef] = ()
    """The images in the order of their places in the tokens."""
    turns: Sequence[int] = ()
    """Turn of each token of a session, from 0; -1 = not in the loss. Empty = no session."""
    session: Mapping[str, Any] | None = None
    """What the workflow recorded of the session of an agent."""
    without_reward: Sequence[Mapping[str, Any]] = ()
    """What the first trajectory recorded of the sessions of the episode that have no trajectory."""

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
        result, rows = cls(folder), None
        for event in open_reader(folder).events():
            if event["event"] == "started":
                rows, result.num_rows = row_stream(event), event["num_rows"]
            else:
                result._take(event, rows)
        return result

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
            counted_as, reason = event.get("kind", ""), event["reason"]
            record.state, record.reason = kind, reason if counted_as in reason else f"{counted_as}: {reason}"
        elif kind == "batched":
            self.batches[event["step"]] = event["ids"]
            for record in self.of_step(event["step"]):
                record.state, record.step = "batched", event["step"]
        elif kind == "consumed" and event["step"] in self.batches:
            for record in self.of_step(event["step"]):
                record.state = "trained"
        elif kind == "skipped":
            for record in self.of_step(event["step"]):
                record.state, record.reason, record.step = "rejected", "skipped", None
            del self.batches[event["step"]]

    def _record(self, event: Event) -> EpisodeRecord:
        return self.records.setdefault(event["id"], EpisodeRecord(episode=event["id"]))

    def episode(self, episode_id: int) -> EpisodeRecord:
        """LedgerError when there is no such episode."""
        if (result := self.records.get(episode_id)) is None:
            known = f"its ids are 0 to {max(self.records)}" if self.records else "it has no episodes"
            message = f"there is no episode {episode_id} in {self.folder}: {known}"
            raise LedgerError(message, code="ledger.not_found")
        return result

    def of_step(self, step: int) -> list[EpisodeRecord]:
        """The episodes of a batch. LedgerError when there is no batch of this step."""
        if (ids := self.batches.get(step)) is None:
            steps = self.batches
            known = f"batches are recorded for steps {min(steps)} to {max(steps)}" if steps else "it has none"
            message = f"there is no batch of step {step} in {self.folder}: {known}"
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
        return [] if record.payload is None else to_table(record.episode, reader.read(record.payload)).rewards.tolist()
    except LedgerError:
        return []


def samples_of(record: EpisodeRecord, payload: bytes) -> list[Sample]:
    """The trajectories of a payload. Raises LedgerError when it is damaged."""
    table = to_table(record.episode, payload)
    sessions, pictures, recorded = table.columns.get(SESSION), images_of(table), recorded_sessions(record_of(table))
    numbers: list[int] = [] if sessions is None else sessions.tolist()
    samples: list[Sample] = []
    end = 0
    for number, size in enumerate(table.lengths.tolist()):
        begin, end = end, end + size
        in_loss: list[int] = table.loss_mask[begin:end].tolist()
        columns = columns_of_row(table, number, slice(begin, end))
        samples.append(
            Sample(
                record=record,
                number=number,
                reward=float(table.rewards[number]),
                parts=reward_parts(columns),
                finished=bool(table.finished[number]),
                token_ids=table.token_ids[begin:end].tolist(),
                in_loss=in_loss,
                logprobs=table.rollout_logprobs[begin:end].tolist(),
                versions=table.output_versions[begin:end].tolist(),
                images=pictures[number] if pictures else (),
                turns=columns.get(TURNS, ()),
                columns={spec.name: _shown(spec, values, in_loss) for spec, values in columns.items() if spec.show},
                session=recorded[numbers[number]] if recorded else None,
                without_reward=recorded[max(numbers) + 1 :] if number == 0 and recorded else (),
            )
        )
    return samples


def _shown(spec: ColumnSpec, values: Any, in_loss: Sequence[int]) -> float | None:
    """A column in one number, as its declaration says."""
    if spec.per == "sequence":
        return float(np.asarray(values, np.float64).mean())
    rows: np.ndarray = np.asarray(values, np.float64)[np.asarray(in_loss, bool)]
    rows = rows[~np.isnan(rows)]
    if not rows.size:
        return None
    return float(rows.sum() if spec.show == "sum" else rows.mean())


def timed_events(folder: Path) -> Iterator[tuple[float, Event]]:
    """All events, each with the time at which its group was written. Raises LedgerError when lines are damaged."""
    at = 0.0
    for event in open_reader(folder).events():
        if event["event"] == "group":
            at = event["at"]
        yield at, event


def when(at: float) -> str:
    """Local time with milliseconds; the plain number when it is outside the range of dates."""
    try:
        whole = math.floor(at)
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(whole)) + f".{int((at - whole) * 1000):03d}"
    except (OverflowError, ValueError, OSError):
        return f"time {at}"


@dataclass(slots=True)
class _Timeline:
    """Lines with their times, in the order of the events."""

    entries: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])

    def add(self, at: float, line: str) -> None:
        self.entries.append((at, line))

    def lines(self) -> list[str]:
        lines = [f"{when(at)}  {at - self.entries[0][0]:+11.3f} s  {line}" for at, line in self.entries]
        if any(later[0] < earlier[0] for earlier, later in pairwise(self.entries)):
            lines.append("(the clock went back; the lines are in the order of the events)")
        return lines


@dataclass(slots=True)
class _EpisodeHistory:
    """The state of one episode after the events so far."""

    episode_id: int
    timeline: _Timeline = field(default_factory=_Timeline)
    state: str = ""
    rows: PromptStream[int] | None = None
    num_admitted: int = 0
    accepted: Event | None = None
    step: int = -1
    """Train step of its batch; -1 = in none."""
    weights: str = ""
    is_trained: bool = False
    is_covered: bool = False

    def take(self, at: float, event: Event) -> None:
        kind = event["event"]
        if kind == "started":
            self.rows = row_stream(event)
            if self.state == "running":
                self.timeline.add(at, "the controller restarted: this attempt is lost, the episode starts again")
        elif kind == "admitted" and event["attempt"] == 0:
            self.num_admitted = max(self.num_admitted, event["id"] + 1)
        if event.get("id") == self.episode_id:
            self._own(at, event)
        elif kind == "batched" and self.episode_id in event["ids"]:
            self._batched(at, event)
        elif kind == "skipped" and self.episode_id in event["ids"]:
            self.state, self.step = "rejected", -1
            self.timeline.add(at, f"rejected: batch {event['step']} was skipped by hand")
        elif self.step >= 0 and kind in ("consumed", "trained_again", "committed", "attached"):
            self._trained(at, event)

    def _own(self, at: float, event: Event) -> None:
        kind = event["event"]
        if kind == "admitted":
            self.state = "running"
            again = f", attempt {event['attempt']}" if event["attempt"] else ""
            self.timeline.add(at, f"admitted at policy version {event['version']}{again}: {self.row()}")
        elif kind == "accepted":
            self.state, self.accepted = "accepted", event
            self.timeline.add(at, _accepted_line(event))
        else:
            self.state = kind
            self.timeline.add(at, f"{kind}: {event['reason']}")

    def row(self) -> str:
        """The dataset row of its prompt."""
        if self.rows is None:
            return "unknown row"
        epoch, position = divmod(self.episode_id, self.rows.rows_per_epoch)
        return f"row {self.rows.index(self.episode_id)} of the dataset, epoch {epoch}, position {position}"

    def _batched(self, at: float, event: Event) -> None:
        self.state, self.step = "batched", event["step"]
        line = f"in batch {self.step}, place {event['ids'].index(self.episode_id) + 1} of {len(event['ids'])}"
        line += f", for policy version {event['version']}"
        low = -1 if self.accepted is None else self.accepted["min_version"]
        if low >= 0:
            line += f", staleness {event['version'] - low}"
        if event["mask_before"] > 0:
            line += f"; tokens of versions below {event['mask_before']} are masked"
        self.timeline.add(at, line)

    def _trained(self, at: float, event: Event) -> None:
        kind, step = event["event"], event["step"]
        if kind == "consumed" and step == self.step:
            self.state, self.is_trained, self.weights = "consumed", True, event.get("weights", "")
            self.timeline.add(at, f"consumed: trained on in step {step}, which made version {event['version']}")
        elif kind == "trained_again" and step == self.step:
            self.is_trained = True
            self.timeline.add(at, f"trained on again in step {step}; {same_weights(self.weights, event)}")
        elif kind == "attached" and step <= self.step and self.is_trained:
            self.is_trained = self.is_covered = False
            self.timeline.add(at, f"the trainer recovered at step {step}: batch {self.step} is trained on again")
        elif kind == "committed" and step > self.step and self.is_trained and not self.is_covered:
            self.is_covered = True
            self.timeline.add(at, f"included in the checkpoint after {step} steps ({event['path']})")


def same_weights(before: str, event: Event) -> str:
    """Whether the weights after a repeated step are those of the first time."""
    weights = event.get("weights", "")
    if not before or not weights:
        return "it is unknown whether the weights are the same"
    return "the weights are bitwise the same" if weights == before else "the weights differ"


def _accepted_line(event: Event) -> str:
    made = "no version" if event["max_version"] < 0 else f"versions {event['min_version']} to {event['max_version']}"
    stats = "".join(f", {name} {value:g}" for name, value in event["stats"].items())
    return (
        f"accepted: reward {event['reward']:g}, {event['trajectories']} trajectories with {event['tokens']} tokens "
        f"({event['generated']} in the loss) by {made}; {event['seconds']:.3f} s on "
        f"{', '.join(event['replicas']) or 'no replica'}, {event['interruptions']} interruptions{stats}"
    )


def show_episode(folder: Path, episode_id: int) -> list[str]:
    """The history of one episode. Raises LedgerError when there is no such episode."""
    history = _EpisodeHistory(episode_id)
    for at, event in timed_events(folder):
        history.take(at, event)
    if not history.state:
        known = f"its ids are 0 to {history.num_admitted - 1}" if history.num_admitted else "it has no episodes"
        raise LedgerError(f"there is no episode {episode_id} in {folder}: {known}", code="ledger.not_found")
    lines = [f"episode {episode_id}: {history.state}", *history.timeline.lines()]
    if history.accepted is None:
        return lines
    try:
        with PayloadReader(folder) as reader:
            read_table(reader, history.accepted)
    except LedgerError as error:
        lines.append(f"the trajectories cannot be read: {error}")
    return lines


def show_step(folder: Path, step: int) -> list[str]:
    """The history of the batch of a train step. Raises LedgerError when there is none."""
    rows: PromptStream[int] | None = None
    accepted: dict[int, Event] = {}
    batch: Event | None = None
    timeline, weights, steps = _Timeline(), "", list[int]()
    for at, event in timed_events(folder):
        kind = event["event"]
        if kind == "started":
            rows = row_stream(event)
        elif kind == "accepted" and batch is None:
            accepted[event["id"]] = event
        elif kind == "batched":
            steps.append(event["step"])
            if event["step"] == step:
                batch = event
                timeline.add(at, f"composed of {len(event['ids'])} episodes for policy version {event['version']}")
            elif batch is None:
                for episode_id in event["ids"]:
                    accepted.pop(episode_id, None)
        elif kind == "consumed" and event["step"] == step:
            weights = event.get("weights", "")
            checksum = f" with checksum {weights}" if weights else ""
            timeline.add(at, f"consumed, which made version {event['version']}{checksum}")
        elif kind == "skipped" and event["step"] == step:
            batch = None
            timeline.add(at, f"a batch of {len(event['ids'])} episodes was skipped by hand")
        elif kind == "trained_again" and event["step"] == step:
            timeline.add(at, f"trained on again; {same_weights(weights, event)}")
        elif kind == "evaluated" and event["step"] == step + 1:
            result = ", ".join(f"{name} {value:g}" for name, value in event["result"].items())
            timeline.add(at, f"evaluated after this step ({event['mode']}): {result}")
    if batch is None:
        known = f"batches are recorded for steps {min(steps)} to {max(steps)}" if steps else "it has no batches"
        raise LedgerError(f"there is no batch of step {step} in {folder}: {known}", code="ledger.not_found")
    head = [f"batch of step {step}", *timeline.lines()]
    if batch["mask_before"] > 0:
        head.append(f"tokens of versions below {batch['mask_before']} are masked")
    if text := setpoint_text({name: value for name, value in batch["stats"].items() if name.startswith("setpoint/")}):
        head.append(text)
    return head + _batch_table(batch, accepted, rows)


def setpoint_text(stats: Mapping[str, float]) -> str:
    """What the statistics `setpoint/*` of batches say about rollout.target_staleness; empty = it is not set."""
    if not stats:
        return ""
    shown = [f"{name} {stats[f'setpoint/{name}']:.3g}" for name in ("target", "value", "error")
             if f"setpoint/{name}" in stats]  # fmt: skip
    return f"set-point of staleness: {', '.join(shown)}; lead {stats['setpoint/lead']:.3g} versions"


def _batch_table(batch: Event, accepted: dict[int, Event], rows: PromptStream[int] | None) -> list[str]:
    lines = [f"{'place':>6} {'episode':>8} {'row':>8} {'epoch':>6} {'reward':>10} {'tokens':>8}  versions"]
    for place, episode_id in enumerate(batch["ids"]):
        row, epoch = ("?", "?") if rows is None else (rows.index(episode_id), episode_id // rows.rows_per_epoch)
        start = f"{place + 1:>6} {episode_id:>8} {row:>8} {epoch:>6}"
        event = accepted.get(episode_id)
        if event is None:
            lines.append(f"{start}  not accepted")
            continue
        versions = f"{event['min_version']} to {event['max_version']}"
        lines.append(f"{start} {event['reward']:>10.5g} {event['tokens']:>8}  {versions}")
    return lines
