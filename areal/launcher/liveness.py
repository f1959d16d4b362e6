"""Liveness of a run's processes: what each one does according to its heartbeat, and which ones hang."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from areal.launcher.backend import ProcessBackend
from areal.launcher.units import Child
from areal.system.heartbeat import Beat, write_beats
from areal.system.run_paths import RunPaths

_LOOK_INTERVAL_S = 0.5
_MAX_PER_LOOK_S = 1.0
"""The maximum that one look adds to a silence: a launcher that was stopped itself has seen no heartbeats."""
_DUMP_S = 1.0
"""Time for a hung process to write its stacks before it is killed."""


class SilenceTimer:
    """Seconds since each process last changed its heartbeat count. Does not use the times of files."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        self._silent_s: dict[str, float] = {}

    def look(self, name: str, pid: int, beat: Beat | None, *, since_last_look_s: float) -> float:
        """Seconds of silence of process `name`; 0 before the first heartbeat of this `pid`."""
        if beat is None or beat.pid != pid:
            self._seen.pop(name, None)
            return 0.0
        if self._seen.get(name) != (pid, beat.beats):
            self._seen[name] = (pid, beat.beats)
            self._silent_s[name] = 0.0
        else:
            self._silent_s[name] += min(since_last_look_s, _MAX_PER_LOOK_S)
        return self._silent_s[name]


class LivenessWatch:
    """Reads the heartbeats of a run's processes, finds those that hang, and writes RUN/alive.json for readers."""

    def __init__(self, paths: RunPaths, backend: ProcessBackend, hang_s: float) -> None:
        self.beats: dict[str, Beat] = {}
        """The last heartbeat of every running process that has one."""
        self.silent_s: dict[str, float] = {}
        """Seconds since that heartbeat."""
        self._paths = paths
        self._backend = backend
        self._hang_s = hang_s
        self._silences = SilenceTimer()
        self._rejections: set[str] = set()
        """Ids of connections to servers with wrong weights that were reported."""
        self._looked_s: float | None = None
        self._dump_requested: dict[str, int] = {}

    def look(
        self, children: Iterable[Child], now_s: float, status: dict[str, Any] | None = None
    ) -> list[tuple[Child, str]]:
        """The processes that hang and the servers with wrong weights by the controller's `status`, each with a
        description. Reads the heartbeats at most twice a second."""
        since_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        if self._looked_s is not None and since_s < _LOOK_INTERVAL_S:
            return []
        self._looked_s = now_s
        self.beats, self.silent_s = {}, {}
        found = list(self._hung(children, since_s))
        with contextlib.suppress(OSError):  # a full disk ends the run elsewhere
            write_beats(self._paths.alive, self.beats)
        return found + list(self._rejected(children, status))

    @property
    def step(self) -> int | None:
        """The train step that the trainers work on; None when no heartbeat contains one."""
        return max((beat.step for beat in self.beats.values() if beat.step is not None), default=None)

    def _hung(self, children: Iterable[Child], since_s: float) -> Iterator[tuple[Child, str]]:
        beats = self._backend.beats()
        for child in children:
            if not child.is_running or child.pid is None:
                continue
            beat = beats.get(child.name)
            silent_s = self._silences.look(child.name, child.pid, beat, since_last_look_s=since_s)
            if beat is None or beat.pid != child.pid:
                continue
            host, _ = self._backend.place_of(child.planned)
            self.beats[child.name] = dataclasses.replace(beat, node=host.node, silent_s=round(silent_s, 1))
            self.silent_s[child.name] = silent_s
            if silent_s < self._hang_s or child.killed_s is not None:
                continue
            if silent_s < self._hang_s + _DUMP_S and self._dumps_stacks(child.name, child.pid):
                continue
            doing = f"{beat.doing!r} for {beat.for_s:.0f} s" if beat.doing else "empty"
            yield child, f"hung: no heartbeat for {silent_s:.0f} s (launcher.hang_s), the last one was {doing}"

    def _rejected(self, children: Iterable[Child], status: dict[str, Any] | None) -> Iterator[tuple[Child, str]]:
        """A status may be older than the restart that it caused, so each connection to a server counts once."""
        by_name = {child.name: child for child in children if child.is_running and child.killed_s is None}
        replicas: list[dict[str, Any]] = ((status or {}).get("replicas") or {}).get("replicas") or []
        for replica in replicas:
            child, connection = by_name.get(replica.get("name", "")), replica.get("id", "")
            if child is not None and replica.get("weights") == "rejected" and connection not in self._rejections:
                self._rejections.add(connection)
                yield child, "has other weights than the other replicas, also after a second update (rollout.canary)"

    def _dumps_stacks(self, name: str, pid: int) -> bool:
        """Request the stacks of a process, once. False when it cannot write them."""
        if self._dump_requested.get(name) == pid:
            return True
        if not self._backend.request_stacks(name, f"no heartbeat for {self._hang_s:g} s"):
            return False
        self._dump_requested[name] = pid
        return True
