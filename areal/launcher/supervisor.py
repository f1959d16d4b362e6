"""Owns one attempt at a run: starts all processes, waits until they are ready, restarts servers, stops everything.

Waits for: ready signs and ends of its children (looked at 20 times a second), or an interruption by the user.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from areal.api.config import LauncherConfig
from areal.launcher.children import Child
from areal.launcher.job import LaunchPlan
from areal.launcher.status import StatusLine, StatusSource
from areal.system.discovery import NameRegistry
from areal.system.process import kill_trees

_POLL_S = 0.05
_RSS_INTERVAL_S = 1.0
_SETTLE_S = 0.5
"""After the first death: how long others may take to die of the same cause before the cause is chosen."""
MAX_SERVER_RESTARTS = 5
"""Restarts of one server without a stretch of good health between them."""
_GOOD_HEALTH_S = 300.0
_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0

Status = Literal["completed", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended."""

    status: Status
    cause: str
    """Empty unless it failed."""
    was_ready: bool
    """All processes were ready once: a failure after that may be chance, one before it is not."""
    exit_codes: dict[str, int | None]
    restarts: dict[str, int]


class MemoryMeter:
    """The highest resident memory of this process and all its descendants together."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._next_s = 0.0

    def sample(self) -> None:
        """Look, at most once a second."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _RSS_INTERVAL_S
        own = psutil.Process()
        total = own.memory_info().rss
        for process in own.children(recursive=True):
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        self.peak_bytes = max(self.peak_bytes, total)


