"""Proves from the files alone that a ledger lost no episode and trained on none twice.

Two independent models process the events: the rules in audit_rules.py and the state machine of the controller. A
difference between them is a violation too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import orjson

from areal.api.data import TURNS, tokens_checksum
from areal.api.errors import InputError, LedgerError
from areal.api.table import SESSION, TokenTable, images_of
from areal.data.image_files import ImageFiles
from areal.data.prompt_stream import PromptStream, row_stream
from areal.ledger.event_files import IncompleteTail, LedgerReader, PayloadReader, Progress, open_reader, payload_path
from areal.ledger.kept import kept_names, read_kept
from areal.ledger.payload import record_of, recorded_sessions, to_table
from areal.ledger.state import FAILED, IDENTITY, REJECTED, SKIPPED_KEY, STATE_NAMES, Event, LedgerState, failure_key

# ----------------------------------------------------------------------------------------------------------------------
# The result of an audit: broken rules and totals, as lines for people and as JSON for programs.

MAX_IDS = 10
"""Maximum number of ids in a line; JSON has all."""
MAX_LINES_PER_RULE = 10
"""Maximum number of lines for the violations of one rule; JSON has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule."""

    rule: str
    """Name of the rule."""
    message: str
    episodes: tuple[int, ...] = ()
    """All affected episodes, including those that the message omits."""
    steps: tuple[int, ...] = ()


def listed(ids: Iterable[int]) -> str:
    """The first MAX_IDS ids, and the number of the others."""
    numbers = list(ids)
    rest = len(numbers) - MAX_IDS
    return ", ".join(map(str, numbers[:MAX_IDS])) + (f" ... and {rest} more" if rest > 0 else "")


@dataclass(slots=True)
class AuditReport:
    """The findings of an audit. AuditRules fills it event by event."""

    num_admitted: int = 0
    counts: dict[str, int] = field(default_factory=dict[str, int])
    """Episodes per state. Their sum must be num_admitted."""
    num_attempts: int = 0
    """Starts of episodes, including restarts after a crash."""
    num_controllers: int = 0
    num_attaches: int = 0
    num_batches: int = 0
    committed_step: int = 0
    trained_again: list[int] = field(default_factory=list[int])
    """Steps trained again after a trainer recovered, in order."""
    num_bitwise_equal: int = 0
    """How many of these steps led to bitwise the same weights as the first time."""
    unequal: list[int] = field(default_factory=list[int])
    """Steps that led to other weights. Not a violation: sums round differently on other hardware."""
    reasons: Counter[str] = field(default_factory=Counter[str])
    notes: list[str] = field(default_factory=list[str])
    """Remarks that are not violations."""
    violations: list[Violation] = field(default_factory=list[Violation])
    incomplete: IncompleteTail | None = None
    """A group that is being written now, or that the next start cuts. Not a violation."""

    def violate(self, rule: str, message: str, *, episodes: Iterable[int] = (), steps: Iterable[int] = ()) -> None:
        self.violations.append(Violation(rule=rule, message=message, episodes=tuple(episodes), steps=tuple(steps)))

    @property
    def is_clean(self) -> bool:
        return not self.violations

    def lines(self) -> list[str]:
        """The report for people."""
        terms = " + ".join(f"{name} {count}" for name, count in self.counts.items())
        sign = "=" if sum(self.counts.values()) == self.num_admitted else "!="
        lines = [
            f"admitted {self.num_admitted} {sign} {terms}",
            f"episode starts: {self.num_attempts}, controller starts: {self.num_controllers}, "
            f"trainer attaches: {self.num_attaches}, batches: {self.num_batches}, "
            f"last checkpoint: step {self.committed_step}",
            *(f"{reason}: {count}" for reason, count in sorted(self.reasons.items())),
        ]
        if self.trained_again:
            lines.append(f"steps trained again: {len(self.trained_again)}, bitwise equal: {self.num_bitwise_equal}")
        if self.unequal:
            lines.append(f"trained again to other weights than before: step {listed(self.unequal)}")
        lines.extend(self.notes)
        if (tail := self.incomplete) is not None:
            lines.append(f"incomplete last group: {tail.size} bytes of {tail.path} from byte {tail.offset}")
        lines.extend(self._violation_lines())
        lines.append("clean" if self.is_clean else f"{len(self.violations)} violations")
        return lines

    def _violation_lines(self) -> list[str]:
        shown, lines = Counter[str](), list[str]()
        for violation in self.violations:
            shown[violation.rule] += 1
            if shown[violation.rule] <= MAX_LINES_PER_RULE:
                lines.append(f"VIOLATION [{violation.rule}] {violation.message}")
        for rule, times in shown.items():
            if times > MAX_LINES_PER_RULE:
                lines.append(f"VIOLATION [{rule}] ... and {times - MAX_LINES_PER_RULE} more (--json lists all)")
        return lines

    def to_json(self) -> dict[str, Any]:
        """The complete report, JSON-ready."""
        tail = None if self.incomplete is None else asdict(self.incomplete) | {"path": str(self.incomplete.path)}
        return asdict(self) | {"reasons": dict(self.reasons), "incomplete": tail, "clean": self.is_clean}


# ----------------------------------------------------------------------------------------------------------------------
# The rules of an audit for the turns of agents: each is sampled once, and trained on once or never.
#
# The journal of turns (areal.agent.session_server) has their stages intent, generated and delivered; the event
# `accepted` of the ledger adopts the turns of its episode, and its payload has their tokens and the facts of their
# sessions.


class _Generated(NamedTuple):
    num_tokens: int
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adoption:
    """An accepted episode with turns."""

    episode: int
    turns: list[str]
    num_trained: int | None
    """Tokens in the loss of its payload; None = the payload was not read."""
    trained: dict[str, _Generated]
    """The same of each turn, in order of place; empty where the payload does not name turns."""
    overwritten: int | None
    """Generated tokens that its transcripts overwrote (agent.on_drift: realign); None = not recorded."""


@dataclass(slots=True)
class TurnRules:
    """The rules applied to one ledger and the journal of its turns."""

    _adoptions: list[_Adoption] = field(default_factory=list[_Adoption])
    _adopted_by: dict[str, int] = field(default_factory=dict[str, int])
    _intended: set[str] = field(default_factory=set[str])
    _generated: dict[str, _Generated] = field(default_factory=dict[str, _Generated])
    _delivered: set[str] = field(default_factory=set[str])

    def accepted(self, event: Event, columns: TokenTable | None, record: str) -> None:
        """Take an `accepted` event, with its trajectories and the record of its sessions where they were read."""
        if turns := event.get("turns"):
            self._adoptions.append(
                _Adoption(
                    episode=event["id"],
                    turns=list(turns),
                    num_trained=None if columns is None else columns.loss_mask.tobytes().count(1),
                    trained={} if columns is None else _trained_turns(columns, turns),
                    overwritten=_num_overwritten(record, turns),
                )
            )

    def check(self, report: AuditReport, folder: Path) -> None:
        """Add what breaks a rule to `report`. `folder`: that of the journal, which a run without agents does not have.

        A journal is complete up to its last whole line: every line was written at once.
        """
        for path in sorted(folder.glob("*.jsonl")):
            for event in _events(path):
                self._take(report, event)
        for adoption in self._adoptions:
            self._check_adoption(report, adoption)
        if self._intended:
            report.notes.append(self._summary())

    def _summary(self) -> str:
        adopted = len(self._adopted_by)
        return (
            f"turns: {len(self._intended)} intended, {len(self._generated)} generated, {len(self._delivered)} "
            f"delivered, {adopted} adopted by accepted episodes, {len(self._generated) - adopted} generated and never "
            "trained on"
        )

    def _take(self, report: AuditReport, event: dict[str, Any]) -> None:
        match event:
            case {"event": "intent", "turns": [*turns]}:
                for turn in turns:
                    if turn in self._intended:
                        report.violate("turn sampled twice", f"turn {turn} has two intents")
                    self._intended.add(turn)
            case {"event": "generated", "turn": str(turn), "tokens": int(num_tokens), "crc": int(checksum)}:
                if turn not in self._intended:
                    report.violate("turn without intent", f"turn {turn} was generated without an intent")
                if turn in self._generated:
                    report.violate("turn sampled twice", f"turn {turn} was generated twice")
                self._generated[turn] = _Generated(num_tokens, checksum)
            case {"event": "delivered", "turns": [*turns]}:
                for turn in turns:
                    self._delivered.add(turn)
            case {"event": "ended"}:
                pass  # of an earlier version: the payload has the facts of a session
            case _:
                report.violate("form", f"{event!r} is not an event of a journal of turns")

    def _check_adoption(self, report: AuditReport, adoption: _Adoption) -> None:
        episode = adoption.episode
        known: list[_Generated] = []
        for turn in adoption.turns:
            other = self._adopted_by.setdefault(turn, episode)
            if other != episode or adoption.turns.count(turn) > 1:
                text = f"turn {turn} is adopted by episode {other} and by episode {episode}"
                report.violate("turn trained twice", text, episodes=sorted({other, episode}))
            if (generated := self._generated.get(turn)) is None:
                text = f"episode {episode} adopts turn {turn}, which was never generated"
                report.violate("turn never generated", text, episodes=[episode])
            else:
                known.append(generated)
        for turn, trained in adoption.trained.items():
            generated = self._generated.get(turn)
            if turn not in adoption.turns:
                text = f"episode {episode} trains on a turn that it does not adopt"
                report.violate("turn not adopted", text, episodes=[episode])
            elif generated is not None and trained.num_tokens > generated.num_tokens:
                self._trained_twice(report, adoption, trained.num_tokens, f"turn {turn}", generated.num_tokens)
            elif generated is not None and trained.num_tokens == generated.num_tokens and trained != generated:
                text = f"episode {episode} trains on other tokens than those that were generated for turn {turn}"
                report.violate("turn changed", text, episodes=[episode])
        num_trained, num_wanted = adoption.num_trained, sum(entry.num_tokens for entry in known)
        if num_trained is None:
            return
        if not adoption.trained and num_trained > num_wanted:
            self._trained_twice(report, adoption, num_trained, "its turns", num_wanted)
        if adoption.overwritten is not None and num_trained < num_wanted - adoption.overwritten:
            text = f"episode {episode} trains on {num_trained} of the {num_wanted} tokens of its turns"
            report.violate("turn lost", f"{text}, and {adoption.overwritten} were overwritten", episodes=[episode])

    def _trained_twice(self, report: AuditReport, adoption: _Adoption, trained: int, what: str, generated: int) -> None:
        text = f"episode {adoption.episode} trains on {trained} tokens of {what} with {generated} tokens"
        report.violate("turn trained twice", text, episodes=[adoption.episode])


def _trained_turns(columns: TokenTable, turns: Sequence[str]) -> dict[str, _Generated]:
    """The tokens in the loss by turn id, those of a turn in the order of their places; "" for a turn that is not one of
    `turns`. Rows name a turn by the numbers of its session and of the turn in it."""
    if TURNS not in columns.columns or SESSION not in columns.columns:
        return {}
    sessions: dict[str, list[str]] = {}
    for turn in turns:
        sessions.setdefault(turn.rpartition(".")[0], []).append(turn)
    of_session = list(sessions.values())
    made = np.flatnonzero(columns.loss_mask)
    starts = np.cumsum(columns.lengths) - columns.lengths
    places = np.arange(len(columns.loss_mask)) - np.repeat(starts, columns.lengths)
    session_of, turn_of = np.repeat(columns.columns[SESSION], columns.lengths)[made], columns.columns[TURNS][made]
    order = np.lexsort((places[made], turn_of, session_of))
    edges = np.flatnonzero((np.diff(session_of[order]) != 0) | (np.diff(turn_of[order]) != 0)) + 1
    generated: dict[str, _Generated] = {}
    for part in np.split(order, edges) if len(order) else ():
        session, number = int(session_of[part[0]]), int(turn_of[part[0]])
        known = 0 <= session < len(of_session) and 0 <= number < len(of_session[session])
        name = of_session[session][number] if known else ""
        generated[name] = _Generated(len(part), tokens_checksum(columns.token_ids[made[part]].tolist()))
    return generated


def _num_overwritten(record: str, turns: Sequence[str]) -> int | None:
    """None: a workflow of the user, or an earlier version, did not record it for all sessions of these turns."""
    counts = {
        recorded_session.get("session"): recorded_session.get("overwritten")
        for recorded_session in recorded_sessions(record)
    }
    numbers = [counts.get(session) for session in {turn.rpartition(".")[0] for turn in turns}]
    return None if None in numbers else sum(count for count in numbers if count is not None)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    *lines, _ = path.read_bytes().split(b"\n")
    for line in lines:
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError:
            yield {"damaged": line[:80].decode("utf-8", "replace")}


# ----------------------------------------------------------------------------------------------------------------------
# The rules of an audit: the events of a ledger, in order, lose no episode and train on none twice.
#
# The rules use only the events and not the state machine of the controller, so they also detect errors in that. An
# event that breaks a rule is reported and then applied as far as possible, so that one violation does not cause others.
# Times are ignored, because clocks jump.

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
    _highest: int = -1  # The highest policy version so far.
    _offset: int | None = None  # Policy version minus train step, constant during a run.
    _lacking: int = 0  # Episodes that the batches so far have less than batch_size each.
    _unconfirmed: int | None = None
    """A version published out of order: valid only if a trainer attaches at it before any other event depends on it."""

    def counts(self) -> dict[str, int]:
        """Episodes per state."""
        by_state = Counter(episode.state for episode in self._episodes.values())
        return {name: by_state[name] for name in STATE_NAMES}

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
        self.report.reasons[failure_key(event)] += 1

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

    def _skipped(self, event: Event) -> None:
        """The newest batch, which a trainer refused, is left out; another one is made for its step."""
        step = int(event["step"])
        batch = self.batches.get(step)
        if batch is None or batch.is_consumed or step != self._next_step - 1:
            self._bad_batch("skipped", step, "was skipped, but it is not the newest batch, or was consumed")
            return
        for episode_id in batch.ids:
            if (episode := self._episodes.get(episode_id)) is not None and episode.step == step:
                episode.state = "rejected"
        self.report.reasons[SKIPPED_KEY] += len(batch.ids)
        self._next_step = step
        del self.batches[step]

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
        "skipped": _skipped,
        "trained_again": _trained_again,
        "committed": _committed,
        "pruned": _pruned,
        "evaluated": lambda rules, event: None,
        "compared": lambda rules, event: None,
        "group": lambda rules, event: None,  # checked by the reader
    }


def ledger_folder(run: Path) -> Path:
    """The ledger folder of a run folder, or the given folder itself."""
    return run / "ledger" if (run / "ledger").is_dir() else run


def audit(folder: Path, *, check_payloads: bool = True) -> AuditReport:
    """Check all rules on the ledger in `folder`. It only reads, so it may run while a controller writes.

    Raises LedgerError when the folder holds no events.
    """
    reader = open_reader(folder)
    with PayloadReader(folder) as payloads:
        run = _Audit(folder, payloads if check_payloads else None)
        with Progress("events audited") as progress:
            for group in reader.groups():
                for event in group:
                    run.take(event)
                    progress.step()
    return run.report(reader)


@dataclass(slots=True)
class _Audit:
    """One pass over all events."""

    folder: Path
    payloads: PayloadReader | None
    rules: AuditRules = field(default_factory=AuditRules)
    turns: TurnRules = field(default_factory=TurnRules)
    state: LedgerState = field(default_factory=LedgerState)
    refusal: str = ""
    """Why a controller would refuse this ledger."""
    num_events: int = 0
    num_decreasing: int = 0
    missing: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Episodes of each missing segment."""
    images: dict[str, int] = field(default_factory=dict[str, int])
    """Digest of each image -> the first episode that refers to it."""

    def take(self, event: Event) -> None:
        max_version = None
        if event.get("event") == "accepted":
            columns, record = (None, "") if self.payloads is None else self._payload(self.payloads, event)
            max_version = None if columns is None else self._check_payload(event, columns)
            self.turns.accepted(event, columns, record)
        self.rules.take(self.num_events, event, max_version=max_version)
        if not self.refusal:
            try:
                self.state.apply(event)
            except (LedgerError, KeyError, TypeError, ValueError, AttributeError) as error:
                self.refusal = f"a controller would refuse event {self.num_events}: {error}"
        self.num_events += 1

    def _payload(self, payloads: PayloadReader, event: Event) -> tuple[TokenTable | None, str]:
        """The trajectories of an accepted episode, and what its workflow recorded of its sessions.

        None when they cannot be read, which is a finding.
        """
        try:
            segment, offset, size = event["payload"]
            payload = payloads.read((segment, offset, size))
            table = to_table(event["id"], payload)
            for row in images_of(table):
                for image in row:
                    self.images.setdefault(image.sha256, event["id"])
            return table, record_of(table)
        except LedgerError as error:
            segment = event["payload"][0]
            if payload_path(self.folder, segment).exists():
                self.rules.report.violate("payload", f"episode {event['id']}: {error}", episodes=[event["id"]])
            else:
                self.missing.setdefault(segment, []).append(event["id"])
        except (KeyError, TypeError, ValueError, IndexError):
            pass  # AuditRules reports a malformed event
        return None, ""

    def _check_payload(self, event: Event, columns: TokenTable) -> int | None:
        """Compare the event with its payload. Returns the newest version of its tokens."""
        try:
            problems = _differences(event, columns)
            if problems:
                self.rules.report.violate(
                    "payload", f"episode {event['id']}: {'; '.join(problems)}", episodes=[event["id"]]
                )
            newest = int(columns.output_versions.max())
            if event["min_version"] < newest:
                self.num_decreasing += _num_decreasing(columns)
            return newest
        except (KeyError, TypeError, ValueError, IndexError):
            return None  # AuditRules reports a malformed event

    def report(self, reader: LedgerReader) -> AuditReport:
        """The findings, after all events."""
        report = self.rules.report
        report.counts, report.incomplete = self.rules.counts(), reader.incomplete
        report.num_batches = len(self.rules.batches)
        if pruned := {segment for segment in self.missing if segment in reader.pruned}:
            count = sum(len(self.missing.pop(segment)) for segment in pruned)
            text = f"the payloads of {count} episodes in {len(pruned)} segments were pruned (rollout.keep_payloads)"
            report.notes.append(text)
        for segment, ids in self.missing.items():
            path = payload_path(self.folder, segment)
            report.violate("payload", f"{path} is missing: it holds episodes {listed(ids)}", episodes=ids)
        for path in reader.lost(newest=True):
            report.violate("lost events", f"{path} is missing, but its payload file exists")
        for path in reader.lost(newest=False):
            report.notes.append(f"{path} was lost; the next controller continued from the events before it")
        if reader.damage:
            report.violate("damage", f"{reader.damage}; no later event was audited")
        if not report.violations:  # the state machine stops at the first violation, so it may differ after one
            self._compare_models(report)
        if self.num_decreasing:
            note = f"{self.num_decreasing} trajectories have a token of an older version than an earlier token"
            report.notes.append(note)
        if waiting := self.rules.num_interrupted:
            text = f"{waiting} running episodes were interrupted; if the run needs more, these start first"
            report.notes.append(text)
        self._note_kept(report)
        self.turns.check(report, self.folder.parent / "turns")
        self._check_images(report)
        if first := min(self.rules.batches, default=0):
            report.notes.append(f"the ledger starts at step {first}; rows of earlier steps may be used again")
        return report

    def _check_images(self, report: AuditReport) -> None:
        """Every image that a payload refers to is a file with its digest."""
        files = ImageFiles(self.folder.parent / "images")
        for sha256, episode_id in self.images.items():
            try:
                files.read(sha256)
            except InputError as error:
                report.violate("image", f"episode {episode_id}: {error}", episodes=[episode_id])

    def _note_kept(self, report: AuditReport) -> None:
        """Payloads kept for readers prove nothing and are not durable, so a damaged one is not a violation."""
        num_others, damaged = 0, list[int]()
        kept = kept_names(self.folder)
        for episode_id, attempt in kept:
            states = self.state.states
            num_others += not (episode_id < len(states) and states[episode_id] in (REJECTED, FAILED))
            try:
                read_kept(self.folder, episode_id, attempt)
            except LedgerError:
                damaged.append(episode_id)
        if num_others:
            report.notes.append(f"{num_others} of {len(kept)} kept payloads are of attempts that a crash ended")
        if damaged:
            report.notes.append(f"the kept payloads of the rejected or failed episodes {listed(damaged)} are damaged")

    def _compare_models(self, report: AuditReport) -> None:
        """The state machine of the controller must agree with the rules."""
        if self.refusal:
            report.violate("state machine", self.refusal)
            return
        try:
            self.state.check_integrity()
        except LedgerError as error:
            report.violate("state machine", str(error))
        if (counts := self.state.counts_by_name()) != report.counts:
            report.violate("state machine", f"counts are {report.counts}, those of the controller {counts}")


