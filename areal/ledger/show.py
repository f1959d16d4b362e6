"""The history of one episode, or of one train batch, from the files of the ledger."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from areal.api.errors import LedgerError
from areal.data.prompt_stream import PromptStream, row_stream
from areal.ledger.event_files import PayloadReader, open_reader
from areal.ledger.payload import read_columns
from areal.ledger.state import Event


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
            read_columns(reader, history.accepted)
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
    return head + _batch_table(batch, accepted, rows)


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
