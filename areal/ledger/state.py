"""The state machine of episodes: what the events of a ledger mean, and which events it refuses. Pure.

The running controller, its recovery and the audit use the same `apply`, so the state of a running controller always
equals the state that its files describe.

    admitted -> running -> accepted (waiting) -> batched(step) -> consumed(step)
                   |           `-> rejected("stale")    `-> rejected("skipped"), by hand
                   |-> rejected(reason)
                   `-> failed(reason)

At any time admitted = running + waiting + rejected + failed + batched + consumed.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from areal.api.errors import LedgerError

# ----------------------------------------------------------------------------------------------------------------------
# The counts of an accepted episode, from which the statistics of a batch are computed.


class TokenCounts(NamedTuple):
    """What the statistics of a batch need of an episode, so that nobody reads its payload for them."""

    num_trajectories: int
    num_sessions: int
    num_finished: int
    """Sessions."""
    longest: int
    """Tokens of its longest trajectory."""
    reward: float
    """Mean over the sessions."""
    by_version: tuple[tuple[int, int, int], ...]
    """(policy version or -1 = not generated, tokens, trained tokens among them), ascending."""


def counts_of_event(event: dict[str, Any]) -> TokenCounts:
    """The counts of an `accepted` event."""
    rows: list[tuple[int, int, int]] = event["by_version"]  # or lists, in a file
    by_version: Any = tuple(map(tuple, rows))
    return TokenCounts(
        event["trajectories"], event["sessions"], event["finished"], event["longest"], event["reward"], by_version
    )


def count_by_version(versions: array[int], loss_mask: bytes | bytearray) -> tuple[tuple[int, int, int], ...]:
    """See `TokenCounts.by_version`. versions [T] int32, loss_mask [T] uint8. Neighbours mostly have one version."""
    numbers = np.frombuffer(versions, "i4")
    starts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()]
    counts: dict[int, tuple[int, int]] = {}
    for start, end in zip(starts, [*starts[1:], len(versions)], strict=True):
        before = counts.get(versions[start], (0, 0))
        num_trained = end - start - loss_mask.count(0, start, end)
        counts[versions[start]] = (before[0] + end - start, before[1] + num_trained)
    return tuple((version, *counts[version]) for version in sorted(counts))


class LedgerBehind(LedgerError):
    """A trainer has done more train steps than the ledger records: its newest events were lost."""

    code = "ledger.behind_trainer"

    def __init__(self, step: int, newest_step: int | None) -> None:
        recorded = "records no trainer" if newest_step is None else f"ends after step {newest_step}"
        super().__init__(
            f"the trainer is at step {step}, but the ledger {recorded}: its newest events were lost. "
            f"Training can continue from a checkpoint of at most {newest_step or 0} steps"
        )
        self.step, self.newest_step = step, newest_step


Event = dict[str, Any]
"""One line of the ledger, JSON-ready; key "event" names its kind."""

RUNNING, WAITING, REJECTED, FAILED, BATCHED, CONSUMED = range(6)
STATE_NAMES = ("running", "waiting", "rejected", "failed", "batched", "consumed")

FORMAT = 2
"""Of the events and payloads of a ledger, in each `started` event."""
IDENTITY = ("seed", "batch_size", "num_rows", "rows_per_epoch", "shuffle")
"""The settings that decide the row of admission k. A ledger may only be continued with the same values."""


class RunningEpisode(NamedTuple):
    """A running episode."""

    attempt: int
    version: int
    """Policy version when this attempt started."""
    ahead: int | None
    """Episodes beyond those that this version needs that the gate allowed then; None = not recorded."""


class AcceptedEpisode(NamedTuple):
    """An accepted episode and the location of its trajectories."""

    episode_id: int
    payload: tuple[int, int, int]
    """Segment number, offset and size in bytes."""
    min_version: int
    """Oldest policy version among its tokens."""
    num_tokens: int
    stats: dict[str, float]
    """Statistics of the workflow."""
    counts: TokenCounts
    ahead: int | None = None
    """See `RunningEpisode.ahead`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """The composition of one train batch, sufficient to rebuild its bytes."""

    step: int
    version: int
    """Policy version that trains on it."""
    mask_before: int
    """Tokens of versions below this are excluded from the loss; 0 = none."""
    episode_ids: tuple[int, ...]
    payloads: tuple[tuple[int, int, int], ...]
    stats: dict[str, float]
    by_tree: bool = False
    """Shares of data ranks are balanced by tokens of which those that rows share are counted once."""


