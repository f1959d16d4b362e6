"""Owns the rules of restarting, as pure functions: what starts again after which deaths, how often, after how long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from areal.api.config import RecoverConfig
from areal.system.process import MEND_EXIT, TRANSIENT_EXIT

Role = Literal["controller", "trainer", "server"]

_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How one process ended by itself; what the launcher killed only for the sake of another is none."""

    name: str
    exit_code: int
    """As subprocess tells it: negative = signal."""
    was_ready: bool
    """It was ready at least once since the launch, in this life or an earlier one."""

    @property
    def may_be_chance(self) -> bool:
        """Whether the same process, started again, may well get further."""
        if self.exit_code < 0 or self.exit_code == TRANSIENT_EXIT:
            return True
        return self.exit_code != MEND_EXIT and self.was_ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows from the deaths of one unit."""

    told: Death
    """The death that caused the others, or that ends the run."""
    ends_run: bool
    why: str = ""
    """Why the run ends; empty when the death itself says it."""


def judge(
    role: Role, deaths: Sequence[Death], *, num_restarts: int, recover: RecoverConfig, disk_problem: str
) -> Verdict:
    """Restart or end. `deaths` of one unit in the order in which they happened; `num_restarts` without progress."""
    first = deaths[0]
    # Two ranks that end at the same time: one says what is wrong, the other only that it lost the first.
    told = first if first.exit_code < 0 else next((death for death in deaths if not death.may_be_chance), first)
    if disk_problem:
        return Verdict(told=told, ends_run=True, why=disk_problem)
    if not told.may_be_chance:
        return Verdict(told=told, ends_run=True)
    if role == "trainer" and recover.mode == "disabled":
        return Verdict(told=told, ends_run=True, why="recover.mode=disabled: trainers are not started again")
    if num_restarts >= recover.retries:
        why = f"{num_restarts} restarts before brought no train step (recover.retries={recover.retries})"
        return Verdict(told=told, ends_run=True, why=why)
    return Verdict(told=told, ends_run=False)


def backoff_s(num_restarts: int) -> float:
    """Seconds to wait before the next restart after so many."""
    return min(_BACKOFF_S * 2.0**num_restarts, _MAX_BACKOFF_S)


class RestartCounts:
    """Restarts by unit since the run last got beyond its highest train step."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._highest_step: int | None = None

    def of(self, unit: str) -> int:
        return self._counts[unit]

    def add(self, unit: str) -> None:
        self._counts[unit] += 1

    def saw_step(self, step: int) -> None:
        """The trainers work on train step `step`. A step seen for the first time forgives all restarts."""
        if self._highest_step is None:
            self._highest_step = step
        elif step > self._highest_step:
            self._highest_step = step
            self._counts.clear()
