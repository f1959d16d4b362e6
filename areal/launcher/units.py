"""Units of a run: processes that start, fail and are counted together (one server, the controller, all trainer ranks).

A trainer rank, or a part of a server over several machines, cannot continue without the others. When one dies, the
others are killed and all start again.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from typing import Literal

from areal.fleet.server_log import end_reason
from areal.launcher.backend import ProcessBackend
from areal.launcher.job import PlannedProcess, start_again
from areal.launcher.restart_rules import Role
from areal.system.process import ERROR_PREFIX

_QUOTED_LINES = 6
_CODE = re.compile(r" \[[a-z]+\.[a-z_]+\]$")


class Child:
    """One planned process: its state since its last start, and its output."""

    def __init__(self, planned: PlannedProcess, backend: ProcessBackend, clock: Callable[[], float]) -> None:
        self.planned = planned
        self.pid: int | None = None
        """Process id on its machine; None before the first start."""
        self.is_ready = False
        self.was_ready = False
        """The unit was ready after one of its starts."""
        self.started_s = 0.0
        self.killed_s: float | None = None
        """When the launcher killed it; None = it did not."""
        self.killed_with_unit = False
        """It was killed because another process of its unit died: its own exit code means nothing."""
        self._backend = backend
        self._clock = clock
        self._kill_reason = ""
        self._was_terminated = False

    @property
    def name(self) -> str:
        return self.planned.name

    @property
    def registered_names(self) -> list[str]:
        """The names in the registry by which others find this process."""
        index, part = self.planned.index, self.planned.part
        by_role = {
            "server": [f"servers/{index}", f"parts/{index}", f"gateways/{index}-{part}"],
            "controller": ["controller"],
            "trainer": [],
        }
        return [f"ready/{self.name}", *by_role[self.planned.role]]

    @property
    def exit_code(self) -> int | None:
        """Negative = ended by this signal; None while it runs or before its first start."""
        return None if self.pid is None else self._backend.poll(self.name)

    @property
    def is_running(self) -> bool:
        return self.pid is not None and self.exit_code is None

    def start(self) -> None:
        self.is_ready, self.killed_with_unit, self._was_terminated = False, False, False
        self.killed_s, self._kill_reason = None, ""
        self.started_s = self._clock()
        self.pid = self._backend.start(self.planned)

    def terminate(self) -> None:
        """Send SIGTERM, once."""
        if self.is_running and not self._was_terminated:
            self._was_terminated = True
            self._backend.signal(self.name, signal.SIGTERM)

    def kill(self, reason: str = "") -> None:
        """Kill it, and return at once. Without a reason it is killed because another process of its unit died."""
        if self.is_running and self.killed_s is None:
            self.killed_s = self._clock()
            self.killed_with_unit, self._kill_reason = not reason, reason
            self._backend.signal(self.name, signal.SIGKILL)

    def kill_descendants(self) -> None:
        """Kill what it started and what still runs, once it has ended itself."""
        if self.pid is not None and not self.is_running:
            self._backend.signal(self.name, signal.SIGKILL)

    @property
    def error(self) -> str:
        """The error line that it printed at its end, else the last line of a traceback; empty without either."""
        lines = self._backend.last_lines(self.name).lines
        if printed := _error_line(lines):
            return printed
        return lines[-1].strip() if any(line.startswith("Traceback ") for line in lines) else ""

    def has_same_error(self, other: Child) -> bool:
        """Whether both died of one error: they printed the same one, or one quotes the other's."""
        error, others = _CODE.sub("", self.error), _CODE.sub("", other.error)
        return bool(error and others) and (error in others or others in error)

    def exit_text(self) -> str:
        """How it ended, as a predicate: `exited with 1`."""
        code = self.exit_code
        if self._kill_reason:
            return f"{self._kill_reason}, and was killed"
        if code is None:
            return "is running"
        return f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with {code}"

    def server_error(self) -> list[str]:
        """The last error that a foreign server printed, which the error of its host does not repeat."""
        lines = self._backend.last_lines(self.name).lines
        if "--backend" not in self.planned.argv:  # a flag of the host of a foreign server only
            return []
        return end_reason([line for line in lines if not line.startswith(ERROR_PREFIX)])

    def failure_text(self) -> str:
        """How it ended, its error line or the end of its log, and where the log is."""
        lines, log = self._backend.last_lines(self.name).lines, self.planned.log_path
        quoted = ""
        if printed := _error_line(lines):
            what = f"{printed} (log: {log})"
        elif self.exit_code in (-signal.SIGKILL, -signal.SIGTERM):  # its last lines do not say why
            what = f"its log is {log}"
        else:
            what = f"{lines[-1].strip() if lines else 'it printed nothing'} (log: {log})"
            quoted = "".join(f"\n    {line}" for line in lines[-_QUOTED_LINES:]) if len(lines) > 1 else ""
        return f"{self.name} {self.exit_text()}: {what}{quoted}"

    def last_output_ns(self) -> int:
        """When it last wrote to its log; 0 for a process that a signal ended.

        The earliest of several processes that died together is the likely cause.
        """
        return 0 if (self.exit_code or 0) < 0 else self._backend.last_lines(self.name).written_ns


