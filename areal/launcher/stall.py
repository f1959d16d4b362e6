"""Detection of a stalled run: reports in one line which process waits for which when nothing makes progress.

Progress is any change of the controller's counters, of a trainer rank's phase or step, or of the set of processes.
`look` is called about once a second.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal.launcher.stall_report import SILENT_S, RunSnapshot, explain
from areal.system.heartbeat import Beat

_COUNTERS = ("step", "version", "updating_to", "admitted", "accepted", "rejected", "failed", "batched", "consumed")
_COUNTERS += ("generated_tokens", "awaited")  # the latter contains the progress of an evaluation
_MAX_SHARE_PER_LOOK = 0.25
"""Share of stall_s that one look adds at most: a launcher that was stopped itself has seen no progress."""


class StallWatch:
    """Measures the time without progress by its own clock, from changes only."""

    def __init__(
        self,
        stall_s: float,
        stacks: Path,
        request_stacks: Callable[[str, str], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stacks`: folder of the stack dumps. `request_stacks`: takes the name of a process and a reason."""
        self._stall_s = stall_s
        self._stacks = stacks
        self._request_stacks = request_stacks
        self._clock = clock
        self._looked_s: float | None = None
        self._stalled_s = 0.0
        self._num_reports = 0
        self._names: set[str] = set()
        self._pids: Mapping[str, int] = {}
        self._status: dict[str, Any] | None = None
        self._phases: dict[str, Beat] = {}
        self._unanswered_s = 0.0

    def look(
        self,
        status: dict[str, Any] | None,
        beats: Mapping[str, Beat],
        silent_s: Mapping[str, float],
        pids: Mapping[str, int],
    ) -> str | None:
        """The message for the user, if one is due.

        `status`: the controller's answer, None without one. `beats`, `silent_s`: the last heartbeat of each process and
        its age. `pids`: the processes that run.
        """
        now_s = self._clock()
        since_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, _MAX_SHARE_PER_LOOK * self._stall_s)
        self._looked_s = now_s
        self._names |= pids.keys()
        alive = {name: beat for name, beat in beats.items() if beat.pid == pids.get(name)}
        self._unanswered_s = 0.0 if status is not None else self._unanswered_s + since_s
        has_progress = self._has_progress(status, alive, pids)
        self._status = status or self._status
        if has_progress:
            stalled_s, was_reported = self._stalled_s, self._num_reports > 0
            self._stalled_s, self._num_reports = 0.0, 0
            return f"areal: progress again, after {stalled_s:.0f} s without" if was_reported else None
        self._stalled_s += since_s
        if self._stalled_s < self._stall_s * (self._num_reports + 1):
            return None
        self._num_reports += 1
        return self._report(alive, silent_s, pids)

    def _has_progress(self, status: dict[str, Any] | None, alive: Mapping[str, Beat], pids: Mapping[str, int]) -> bool:
        changed = dict(pids) != self._pids
        self._pids = dict(pids)
        if status is not None:
            changed |= self._status is None or _counters(status) != _counters(self._status)
        for name, beat in alive.items():
            if not name.startswith("trainer"):
                continue  # the controller counts the progress of the others
            before = self._phases.get(name)
            changed |= before is None or (before.doing, before.step) != (beat.doing, beat.step)
            changed |= before is not None and beat.for_s < before.for_s  # left the phase and returned between looks
            self._phases[name] = beat
        return changed

    def _report(self, alive: Mapping[str, Beat], silent_s: Mapping[str, float], pids: Mapping[str, int]) -> str:
        headline = f"no progress for {self._stalled_s:.0f} s"
        snapshot = RunSnapshot(
            status=self._status if self._unanswered_s < SILENT_S else None,
            beats=alive,
            running=frozenset(pids),
            known=frozenset(self._names),
            silent_s={name: silent_s[name] for name in alive},
            unanswered_s=self._unanswered_s,
        )
        for name in alive:  # a process without a heartbeat may not handle the signal yet, which would end it
            self._request_stacks(name, headline)
        return f"areal: {headline}: {'; '.join(explain(snapshot))}. Stacks of all processes: {self._stacks}"


def _counters(status: dict[str, Any]) -> object:
    fleet = status.get("replicas") or {}
    return [*(status.get(name) for name in _COUNTERS), fleet.get("generated_tokens")]
