"""Owns what an audit proves: that a ledger's events, in their order, lose no episode and train on none twice.

These are books of their own, kept from the events alone: the state machine of the controller is not asked, so an error
in it shows too. An event that breaks a rule is noted and then taken at its word as far as possible, so that one
violation does not bring on others. Times are never looked at: clocks jump.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.data.prompt_stream import PromptStream
from areal.ledger.state import IDENTITY, STATE_NAMES, Event
from areal.ledger.violations import Violation, listed, rows_of

MAX_SKIPPED = 1_000_000
"""Most skipped ids that one violation names: a damaged id may be any number."""


@dataclass(slots=True)
class _Episode:
    state: str
    attempt: int
    era: int
    """When the newest attempt began; see RuleBook."""
    version: int
    """Policy version at which it began."""
    max_version: int = -1
    step: int = -1
    """Train step of its batch."""


@dataclass(slots=True)
class _Batch:
    ids: list[int]
    is_consumed: bool = False
    weights: str = ""
    """Checksum after it was trained on the first time."""


@dataclass(slots=True)
class RuleBook:
    """The books of one ledger. Feed it every event once, in order."""

    violations: list[Violation] = field(default_factory=list[Violation])
    num_admitted: int = 0
    num_starts: int = 0
    """Starts of episodes, repetitions after a death included."""
    num_controllers: int = 0
    num_attaches: int = 0
    committed_step: int = 0
    trained_again: list[int] = field(default_factory=list[int])
    """Steps trained again after a recovery, in order."""
    num_equal: int = 0
    """Those of them after which the weights were bitwise those of the first time."""
    unequal: list[int] = field(default_factory=list[int])
    """Those of them after which the weights differed; the rest is unknown."""
    reasons: Counter[str] = field(default_factory=Counter[str])
    batches: dict[int, _Batch] = field(default_factory=dict[int, _Batch])
    _episodes: dict[int, _Episode] = field(default_factory=dict[int, _Episode])
    _era: int = 0
    """Counts what ends all attempts: a new controller, and a trainer that goes back where no batch is recorded."""
    _identity: Event | None = None
    _rows: PromptStream[int] | None = None
    _next_id: int = 0
    _next_step: int = 0
    _trained: int | None = None
    _version: int | None = None
    _highest: int = -1
    """Newest policy version that was ever current."""
    _offset: int | None = None
    """Policy version less train step: the same all through a run."""
    _unconfirmed: int | None = None
    """A publication out of turn: right only if a trainer attaches at that version before anything depends on it."""

    def counts(self) -> dict[str, int]:
        """Episodes per state."""
        found = Counter(episode.state for episode in self._episodes.values())
        return {name: found[name] for name in STATE_NAMES}

    def take(self, number: int, event: Event, *, max_version: int | None = None) -> None:
        """Event `number` of the ledger. `max_version`: of an accepted episode, as its payload says."""
        handler = _HANDLERS.get(event.get("event", ""))
        if handler is None:
            self._violate("unknown event", f"event {number}: {event.get('event')!r} is no event of this version")
            return
        if self.num_controllers == 0 and event["event"] not in ("group", "started"):
            self._violate("beginning", f"event {number} ({event['event']}) comes before any controller started")
            self.num_controllers = 1
        try:
            handler(self, event)
            if max_version is not None and event["event"] == "accepted":
                self._episodes[event["id"]].max_version = max_version
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._violate("form", f"event {number} ({event['event']}) is malformed: {type(error).__name__}: {error}")

    def batch_version(self, step: int) -> int | None:
        """Policy version at which the batch of `step` belongs; None while no trainer said where it stands."""
        return None if self._offset is None else step + self._offset

    def _violate(self, rule: str, message: str, *, episodes: Sequence[int] = (), steps: Sequence[int] = ()) -> None:
        found = Violation(rule=rule, message=message, episodes=tuple(episodes), steps=tuple(steps))
        self.violations.append(found)

    def _row_of(self, episode_id: int) -> str:
        if self._rows is None or episode_id < 0:
            return "its row"
        return f"row {self._rows.index(episode_id)} of epoch {episode_id // self._rows.rows_per_epoch}"

    def _started(self, event: Event) -> None:
        self.num_controllers += 1
        self._era += 1
        identity: Event = {name: event[name] for name in IDENTITY}
        if self._identity is not None and identity != self._identity:
            changed = [name for name in IDENTITY if identity[name] != self._identity[name]]
            self._violate("identity", f"controller {self.num_controllers} started with another {', '.join(changed)}")
        self._identity, self._rows = identity, rows_of(identity)
        if self._rows is None:
            self._violate("identity", f"no prompt stream has the identity {identity}")

    def _attached(self, event: Event) -> None:
        step, version = int(event["step"]), int(event["version"])
        self.num_attaches += 1
        if self._offset is None:
            self._offset = version - step
        elif version - step != self._offset:
            self._violate(
                "version of step",
                f"a trainer attached at step {step} with version {version}, not {step + self._offset}",
                steps=[step],
            )
        if not self.batches:  # nothing is recorded with which it could catch up
            self._era += version < self._highest
            self._next_step, self._highest = step, version
        first = min(self.batches, default=step)
        if not first <= step <= self._next_step:
            self._violate(
                "attach",
                f"a trainer attached at step {step}, but batches are recorded from {first} to {self._next_step - 1}",
                steps=[step],
            )
        skipped = [number for number, batch in self.batches.items() if number < step and not batch.is_consumed]
        if skipped:
            self._violate(
                "never consumed",
                f"a trainer attached at step {step}, so that it never trains on batch {listed(skipped)}",
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
        version, out_of_turn = int(event["version"]), False
        if self._version is not None and self._trained is not None and self._offset is not None:
            step = version - self._offset
            out_of_turn = version < self._version or step not in (self._trained, self._trained + 1)
        if out_of_turn:  # perhaps not for the first time: a trainer may come back and die before it attaches
            self._unconfirmed = version
        elif self._unconfirmed != version:
            self._require_confirmed(f"before version {version} was published")
        self._become(version)

    def _require_confirmed(self, when: str) -> None:
        if self._unconfirmed is not None:
            self._violate(
                "publication",
                f"version {self._unconfirmed} was published out of turn, and no trainer attached at it {when}",
                steps=[] if self._offset is None else [self._unconfirmed - self._offset],
            )
            self._unconfirmed = None

    def _admitted(self, event: Event) -> None:
        episode_id, attempt, version = int(event["id"]), int(event["attempt"]), int(event["version"])
        self.num_starts += 1
        if attempt == 0:
            self._require_new(episode_id)
        else:
            self._require_again(episode_id, attempt)
        self._require_confirmed(f"before episode {episode_id} was admitted")
        if version != self._version:
            self._violate(
                "admission",
                f"episode {episode_id} was admitted at version {version}, but the trainer held {self._version}",
                episodes=[episode_id],
            )
        elif version < self._highest:
            self._violate(
                "admission",
                f"episode {episode_id} was admitted at version {version} while the trainer, which had gone back, was "
                f"yet to reach version {self._highest} again",
                episodes=[episode_id],
            )
        known = self._episodes.get(episode_id)
        self.num_admitted += known is None
        state = "running" if known is None else known.state
        step = -1 if known is None else known.step
        self._episodes[episode_id] = _Episode(state, attempt, self._era, version, step=step)

    def _require_new(self, episode_id: int) -> None:
        if episode_id in self._episodes:
            self._violate(
                "row used twice",
                f"episode {episode_id} was admitted twice: {self._row_of(episode_id)} was used twice",
                episodes=[episode_id],
            )
        elif episode_id != self._next_id:
            missing = range(self._next_id, min(episode_id, self._next_id + MAX_SKIPPED))
            text = f"episodes {listed(missing)} were" if missing else f"order broken: {self._next_id} was"
            self._violate(
                "row skipped",
                f"episode {episode_id} was admitted, but {text} due: "
                f"{self._row_of(self._next_id)} was skipped" + (f" and {len(missing) - 1} more" if missing[1:] else ""),
                episodes=missing,
            )
        self._next_id = max(self._next_id, episode_id + 1)

    def _require_again(self, episode_id: int, attempt: int) -> None:
        known = self._episodes.get(episode_id)
        if known is None:
            problem = "was never admitted before"
        elif known.state != "running":
            problem = f"was {known.state} already"
        elif attempt != known.attempt + 1:
            problem = f"was at attempt {known.attempt} before"
        elif known.era == self._era:
            problem = "was running already"
        else:
            return
        text = f"episode {episode_id} was started again (attempt {attempt}), but {problem}"
        self._violate("attempt", text, episodes=[episode_id])

    def _ended(self, event: Event, verdict: str, *, was: tuple[str, ...] = ("running",)) -> _Episode:
        """The episode that a verdict is about, which is then in state `verdict`."""
        episode_id = int(event["id"])
        episode = self._episodes.get(episode_id)
        done = "accepted" if verdict == "waiting" else verdict
        if episode is None:
            self._violate(
                "never admitted", f"episode {episode_id} was {done}, but never admitted", episodes=[episode_id]
            )
            episode = self._episodes[episode_id] = _Episode(verdict, 0, self._era, -1)
            return episode
        if episode.state not in was:
            twice = done == "accepted" and episode.state in ("waiting", "batched", "consumed")
            self._violate(
                "accepted twice" if twice else "verdict",
                f"episode {episode_id} was {done}" + (" twice" if twice else f", but it was {episode.state} already"),
                episodes=[episode_id],
            )
            return episode
        if episode.state == "running" and episode.era != self._era:
            self._violate(
                "verdict",
                f"episode {episode_id} was {done} by an attempt that had been given up",
                episodes=[episode_id],
            )
        episode.state = verdict
        return episode

    def _accepted(self, event: Event) -> None:
        episode = self._ended(event, "waiting")
        low, episode.max_version = int(event["min_version"]), int(event["max_version"])
        if 0 <= low < episode.version:
            self._violate(
                "old token",
                f"episode {event['id']} holds a token of version {low}, but was started at version {episode.version}",
                episodes=[event["id"]],
            )

    def _rejected(self, event: Event) -> None:
        reason = str(event["reason"])
        self._ended(event, "rejected", was=("running", "waiting") if reason == "stale" else ("running",))
        self.reasons[f"rejected: {reason}"] += 1

    def _failed(self, event: Event) -> None:
        self._ended(event, "failed")
        self.reasons[f"failed: {str(event['reason']).partition(':')[0]}"] += 1

    def _batched(self, event: Event) -> None:
        step, version, ids = int(event["step"]), int(event["version"]), [int(number) for number in event["ids"]]
        self._require_confirmed(f"before batch {step} was made")
        for episode_id, times in Counter(ids).items():
            if times > 1:
                text = f"episode {episode_id} is {times} times in batch {step}"
                self._violate("twice in a batch", text, episodes=[episode_id], steps=[step])
            self._into_batch(episode_id, step, version)
        if self._identity is not None and len(ids) != self._identity["batch_size"]:
            text = f"batch {step} holds {len(ids)} episodes, not {self._identity['batch_size']}"
            self._violate("batch size", text, steps=[step])
        if step in self.batches:
            self._violate("batch order", f"batch {step} was made twice", steps=[step])
        elif step != self._next_step:
            self._violate("batch order", f"batch {step} was made, but {self._next_step} was due", steps=[step])
        elif step != self._trained:
            text = f"batch {step} was made while the trainer stood at step {self._trained}"
            self._violate("batch order", text, steps=[step])
        if version != self.batch_version(step) or version != self._version:
            text = f"batch {step} was made for version {version}; its step has {self.batch_version(step)}"
            self._violate("version of step", f"{text}, the trainer held {self._version}", steps=[step])
        self._next_step = max(self._next_step, step + 1)
        self.batches.setdefault(step, _Batch(ids))

    def _into_batch(self, episode_id: int, step: int, version: int) -> None:
        episode = self._episodes.get(episode_id)
        state = "never admitted" if episode is None else episode.state
        if episode is not None and episode.step not in (-1, step):
            text = f"episode {episode_id} is in batch {episode.step} and in batch {step}"
            self._violate("in two batches", text, episodes=[episode_id], steps=[episode.step, step])
        elif state != "waiting":
            text = f"episode {episode_id} is in batch {step}, but was {state}, not accepted and waiting"
            self._violate("not accepted", text, episodes=[episode_id], steps=[step])
        if episode is None:
            return
        if episode.max_version > version:
            text = f"episode {episode_id} holds a token of version {episode.max_version}"
            text = f"{text}, newer than version {version}, at which batch {step} is trained on"
            self._violate("newer token", text, episodes=[episode_id], steps=[step])
        if episode.step == -1:
            episode.state, episode.step = "batched", step

    def _consumed(self, event: Event) -> None:
        step, batch = self._trained_on(event, "consumed")
        if batch is None:
            return
        if batch.is_consumed:
            text = f"batch {step} was consumed twice without a trainer going back to it"
            self._violate("consumed twice", text, steps=[step], episodes=batch.ids)
        elif step != self._trained:
            text = f"batch {step} was consumed while the trainer stood at step {self._trained}"
            self._violate("consumption order", text, steps=[step])
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
            self._violate("trained again", f"batch {step} was trained again, but never consumed", steps=[step])
        elif step != self._trained:
            text = f"batch {step} was trained again while the trainer stood at step {self._trained}: it did not go back"
            self._violate("consumed twice", text, steps=[step], episodes=batch.ids)
        weights = str(event.get("weights", ""))
        self.trained_again.append(step)
        if weights and batch.weights:
            if weights == batch.weights:
                self.num_equal += 1
            else:
                self.unequal.append(step)
        self._trained = step + 1

    def _trained_on(self, event: Event, verb: str) -> tuple[int, _Batch | None]:
        step, version = int(event["step"]), int(event["version"])
        self._require_confirmed(f"before batch {step} was {verb}")
        batch = self.batches.get(step)
        if batch is None:
            self._violate("never batched", f"batch {step} was {verb}, but none was made for that step", steps=[step])
        elif version != self.batch_version(step + 1) or version != self._version:
            text = f"batch {step} was {verb} and led to version {version}; that step leads to version"
            text = f"{text} {self.batch_version(step + 1)}, and version {self._version} was published last"
            self._violate("version of step", text, steps=[step])
        return step, batch

    def _committed(self, event: Event) -> None:
        self.committed_step = int(event["step"])
        if self._trained is None or self.committed_step > self._trained:
            text = f"a checkpoint after step {self.committed_step} was committed with {self._trained} steps trained"
            self._violate("checkpoint", text, steps=[self.committed_step])

    def _ignore(self, event: Event) -> None:
        """A group mark, which the reader has checked, or the result of an evaluation: neither moves an episode."""


_HANDLERS: dict[Any, Callable[[RuleBook, Event], None]] = {
    "started": RuleBook._started,  # pyright: ignore[reportPrivateUsage] - the table of this class's own handlers
    "attached": RuleBook._attached,  # pyright: ignore[reportPrivateUsage]
    "published": RuleBook._published,  # pyright: ignore[reportPrivateUsage]
    "admitted": RuleBook._admitted,  # pyright: ignore[reportPrivateUsage]
    "accepted": RuleBook._accepted,  # pyright: ignore[reportPrivateUsage]
    "rejected": RuleBook._rejected,  # pyright: ignore[reportPrivateUsage]
    "failed": RuleBook._failed,  # pyright: ignore[reportPrivateUsage]
    "batched": RuleBook._batched,  # pyright: ignore[reportPrivateUsage]
    "consumed": RuleBook._consumed,  # pyright: ignore[reportPrivateUsage]
    "trained_again": RuleBook._trained_again,  # pyright: ignore[reportPrivateUsage]
    "committed": RuleBook._committed,  # pyright: ignore[reportPrivateUsage]
    "evaluated": RuleBook._ignore,  # pyright: ignore[reportPrivateUsage]
    "group": RuleBook._ignore,  # pyright: ignore[reportPrivateUsage]
}