class Unit:
    """Processes that are started, restarted and counted together."""

    def __init__(self, planned: Sequence[PlannedProcess], backend: ProcessBackend, clock: Callable[[], float]) -> None:
        self.role: Role = planned[0].role
        self.name = "trainers" if self.role == "trainer" else planned[0].name
        self.children = [Child(process, backend, clock) for process in planned]
        self.num_starts = 0
        self.restarts: list[str] = []
        """The reason of each restart."""
        self.restart_at_s: float | None = None
        """When it starts again; None = no restart is due."""
        self.dead_since_s: float | None = None
        """When an unexpected end was first seen; None = there is none, or it is handled."""
        self.must_run = self.role == "server"
        """An end with 0 is unexpected too: servers run until stopped, the controller until the trainers end."""
        self.phase: Literal["member", "joining", "leaving"] = "member"
        """Joining: added to a running run and not yet ready; when it fails, the run continues without it.
        Leaving: it is being removed, and its end is expected."""

    @property
    def is_running(self) -> bool:
        return any(child.is_running for child in self.children)

    @property
    def is_ready(self) -> bool:
        return all(child.is_ready for child in self.children)

    @property
    def has_succeeded(self) -> bool:
        """Every process of it ended with 0."""
        return all(child.exit_code == 0 for child in self.children)

    def dead(self) -> list[Child]:
        """The processes that ended unexpectedly, the likely cause first."""
        allowed = (None,) if self.must_run else (None, 0)
        dead = [child for child in self.children if child.exit_code not in allowed and not child.killed_with_unit]
        return sorted(dead, key=Child.last_output_ns)

    def start(self, *, num_servers: int, recover: bool | None) -> None:
        """Start it, for the first time or again. `recover` None = as planned."""
        self.restart_at_s = self.dead_since_s = None
        self.must_run = self.role == "server"
        for child in self.children:
            run_id = self.num_starts if self.role == "trainer" else None
            child.planned = start_again(child.planned, num_servers=num_servers, run_id=run_id, recover=recover)
            child.start()
        self.num_starts += 1

    def kill(self) -> None:
        """Kill the processes that still run after another one died."""
        for child in self.children:
            child.kill()

    def kill_descendants(self) -> None:
        for child in self.children:
            child.kill_descendants()


def units_of(processes: Sequence[PlannedProcess], backend: ProcessBackend, clock: Callable[[], float]) -> list[Unit]:
    """The units of a plan, in its order, the trainers last."""
    groups: dict[tuple[Role, int], list[PlannedProcess]] = {}
    for planned in processes:
        groups.setdefault((planned.role, 0 if planned.role == "trainer" else planned.index), []).append(planned)
    by_end = sorted(groups.items(), key=lambda item: item[0][0] == "trainer")
    return [Unit(group, backend, clock) for _, group in by_end]


def _error_line(lines: Sequence[str]) -> str:
    """The last line with an error of areal, without its prefix; empty without one."""
    return next((line.removeprefix(ERROR_PREFIX) for line in reversed(lines) if line.startswith(ERROR_PREFIX)), "")


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return name + (" (out of memory, or killed by a user)" if name == "SIGKILL" else "")
