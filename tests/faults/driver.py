"""One run under test: starts its launcher (and restarts it), observes the run, finds its processes.

Looks from outside only: the launcher's command line, the controller's GET /status, the files of the run folder, and
the operating system's processes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from areal.launcher.preflight import newest_checkpoint, step_of
from areal.system.run_paths import RunPaths

ROOT = Path(__file__).resolve().parents[2]
STATUS_TIMEOUT_S = 0.5
_SCAN_S = 0.2


class RunBroken(Exception):
    """The run under test does not do what it must; the message says what."""


@dataclass(kw_only=True)
class Run:
    """One run folder and the launcher on it."""

    arguments: Sequence[str]
    """Behind `python -m areal.launcher.local`; the same for every start."""
    folder: Path
    log_path: Path
    """Where the launcher's standard error goes, all starts one after the other."""
    deadline: float = float("inf")
    """Monotonic time at which every wait for this run ends."""
    launcher: subprocess.Popen[bytes] | None = None
    num_launches: int = 0
    highest_step: int = 0
    """The most train steps the controller ever said were done."""
    _connection: http.client.HTTPConnection | None = None
    _address: str = ""
    _pids: dict[str, int] = field(default_factory=dict)
    _next_scan_s: float = 0.0

    def start(self) -> None:
        """Start the launcher, or start it again with the same words."""
        argv = [sys.executable, "-m", "areal.launcher.local", *self.arguments]
        with open(self.log_path, "ab") as log:
            log.write(f"\n===== launch {self.num_launches} =====\n".encode())
            log.flush()
            self.launcher = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.num_launches += 1
        self._next_scan_s = 0.0

    @property
    def exit_code(self) -> int | None:
        """The launcher's; None while it runs. RunBroken when all took too long."""
        if time.monotonic() > self.deadline:
            raise RunBroken("the time limit of the whole test is over")
        return None if self.launcher is None else self.launcher.poll()

    @property
    def checkpoint_step(self) -> int:
        """Train steps that a recovery continues from; 0 without a complete checkpoint."""
        newest = newest_checkpoint(RunPaths(self.folder))
        return step_of(newest) if newest else 0

    def pids(self, *, fresh: bool = False) -> dict[str, int]:
        """Process name -> pid of the launcher and its children, looked at a few times a second unless `fresh`."""
        if self.exit_code is not None or self.launcher is None:
            return {}
        if fresh or time.monotonic() >= self._next_scan_s:
            self._next_scan_s = time.monotonic() + _SCAN_S
            result = {"launcher": self.launcher.pid}
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self.launcher.pid).children():
                    name = process_name(child, self.folder)
                    if name:
                        result[name] = child.pid
            self._pids = result
        return self._pids

    def status(self) -> dict[str, Any] | None:
        """What the controller says; None when there is none or it does not answer."""
        try:
            record = json.loads((self.folder / "names" / "controller.json").read_bytes())
        except (OSError, ValueError):
            return None
        if record["address"] != self._address or self._connection is None:
            self._address = record["address"]
            self._connection = self.connection(urlsplit(self._address).netloc, STATUS_TIMEOUT_S)
        try:
            token = (self.folder / "token").read_text()
            self._connection.request("GET", "/status", headers={"Authorization": f"Bearer {token}"})
            result = json.loads(self._connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            self._connection.close()
            self._connection = None
            return None
        self.highest_step = max(self.highest_step, result["step"])
        return result

    def connection(self, netloc: str, timeout_s: float) -> http.client.HTTPConnection:
        """To a process of the run."""
        return http.client.HTTPConnection(netloc, timeout=timeout_s)

    def is_ready(self, name: str, pid: int) -> bool:
        """Whether this very process has given its ready sign."""
        try:
            text = (self.folder / "names" / "ready" / f"{name}.json").read_text()
            return json.loads(text)["pid"] == own_pid(pid)
        except (OSError, ValueError, KeyError):
            return False

    def all_ready(self, names: Sequence[str]) -> bool:
        pids = self.pids()
        return all(name in pids and self.is_ready(name, pids[name]) for name in names)

    def kill(self, names: Sequence[str]) -> dict[str, int]:
        """SIGKILL all of them at once. Returns who was there to be killed; a dead launcher is not started again."""
        return self._signal(names, signal.SIGKILL)

    def terminate(self, names: Sequence[str], limit_s: float = 60.0) -> dict[str, int]:
        """SIGTERM. Returns when the launcher has ended, if it is one of them."""
        struck = self._signal(names, signal.SIGTERM)
        if "launcher" in struck and self.launcher is not None:
            self.launcher.wait(limit_s)
        return struck

    def stop(self, names: Sequence[str]) -> dict[str, int]:
        return self._signal(names, signal.SIGSTOP)

    def go_on(self, names: Sequence[str]) -> dict[str, int]:
        return self._signal(names, signal.SIGCONT)

    def cut_power(self, names: Sequence[str]) -> dict[str, int]:
        """Nodes lose power, with all that runs there. Returns the processes that were there."""
        raise RunBroken(f"a run on one machine has no nodes: {', '.join(names)}")

    def restore(self) -> None:
        """Nodes without power can be used again."""

    def _signal(self, names: Sequence[str], number: signal.Signals) -> dict[str, int]:
        pids = self.pids(fresh=True)
        struck = {name: pids[name] for name in names if name in pids}
        for pid in struck.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGKILL and "launcher" in struck and self.launcher is not None:
            self.launcher.wait()
        self._next_scan_s = 0.0
        return struck

    def wait_for(self, condition: Callable[[], bool], limit_s: float, poll_s: float = 0.02) -> bool:
        """True once it holds; False after `limit_s`. RunBroken when the launcher ends by itself meanwhile."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() >= deadline:
                return False
            if self.exit_code is not None:
                raise RunBroken(f"the launcher ended by itself with {self.exit_code}:\n{self.tail(self.log_path)}")
            time.sleep(poll_s)
        return True

    def train_up_to(self, step: int, limit_s: float = 300.0) -> None:
        """Wait until this many steps were done. RunBroken when they are not done in time."""

        def is_there() -> bool:
            self.status()
            return self.highest_step >= step

        if not self.wait_for(is_there, limit_s, poll_s=0.005):
            raise RunBroken(f"no step {step} in {limit_s:g} s:\n{self.tail(self.log_path)}")

    def wait_for_the_end(self, limit_s: float = 300.0) -> int:
        """The launcher's exit code."""
        assert self.launcher is not None
        return self.launcher.wait(timeout=limit_s)

    def abandon(self) -> None:
        """End everything by force; children die with their launcher."""
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()

    def left_behind(self) -> list[str]:
        """Processes of this run that still live, the launcher's children and theirs."""
        return [f"{name} (pid {process.pid})" for process in psutil.process_iter() if (name := alive(process, self))]

    @staticmethod
    def tail(path: Path, lines: int = 15) -> str:
        """The end of a log."""
        try:
            return "\n".join(f"    {line}" for line in path.read_text(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"    ({error})"


def process_name(process: psutil.Process, folder: Path) -> str:
    """The name the launcher gave a process of the run in `folder`; empty for others and for the dead."""
    try:
        text = process.environ().get("AREAL_PROCESS", "")
        if not text or process.status() == psutil.STATUS_ZOMBIE:
            return ""
        context = json.loads(text)
    except (psutil.Error, OSError, ValueError):
        return ""
    if context["run_dir"] != str(folder):
        return ""
    return context["role"] if context["role"] == "controller" else f"{context['role']}-{context['index']}"


def own_pid(pid: int) -> int:
    """The id of a process as the process itself sees it, which differs on a node of tests/cluster/nodes.py."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def alive(process: psutil.Process, run: Run) -> str:
    """A name when it belongs to the run and lives: any descendant inherits the context of its ancestor."""
    return process_name(process, run.folder)


def is_running(pid: int, started_s: float) -> bool:
    """Whether the process that had this pid then still lives."""
    try:
        process = psutil.Process(pid)
        return process.create_time() <= started_s and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
