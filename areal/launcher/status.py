"""The status line of a running run, and the source of its numbers: the controller, or the metrics file."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.cells import cell_len, set_cell_size

from areal.api.config import LauncherConfig
from areal.launcher.backend import ProcessBackend
from areal.launcher.liveness import LivenessWatch
from areal.launcher.result import RunAlarmLines
from areal.launcher.stall import StallWatch
from areal.launcher.units import Child
from areal.system.discovery import NameRegistry
from areal.system.heartbeat import read_beats

_TIMEOUT_S = 0.5
_PLAIN_INTERVAL_S = 10.0
_TAIL_BYTES = 1 << 16
_WAITING_S = 5.0
"""After this time within one step the line also shows what the run waits for."""


class Source(Protocol):
    """Where the status line gets its numbers."""

    def status(self) -> dict[str, Any] | None:
        """The state of the run; None without an answer."""
        ...

    def text(self, status: dict[str, Any] | None) -> str | None:
        """The status line for an answer of `status()`; None when nothing is known."""
        ...

    def read_last(self) -> str | None:
        """The line that stays after the run; None = what was shown."""
        ...


class RunStatus:
    """Refreshes the status line at the configured interval, by one request to the controller each time."""

    def __init__(
        self,
        config: LauncherConfig,
        backend: ProcessBackend,
        source: Source,
        line: StatusLine,
        liveness: LivenessWatch,
        stacks: Path,
        alarms: RunAlarmLines,
    ) -> None:
        self._interval_s = config.status_interval_s
        self._alarms = alarms
        self._source = source
        self._line = line
        self._liveness = liveness
        self._stall = StallWatch(config.stall_s, stacks, backend.request_stacks)
        self._next_s = 0.0
        self._has_failure = False
        self.last: dict[str, Any] | None = None
        """The answer of the controller to the last request; None without one."""
        self.last_known: dict[str, Any] | None = None
        """The last answer of the controller."""

    def show(self, children: Sequence[Child], *, was_ready: bool) -> None:
        """Refresh the line when it is due. `was_ready`: all processes were ready once."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        self.last = status = self._source.status()
        self.last_known = status or self.last_known
        self._show_alarms()
        pids = {child.name: child.pid for child in children if child.is_running and child.pid is not None}
        if report := self._stall.look(status, self._liveness.beats, self._liveness.silent_s, pids):
            self._line.say(report)
        failure = status.get("first_failure", "") if status else ""
        if failure and not self._has_failure:
            self._has_failure = True
            self._line.say(f"areal: warning: {failure}")
        parts = [self._source.text(status) if was_ready else None, waiting_text(children, now_s)]
        if any(parts):
            self._line.show(" | ".join(part for part in parts if part))

    def _show_alarms(self) -> None:
        for text in self._alarms.new():
            self._line.say(f"areal: {text}")

    def end(self) -> None:
        """Leave the result of the run as the last line."""
        self._show_alarms()
        self._line.end(self._source.read_last())


def waiting_text(children: Sequence[Child], now_s: float) -> str | None:
    """Which processes are not ready yet, and the seconds since their start; None when all are ready."""
    waiting = [child for child in children if not child.is_ready and child.exit_code != 0]
    if not waiting:
        return None
    waited_s = now_s - min((child.started_s for child in waiting if child.is_running), default=now_s)
    return f"waiting {waited_s:.0f} s for {', '.join(child.name for child in waiting)} to get ready"


class StatusSource:
    """Reads the state of a run from the controller, or from metrics.jsonl when there is none."""

    def __init__(
        self,
        registry: NameRegistry,
        metrics: Path,
        *,
        has_controller: bool,
        total_steps: int | None,
        token: str = "",
    ) -> None:
        self._registry = registry
        self._headers = {"Authorization": f"Bearer {token}"}
        self._metrics = metrics
        self._has_controller = has_controller
        self._total_steps = total_steps
        self._step: int | None = None
        self._step_since_s = 0.0
        # Without a proxy: the controller is in the network of the run.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def status(self) -> dict[str, Any] | None:
        """The controller's answer to one request; None without a controller or without an answer."""
        found = self._registry.get("controller") if self._has_controller else None
        if found is None:
            return None
        try:
            request = urllib.request.Request(f"{json.loads(found)['address']}/status", headers=self._headers)
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                status = json.loads(answer.read())
            return status if isinstance(status, dict) else None
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
            return None

    def text(self, status: dict[str, Any] | None) -> str | None:
        """The status line for an answer of `status()`; None when nothing is known."""
        if not self._has_controller:
            return self.read_last()
        if status is None:
            return None
        now_s = time.monotonic()
        if status.get("step") != self._step:
            self._step, self._step_since_s = status.get("step"), now_s
        return rollout_line(status, self._total_steps, is_waiting=now_s - self._step_since_s >= _WAITING_S)

    def read_last(self) -> str | None:
        """The status line from the last record of the metrics; None without one."""
        if (last := last_record(self._metrics)) is None:
            return None
        return (finished_line if self._has_controller else training_line)(last, self._total_steps)