class Interruptions:
    """Counts the user's requests to stop; signal handlers call `add`."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, *_: object) -> None:
        self.count += 1

    def wait(self, seconds: float) -> bool:
        """Sleep, but not through an interruption; True when there was one."""
        deadline = time.monotonic() + seconds
        while not self.count and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self.count > 0


class Supervisor:
    """Runs the processes of one plan to their common end."""

    def __init__(
        self,
        plan: LaunchPlan,
        config: LauncherConfig,
        *,
        registry: NameRegistry,
        source: StatusSource,
        line: StatusLine,
        meter: MemoryMeter,
        interruptions: Interruptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._registry = registry
        self._source = source
        self._line = line
        self._meter = meter
        self._interruptions = interruptions
        self._clock = clock
        self._children = [Child(planned, os.environ) for planned in plan.processes]
        self._was_ready = False
        self._failures: dict[str, int] = {}  # of servers, since their last stretch of good health
        self._restart_at: dict[str, float] = {}
        self._ending_since: float | None = None
        self._next_status_s = 0.0

    def run(self) -> Outcome:
        """From start to end; returns when no process is left."""
        cause: str | None = "the launcher failed"
        try:
            for child in self._children:
                child.start()
            cause = self._watch()
        finally:
            self._stop()
        if self._interruptions.count:
            status: Status = "interrupted"
        else:
            status = "completed" if cause is None else "failed"
        return Outcome(
            status=status,
            cause=(cause or "") if status == "failed" else "",
            was_ready=self._was_ready,
            exit_codes={child.name: child.exit_code for child in self._children},
            restarts={child.name: child.restarts for child in self._children if child.restarts},
        )

    def _watch(self) -> str | None:
        """Until the run ends well (None), fails (the cause) or is interrupted (None)."""
        while not self._interruptions.count:
            for child in self._children:
                child.is_ready = child.is_ready or self._registry.get(f"ready/{child.name}") is not None
            self._was_ready = self._was_ready or all(child.is_ready for child in self._children)
            if self._fatal():
                return self._cause()
            cause = self._idle_end() or self._late()
            if cause is not None:
                return cause
            if all(child.exit_code == 0 for child in self._leaders):
                return None
            self._restart_servers()
            self._meter.sample()
            self._show()
            time.sleep(_POLL_S)
        return None

    @property
    def _leaders(self) -> Sequence[Child]:
        """The processes that decide about the end of a run; servers only serve."""
        return [child for child in self._children if child.planned.role != "server"]

    @property
    def _servers(self) -> Sequence[Child]:
        return [child for child in self._children if child.planned.role == "server"]

    def _fatal(self) -> list[Child]:
        """The processes whose death ends the run."""
        dead = [child for child in self._leaders if child.exit_code not in (None, 0)]
        for child in self._servers:
            if child.exit_code is not None and child.name not in self._restart_at:
                dead += [] if self._may_restart(child) else [child]
        return dead

    def _cause(self) -> str:
        """The likely first death, told first, and the others behind it."""
        deadline = self._clock() + _SETTLE_S
        while self._clock() < deadline and any(child.is_running for child in self._leaders):
            time.sleep(_POLL_S)
        dead = sorted(self._fatal(), key=lambda child: child.spoke_last_ns())
        first = dead[0].obituary()
        failures = self._failures.get(dead[0].name, 0)
        again = f" ({failures} restarts before)" if failures else ""
        others = [child for child in dead[1:] if not _same_error(dead[0].error, child.error)]
        return first + again + "".join(f"\n  then {child.obituary()}" for child in others)

    def _idle_end(self) -> str | None:
        """A process that ended well but never did its part: a script that does not train."""
        for child in self._leaders:
            if child.exit_code == 0 and not child.is_ready and self._registry.get(f"ready/{child.name}") is None:
                return (
                    f"{child.name} ended without taking part in the run: a script must call train(...) of its "
                    f"PPOTrainer or SFTTrainer in every process ({child.obituary()})"
                )
        return None

    def _late(self) -> str | None:
        """A process that takes longer than it may: to get ready, or to end after others ended."""
        limit = self._config.ready_timeout_s
        for child in self._children:
            if child.is_running and not child.is_ready and self._clock() - child.started_s > limit:
                return f"{child.name} was not ready after {limit:g} s (launcher.ready_timeout_s): {child.obituary()}"
        if any(child.exit_code == 0 for child in self._leaders):
            self._ending_since = self._ending_since or self._clock()
            if self._clock() - self._ending_since > limit:
                names = ", ".join(child.name for child in self._leaders if child.is_running)
                return f"{names} did not end within {limit:g} s after the other processes had ended"
        return None

    def _may_restart(self, child: Child) -> bool:
        if self._ending_since is not None:
            return True  # and it will not be: the run is over
        return child.is_ready and self._failures.get(child.name, 0) < MAX_SERVER_RESTARTS

    def _restart_servers(self) -> None:
        now = self._clock()
        for child in self._servers if self._ending_since is None else ():
            if child.is_running:
                if child.is_ready and now - child.started_s > _GOOD_HEALTH_S:
                    self._failures.pop(child.name, None)
            elif child.name not in self._restart_at:
                failures = self._failures[child.name] = self._failures.get(child.name, 0) + 1
                delay = min(_BACKOFF_S * 2 ** (failures - 1), _MAX_BACKOFF_S)
                self._restart_at[child.name] = now + delay
                self._registry.remove(f"ready/{child.name}")
                self._registry.remove(f"servers/{child.planned.index}")
                self._line.say(f"{child.obituary()}\n  {child.name} starts again in {delay:g} s")
                child.end_group()
            elif now >= self._restart_at[child.name]:
                del self._restart_at[child.name]
                child.restarts += 1
                child.start()

    def _show(self) -> None:
        if self._clock() < self._next_status_s:
            return
        self._next_status_s = self._clock() + self._config.status_interval_s
        if self._was_ready:
            text = self._source.read()
        else:
            waited = self._clock() - min(child.started_s for child in self._children)
            names = ", ".join(child.name for child in self._children if not child.is_ready)
            text = f"waiting {waited:.0f} s for {names} to get ready"
        if text is not None:
            self._line.show(text)

    def _stop(self) -> None:
        """End what still runs. A second interruption ends the polite part."""
        already = self._interruptions.count
        pids = [child.pid for child in self._children if child.is_running and child.pid is not None]
        kill_trees(pids, self._config.stop_grace_s, hurry=lambda: self._interruptions.count > max(1, already))
        for child in self._children:
            child.wait()
            child.end_group()
        if self._was_ready and not self._interruptions.count:
            self._line.end(self._source.read_last())


def _same_error(first: str, other: str) -> bool:
    """Whether two processes died of one mistake: they say the same, or one passes on what the other said."""
    return bool(first and other) and (first in other or other in first)