def _differences(event: Event, columns: TokenTable) -> list[str]:
    """The fields of an `accepted` event that differ from its payload."""
    made = columns.output_versions[columns.output_versions != -1]
    differences: dict[str, Any] = {
        "trajectories": len(columns.lengths),
        "tokens": len(columns.token_ids),
        "generated": columns.loss_mask.tobytes().count(1),
        "min_version": int(made.min()) if len(made) else -1,
        "max_version": int(made.max()) if len(made) else -1,
    }
    problems = [
        f"{name} is {event[name]} in the event, {value} in the payload"
        for name, value in differences.items()
        if event[name] != value
    ]
    rewards = _rewards_of_sessions(columns)
    reward = sum(rewards) / len(rewards)
    largest = max(map(abs, rewards))
    if not math.isclose(event["reward"], reward, abs_tol=1e-6 * max(1.0, largest)):  # float32 in the payload
        problems.append(f"reward is {event['reward']} in the event, {reward:.6g} in the payload")
    return problems


def _rewards_of_sessions(columns: TokenTable) -> list[float]:
    """The rewards of which an event has the mean: that of each session, which its rows repeat."""
    sessions = columns.columns.get(SESSION)
    of_row: list[int] = [-1] * len(columns.lengths) if sessions is None else sessions.tolist()
    keys = [(session, -1) if session >= 0 else (-1, row) for row, session in enumerate(of_row)]
    return list(dict(zip(keys, columns.rewards.tolist(), strict=True)).values())


def _num_decreasing(columns: TokenTable) -> int:
    """Number of trajectories with a generated token of an older version than an earlier one."""
    made = np.flatnonzero(columns.output_versions >= 0)
    versions = columns.output_versions[made]
    falls = np.flatnonzero(versions[1:] < versions[:-1]) + 1
    if len(falls) == 0:
        return 0
    trajectory_of = np.repeat(np.arange(len(columns.lengths)), columns.lengths)[made]
    within = trajectory_of[falls] == trajectory_of[falls - 1]
    return len(np.unique(trajectory_of[falls][within]))