@dataclass(frozen=True, slots=True)
class EvaluationSource:
    """Reads the state of an evaluation without training from the heartbeat of its process."""

    heartbeats: Path

    def status(self) -> dict[str, Any] | None:
        beat = read_beats(self.heartbeats).get("controller")
        return None if beat is None else {"awaited": beat.doing}

    def text(self, status: dict[str, Any] | None) -> str | None:
        return None if status is None else str(status["awaited"])

    def read_last(self) -> str | None:
        return None


def last_record(path: Path) -> dict[str, Any] | None:
    """The last complete line of a metrics file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
        return json.loads(lines[-2]) if len(lines) > 1 else None
    except (OSError, ValueError):
        return None


def rollout_line(status: dict[str, Any], total_steps: int | None, *, is_waiting: bool) -> str:
    """The line of an asynchronous run. `is_waiting`: also say what the run waits for, and how many servers serve."""
    parts = [
        _step(status, status.get("total_steps") or total_steps),
        f"reward {_number(status.get('reward_mean'), '.3f')}",
        f"queue {status.get('waiting', 0)}+{status.get('running', 0)} running"
        + "".join(f", {status[name]} {name}" for name in ("rejected", "failed") if status.get(name)),
        f"staleness {_number(status.get('staleness_mean'), '.2f')}",
        f"{_number(status.get('tokens_per_s'), ',.0f')} tokens/s",
    ]
    if is_waiting:
        replicas: list[dict[str, Any]] = (status.get("replicas") or {}).get("replicas") or []
        num_serving = sum(replica["state"] == "serving" for replica in replicas)
        if num_serving < len(replicas):
            parts.append(f"{num_serving} of {len(replicas)} servers serve")
        parts.append(f"waits for {status.get('awaited') or '?'}")
    return " | ".join(parts)


def finished_line(record: dict[str, Any], total_steps: int | None) -> str:
    """The line of an asynchronous run that has ended."""
    reward, staleness = record.get("rollout/reward"), record.get("rollout/staleness_mean")
    return f"{_step(record, total_steps)} | reward {_number(reward, '.3f')} | staleness {_number(staleness, '.2f')}"


def training_line(record: dict[str, Any], total_steps: int | None) -> str:
    """The line of a run without rollouts."""
    loss, speed = _number(record.get("loss"), ".4f"), _number(record.get("trained_tokens_per_s"), ",.0f")
    return f"{_step(record, total_steps)} | loss {loss} | {speed} tokens/s"


def _step(record: dict[str, Any], total_steps: int | None) -> str:
    return f"step {record.get('step', 0)}/{'?' if total_steps is None else total_steps}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def fitted(text: str, width: int) -> str:
    """The line in at most `width` columns: whole parts in the middle are left out first, then the end is cut."""
    parts = text.split(" | ")
    while len(parts) > 2 and cell_len(" | ".join(parts)) > width:
        del parts[2]
    text = " | ".join(parts)
    return text if cell_len(text) <= width else set_cell_size(text, width)


class StatusLine:
    """One line: refreshed in place on a terminal, else printed as a new line at most every 10 seconds."""

    def __init__(self, stream: TextIO | None = None, *, width: Callable[[], int] | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._width = width or (lambda: shutil.get_terminal_size().columns)
        self._live = self._stream.isatty()
        self._shown = ""
        self._shown_s = float("-inf")

    def show(self, text: str) -> None:
        """Show `text`; outside of a terminal, only if it is new and the interval is over."""
        if self._live:
            self._stream.write("\r" + fitted(text, self._width() - 1) + "\x1b[K")
        elif text != self._shown and time.monotonic() - self._shown_s >= _PLAIN_INTERVAL_S:
            self._stream.write(text + "\n")
            self._shown_s = time.monotonic()
        else:
            return
        self._shown = text
        self._stream.flush()

    def say(self, text: str) -> None:
        """Print a line that stays, above the live one."""
        self._stream.write(("\r\x1b[K" if self._live and self._shown else "") + text + "\n")
        self._stream.flush()
        self._shown = ""

    def end(self, text: str | None) -> None:
        """Leave `text`, or what is shown, as the last line."""
        shown, self._shown = self._shown, ""
        if self._live and shown:
            self._stream.write("\n" if text is None else "\r\x1b[K")
            shown = "" if text is not None else shown
        if text is not None and text != shown:
            self._stream.write(text + "\n")
        self._stream.flush()