@dataclass(slots=True, kw_only=True)
class LedgerState:
    """The state after a sequence of events. Episode ids are admission numbers, counted from 0."""

    states: bytearray = field(default_factory=bytearray)
    """State of every admitted episode, by id."""
    counts: list[int] = field(default_factory=lambda: [0] * len(STATE_NAMES))
    """Episodes per state."""
    running: dict[int, RunningEpisode] = field(default_factory=dict[int, RunningEpisode])
    waiting: dict[int, AcceptedEpisode] = field(default_factory=dict[int, AcceptedEpisode])
    batches: dict[int, BatchRecord] = field(default_factory=dict[int, BatchRecord])
    consumed_steps: set[int] = field(default_factory=set[int])
    evaluations: dict[tuple[int, str], dict[str, float]] = field(
        default_factory=dict[tuple[int, str], dict[str, float]]
    )
    """Results by (completed train steps, mode)."""
    committed_step: int = 0
    """Train steps in the newest recovery checkpoint."""
    committed_steps: set[int] = field(default_factory=set[int])
    """Train steps of all recovery checkpoints so far."""
    last_segment: int = 0
    """The highest payload segment that an episode refers to."""
    pruned_segments: set[int] = field(default_factory=set[int])
    """Payload segments that were deleted on purpose, see areal.ledger.ledger."""
    version: int = 0
    """Policy version of the servers: the last one published, or the one of the trainer's last attach."""
    highest_version: int = 0
    """The highest version published so far. Above `version` while a recovered trainer catches up."""
    last_published: Event | None = None
    trained_steps: int | None = None
    """Completed train steps, reported by the trainer at its attach and after each step; None = no trainer so far."""
    ess: float | None = None
    """Effective sample size of the batch trained on last, as a share of its tokens; None = not measured."""
    skipped_steps: int = 0
    """Train steps completed before this ledger started (its folder is new)."""
    identity: Event | None = None
    reasons: Counter[str] = field(default_factory=Counter[str])
    """How often each "rejected: reason" and "failed: reason" occurred."""
    first_open: int = field(default=0, compare=False)
    """All episodes below this id have ended."""

    def counts_by_name(self) -> dict[str, int]:
        """Episodes per state, by the state's name."""
        return dict(zip(STATE_NAMES, self.counts, strict=True))

    def episodes(self) -> dict[str, Any]:
        """The numbers of episodes by state and reason, JSON-ready."""
        return {"admitted": self.num_admitted, **self.counts_by_name(), "reasons": dict(self.reasons)}

    @property
    def trainer_version(self) -> int:
        """Policy version of the trainer. The policy version is the number of steps done; servers install it later."""
        return max(self.version, self.trained_steps or 0)

    @property
    def is_catching_up(self) -> bool:
        """A recovered trainer has yet to make a version again that was published before."""
        return self.version < self.highest_version

    @property
    def num_admitted(self) -> int:
        return len(self.states)

    @property
    def num_accepted(self) -> int:
        """All accepted episodes except those dropped as stale."""
        counts = self.counts
        return counts[WAITING] + counts[BATCHED] + counts[CONSUMED]

    @property
    def next_step(self) -> int:
        """The first train step without a recorded batch."""
        return self.skipped_steps + len(self.batches)

    @property
    def newest_step(self) -> int | None:
        """The most train steps that a trainer can have done; None = any, because no trainer is recorded.

        A trainer that has done more, or that has a checkpoint of more, knows of events that were lost.
        """
        return None if self.trained_steps is None else self.skipped_steps + len(self.consumed_steps)

    def require_reached(self, step: int) -> None:
        """Raise LedgerBehind when a trainer that attached before has done `step` train steps, more than recorded."""
        if self.trained_steps is None or step > self.trained_steps:
            raise LedgerBehind(step, self.newest_step)

    def require_batch(self, step: int, version: int) -> None:
        """Raise LedgerBehind when a trainer trained on the batch of `step` to `version`, and the batch or the version
        before is not recorded."""
        self.require_reached(step)
        if step not in self.batches or version > self.version + 1:
            raise LedgerBehind(step, self.newest_step)

    def require_version(self, version: int) -> None:
        """Raise LedgerBehind when the recorded batches do not lead to policy `version`."""
        if self.trained_steps is not None and version > self.next_step:
            raise LedgerBehind(version, self.newest_step)

    @classmethod
    def replay(cls, events: Iterable[Event]) -> Self:
        """The state after `events`. Raises LedgerError at the first one that breaks a rule."""
        state = cls()
        for event in events:
            state.apply(event)
        return state

    def apply(self, event: Event) -> None:
        """Apply one event. An event that breaks a rule raises LedgerError and changes nothing."""
        kind, handlers = event["event"], self._HANDLERS
        if kind not in handlers:
            raise LedgerError(f"unknown ledger event {kind!r}", code="ledger.unknown_event")
        handlers[kind](self, event)

    def check_integrity(self) -> None:
        """Recount all episodes. Raises LedgerError when a counter differs. For tests and the audit."""
        counted = [self.states.count(state) for state in range(len(STATE_NAMES))]
        if counted != self.counts:
            raise _broken(f"episode counters {self.counts} differ from a recount {counted}")
        if len(self.running) != counted[RUNNING] or len(self.waiting) != counted[WAITING]:
            raise _broken("the tables of running and waiting episodes differ from the episode states")
        batched = sum(len(batch.episode_ids) for batch in self.batches.values())
        if batched != counted[BATCHED] + counted[CONSUMED]:
            raise _broken(f"{batched} episodes in batches, {counted[BATCHED] + counted[CONSUMED]} by state")

    def oldest_waiting(self, limit: int, *, in_order: bool) -> list[int]:
        """Ids of at most `limit` waiting episodes in order of admission; `in_order` stops at the first running one."""
        states, end = self.states, len(self.states)
        while self.first_open < end and states[self.first_open] > WAITING:
            self.first_open += 1
        if in_order and (first_running := states.find(RUNNING, self.first_open)) >= 0:
            end = first_running
        result: list[int] = []
        position = self.first_open - 1
        for _ in range(limit):
            position = states.find(WAITING, position + 1, end)
            if position < 0:
                break
            result.append(position)
        return result

    def _move_all(self, episode_ids: Sequence[int], source: int, target: int) -> None:
        states = self.states
        for episode_id in episode_ids:
            states[episode_id] = target
        self.counts[source] -= len(episode_ids)
        self.counts[target] += len(episode_ids)

    def _require(self, episode_id: int, wanted: int, verb: str) -> None:
        if not 0 <= episode_id < len(self.states):
            raise _broken(f"episode {episode_id} {verb}, but it was never admitted")
        if self.states[episode_id] != wanted:
            state = STATE_NAMES[self.states[episode_id]]
            raise _broken(f"episode {episode_id} {verb}, but it is {state}, not {STATE_NAMES[wanted]}")

    def _end(self, episode_id: int, target: int, verb: str) -> None:
        if episode_id not in self.running:
            self._require(episode_id, RUNNING, verb)
        self.states[episode_id] = target
        self.counts[RUNNING] -= 1
        self.counts[target] += 1
        del self.running[episode_id]

    def _started(self, event: Event) -> None:
        if event.get("format") != FORMAT:
            raise LedgerError(
                f"the ledger has format {event.get('format', 1)}, this version of areal reads and writes {FORMAT}: "
                "continue the run with the version that started it, or choose a new trial_name",
                code="ledger.old_format",
            )
        identity = {name: event[name] for name in IDENTITY}
        if self.identity is not None and identity != self.identity:
            changed = ", ".join(
                f"{name}: {self.identity[name]} -> {identity[name]}"
                for name in IDENTITY
                if identity[name] != self.identity[name]
            )
            raise LedgerError(
                f"the ledger of this run was started with other data settings ({changed}): "
                "restore them, or choose a new trial_name",
                code="ledger.other_data",
            )
        self.identity = identity

    def _attached(self, event: Event) -> None:
        step: int = event["step"]
        if self.newest_step is not None and step > self.newest_step:
            raise LedgerBehind(step, self.newest_step)
        if not self.batches:  # no recorded batch leads to an earlier version again
            self.skipped_steps = step
            self.highest_version = event["version"]
        elif step < self.skipped_steps:
            raise LedgerError(
                f"the trainer continues at step {step}, but the first batch in this ledger is that of step "
                f"{self.skipped_steps}: restore a checkpoint of that step or later, or the ledger of the earlier steps",
                code="ledger.other_run",
            )
        self.trained_steps = step
        self.version = event["version"]

    def _published(self, event: Event) -> None:
        self.version = event["version"]
        self.highest_version = max(self.highest_version, self.version)
        self.last_published = event

    def _admitted(self, event: Event) -> None:
        episode_id: int = event["id"]
        attempt: int = event["attempt"]
        if attempt == 0:
            if episode_id != len(self.states):
                raise _broken(f"episode {episode_id} admitted, but the next id is {len(self.states)}")
            self.states.append(RUNNING)
            self.counts[RUNNING] += 1
        else:
            self._require(episode_id, RUNNING, f"started again (attempt {attempt})")
            if attempt != self.running[episode_id].attempt + 1:
                previous = self.running[episode_id].attempt
                raise _broken(f"episode {episode_id}: attempt {attempt} follows attempt {previous}")
        ahead: int | None = event["ahead"] if "ahead" in event else None  # noqa: SIM401 - once for each episode
        self.running[episode_id] = RunningEpisode(attempt, event["version"], ahead)

    def _accepted(self, event: Event) -> None:
        episode_id: int = event["id"]
        ahead = self.running[episode_id].ahead if episode_id in self.running else None
        self._end(episode_id, WAITING, "accepted")
        where = tuple(event["payload"])
        if where[0] > self.last_segment:
            self.last_segment = where[0]
        self.waiting[episode_id] = AcceptedEpisode(
            episode_id, where, event["min_version"], event["tokens"], event["stats"], counts_of_event(event), ahead
        )

    def _rejected(self, event: Event) -> None:
        episode_id: int = event["id"]
        reason: str = event["reason"]
        if reason == "stale" and episode_id in self.waiting:
            self._move_all([episode_id], WAITING, REJECTED)
            del self.waiting[episode_id]
        else:
            self._end(episode_id, REJECTED, f"rejected ({reason})")
        self.reasons[f"rejected: {reason}"] += 1

    def _failed(self, event: Event) -> None:
        episode_id: int = event["id"]
        self._end(episode_id, FAILED, "failed")
        self.reasons[failure_key(event)] += 1

    def _batched(self, event: Event) -> None:
        step: int = event["step"]
        ids: list[int] = event["ids"]
        if step != self.next_step:
            raise _broken(f"batch of step {step} composed, but step {self.next_step} is next")
        if len(set(ids)) != len(ids):
            twice = sorted(episode_id for episode_id, times in Counter(ids).items() if times > 1)
            raise _broken(f"batch of step {step} holds episodes {twice} more than once")
        for episode_id in ids:
            if episode_id not in self.waiting:
                self._require(episode_id, WAITING, f"batched (step {step})")
        self.batches[step] = BatchRecord(
            step=step,
            version=event["version"],
            mask_before=event["mask_before"],
            episode_ids=tuple(ids),
            payloads=tuple([self.waiting[episode_id].payload for episode_id in ids]),
            stats=event["stats"],
            by_tree=event.get("by_tree", False),
        )
        self._move_all(ids, WAITING, BATCHED)
        for episode_id in ids:
            del self.waiting[episode_id]

    def _consumed(self, event: Event) -> None:
        step: int = event["step"]
        if step not in self.batches:
            raise _broken(f"step {step} consumed, but no batch was recorded for it")
        if step in self.consumed_steps:
            raise _broken(f"step {step} consumed twice without a trainer going back to it")
        self._move_all(self.batches[step].episode_ids, BATCHED, CONSUMED)
        self.consumed_steps.add(step)
        self.trained_steps, self.ess = step + 1, event.get("ess")

    def _skipped(self, event: Event) -> None:
        step: int = event["step"]
        record = self.batches.get(step)
        if record is None or step in self.consumed_steps or step != self.next_step - 1:
            raise _broken(f"batch of step {step} skipped, but it is not the newest batch, or was consumed")
        self._move_all(record.episode_ids, BATCHED, REJECTED)
        del self.batches[step]
        self.reasons[SKIPPED_KEY] += len(record.episode_ids)

    def _trained_again(self, event: Event) -> None:
        step: int = event["step"]
        if step not in self.consumed_steps:
            raise _broken(f"step {step} trained again, but it was never consumed")
        self.trained_steps, self.ess = step + 1, event.get("ess")

    def _evaluated(self, event: Event) -> None:
        self.evaluations[event["step"], event["mode"]] = event["result"]

    def _committed(self, event: Event) -> None:
        self.committed_step = event["step"]
        self.committed_steps.add(self.committed_step)

    def needed_segments(self, first_step: int) -> set[int]:
        """The payload segments of the waiting episodes, and of the batches from `first_step` on."""
        recorded = (batch for step, batch in self.batches.items() if step >= first_step)
        segments = {where[0] for batch in recorded for where in batch.payloads}
        return segments | {episode.payload[0] for episode in self.waiting.values()}

    def _pruned(self, event: Event) -> None:
        segments: set[int] = set(event["segments"])
        if lost := segments & self.needed_segments(event["first_step"]):
            raise _broken(f"payload segments {sorted(lost)} pruned, but episodes need them")
        self.pruned_segments |= segments

    _HANDLERS: ClassVar[dict[str, Callable[[LedgerState, Event], None]]] = {
        "started": _started,
        "attached": _attached,
        "published": _published,
        "admitted": _admitted,
        "accepted": _accepted,
        "rejected": _rejected,
        "failed": _failed,
        "batched": _batched,
        "consumed": _consumed,
        "evaluated": _evaluated,
        "committed": _committed,
        "pruned": _pruned,
        "skipped": _skipped,
        "trained_again": _trained_again,
        "group": lambda state, event: None,
        "compared": lambda state, event: None,
    }


SKIPPED_KEY = "rejected: skipped"
"""How the episodes of a `skipped` batch are counted."""


def failure_key(event: Event) -> str:
    """How a `failed` event is counted. Ledgers of before have no kind."""
    return f"failed: {event.get('kind') or str(event['reason']).partition(':')[0]}"


def _broken(message: str) -> LedgerError:
    return LedgerError(message, code="ledger.broken_rule")
