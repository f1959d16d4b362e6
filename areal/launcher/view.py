"""Owns what the user sees of a running run: the status line, who is awaited, who waits for whom when nothing moves."""

from __future__ import annotations

import time
from collections.abc import Sequence

from areal.api.config import LauncherConfig
from areal.launcher.children import Child
from areal.launcher.life import LifeWatch
from areal.launcher.stall import StallWatch
from areal.launcher.status import StatusLine, StatusSource
from areal.system.run_paths import RunPaths


class RunView:
    """Refreshes the status line as often as the configuration says; the controller is asked once for each."""

    def __init__(
        self, config: LauncherConfig, paths: RunPaths, source: StatusSource, line: StatusLine, life: LifeWatch
    ) -> None:
        self._interval_s = config.status_interval_s
        self._source = source
        self._line = line
        self._life = life
        self._stall = StallWatch(config.stall_s, paths)
        self._next_s = 0.0

    def show(self, children: Sequence[Child], *, was_ready: bool) -> None:
        """Look and show, when it is time. `was_ready`: the run as a whole was, once."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        status = self._source.status()
        pids = {child.name: child.pid for child in children if child.is_running and child.pid is not None}
        if stall := self._stall.look(status, self._life.beats, pids):
            self._line.say(stall)
        parts = [self._source.text(status) if was_ready else None, awaited_text(children, now_s)]
        if any(parts):
            self._line.show(" | ".join(part for part in parts if part))

    def end(self) -> None:
        """Leave what the run came to as the last line."""
        self._line.end(self._source.read_last())


def awaited_text(children: Sequence[Child], now_s: float) -> str | None:
    """Who is not ready yet, and since when; None when all are."""
    awaited = [child for child in children if not child.is_ready and child.exit_code != 0]
    if not awaited:
        return None
    # The dead wait for their restart: how long they had lived is no waiting.
    waited_s = now_s - min((child.started_s for child in awaited if child.is_running), default=now_s)
    return f"waiting {waited_s:.0f} s for {', '.join(child.name for child in awaited)} to get ready"
