"""Owns the proof of a ledger: the conservation equation and every broken rule, from the files alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal.api.errors import LedgerError
from areal.rollout.ledger_files import TornTail, read_contents, read_payload
from areal.rollout.ledger_state import Event, LedgerState
from areal.rollout.payload import check_payload


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What an audit found."""

    num_admitted: int
    counts: dict[str, int]
    """Episodes per state; they must sum to num_admitted."""
    num_attempts: int
    """Starts of episodes, repetitions after a death included."""
    num_batches: int
    committed_step: int
    reasons: dict[str, int]
    violations: list[str]
    torn: TornTail | None
    """A half-written end that the next start will cut; no violation."""

    @property
    def is_clean(self) -> bool:
        return not self.violations

    def lines(self) -> list[str]:
        """For people to read."""
        terms = " + ".join(f"{name} {count}" for name, count in self.counts.items())
        sign = "=" if sum(self.counts.values()) == self.num_admitted else "!="
        lines = [
            f"admitted {self.num_admitted} {sign} {terms}",
            f"{self.num_attempts} starts, {self.num_batches} batches, committed up to step {self.committed_step}",
            *(f"{reason}: {count}" for reason, count in sorted(self.reasons.items())),
        ]
        if self.torn is not None:
            lines.append(f"half-written tail: {self.torn.size} bytes of {self.torn.path} from byte {self.torn.offset}")
        lines.extend(f"VIOLATION {violation}" for violation in self.violations)
        lines.append("clean" if self.is_clean else f"{len(self.violations)} violations")
        return lines


def ledger_folder(run: Path) -> Path:
    """The ledger of a run folder, or the folder itself when it is one."""
    return run / "ledger" if (run / "ledger").is_dir() else run


def audit(folder: Path, *, check_payloads: bool = True) -> AuditReport:
    """Replay the events of a ledger folder and check everything that can be checked. LedgerError without a ledger."""
    if not folder.is_dir():
        raise LedgerError(f"{folder} is no ledger folder: name the folder of a run")
    try:
        contents = read_contents(folder)
    except LedgerError as error:
        return _unreadable(str(error))
    state, violations = LedgerState(), list[str]()
    admitted: set[int] = set()
    num_attempts = 0
    for number, event in enumerate(contents.events):
        try:
            state.apply(event)
        except (LedgerError, KeyError) as error:
            violations.append(f"event {number}: {error}")
            continue
        if event["event"] == "admitted":
            admitted.add(event["id"])
            num_attempts += 1
        if check_payloads and event["event"] == "accepted":
            violations.extend(_payload_problems(folder, event))
    try:
        state.check_integrity()
    except LedgerError as error:
        violations.append(str(error))
    if sum(state.counts) != len(admitted):
        violations.append(f"{len(admitted)} episodes were admitted, but {sum(state.counts)} are accounted for")
    return AuditReport(
        num_admitted=len(admitted),
        counts=state.counts_by_name(),
        num_attempts=num_attempts,
        num_batches=len(state.batches),
        committed_step=state.committed_step,
        reasons=dict(state.reasons),
        violations=violations,
        torn=contents.torn,
    )


def _payload_problems(folder: Path, event: Event) -> list[str]:
    segment, offset, size = event["payload"]
    try:
        check_payload(event["id"], read_payload(folder, (segment, offset, size)))
    except LedgerError as error:
        return [f"episode {event['id']}: {error}"]
    return []


def _unreadable(problem: str) -> AuditReport:
    return AuditReport(
        num_admitted=0,
        counts={},
        num_attempts=0,
        num_batches=0,
        committed_step=0,
        reasons={},
        violations=[problem],
        torn=None,
    )


def main(argv: Sequence[str]) -> int:
    """Exit status 0 for a clean ledger, 1 for violations, 2 when there is none to read."""
    parser = argparse.ArgumentParser(prog="python -m areal.rollout.ledger", description="Read the ledger of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("audit", help="prove that no episode was lost or used twice")
    command.add_argument("run", type=Path, help="run folder, or its ledger folder")
    arguments = parser.parse_args(argv)
    try:
        report = audit(ledger_folder(arguments.run))
    except LedgerError as error:
        sys.stderr.write(f"areal: error: {error}\n")
        return 2
    sys.stdout.write("\n".join(report.lines()) + "\n")
    return 0 if report.is_clean else 1
