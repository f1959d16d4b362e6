"""Owns the proof of a ledger: the conservation equation and every broken rule, from the files alone.

Two sets of books are kept: those of the rules (ledger_rules.py) and those of the controller's own state machine. They
must agree, or one of them is wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal.api.errors import LedgerError
from areal.ledger.audit_rules import RuleBook
from areal.ledger.event_files import LedgerReader, PayloadReader, TornTail, payload_path
from areal.ledger.payload_columns import disagreements, num_going_back, read_columns
from areal.ledger.reading_progress import Progress
from areal.ledger.state import Event, LedgerState
from areal.ledger.violations import Violation, listed

MAX_LINES_PER_RULE = 10
"""Longest list of violations of one rule that people get to see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What an audit found."""

    num_admitted: int
    counts: dict[str, int]
    """Episodes per state; they must sum to num_admitted."""
    num_attempts: int
    """Starts of episodes, repetitions after a death included."""
    num_controllers: int
    num_attaches: int
    num_batches: int
    committed_step: int
    trained_again: list[int]
    """Steps trained again after a trainer went back, in order."""
    num_bitwise_equal: int
    """Those of them after which the weights were bitwise those of the first time."""
    unequal: list[int]
    """Those of them after which they were not. No violation: on other hardware, sums round differently."""
    reasons: dict[str, int]
    notes: list[str]
    """Worth knowing, but no violations."""
    violations: list[Violation]
    torn: TornTail | None
    """A half-written end: of a group that is just being written, or that the next start will cut; no violation."""

    @property
    def is_clean(self) -> bool:
        return not self.violations

    def lines(self) -> list[str]:
        """For people to read."""
        terms = " + ".join(f"{name} {count}" for name, count in self.counts.items())
        sign = "=" if sum(self.counts.values()) == self.num_admitted else "!="
        lines = [
            f"admitted {self.num_admitted} {sign} {terms}",
            f"{self.num_attempts} starts by {self.num_controllers} controllers, {self.num_attaches} attaches of "
            f"trainers, {self.num_batches} batches, committed up to step {self.committed_step}",
            *(f"{reason}: {count}" for reason, count in sorted(self.reasons.items())),
        ]
        if self.trained_again:
            lines.append(f"steps trained again: {len(self.trained_again)}, bitwise equal: {self.num_bitwise_equal}")
        if self.unequal:
            lines.append(f"with other weights than the first time: after steps {listed(self.unequal)}")
        lines.extend(self.notes)
        if self.torn is not None:
            lines.append(f"half-written tail: {self.torn.size} bytes of {self.torn.path} from byte {self.torn.offset}")
        lines.extend(self._violation_lines())
        lines.append("clean" if self.is_clean else f"{len(self.violations)} violations")
        return lines

    def _violation_lines(self) -> list[str]:
        shown, lines = Counter[str](), list[str]()
        for violation in self.violations:
            shown[violation.rule] += 1
            if shown[violation.rule] <= MAX_LINES_PER_RULE:
                lines.append(f"VIOLATION [{violation.rule}] {violation}")
        for rule, times in shown.items():
            if times > MAX_LINES_PER_RULE:
                lines.append(f"VIOLATION [{rule}] ... and {times - MAX_LINES_PER_RULE} more (--json lists all)")
        return lines

    def to_json(self) -> dict[str, Any]:
        """For programs: everything, JSON-ready."""
        torn = None if self.torn is None else asdict(self.torn) | {"path": str(self.torn.path)}
        return asdict(self) | {"torn": torn, "clean": self.is_clean}


def ledger_folder(run: Path) -> Path:
    """The ledger of a run folder, or the folder itself when it is one."""
    return run / "ledger" if (run / "ledger").is_dir() else run


def open_reader(folder: Path) -> LedgerReader:
    """A pass over the events of a ledger folder. LedgerError when there are none to read."""
    if not folder.is_dir():
        raise LedgerError(f"{folder} is no ledger folder: name the folder of a run")
    reader = LedgerReader(folder)
    if not reader.numbers:
        raise LedgerError(f"{folder} holds no events: name the folder of a run whose controller has started")
    return reader


def audit(folder: Path, *, check_payloads: bool = True) -> AuditReport:
    """Check everything that can be checked about the ledger in `folder`. LedgerError when there is nothing to read.

    Reads only, so it may run while a controller writes.
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
    rules: RuleBook = field(default_factory=RuleBook)
    state: LedgerState = field(default_factory=LedgerState)
    refusal: str = ""
    """Why the controller would not go on with this ledger."""
    num_events: int = 0
    num_going_back: int = 0
    missing: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Episodes whose whole segment is not there, by segment."""

    def take(self, event: Event) -> None:
        max_version = None
        if self.payloads is not None and event.get("event") == "accepted":
            max_version = self._look_into(self.payloads, event)
        self.rules.take(self.num_events, event, max_version=max_version)
        if not self.refusal:
            try:
                self.state.apply(event)
            except (LedgerError, KeyError, TypeError, ValueError, AttributeError) as error:
                self.refusal = f"a controller would refuse event {self.num_events}: {error}"
        self.num_events += 1

    def _look_into(self, payloads: PayloadReader, event: Event) -> int | None:
        """Check the payload of an accepted episode; returns its newest version."""
        try:
            columns = read_columns(payloads, event)
            problems = disagreements(event, columns)
            if problems:
                self._violate("payload", f"episode {event['id']}: {'; '.join(problems)}", [event["id"]])
            newest = int(columns.output_versions.max())
            if event["min_version"] < newest:
                self.num_going_back += num_going_back(columns)
            return newest
        except LedgerError as error:
            segment: int = event["payload"][0]
            if payload_path(self.folder, segment).exists():
                self._violate("payload", f"episode {event['id']}: {error}", [event["id"]])
            else:
                self.missing.setdefault(segment, []).append(event["id"])
        except (KeyError, TypeError, ValueError, IndexError):
            pass  # the rules tell of a malformed event
        return None

    def _violate(self, rule: str, message: str, episodes: list[int]) -> None:
        self.rules.violations.append(Violation(rule=rule, message=message, episodes=tuple(episodes)))

    def report(self, reader: LedgerReader) -> AuditReport:
        """What was found, once all events were taken."""
        rules, counts = self.rules, self.rules.counts()
        for segment, ids in self.missing.items():
            path = payload_path(self.folder, segment)
            self._violate("payload", f"{path} is missing: it holds episodes {listed(ids)}", ids)
        if reader.damage:
            self._violate("damage", f"{reader.damage}; nothing after it was audited", [])
        self._compare_books(counts)
        notes: list[str] = []
        if self.num_going_back:
            notes.append(f"{self.num_going_back} trajectories hold a token of an older version than one before it")
        if first := min(rules.batches, default=0):
            notes.append(
                f"the ledger begins at step {first}: nothing is known of the steps before, whose rows may come twice"
            )
        return AuditReport(
            num_admitted=rules.num_admitted,
            counts=counts,
            num_attempts=rules.num_starts,
            num_controllers=rules.num_controllers,
            num_attaches=rules.num_attaches,
            num_batches=len(rules.batches),
            committed_step=rules.committed_step,
            trained_again=rules.trained_again,
            num_bitwise_equal=rules.num_equal,
            unequal=rules.unequal,
            reasons=dict(rules.reasons),
            notes=notes,
            violations=rules.violations,
            torn=reader.torn,
        )

    def _compare_books(self, counts: dict[str, int]) -> None:
        """The state machine of the controller must say the same as the rules."""
        if self.rules.violations:
            return  # then they may differ: the state machine stopped at the first violation
        if self.refusal:
            self._violate("state machine", self.refusal, [])
            return
        try:
            self.state.check_integrity()
        except LedgerError as error:
            self._violate("state machine", str(error), [])
        if self.state.counts_by_name() != counts:
            self._violate("state machine", f"counts {counts}, the controller's {self.state.counts_by_name()}", [])
