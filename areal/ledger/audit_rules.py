"""The rules of an audit: the events of a ledger, in order, lose no episode and train on none twice.

The rules use only the events and not the state machine of the controller, so they also detect errors in that. An event
that breaks a rule is reported and then applied as far as possible, so that one violation does not cause others. Times
are ignored, because clocks jump.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from areal.data.prompt_stream import PromptStream
from areal.ledger.audit_report import AuditReport, listed
from areal.ledger.state import IDENTITY, STATE_NAMES, Event, row_stream

MAX_SKIPPED = 1_000_000
"""Maximum number of skipped ids in one violation: a damaged id may be any number."""


@dataclass(slots=True)
class _Episode:
    state: str
    attempt: int
    era: int
    """Era of the newest attempt; see AuditRules."""
    version: int
    """Policy version at the start of the newest attempt."""
    max_version: int = -1
    step: int = -1
    """Train step of its batch."""


@dataclass(slots=True)
class _Batch:
    ids: list[int]
    is_consumed: bool = False
    weights: str = ""
    """Checksum of the weights after it was trained on the first time."""


@dataclass(slots=True)
class AuditRules:
    """The rules applied to one ledger. `take` every event once, in order."""

    report: AuditReport = field(default_factory=AuditReport)
    batches: dict[int, _Batch] = field(default_factory=dict[int, _Batch])
    _episodes: dict[int, _Episode] = field(default_factory=dict[int, _Episode])
    _era: int = 0
    """Incremented when all attempts end: a controller starts, or a trainer goes back and no batch is recorded."""
    _identity: Event | None = None
    _rows: PromptStream[int] | None = None
    _next_id: int = 0
    _next_step: int = 0
    _trained: int | None = None
    _version: int | None = None
    _highest: int = -1
    """The highest policy version so far."""
    _offset: int | None = None
    """Policy version minus train step, constant during a run."""
    _unconfirmed: int | None = None
    """A version published out of order: valid only if a trainer attaches at it before any other event depends on it."""

    def counts(self) -> dict[str, int]:
        """Episodes per state."""
        found = Counter(episode.state for episode in self._episodes.values())
        return {name: found[name] for name in STATE_NAMES}

    def take(self, number: int, event: Event, *, max_version: int | None = None) -> None:
        """Apply event `number`. `max_version`: the newest version in the payload of an accepted episode."""
        handler = self._HANDLERS.get(event.get("event", ""))
        if handler is None:
            self.report.violate(
                "unknown event", f"event {number}: {event.get('event')!r} is not an event of this version"
            )
            return
        if self.report.num_controllers == 0 and event["event"] not in ("group", "started"):
            self.report.violate("beginning", f"event {number} ({event['event']}) is before the start of any controller")
            self.report.num_controllers = 1
        try:
            handler(self, event)
            if max_version is not None and event["event"] == "accepted":
                self._episodes[event["id"]].max_version = max_version
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.report.violate(
                "form", f"event {number} ({event['event']}) is malformed: {type(error).__name__}: {error}"
            )

    def batch_version(self, step: int) -> int | None:
        """Policy version that trains on the batch of `step`; None before a trainer attached."""
        return None if self._offset is None else step + self._offset

    def _row_of(self, episode_id: int) -> str:
        if self._rows is None or episode_id < 0:
            return "its row"
        return f"row {self._rows.index(episode_id)} of epoch {episode_id // self._rows.rows_per_epoch}"

    def _started(self, event: Event) -> None:
        self.report.num_controllers += 1
        self._era += 1
        identity: Event = {name: event[name] for name in IDENTITY}
        if self._identity is not None and identity != self._identity:
            changed = [name for name in IDENTITY if identity[name] != self._identity[name]]
            self.report.violate(
                "identity", f"controller {self.report.num_controllers} started with other {', '.join(changed)}"
            )
        self._identity, self._rows = identity, row_stream(identity)
        if self._rows is None:
            self.report.violate("identity", f"no prompt stream has the identity {identity}")

    def _attached(self, event: Event) -> None:
        step, version = int(event["step"]), int(event["version"])
        self.report.num_attaches += 1
        if self._offset is None:
            self._offset = version - step
        elif version - step != self._offset:
            self.report.violate(
                "version of step",
                f"a trainer attached at step {step} with version {version}, not {step + self._offset}",
                steps=[step],
            )
        if not self.batches:  # no recorded batch leads to an earlier version again
            self._era += version < self._highest
            self._next_step, self._highest = step, version
        first = min(self.batches, default=step)
        if not first <= step <= self._next_step:
            self.report.violate(
                "attach",
                f"a trainer attached at step {step}, but batches are recorded from {first} to {self._next_step - 1}",
                steps=[step],
            )
        skipped = [number for number, batch in self.batches.items() if number < step and not batch.is_consumed]
        if skipped:
            self.report.violate(
                "never consumed",
                f"a trainer attached at step {step} and skips batch {listed(skipped)}",
                steps=skipped,
            )
        if self._unconfirmed == version:
            self._unconfirmed = None
        self._trained = step
        self._become(version)

    def _become(self, version: int) -> None:
        self._version = version
        self._highest = max(self._highest, version)

    def _published(self, event: Event) -> None:
        version, is_out_of_order = int(event["version"]), False
        if self._version is not None and self._trained is not None and self._offset is not None:
            step = version - self._offset
            is_out_of_order = version < self._version or step not in (self._trained, self._trained + 1)
        if is_out_of_order:  # possibly again: a recovered trainer may die before it attaches
            self._unconfirmed = version
        elif self._unconfirmed != version:
            self._require_confirmed(f"before version {version} was published")
        self._become(version)

    def _require_confirmed(self, when: str) -> None:
        if self._unconfirmed is not None:
            self.report.violate(
                "publication",
                f"version {self._unconfirmed} was published out of order, and no trainer attached at it {when}",
                steps=[] if self._offset is None else [self._unconfirmed - self._offset],
            )
            self._unconfirmed = None

    def _admitted(self, event: Event) -> None:
        episode_id, attempt, version = int(event["id"]), int(event["attempt"]), int(event["version"])
        self.report.num_attempts += 1
        if attempt == 0:
            self._require_new(episode_id)
        else:
            self._require_again(episode_id, attempt)
        self._require_confirmed(f"before episode {episode_id} was admitted")
        if version != self._version:
            self.report.violate(
                "admission",
                f"episode {episode_id} was admitted at version {version}, but the trainer had {self._version}",
                episodes=[episode_id],
            )
        elif version < self._highest:
            self.report.violate(
                "admission",
                f"episode {episode_id} was admitted at version {version} before the recovered trainer reached version "
                f"{self._highest} again",
                episodes=[episode_id],
            )
        known = self._episodes.get(episode_id)
        self.report.num_admitted += known is None
        state = "running" if known is None else known.state
        step = -1 if known is None else known.step
        self._episodes[episode_id] = _Episode(state, attempt, self._era, version, step=step)

    def _require_new(self, episode_id: int) -> None:
        if episode_id in self._episodes:
            self.report.violate(
                "row used twice",
                f"episode {episode_id} was admitted twice: {self._row_of(episode_id)} was used twice",
                episodes=[episode_id],
            )
        elif episode_id != self._next_id:
            missing = range(self._next_id, min(episode_id, self._next_id + MAX_SKIPPED))
            expected = f"episodes {listed(missing)}" if missing else f"episode {self._next_id}"
            self.report.violate(
                "row skipped",
                f"episode {episode_id} was admitted, but {expected} must come first: "
                f"{self._row_of(self._next_id)} was skipped" + (f" and {len(missing) - 1} more" if missing[1:] else ""),
                episodes=missing,
            )
        self._next_id = max(self._next_id, episode_id + 1)

    def _require_again(self, episode_id: int, attempt: int) -> None:
        known = self._episodes.get(episode_id)
        if known is None:
            problem = "was not admitted before"
        elif known.state != "running":
            problem = f"was already {known.state}"
        elif attempt != known.attempt + 1:
            problem = f"was at attempt {known.attempt} before"
        elif known.era == self._era:
            problem = "was already running"
        else:
            return
        text = f"episode {episode_id} was started again (attempt {attempt}), but {problem}"
        self.report.violate("attempt", text, episodes=[episode_id])

    def _ended(self, event: Event, verdict: str, *, was: tuple[str, ...] = ("running",)) -> _Episode:
        """The episode of a verdict, moved to state `verdict`."""
        episode_id = int(event["id"])
        episode = self._episodes.get(episode_id)
        done = "accepted" if verdict == "waiting" else verdict
        if episode is None:
            self.report.violate(
                "never admitted", f"episode {episode_id} was {done}, but never admitted", episodes=[episode_id]
            )
            episode = self._episodes[episode_id] = _Episode(verdict, 0, self._era, -1)
            return episode
        if episode.state not in was:
            twice = done == "accepted" and episode.state in ("waiting", "batched", "consumed")
            self.report.violate(
                "accepted twice" if twice else "verdict",
                f"episode {episode_id} was {done}" + (" twice" if twice else f", but it was already {episode.state}"),
                episodes=[episode_id],
            )
            return episode
        if episode.state == "running" and episode.era != self._era:
            self.report.violate(
                "verdict",
                f"episode {episode_id} was {done} by an attempt that had been cancelled",
                episodes=[episode_id],
            )
        episode.state = verdict
        return episode

    def _accepted(self, event: Event) -> None:
        episode = self._ended(event, "waiting")
        low, episode.max_version = int(event["min_version"]), int(event["max_version"])
        if 0 <= low < episode.version:
            self.report.violate(
                "old token",
                f"episode {event['id']} has a token of version {low}, but started at version {episode.version}",
                episodes=[event["id"]],
            )

    def _rejected(self, event: Event) -> None:
        reason = str(event["reason"])
        self._ended(event, "rejected", was=("running", "waiting") if reason == "stale" else ("running",))
        self.report.reasons[f"rejected: {reason}"] += 1

    def _failed(self, event: Event) -> None:
        self._ended(event, "failed")
        self.report.reasons[f"failed: {str(event['reason']).partition(':')[0]}"] += 1

    def _batched(self, event: Event) -> None:
        step, version, ids = int(event["step"]), int(event["version"]), [int(number) for number in event["ids"]]
        self._require_confirmed(f"before batch {step} was made")
        for episode_id, times in Counter(ids).items():
            if times > 1:
                text = f"episode {episode_id} is {times} times in batch {step}"
                self.report.violate("twice in a batch", text, episodes=[episode_id], steps=[step])
            self._into_batch(episode_id, step, version)
        if self._identity is not None and len(ids) != self._identity["batch_size"]:
            text = f"batch {step} holds {len(ids)} episodes, not {self._identity['batch_size']}"
            self.report.violate("batch size", text, steps=[step])
        if step in self.batches:
            self.report.violate("batch order", f"batch {step} was made twice", steps=[step])
        elif step != self._next_step:
            self.report.violate(
                "batch order", f"batch {step} was made, but batch {self._next_step} is next", steps=[step]
            )
        elif step != self._trained:
            text = f"batch {step} was made while the trainer was at step {self._trained}"
            self.report.violate("batch order", text, steps=[step])
        if version != self.batch_version(step) or version != self._version:
            text = f"batch {step} was made for version {version}; its step has {self.batch_version(step)}"
            self.report.violate("version of step", f"{text}, the trainer had {self._version}", steps=[step])
        self._next_step = max(self._next_step, step + 1)
        self.batches.setdefault(step, _Batch(ids))

    def _into_batch(self, episode_id: int, step: int, version: int) -> None:
        episode = self._episodes.get(episode_id)
        state = "never admitted" if episode is None else episode.state
        if episode is not None and episode.step not in (-1, step):
            text = f"episode {episode_id} is in batch {episode.step} and in batch {step}"
            self.report.violate("in two batches", text, episodes=[episode_id], steps=[episode.step, step])
        elif state != "waiting":
            text = f"episode {episode_id} is in batch {step}, but was {state}, not accepted and waiting"
            self.report.violate("not accepted", text, episodes=[episode_id], steps=[step])
        if episode is None:
            return
        if episode.max_version > version:
            text = f"episode {episode_id} has a token of version {episode.max_version}"
            text = f"{text}, newer than version {version}, which trains on batch {step}"
            self.report.violate("newer token", text, episodes=[episode_id], steps=[step])
        if episode.step == -1:
            episode.state, episode.step = "batched", step

    def _consumed(self, event: Event) -> None:
        step, batch = self._trained_on(event, "consumed")
        if batch is None:
            return
        if batch.is_consumed:
            text = f"batch {step} was consumed twice without a trainer going back to it"
            self.report.violate("consumed twice", text, steps=[step], episodes=batch.ids)
        elif step != self._trained:
            text = f"batch {step} was consumed while the trainer was at step {self._trained}"
            self.report.violate("consumption order", text, steps=[step])
        batch.is_consumed, batch.weights = True, str(event.get("weights", ""))
        for episode_id in batch.ids:
            if (episode := self._episodes.get(episode_id)) is not None and episode.step == step:
                episode.state = "consumed"
        self._trained = step + 1

    def _trained_again(self, event: Event) -> None:
        step, batch = self._trained_on(event, "trained again")
        if batch is None:
            return
        if not batch.is_consumed:
            self.report.violate("trained again", f"batch {step} was trained again, but never consumed", steps=[step])
        elif step != self._trained:
            text = f"batch {step} was trained again while the trainer was at step {self._trained}: it did not go back"
            self.report.violate("consumed twice", text, steps=[step], episodes=batch.ids)
        weights = str(event.get("weights", ""))
        self.report.trained_again.append(step)
        if weights and batch.weights:
            if weights == batch.weights:
                self.report.num_bitwise_equal += 1
            else:
                self.report.unequal.append(step)
        self._trained = step + 1

    def _trained_on(self, event: Event, verb: str) -> tuple[int, _Batch | None]:
        step, version = int(event["step"]), int(event["version"])
        self._require_confirmed(f"before batch {step} was {verb}")
        batch = self.batches.get(step)
        if batch is None:
            self.report.violate("never batched", f"batch {step} was {verb}, but that step has no batch", steps=[step])
        elif version != self.batch_version(step + 1) or version != self._version:
            text = f"batch {step} was {verb} and led to version {version}; that step leads to version"
            text = f"{text} {self.batch_version(step + 1)}, and version {self._version} was published last"
            self.report.violate("version of step", text, steps=[step])
        return step, batch

    def _committed(self, event: Event) -> None:
        self.report.committed_step = int(event["step"])
        if self._trained is None or self.report.committed_step > self._trained:
            text = (
                f"a checkpoint after step {self.report.committed_step} was committed with {self._trained} steps trained"
            )
            self.report.violate("checkpoint", text, steps=[self.report.committed_step])

    def _ignore(self, event: Event) -> None:
        """A group mark, which the reader checks, or the result of an evaluation: neither changes an episode."""

    _HANDLERS: ClassVar[dict[Any, Callable[[AuditRules, Event], None]]] = {
        "started": _started,
        "attached": _attached,
        "published": _published,
        "admitted": _admitted,
        "accepted": _accepted,
        "rejected": _rejected,
        "failed": _failed,
        "batched": _batched,
        "consumed": _consumed,
        "trained_again": _trained_again,
        "committed": _committed,
        "evaluated": _ignore,
        "group": _ignore,
    }
