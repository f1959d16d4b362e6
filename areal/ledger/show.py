"""Owns telling the life of one episode, or the making of one train batch, from the ledger's files alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from areal.api.errors import LedgerError
from areal.ledger.audit import open_reader
from areal.ledger.event_files import PayloadReader
from areal.ledger.payload_columns import EpisodeColumns, read_columns
from areal.ledger.state import Event
from areal.ledger.violations import rows_of


def timed_events(folder: Path) -> Iterator[tuple[float, Event]]:
    """All events, each with the time at which its group was written. LedgerError when lines are damaged."""
    at = 0.0
    for event in open_reader(folder).events():
        if event["event"] == "group":
            at = event["at"]
        yield at, event


def when(at: float) -> str:
    """A time for people, in local time. Clocks may say anything."""
    try:
        whole = math.floor(at)
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(whole)) + f".{int((at - whole) * 1000):03d}"
    except (OverflowError, ValueError, OSError):
        return f"time {at}"


@dataclass(slots=True)
class _Story:
    """Lines with their times, and how they are told."""

    told: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])

    def tell(self, at: float, line: str) -> None:
        self.told.append((at, line))

    def lines(self) -> list[str]:
        if not self.told:
            return []
        began = self.told[0][0]
        lines = [f"{when(at)}  {at - began:+11.3f} s  {line}" for at, line in self.told]
        if any(later[0] < earlier[0] for earlier, later in zip(self.told, self.told[1:], strict=False)):
            lines.append("(the clock went back meanwhile; the lines are in the order of what happened)")
        return lines


@dataclass(slots=True)
class _Life:
    """What is known of one episode so far."""

    episode_id: int
    story: _Story = field(default_factory=_Story)
    state: str = ""
    identity: Event | None = None
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
            self._started(at, event)
        elif kind == "admitted" and event["attempt"] == 0:
            self.num_admitted = max(self.num_admitted, event["id"] + 1)
        if event.get("id") == self.episode_id:
            self._own(at, event)
        elif kind == "batched" and self.episode_id in event["ids"]:
            self._batched(at, event)
        elif self.step >= 0 and kind in ("consumed", "trained_again", "committed", "attached"):
            self._trained(at, event)

    def _started(self, at: float, event: Event) -> None:
        self.identity = event
        if self.state == "running":
            self.story.tell(at, "the controller was started again: the attempt is lost, the episode is kept")

    def _own(self, at: float, event: Event) -> None:
        kind = event["event"]
        if kind == "admitted":
            self.state = "running"
            again = f", attempt {event['attempt']}" if event["attempt"] else ""
            self.story.tell(at, f"admitted at policy version {event['version']}{again}: {self.row()}")
        elif kind == "accepted":
            self.state, self.accepted = "accepted", event
            self.story.tell(at, _accepted_line(event))
        else:
            self.state = kind
            self.story.tell(at, f"{kind}: {event['reason']}")

    def row(self) -> str:
        """Where its prompt comes from."""
        rows = None if self.identity is None else rows_of(self.identity)
        if rows is None:
            return "no row is known"
        epoch, position = divmod(self.episode_id, rows.rows_per_epoch)
        return f"row {rows.index(self.episode_id)} of the dataset, epoch {epoch}, number {position} in its order"

    def _batched(self, at: float, event: Event) -> None:
        self.state, self.step = "batched", event["step"]
        line = f"in batch {self.step}, place {event['ids'].index(self.episode_id) + 1} of {len(event['ids'])}"
        line += f", to be trained on at version {event['version']}"
        low = -1 if self.accepted is None else self.accepted["min_version"]
        if low >= 0:
            line += f": its oldest token is {event['version'] - low} versions old"
        if event["mask_before"] > 0:
            line += f"; tokens of versions below {event['mask_before']} are masked"
        self.story.tell(at, line)

    def _trained(self, at: float, event: Event) -> None:
        kind, step = event["event"], event["step"]
        if kind == "consumed" and step == self.step:
            self.state, self.is_trained, self.weights = "consumed", True, event.get("weights", "")
            self.story.tell(at, f"consumed: trained on in step {step}, which led to version {event['version']}")
        elif kind == "trained_again" and step == self.step:
            self.is_trained = True
            line = f"trained on again in step {step}, after a recovery; {same_weights(self.weights, event)}"
            self.story.tell(at, line)
        elif kind == "attached" and step <= self.step and self.is_trained:
            self.is_trained = self.is_covered = False
            self.story.tell(at, f"the trainer went back to step {step}: batch {self.step} will be trained on again")
        elif kind == "committed" and step > self.step and self.is_trained and not self.is_covered:
            self.is_covered = True
            self.story.tell(at, f"covered by the checkpoint after {step} steps ({event['path']})")


def same_weights(before: str, event: Event) -> str:
    """Whether the weights after a repeated step are those of the first time."""
    weights = event.get("weights", "")
    if not before or not weights:
        return "whether the weights became the same is unknown"
    return "the weights became bitwise the same" if weights == before else "the weights became others"


def _accepted_line(event: Event) -> str:
    made = "no version" if event["max_version"] < 0 else f"versions {event['min_version']} to {event['max_version']}"
    stats = "".join(f", {name} {value:g}" for name, value in event["stats"].items())
    return (
        f"accepted: reward {event['reward']:g}, {event['trajectories']} trajectories of {event['tokens']} tokens "
        f"({event['generated']} to learn from) by {made}; {event['seconds']:.3f} s on "
        f"{', '.join(event['replicas']) or 'no replica'}, {event['interruptions']} interruptions{stats}"
    )


def show_episode(folder: Path, episode_id: int, *, tokens: bool) -> list[str]:
    """The life of one episode, line by line; `tokens` adds every token. LedgerError when there is no such episode."""
    life = _Life(episode_id)
    for at, event in timed_events(folder):
        life.take(at, event)
    if not life.state:
        known = f"its ids are 0 to {life.num_admitted - 1}" if life.num_admitted else "nothing was admitted yet"
        raise LedgerError(f"there is no episode {episode_id} in {folder}: {known}")
    lines = [f"episode {episode_id}: {life.state}", *life.story.lines()]
    if life.accepted is None:
        return lines
    try:
        with PayloadReader(folder) as reader:
            columns = read_columns(reader, life.accepted)
    except LedgerError as error:
        return [*lines, f"its trajectories cannot be read: {error}"]
    return lines + _trajectory_lines(columns, tokens=tokens)


def _trajectory_lines(columns: EpisodeColumns, *, tokens: bool) -> list[str]:
    lines: list[str] = []
    end = 0
    for number, size in enumerate(columns.lengths.tolist()):
        begin, end = end, end + size
        versions: list[int] = columns.output_versions[begin:end].tolist()
        ending = "finished" if columns.finished[number] else "cut by a length limit"
        lines.append(
            f"trajectory {number}: {size} tokens ({_spans(versions)}), reward {columns.rewards[number]:g}, {ending}"
        )
        if tokens:
            lines.append(f"{'place':>7} {'token_id':>9} {'version':>8} {'learnt':>7} {'logprob':>10}")
            lines.extend(
                f"{place:>7} {columns.token_ids[begin + place]:>9} {version:>8} {columns.loss_mask[begin + place]:>7} "
                f"{columns.rollout_logprobs[begin + place]:>10.5f}"
                for place, version in enumerate(versions)
            )
    return lines


def _spans(versions: Sequence[int]) -> str:
    """Who made the tokens, run by run."""
    return ", ".join(
        f"{len(list(run))} {'given' if version < 0 else f'by version {version}'}" for version, run in groupby(versions)
    )


def show_step(folder: Path, step: int) -> list[str]:
    """How the batch of a train step was made and used. LedgerError when there is none."""
    identity: Event | None = None
    accepted: dict[int, Event] = {}
    batch: Event | None = None
    story, weights, steps = _Story(), "", list[int]()
    for at, event in timed_events(folder):
        kind = event["event"]
        if kind == "started":
            identity = event
        elif kind == "accepted" and batch is None:
            accepted[event["id"]] = event
        elif kind == "batched":
            steps.append(event["step"])
            if event["step"] == step:
                batch = event
                story.tell(at, f"made of {len(event['ids'])} episodes, for version {event['version']}")
            elif batch is None:
                for episode_id in event["ids"]:
                    accepted.pop(episode_id, None)
        elif kind == "consumed" and event["step"] == step:
            weights = event.get("weights", "")
            checksum = f"; checksum of the weights {weights}" if weights else ""
            story.tell(at, f"consumed, which led to version {event['version']}{checksum}")
        elif kind == "trained_again" and event["step"] == step:
            story.tell(at, f"trained on again after a recovery; {same_weights(weights, event)}")
        elif kind == "evaluated" and event["step"] == step + 1:
            result = ", ".join(f"{name} {value:g}" for name, value in event["result"].items())
            story.tell(at, f"evaluated ({event['mode']}) with the weights after it: {result}")
    if batch is None:
        known = f"batches are recorded for steps {min(steps)} to {max(steps)}" if steps else "no batch was made yet"
        raise LedgerError(f"there is no batch of step {step} in {folder}: {known}")
    head = [f"batch of step {step}", *story.lines()]
    if batch["mask_before"] > 0:
        head.append(f"tokens of versions below {batch['mask_before']} are masked")
    return head + _batch_table(batch, accepted, identity)


def _batch_table(batch: Event, accepted: dict[int, Event], identity: Event | None) -> list[str]:
    rows = None if identity is None else rows_of(identity)
    lines = [f"{'place':>6} {'episode':>8} {'row':>8} {'epoch':>6} {'reward':>10} {'tokens':>8}  versions"]
    for place, episode_id in enumerate(batch["ids"]):
        row = "?" if rows is None else str(rows.index(episode_id))
        epoch = "?" if rows is None else str(episode_id // rows.rows_per_epoch)
        start = f"{place + 1:>6} {episode_id:>8} {row:>8} {epoch:>6}"
        event = accepted.get(episode_id)
        if event is None:
            lines.append(f"{start}  never accepted")
            continue
        versions = f"{event['min_version']} to {event['max_version']}"
        lines.append(f"{start} {event['reward']:>10.5g} {event['tokens']:>8}  {versions}")
    return lines
