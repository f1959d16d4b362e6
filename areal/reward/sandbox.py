"""Owns a sandbox as the reward function sees it: start a program, talk to it, take its output, and be sure it is gone.

Waits for: the program's output and answers, until the deadline of each call, and for the end of the sandbox's keeper,
which is killed where it does not come. `areal.reward.sandbox_inside` has the other side.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from areal.api.errors import RewardError
from areal.observe.log import get_logger
from areal.reward.sandbox_confine import remove_folder

Role = Literal["program", "functions", "judge"]
"""What runs inside: a whole program, its functions on request, or a judge of assertions about them."""
_MAX_LINE_BYTES = 16 << 20
_MAX_CONTAINERS = 500_000
"""Lists and dicts in a message: many more in as few bytes would take the reward worker's time and memory."""
_END_WAIT_S = 2.0
_START_WAIT_S = 4.0
"""What a sandbox may take to start, usually 0.05 s; a program's own time begins afterwards."""
_READ_BYTES = 1 << 16
_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one program may use."""

    cpu_s: float = 10.0
    """Seconds of processor time of all its threads, rounded up; it is killed beyond."""
    memory_bytes: int = 1 << 30
    """Address space."""
    output_bytes: int = 1 << 20
    """Standard output; the program is ended beyond."""
    file_bytes: int = 16 << 20
    """Each file it writes."""
    folder_bytes: int = 64 << 20
    """All files in its folder, where there are namespaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Which walls to ask for besides the limits. Tests leave some out, to see that the others hold."""

    namespaces: bool = True
    """No network, no other process to be seen, nothing to write to but an empty folder in memory."""
    system_calls: bool = True
    """No new process, no signal, no socket, no mount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a whole program said."""

    stdout: bytes
    exit_code: int | None
    """None = ended by us: too long, or too much output."""


class SandboxEnded(Exception):
    """A sandbox ended, or was ended, before it answered. The message says why."""


class IsolationMissing(Exception):
    """A wall that was asked for cannot be had on this machine. The message says which, and why."""


class Sandbox:
    """One program in processes of its own. Use as a context; nothing of it is left afterwards."""

    def __init__(
        self,
        role: Role,
        source: str,
        *,
        limits: SandboxLimits,
        isolation: Isolation,
        keep_s: float,
        stdin: bytes = b"",
    ) -> None:
        """`keep_s`: it ends by itself after this time, should nobody end it. Call `wait_started` before all else."""
        self.isolation = isolation
        self._limits = limits
        self._folder = tempfile.mkdtemp(prefix="areal-sandbox-")
        self._buffer = bytearray()
        self._channel, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-sPS", "-m", "areal.reward.sandbox_inside", str(theirs.fileno()), str(os.getpid())],
                stdin=given,
                stdout=subprocess.PIPE if role == "program" else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"PYTHONPATH": _ROOT, "PYTHONHASHSEED": "0"},
                cwd="/",
                start_new_session=True,
            )
        orders = {
            "role": role,
            "source": source,
            "limits": {
                "cpu_s": math.ceil(limits.cpu_s),
                "memory_bytes": limits.memory_bytes,
                "file_bytes": limits.file_bytes,
                "folder_bytes": limits.folder_bytes,
            },
            "folder": self._folder,
            "isolate": isolation.namespaces,
            "refuse": isolation.system_calls,
            "keep_s": keep_s,
            "root": _ROOT,
            "packages": [sysconfig.get_path("purelib")],
        }
        with contextlib.suppress(SandboxEnded):  # found again when its first word is awaited
            self.send(orders, until_s=time.monotonic() + _START_WAIT_S)

    def wait_started(self) -> Sandbox:
        """Wait until it is confined and its program begins: itself. IsolationMissing when a wall that was asked for
        cannot be had, RewardError when it does not start at all."""
        try:
            report = self.receive(until_s=time.monotonic() + _START_WAIT_S)
        except SandboxEnded as error:
            raise RewardError(f"a sandbox for the program of a completion did not start: it {error}") from error
        if report["missing"]:
            raise IsolationMissing(report["missing"])
        return self

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The keeper."""
        return self._process.pid

    def ask(self, message: Any, *, until_s: float) -> Any:
        """Send a message and wait for the answer. SandboxEnded when none has come at `until_s` (monotonic clock)."""
        self.send(message, until_s=until_s)
        return self.receive(until_s=until_s)

    def send(self, message: Any, *, until_s: float) -> None:
        """Send a message. SandboxEnded as for `ask`."""
        try:
            self._channel.settimeout(max(1e-3, until_s - time.monotonic()))
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except TimeoutError:
            raise SandboxEnded("ran past its time limit") from None
        except OSError as error:
            raise SandboxEnded("ended early") from error

    def receive(self, *, until_s: float) -> Any:
        """The next message. SandboxEnded as for `ask`, or when it is too large or none at all."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise SandboxEnded("said too much")
            try:
                self._channel.settimeout(max(1e-3, until_s - time.monotonic()))
                data = self._channel.recv(_READ_BYTES)
            except TimeoutError:
                raise SandboxEnded("ran past its time limit") from None
            except OSError:
                data = b""
            if not data:
                raise SandboxEnded("ended early")
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        if line.count(b"[") + line.count(b"{") > _MAX_CONTAINERS:
            raise SandboxEnded("said too much")
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SandboxEnded("said what is no message") from error

    def output(self, *, until_s: float) -> Output:
        """Wait for a whole program: its standard output and exit code."""
        assert self._process.stdout is not None
        stdout, said = self._process.stdout.fileno(), bytearray()
        while len(said) <= self._limits.output_bytes:
            ready, _, _ = select.select([stdout], [], [], max(0.0, until_s - time.monotonic()))
            if not ready:
                return Output(stdout=bytes(said), exit_code=None)
            data = os.read(stdout, _READ_BYTES)
            if not data:  # the keeper held it too, so that its end is near
                return Output(stdout=bytes(said), exit_code=self._end())
            said += data
        return Output(stdout=bytes(said), exit_code=None)

    def close(self) -> None:
        """End it, wait until it is gone, and remove its folder."""
        self._channel.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # the keeper then kills all below it
            self._end()
        if self._process.stdout is not None:
            self._process.stdout.close()
        remove_folder(self._folder)

    def _end(self) -> int | None:
        """The keeper's exit code; it is killed with its group when it does not end."""
        try:
            return self._process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return None


@functools.cache
def available_isolation() -> Isolation:
    """The walls that this machine lets us build, tried once a process; what is missing is told in the log."""
    missing: list[str] = []
    for isolation in (
        Isolation(),
        Isolation(namespaces=False),
        Isolation(system_calls=False),
        Isolation(namespaces=False, system_calls=False),
    ):
        try:
            with Sandbox("program", "", limits=SandboxLimits(), isolation=isolation, keep_s=_START_WAIT_S) as sandbox:
                sandbox.wait_started()
        except IsolationMissing as error:
            missing.append(str(error))
            continue
        if missing:
            get_logger(__name__).warning(
                "programs of completions run under limits, but not isolated from this machine, which lacks %s "
                "(docs/rewards.md)",
                "; ".join(dict.fromkeys(missing)),
            )
        return isolation
    raise RewardError("no sandbox can be started")
