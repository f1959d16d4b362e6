"""The rules of an audit: the events of a ledger, in order, lose no episode and train on none twice.

The rules use only the events and not the state machine of the controller, so they also detect errors in that. An event
that breaks a rule is reported and then applied as far as possible, so that one violation does not cause others. Times
are ignored, because clocks jump.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from areal.data.prompt_stream import PromptStream, row_stream
from areal.ledger.audit_report import AuditReport, listed
from areal.ledger.state import IDENTITY, STATE_NAMES, Event

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
    _interrupted: set[int] = field(default_factory=set[int])
    """Running episodes whose newest attempt is of an earlier era. They start again before any new episode."""
    _next_id: int = 0
    _next_step: int = 0
    _trained: int | None = None
    _version: int | None = None
    _highest: int = -1
    """The highest policy version so far."""
    _offset: int | None = None
    """Policy version minus train step, constant during a run."""
    _lacking: int = 0
    """Episodes that the batches so far have less than batch_size each."""
    _unconfirmed: int | None = None
    """A version published out of order: valid only if a trainer attaches at it before any other event depends on it."""

    def counts(self) -> dict[str, int]:
        """Episodes per state."""
        found = Counter(episode.state for episode in self._episodes.values())
        return {name: found[name] for name in STATE_NAMES}

    @property
    def num_interrupted(self) -> int:
        """Episodes that ran when all attempts ended, and that were not started again since."""
        return len(self._interrupted)

    def take(self, number: int, event: Event, *, max_version: int | None = None) -> None:
        """Apply event `number`. `max_version`: the newest version in the payload of an accepted episode."""
        report, kind = self.report, event.get("event", "")
        handler = self._HANDLERS.get(kind)
        if handler is None:
            report.violate("unknown event", f"event {number}: {kind!r} is not an event of this version")
            return
        if report.num_controllers == 0 and kind not in ("group", "started"):
            report.violate("beginning", f"event {number} ({kind}) is before the start of any controller")
            report.num_controllers = 1
        try:
            handler(self, event)
            if max_version is not None and kind == "accepted":
                self._episodes[event["id"]].max_version = max_version
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            report.violate("form", f"event {number} ({kind}) is malformed: {type(error).__name__}: {error}")

    def batch_version(self, step: int) -> int | None:
        """Policy version that trains on the batch of `step`; None before a trainer attached."""
        return None if self._offset is None else step + self._offset

    def _row_of(self, episode_id: int) -> str:
        if self._rows is None or episode_id < 0:
            return "its row"
        return f"row {self._rows.index(episode_id)} of epoch {episode_id // self._rows.rows_per_epoch}"

    def _bad_episode(self, rule: str, episode_id: int, problem: str, *, steps: Sequence[int] = ()) -> None:
        self.report.violate(rule, f"episode {episode_id} {problem}", episodes=[episode_id], steps=steps)

    def _bad_batch(self, rule: str, step: int, problem: str, *, episodes: Sequence[int] = ()) -> None:
        self.report.violate(rule, f"batch {step} {problem}", episodes=episodes, steps=[step])

    def _bad_attach(self, rule: str, step: int, problem: str, *, steps: Sequence[int]) -> None:
        self.report.violate(rule, f"a trainer attached at step {step}{problem}", steps=steps)

    def _started(self, event: Event) -> None:
        report = self.report
        report.num_controllers += 1
        self._end_attempts()
        identity: Event = {name: event[name] for name in IDENTITY}
        if self._identity is not None and identity != self._identity:
            changed = ", ".join(name for name in IDENTITY if identity[name] != self._identity[name])
            report.violate("identity", f"controller {report.num_controllers} started with other {changed}")
        self._identity, self._rows = identity, row_stream(identity)
        if self._rows is None:
            report.violate("identity", f"no prompt stream has the identity {identity}")

    def _end_attempts(self) -> None:
        self._era += 1
        self._interrupted = {number for number, episode in self._episodes.items() if episode.state == "running"}

    def _attached(self, event: Event) -> None:
        step, version = int(event["step"]), int(event["version"])
        self.report.num_attaches += 1
        if self._offset is None:
            self._offset = version - step
        elif version - step != self._offset:
            problem = f" with version {version}, not {step + self._offset}"
            self._bad_attach("version of step", step, problem, steps=[step])
        if not self.batches:  # no recorded batch leads to an earlier version again
            if version < self._highest:
                self._end_attempts()
            self._next_step, self._highest = step, version
        first = min(self.batches, default=step)
        if not first <= step <= self._next_step:
            problem = f", but batches are recorded from {first} to {self._next_step - 1}"
            self._bad_attach("attach", step, problem, steps=[step])
        skipped = [number for number, batch in self.batches.items() if number < step and not batch.is_consumed]
        if skipped:
            self._bad_attach("never consumed", step, f" and skips batch {listed(skipped)}", steps=skipped)
        if self._unconfirmed == version:
            self._unconfirmed = None
        self._trained = step
        self._become(version)

    def _become(self, version: int) -> None:
        self._version = version
        self._highest = max(self._highest, version)

    def _may_be_at(self, version: int) -> bool:
        """Whether the trainer can have `version`: it continues while the servers install its newest one."""
        return self._version is not None and version in (self._version, self._version + 1)

    def _published(self, event: Event) -> None:
        version, is_out_of_order = int(event["version"]), False
        if self._version is not None and self._trained is not None and self._offset is not None:
            step = version - self._offset
            is_out_of_order = version < self._version or step not in (self._trained, self._trained + 1)
        if is_out_of_order or self._unconfirmed is not None:  # possibly again: a trainer may die before it attaches
            self._unconfirmed = version
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
            self._interrupted.discard(episode_id)
        self._require_confirmed(f"before episode {episode_id} was admitted")
        text = f"was admitted at version {version}"
        if version != self._version:
            self._bad_episode("admission", episode_id, f"{text}, but version {self._version} was published last")
        elif version < self._highest:
            problem = f"{text} before the recovered trainer reached version {self._highest} again"
            self._bad_episode("admission", episode_id, problem)
        known = self._episodes.get(episode_id)
        self.report.num_admitted += known is None
        state = "running" if known is None else known.state
        step = -1 if known is None else known.step
        self._episodes[episode_id] = _Episode(state, attempt, self._era, version, step=step)

    def _require_new(self, episode_id: int) -> None:
        if episode_id in self._episodes:
            problem = f"was admitted twice: {self._row_of(episode_id)} was used twice"
            self._bad_episode("row used twice", episode_id, problem)
        elif episode_id != self._next_id:
            missing = range(self._next_id, min(episode_id, self._next_id + MAX_SKIPPED))
            expected = f"episodes {listed(missing)}" if missing else f"episode {self._next_id}"
            text = f"episode {episode_id} was admitted, but {expected} must come first: {self._row_of(self._next_id)}"
            others = f" and {len(missing) - 1} more" if missing[1:] else ""
            self.report.violate("row skipped", f"{text} was skipped{others}", episodes=missing)
        if self._interrupted:
            ids = sorted(self._interrupted)
            text = f"episode {episode_id} was admitted before the interrupted episodes {listed(ids)} were started again"
            self.report.violate("interrupted", text, episodes=ids)
            self._interrupted = set()
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
        self._bad_episode("attempt", episode_id, f"was started again (attempt {attempt}), but {problem}")

    def _ended(self, event: Event, verdict: str, *, was: tuple[str, ...] = ("running",)) -> _Episode:
        """The episode of a verdict, moved to state `verdict`."""
        episode_id = int(event["id"])
        episode = self._episodes.get(episode_id)
        done = "was accepted" if verdict == "waiting" else f"was {verdict}"
        if episode is None:
            self._bad_episode("never admitted", episode_id, f"{done}, but never admitted")
            episode = self._episodes[episode_id] = _Episode(verdict, 0, self._era, -1)
            return episode
        if episode.state not in was:
            if verdict == "waiting" and episode.state in ("waiting", "batched", "consumed"):
                self._bad_episode("accepted twice", episode_id, f"{done} twice")
            else:
                self._bad_episode("verdict", episode_id, f"{done}, but it was already {episode.state}")
            return episode
        if episode.state == "running" and episode.era != self._era:
            self._bad_episode("verdict", episode_id, f"{done} by an attempt that had been cancelled")
        episode.state = verdict
        self._interrupted.discard(episode_id)
        return episode

    def _accepted(self, event: Event) -> None:
        episode = self._ended(event, "waiting")
        low, episode.max_version = int(event["min_version"]), int(event["max_version"])
        if 0 <= low < episode.version:
            problem = f"has a token of version {low}, but started at version {episode.version}"
            self._bad_episode("old token", event["id"], problem)

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
                self._bad_episode("twice in a batch", episode_id, f"is {times} times in batch {step}", steps=[step])
            self._into_batch(episode_id, step, version)
        if self._identity is not None and (lacks := self._identity["batch_size"] - len(ids)):
            self._lacking += lacks
            # with rollout.dynamic_bs, rejected episodes fill the rest
            if lacks < 0 or not ids or self._lacking > self.counts()["rejected"]:
                self._bad_batch("batch size", step, f"holds {len(ids)} episodes, not {self._identity['batch_size']}")
        if step in self.batches:
            self._bad_batch("batch order", step, "was made twice")
        elif step != self._next_step:
            self._bad_batch("batch order", step, f"was made, but batch {self._next_step} is next")
        elif step != self._trained:
            self._bad_batch("batch order", step, f"was made while the trainer was at step {self._trained}")
        if version != self.batch_version(step) or not self._may_be_at(version):
            problem = f"was made for version {version}; its step has {self.batch_version(step)}"
            self._bad_batch("version of step", step, f"{problem}, and version {self._version} was published last")
        self._next_step = max(self._next_step, step + 1)
        self.batches.setdefault(step, _Batch(ids))

    def _into_batch(self, episode_id: int, step: int, version: int) -> None:
        episode = self._episodes.get(episode_id)
        state = "never admitted" if episode is None else episode.state
        if episode is not None and episode.step not in (-1, step):
            problem = f"is in batch {episode.step} and in batch {step}"
            self._bad_episode("in two batches", episode_id, problem, steps=[episode.step, step])
        elif state != "waiting":
            problem = f"is in batch {step}, but was {state}, not accepted and waiting"
            self._bad_episode("not accepted", episode_id, problem, steps=[step])
        if episode is None:
            return
        if episode.max_version > version:
            problem = f"has a token of version {episode.max_version}, but version {version} trains on batch {step}"
            self._bad_episode("newer token", episode_id, problem, steps=[step])
        if episode.step == -1:
            episode.state, episode.step = "batched", step

    def _consumed(self, event: Event) -> None:
        step, batch = self._trained_on(event, "consumed")
        if batch is None:
            return
        if batch.is_consumed:
            problem = "was consumed twice without a trainer going back to it"
            self._bad_batch("consumed twice", step, problem, episodes=batch.ids)
        elif step != self._trained:
            self._bad_batch("consumption order", step, f"was consumed while the trainer was at step {self._trained}")
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
            self._bad_batch("trained again", step, "was trained again, but never consumed")
        elif step != self._trained:
            problem = f"was trained again while the trainer was at step {self._trained}: it did not go back"
            self._bad_batch("consumed twice", step, problem, episodes=batch.ids)
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
            self._bad_batch("never batched", step, f"was {verb}, but that step has no batch")
        elif version != self.batch_version(step + 1) or not self._may_be_at(version):
            problem = f"was {verb} and led to version {version}; that step leads to {self.batch_version(step + 1)}"
            self._bad_batch("version of step", step, f"{problem}, and version {self._version} was published last")
        return step, batch

    def _committed(self, event: Event) -> None:
        step = self.report.committed_step = int(event["step"])
        if self._trained is None or step > self._trained:
            text = f"a checkpoint after step {step} was committed with {self._trained} steps trained"
            self.report.violate("checkpoint", text, steps=[step])

    def _pruned(self, event: Event) -> None:
        """The state machine checks that nothing refers to these segments."""
        first_step = int(event["first_step"])
        if first_step > self.report.committed_step:
            text = f"payloads before step {first_step} were pruned, beyond the checkpoint {self.report.committed_step}"
            self.report.violate("pruned", text, steps=[first_step])

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
        "pruned": _pruned,
        "evaluated": lambda rules, event: None,
        "compared": lambda rules, event: None,
        "group": lambda rules, event: None,  # checked by the reader
    }
