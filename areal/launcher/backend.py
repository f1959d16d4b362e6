"""How a launcher starts and observes the processes of a run: the protocol, and its implementation for this machine."""

import contextlib
import dataclasses
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from areal.launcher.job import LaunchPlan, PlannedProcess
from areal.launcher.placement import Machine
from areal.launcher.preloaded import ForkedProcess, PreloadedParent
from areal.system.heartbeat import Beat, NodeBeats
from areal.system.network import Host
from areal.system.process import ERROR_PREFIX, kill_trees, spawn
from areal.system.run_paths import RunPaths
from areal.system.stacks import request_stacks

_TAIL_BYTES = 1 << 16
_OUT_OF_MEMORY = "launch.out_of_memory"
_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class LogTail:
    """The last lines that a process has written since its start."""

    lines: list[str]
    """Lines that are not empty."""
    written_ns: int
    """When the log was last written, in nanoseconds since 1970; 0 when there is none."""


class ProcessBackend(Protocol):
    """Starts the processes of one run and observes them.

    A process is addressed by its name in the plan. It may be started again under this name after it has ended.
    """

    def start(self, planned: PlannedProcess) -> int:
        """Start a process. Returns its id on its machine, which its heartbeats contain. LaunchError on failure."""
        ...

    def poll(self, name: str) -> int | None:
        """Exit code; negative = ended by this signal; None while the process runs."""
        ...

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal and return at once; no error when nothing runs.

        SIGKILL also ends what the process started, and may be sent after the process itself has ended.
        """
        ...

    def last_lines(self, name: str) -> LogTail: ...
    def request_stacks(self, name: str, reason: str) -> bool:
        """Make a running process write its stacks. False when it does not do so now: it is stopped or still starts."""
        ...

    def stop(self, names: Iterable[str], grace_s: float, *, hurry: Callable[[], bool]) -> None:
        """End processes with all that they started: SIGTERM, and SIGKILL after `grace_s` or once `hurry()` is true.

        Returns when nothing of them runs.
        """
        ...

    def resident_bytes(self) -> int:
        """Resident memory of the launcher and of all processes of the run together."""
        ...

    def beats(self) -> dict[str, Beat]:
        """The last heartbeat of each process that has sent one since its start, with its memory at the last call of
        `resident_bytes`."""
        ...

    def place_of(self, planned: PlannedProcess) -> tuple[Host, tuple[str, ...]]:
        """The machine and the GPUs with which a process of this name was last started; as planned before that."""
        return planned.host, planned.gpus

    def new_host(self, name: str) -> Host | None:
        """The machine that is obtained for one more server, of this name; None = it uses a machine of the plan."""
        return None

    def is_prepared(self, planned: PlannedProcess) -> bool:
        """Whether a process can be started now; False while the machine for it is being obtained, so ask again."""
        return True

    def forget(self, name: str) -> None:
        """The process of this name has ended and will not start again: give back what was obtained for it."""


class Cluster(Protocol):
    """The machines of a run, and what starts processes on them."""

    def machines(self) -> Sequence[Machine]:
        """Connect to the machines, and describe them. The controller runs on the first. LaunchError on failure."""
        ...

    def backend(self, plan: LaunchPlan, paths: RunPaths, secrets: Mapping[str, str]) -> ProcessBackend:
        """A backend for a run whose folder exists. LaunchError when a machine does not share the folder."""
        ...

    def close(self) -> None:
        """End all that still runs on the machines for this run, and the connections."""
        ...


class LocalBackend(ProcessBackend):
    """Processes on this machine, as children of the launcher."""

    def __init__(
        self, paths: RunPaths, secrets: Mapping[str, str] | None = None, preloaded: PreloadedParent | None = None
    ) -> None:
        """`secrets`: environment variables of every process that are in no plan, such as the run's token.
        `preloaded`: forks the processes that it can."""
        self._paths = paths
        self._secrets = dict(secrets or {})
        self._preloaded = preloaded
        self._processes: dict[str, subprocess.Popen[bytes] | ForkedProcess] = {}
        self._logs: dict[str, tuple[Path, int]] = {}  # with the size at the process's start
        self._memory_kills = _memory_kills()  # Kills whose process is known, or was not of this run.
        self._beats = NodeBeats()
        self._used: dict[str, tuple[int, float]] = {}
        """Resident bytes and CPU seconds of each process with all that it started."""
        self._out_of_memory = set[str]()  # Processes that the kernel ended at a limit of memory.

    def start(self, planned: PlannedProcess) -> int:
        log = Path(planned.log_path)
        self._logs[planned.name] = (log, log.stat().st_size if log.exists() else 0)
        self._out_of_memory.discard(planned.name)
        env = {**os.environ, **planned.env, **self._secrets, **self._beats.slot(planned.name)}
        descriptors, forked = (self._beats.descriptor,), None
        if self._preloaded is not None and self._preloaded.can_fork(planned.argv, env):
            forked = self._preloaded.fork(planned.argv, env, log, descriptors)
        process = forked or spawn(planned.argv, env, log, descriptors=descriptors)
        self._processes[planned.name] = process
        return process.pid

    def poll(self, name: str) -> int | None:
        return self._processes[name].poll()

    def signal(self, name: str, number: signal.Signals) -> None:
        process = self._processes[name]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:  # every process leads its own group
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)

    def last_lines(self, name: str) -> LogTail:
        log, start = self._logs[name]
        try:
            with open(log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(start, size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
                written_ns = os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return LogTail([], 0)
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        if self._is_out_of_memory(name):
            cause = "the kernel ended it, because the memory limit of its control group was reached"
            lines.append(f"{ERROR_PREFIX}{cause} [{_OUT_OF_MEMORY}]")
        return LogTail(lines, written_ns)

    def _is_out_of_memory(self, name: str) -> bool:
        was_killed = name not in self._out_of_memory and self._processes[name].poll() == -signal.SIGKILL
        if was_killed and _memory_kills() > self._memory_kills:
            self._memory_kills += 1
            self._out_of_memory.add(name)
        return name in self._out_of_memory

    def request_stacks(self, name: str, reason: str) -> bool:
        path, pid = self._paths.stacks_of(name), self._processes[name].pid
        try:
            is_stopped = psutil.Process(pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False
        if not path.exists():  # the process does not handle the signal yet, which would end it
            return False
        request_stacks(path, pid, reason)
        return not is_stopped

    def stop(self, names: Iterable[str], grace_s: float, *, hurry: Callable[[], bool]) -> None:
        stopped = [self._processes[name] for name in names if name in self._processes]
        kill_trees([process.pid for process in stopped if process.poll() is None], grace_s, hurry=hurry)
        for process in stopped:
            process.wait()
            with contextlib.suppress(ProcessLookupError, PermissionError):  # what an ended process left in its group
                os.killpg(process.pid, signal.SIGKILL)

    def resident_bytes(self) -> int:
        this_process = psutil.Process()
        children: dict[int, tuple[int, int, float]] = {}
        for process in this_process.children(recursive=True):
            if self._preloaded is not None and process.pid == self._preloaded.pid:  # its pages are its children's too
                continue
            with contextlib.suppress(psutil.NoSuchProcess):  # it is stored whole or, when it ends meanwhile, not at all
                times = process.cpu_times()[:4]  # of the user and of the system, and of children that have ended
                children[process.pid] = process.ppid(), process.memory_info().rss, sum(times)
        names = {process.pid: name for name, process in self._processes.items()}
        self._used = {}
        for pid, (_, size, cpu_s) in children.items():
            while pid not in names and pid in children:
                pid = children[pid][0]
            if name := names.get(pid):
                before, before_s = self._used.get(name, (0, 0.0))
                self._used[name] = before + size, before_s + cpu_s
        return this_process.memory_info().rss + sum(size for _, size, _ in children.values())

    def beats(self) -> dict[str, Beat]:
        beats_by_name: dict[str, Beat] = {}
        for name, beat in self._beats.read().items():
            size, cpu_s = self._used.get(name, (None, None))
            beats_by_name[name] = dataclasses.replace(beat, resident_bytes=size, cpu_s=cpu_s)
        return beats_by_name


def _memory_kills() -> int:
    """How many processes the kernel has ended at the memory limit of the control group of this process.

    0 when this is not known. Source: cgroup-v1/memory.rst and cgroup-v2.rst of the Linux documentation.
    """
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            file = {"memory": f"memory{path}/memory.oom_control", "": f"{path[1:]}/memory.events"}.get(controllers)
            if file is not None and (kills := _oom_kills(_GROUPS / file)) is not None:
                return kills
    except OSError:
        pass
    return 0


def _oom_kills(file: Path) -> int | None:
    if not file.is_file():
        return None
    counts = dict(line.split() for line in file.read_text().splitlines())
    return int(counts["oom_kill"]) if "oom_kill" in counts else None
