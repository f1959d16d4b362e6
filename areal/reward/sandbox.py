"""Starts a program in a sandbox, exchanges messages with it, reads its output, and ends all its processes.

Waits for the program's output and answers until the deadline of each call, and for the end of the sandbox's keeper,
which is killed when it does not end in time. `areal.reward.sandbox_inside` runs on the other side.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

Role = Literal["program", "functions", "checker"]
"""What runs inside: a whole program, a server of its functions, or the assertion checker."""
_MAX_LINE_BYTES = 16 << 20
_MAX_CONTAINERS = 500_000
"""Lists and dicts in a message. More in as few bytes would take the reward worker too much time and memory."""
_END_WAIT_S = 2.0
_START_WAIT_S = 4.0
"""Limit of a sandbox's start, which usually takes 0.05 s; the program's own time limit begins afterwards."""
_READ_BYTES = 1 << 16
_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Resource limits of one program."""

    cpu_s: float = 10.0
    """Seconds of processor time of all its threads, rounded up; beyond, it is killed."""
    memory_bytes: int = 1 << 30
    """Address space."""
    output_bytes: int = 1 << 20
    """Standard output; beyond, the program is ended."""
    file_bytes: int = 16 << 20
    """Size of each file it writes."""
    folder_bytes: int = 64 << 20
    """Size of all files in its folder, where namespaces are available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Protections in addition to the limits. Tests switch some off, to check each of the others alone."""

    namespaces: bool = True
    """No network, no other process visible, nothing writable except an empty folder in memory."""
    system_calls: bool = True
    """No new process, no signal, no socket, no mount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Result of a whole program."""

    stdout: bytes
    exit_code: int | None
    """None = areal ended it: it exceeded its time or its output."""


class SandboxEnded(Exception):
    """A sandbox ended, or was ended, before it answered. The message gives the reason."""


class IsolationMissing(Exception):
    """This machine does not offer a requested protection. The message says which, and why."""


class Sandbox:
    """One program in separate processes. Use it as a context manager: at the end no process and no file remains."""

    def __init__(
        self, role: Role, source: str, *, limits: SandboxLimits, isolation: Isolation, keep_s: float, stdin: bytes = b""
    ) -> None:
        """Call `wait_started` first. The sandbox ends without `close` after `keep_s`."""
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
        bounds = dataclasses.asdict(limits) | {"cpu_s": math.ceil(limits.cpu_s)}
        orders = {"role": role, "source": source, "limits": bounds, "folder": self._folder, "keep_s": keep_s}
        orders |= {"isolate": isolation.namespaces, "refuse": isolation.system_calls}
        orders |= {"root": _ROOT, "packages": [sysconfig.get_path("purelib")]}
        with contextlib.suppress(SandboxEnded):  # wait_started reports it
            self.send(orders, until_s=time.monotonic() + _START_WAIT_S)

    def wait_started(self) -> Sandbox:
        """Wait until the process is confined and starts its program; returns self.

        IsolationMissing when a requested protection is not available, RewardError when the sandbox does not start.
        """
        try:
            report = self.receive(until_s=time.monotonic() + _START_WAIT_S)
        except SandboxEnded as error:
            raise RewardError(f"a sandbox did not start: it {error}", code="sandbox.not_started") from error
        if report["missing"]:
            raise IsolationMissing(report["missing"])
        return self

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the keeper."""
        return self._process.pid

    def ask(self, message: Any, *, until_s: float) -> Any:
        """Send a message and wait for the answer. SandboxEnded when there is none at `until_s` (monotonic clock)."""
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
        """The next message. SandboxEnded as for `ask`, or when the message is too large or invalid."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise SandboxEnded("sent too large a message")
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
            raise SandboxEnded("sent too large a message")
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SandboxEnded("sent an invalid message") from error

    def output(self, *, until_s: float) -> Output:
        """Wait for the end of a whole program: its standard output and exit code."""
        assert self._process.stdout is not None
        stdout, written = self._process.stdout.fileno(), bytearray()
        while len(written) <= self._limits.output_bytes:
            ready, _, _ = select.select([stdout], [], [], max(0.0, until_s - time.monotonic()))
            if not ready:
                return Output(stdout=bytes(written), exit_code=None)
            data = os.read(stdout, _READ_BYTES)
            if not data:  # the keeper holds the pipe too, so it is about to end
                return Output(stdout=bytes(written), exit_code=self._end())
            written += data
        return Output(stdout=bytes(written), exit_code=None)

    def close(self) -> None:
        """End all processes of the sandbox, wait for their end, and remove its folder."""
        self._channel.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # the keeper then kills every process below it
            self._end()
        if self._process.stdout is not None:
            self._process.stdout.close()
        remove_folder(self._folder)

    def _end(self) -> int | None:
        """The keeper's exit code; None when it did not end in time and was killed with its process group."""
        try:
            return self._process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return None


@functools.cache
def available_isolation() -> Isolation:
    """The protections that this machine offers, tried once in each process; missing ones are logged."""
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
                "programs of completions run without all protections, this machine does not offer %s (docs/rewards.md)",
                "; ".join(dict.fromkeys(missing)),
            )
        return isolation
    raise RewardError("no sandbox can be started", code="sandbox.not_started")
