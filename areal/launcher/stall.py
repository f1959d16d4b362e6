"""Owns the stall explainer: notices that nothing in a run moves, and says in one line who waits for whom since when.

Progress is any change of the numbers that the controller counts, of a trainer rank's phase or step, or of the
processes. The line follows the chain trainer -> controller -> servers and rewards, and tells its end first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal.launcher.stall_words import SILENT_S, View, explain
from areal.system.heartbeat import Beat
from areal.system.run_paths import RunPaths
from areal.system.stacks import request_stacks

_COUNTS = ("step", "version", "publishing", "admitted", "accepted", "rejected", "failed", "batched", "consumed")
_COUNTS += ("generated_tokens", "asked_for")
_MOST_PER_LOOK = 0.25
"""Share of stall_s that one look may add to a standstill: time in which the launcher was stopped proves nothing."""


@dataclass(slots=True)
class _Silence:
    """How long a process has shown nothing new."""

    shown: object = None
    seconds: float = field(default=0.0)

    def look(self, shown: object, since_last_look_s: float) -> None:
        self.seconds = 0.0 if shown != self.shown else self.seconds + since_last_look_s
        self.shown = shown


class StallWatch:
    """Looked at about once a second. Decides by its own clock and by changes only."""

    def __init__(
        self,
        stall_s: float,
        paths: RunPaths,
        *,
        clock: Callable[[], float] = time.monotonic,
        ask_for_stacks: Callable[[Path, int, str], None] = request_stacks,
    ) -> None:
        self._stall_s = stall_s
        self._paths = paths
        self._clock = clock
        self._ask_for_stacks = ask_for_stacks
        self._looked_s: float | None = None
        self._still_s = 0.0
        self._num_told = 0
        self._names: set[str] = set()
        self._pids: Mapping[str, int] = {}
        self._status: dict[str, Any] | None = None
        self._phases: dict[str, Beat] = {}
        self._silences: dict[str, _Silence] = {}
        self._unanswered_s = 0.0

    def look(
        self, status: dict[str, Any] | None, beats: Mapping[str, Beat | None], pids: Mapping[str, int]
    ) -> str | None:
        """What to tell the user now. `status`: the controller's answer, None without one. `pids`: what runs."""
        now_s = self._clock()
        since_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, _MOST_PER_LOOK * self._stall_s)
        self._looked_s = now_s
        self._names |= pids.keys()
        alive = {name: beat for name, beat in beats.items() if beat is not None and beat.pid == pids.get(name)}
        for name, beat in alive.items():
            self._silences.setdefault(name, _Silence()).look((beat.pid, beat.beats), since_s)
        self._unanswered_s = 0.0 if status is not None else self._unanswered_s + since_s
        has_moved = self._has_moved(status, alive, pids)
        self._status = status or self._status
        if has_moved:
            return self._end_standstill()
        self._still_s += since_s
        if self._still_s < self._stall_s * (self._num_told + 1):
            return None
        self._num_told += 1
        return self._tell(alive, pids)

    def _has_moved(self, status: dict[str, Any] | None, alive: Mapping[str, Beat], pids: Mapping[str, int]) -> bool:
        moved = dict(pids) != self._pids
        self._pids = dict(pids)
        if status is not None:
            moved |= self._status is None or _counts(status) != _counts(self._status)
        for name, beat in alive.items():
            if not name.startswith("trainer"):
                continue  # what others do is counted by the controller
            before = self._phases.get(name)
            moved |= before is None or (before.doing, before.step) != (beat.doing, beat.step)
            moved |= before is not None and beat.for_s < before.for_s  # it left the phase and came back between looks
            self._phases[name] = beat
        return moved

    def _end_standstill(self) -> str | None:
        was_told, still_s = self._num_told > 0, self._still_s
        self._still_s, self._num_told = 0.0, 0
        return f"areal: the run moves again after it stood still for {still_s:.0f} s" if was_told else None

    def _tell(self, alive: Mapping[str, Beat], pids: Mapping[str, int]) -> str:
        headline = f"nothing has moved for {self._still_s:.0f} s"
        view = View(
            status=self._status if self._unanswered_s < SILENT_S else None,
            beats=alive,
            running=frozenset(pids),
            known=frozenset(self._names),
            silent_s={name: self._silences[name].seconds for name in alive},
            unanswered_s=self._unanswered_s,
        )
        for name, beat in alive.items():  # a process without a sign of life has not registered: it would die
            self._ask_for_stacks(self._paths.stacks_of(name), beat.pid, headline)
        return f"areal: {headline}: {'; '.join(explain(view))}. Stacks of all processes: {self._paths.stacks}"


def _counts(status: dict[str, Any]) -> object:
    """What stands for progress. The words on what is asked for say how far it is, an evaluation too."""
    fleet = status.get("replicas") or {}
    return [*(status.get(name) for name in _COUNTS), fleet.get("generated_tokens")]
