"""The rules of restarts, as pure functions: what starts again after which deaths, how often, after which delay."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from areal.api.config import RecoverConfig
from areal.system.process import TRANSIENT_EXIT, USER_ERROR_EXIT

Role = Literal["controller", "trainer", "server"]

_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The unexpected end of one process; not of one that the launcher killed because another died."""

    name: str
    exit_code: int
    """Exit code as in subprocess: negative = signal."""
    was_ready: bool
    """The process was ready at least once since the launch, also before an earlier restart."""

    @property
    def is_transient(self) -> bool:
        """Whether a restart may succeed."""
        if self.exit_code < 0 or self.exit_code == TRANSIENT_EXIT:
            return True
        return self.exit_code != USER_ERROR_EXIT and self.was_ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows from the deaths in one unit."""

    cause: Death
    """The death that caused the others, or that ends the run."""
    ends_run: bool
    reason: str = ""
    """Why the run ends, or the server is given up; empty when the exit of the process is reason enough."""
    gives_up: bool = False
    """The run continues without this server."""


def decide(
    role: Role,
    deaths: Sequence[Death],
    *,
    num_restarts: int,
    recover: RecoverConfig,
    disk_problem: str,
    others_serve: bool = False,
) -> Decision:
    """Restart the unit, continue without it, or end the run.

    `deaths` in order of time; `num_restarts` since the last progress; `others_serve`: other servers are ready.
    """
    first = deaths[0]
    # When two ranks end together, one reports the error and the other only that it lost the first.
    cause = first if first.exit_code < 0 else next((death for death in deaths if not death.is_transient), first)
    if disk_problem:
        return Decision(cause=cause, ends_run=True, reason=disk_problem)
    if not cause.is_transient:
        return Decision(cause=cause, ends_run=True)
    if role == "trainer" and recover.mode == "disabled":
        return Decision(cause=cause, ends_run=True, reason="recover.mode=disabled: trainers are not restarted")
    if num_restarts >= recover.retries:
        reason = f"no train step was completed in {num_restarts} restarts (recover.retries={recover.retries})"
        gives_up = role == "server" and others_serve
        return Decision(cause=cause, ends_run=not gives_up, reason=reason, gives_up=gives_up)
    return Decision(cause=cause, ends_run=False)


def backoff_s(num_restarts: int) -> float:
    """Seconds to wait before the next restart, after `num_restarts` restarts without progress."""
    return min(_BACKOFF_S * 2.0**num_restarts, _MAX_BACKOFF_S)


class RestartCounts:
    """Restarts by unit since the run last reached a new train step."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._highest_step: int | None = None

    def of(self, unit: str) -> int:
        return self._counts[unit]

    def add(self, unit: str) -> None:
        self._counts[unit] += 1

    def saw_step(self, step: int) -> None:
        """The trainers work on train step `step`. A step above all earlier ones sets every count to zero."""
        if self._highest_step is not None and step > self._highest_step:
            self._counts.clear()
        self._highest_step = max(step, self._highest_step or 0)
