"""The result of an audit: broken rules and totals, as lines for people and as JSON for programs."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from areal.ledger.event_files import IncompleteTail

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
    found = list(ids)
    rest = len(found) - MAX_IDS
    return ", ".join(map(str, found[:MAX_IDS])) + (f" ... and {rest} more" if rest > 0 else "")


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
    """Those that led to other weights. Not a violation: sums round differently on other hardware."""
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
            lines.append(f"steps that led to different weights: {listed(self.unequal)}")
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
