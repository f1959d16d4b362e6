"""Owns one started process: how it stands, how it is ended, and what a dead one has to say."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from areal.launcher.job import PlannedProcess
from areal.system.process import ERROR_PREFIX, spawn

_TAIL_BYTES = 1 << 16
_QUOTED_LINES = 6


class Child:
    """One planned process and its current life."""

    def __init__(self, planned: PlannedProcess, environ: Mapping[str, str]) -> None:
        self.planned = planned
        self.is_ready = False
        self.was_ready = False
        """In this life or an earlier one."""
        self.started_s = 0.0
        self.killed_s: float | None = None
        """When the launcher killed this life; None = it did not."""
        self.died_along = False
        """It was killed for the sake of others: its end says nothing about it."""
        self._environ = environ
        self._log = Path(planned.log_path)
        self._log_start = 0
        self._killed_because = ""
        self._was_asked_to_end = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self.planned.name

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As subprocess tells it (negative = signal); None while it runs or before it started."""
        return None if self._process is None else self._process.poll()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, or start it again."""
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self.is_ready = False
        self.started_s = time.monotonic()
        self.killed_s, self.died_along, self._killed_because = None, False, ""
        self._was_asked_to_end = False
        self._process = spawn(self.planned.argv, {**self._environ, **self.planned.env}, self._log)

    def got_ready(self) -> None:
        self.is_ready = self.was_ready = True

    def terminate(self) -> None:
        """Ask it to end; asking again changes nothing."""
        if self._process is not None and not self._was_asked_to_end:
            self._was_asked_to_end = True
            self._process.terminate()

    def kill(self, because: str = "") -> None:
        """SIGKILL its whole group, now, whether it is stopped or runs. Without a cause it only goes along with others.

        Returns at once: it has ended when its exit code is there.
        """
        if self._process is None or not self.is_running or self.killed_s is not None:
            return
        self.killed_s = time.monotonic()
        self.died_along, self._killed_because = not because, because
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Collect the exit code of a process that was killed."""
        if self._process is not None:
            self._process.wait()

    @property
    def error(self) -> str:
        """The one-line error it printed at its end, else the last line of a traceback; empty when there is neither."""
        lines = self._last_lines()
        found = next((line for line in reversed(lines) if line.startswith(ERROR_PREFIX)), "")
        if not found and lines and any(line.startswith("Traceback ") for line in lines):
            return lines[-1].strip()
        return found.removeprefix(ERROR_PREFIX)

    def obituary(self) -> str:
        """How it ended and what it said last."""
        return f"{self.name} {self.end()}: {self._last_words()}"

    def end(self) -> str:
        """How it ended."""
        code = self.exit_code
        if self._killed_because:
            return f"{self._killed_because}, and was killed"
        return (
            "is running" if code is None else f"was killed by {_signal(-code)}" if code < 0 else f"exited with {code}"
        )

    def spoke_last_ns(self) -> int:
        """When it last wrote to its log; among processes that died together the earliest is likely the cause.

        A process that was killed counts as the earliest.
        """
        if (self.exit_code or 0) < 0:
            return 0
        return self._log.stat().st_mtime_ns if self._log.exists() else 0

    def end_group(self) -> None:
        """Kill what a dead process left behind in its process group."""
        if self._process is not None and not self.is_running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        """The one-line error a child of ours prints, else the end of its log."""
        lines = self._last_lines()
        said = next((line for line in reversed(lines) if line.startswith(ERROR_PREFIX)), None)
        if said is not None:
            return f"{said.removeprefix(ERROR_PREFIX)} (log: {self._log})"
        if self.exit_code in (-signal.SIGKILL, -signal.SIGTERM):  # whatever it said last is not why
            return f"its log is {self._log}"
        if not lines:
            return f"it printed nothing (log: {self._log})"
        quoted = "".join(f"\n    {line}" for line in lines[-_QUOTED_LINES:])
        return f"{lines[-1].strip()} (log: {self._log}){quoted if len(lines) > 1 else ''}"

    def _last_lines(self) -> list[str]:
        """What it wrote since its start, as far as the end of its log goes back."""
        try:
            with open(self._log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - _TAIL_BYTES))
                return [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            return []


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return name + (" (out of memory, or somebody's kill -9)" if name == "SIGKILL" else "")
