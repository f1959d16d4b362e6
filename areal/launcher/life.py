"""Owns what the launcher sees of living processes: what each does, which ones hang, the memory of all together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import psutil

from areal.launcher.children import Child
from areal.system.heartbeat import Beat, read_beat
from areal.system.run_paths import RunPaths
from areal.system.stacks import request_stacks

_LOOK_INTERVAL_S = 0.5
_MOST_PER_LOOK_S = 1.0
"""What one look may add to a silence: time in which the launcher itself was stopped proves nothing about others."""
_DUMP_S = 1.0
"""Time for a process that hangs to write its stacks before it is killed."""
_RSS_INTERVAL_S = 1.0


class Silences:
    """For how long each process has given no sign of life. Judges by changes of `beats`, never by a file's time."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        self._silent_s: dict[str, float] = {}

    def look(self, name: str, pid: int, beat: Beat | None, *, since_last_look_s: float) -> float:
        """Seconds of silence of process `name`; 0 before the first beat of this `pid`."""
        if beat is None or beat.pid != pid:
            self._seen.pop(name, None)
            return 0.0
        if self._seen.get(name) != (pid, beat.beats):
            self._seen[name] = (pid, beat.beats)
            self._silent_s[name] = 0.0
        else:
            self._silent_s[name] += min(since_last_look_s, _MOST_PER_LOOK_S)
        return self._silent_s[name]


class LifeWatch:
    """Reads the heartbeats of a run's processes, and says which of them hang."""

    def __init__(self, paths: RunPaths, hang_s: float) -> None:
        self.beats: dict[str, Beat] = {}
        """The last beat of every process that has one in its present life."""
        self._paths = paths
        self._hang_s = hang_s
        self._silences = Silences()
        self._looked_s: float | None = None
        self._asked: dict[str, int] = {}

    def look(self, children: Iterable[Child], now_s: float) -> list[tuple[Child, str]]:
        """The processes that hang, each with what to say of it. Looks at most twice a second."""
        since_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        if self._looked_s is not None and since_s < _LOOK_INTERVAL_S:
            return []
        self._looked_s = now_s
        self.beats = {}
        return list(self._hung(children, since_s))

    @property
    def step(self) -> int | None:
        """The train step that the trainers work on; None when none says so."""
        return max((beat.step for beat in self.beats.values() if beat.step is not None), default=None)

    def _hung(self, children: Iterable[Child], since_s: float) -> Iterator[tuple[Child, str]]:
        for child in children:
            if not child.is_running or child.pid is None:
                continue
            beat = read_beat(self._paths.alive_of(child.name))
            silent_s = self._silences.look(child.name, child.pid, beat, since_last_look_s=since_s)
            if beat is None or beat.pid != child.pid:
                continue
            self.beats[child.name] = beat
            if silent_s < self._hang_s or child.killed_s is not None:
                continue
            if silent_s < self._hang_s + _DUMP_S and self._writes_stacks(child.name, child.pid):
                continue
            doing = f"{beat.doing!r} for {beat.for_s:.0f} s" if beat.doing else "nothing it told of"
            yield child, f"hung: it gave no sign of life for {silent_s:.0f} s (launcher.hang_s), its last was {doing}"

    def _writes_stacks(self, name: str, pid: int) -> bool:
        """Have it write its stacks, once; False when it cannot: it is stopped, or never said that it would."""
        try:
            stopped = psutil.Process(pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False
        if stopped or not self._paths.stacks_of(name).exists():
            return False
        if self._asked.get(name) != pid:
            self._asked[name] = pid
            request_stacks(self._paths.stacks_of(name), pid, f"no sign of life for {self._hang_s:g} s")
        return True


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
