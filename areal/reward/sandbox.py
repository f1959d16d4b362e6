"""Starts a program in a sandbox, exchanges messages with it, reads its output, and ends all its processes.

Waits for the program's output and answers until the deadline of each call, and for the end of the sandbox's keeper,
which is killed when it does not end in time. `areal.reward.sandbox_inside` runs on the other side.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from areal.reward.sandbox_confine import remove_folder
from areal.reward.sandbox_runner import Output, SandboxEnded

Role = Literal["program", "functions", "checker"]
"""What runs inside: a whole program, a server of its functions, or the assertion checker."""
_MAX_LINE_BYTES = 16 << 20
_MAX_CONTAINERS = 500_000
"""Lists and dicts in a message. More in as few bytes would take the reward worker too much time and memory."""
_END_WAIT_S = 2.0
_START_WAIT_S = 4.0
"""Limit of a sandbox's start, which usually takes 0.05 s; the program's own time limit begins afterwards."""
_READ_BYTES = 1 << 16
_SYSTEM_LIBRARIES = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store",
    "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo",
)  # fmt: skip
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
    """No network, no other process visible, no files except those of Python and an empty folder in memory."""
    system_calls: bool = True
    """No new process, no signal, no socket, no mount."""
    bubblewrap: bool = False
    """The command bwrap makes the namespaces."""


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
        self._folder = "/tmp" if isolation.bubblewrap else tempfile.mkdtemp(prefix="areal-sandbox-")
        packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        visible = visible_paths(packages)
        prefix = _bubblewrap(visible, limits.folder_bytes) if isolation.bubblewrap else [sys.executable]
        self._buffer = bytearray()
        self._channel, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            self._process = subprocess.Popen(
                [*prefix, "-sPS", "-m", "areal.reward.sandbox_inside", str(theirs.fileno()), str(os.getpid())],
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
        orders |= {"isolate": isolation.namespaces and not isolation.bubblewrap, "refuse": isolation.system_calls}
        orders |= {"root": _ROOT, "packages": packages, "visible": visible}
        with contextlib.suppress(SandboxEnded):  # wait_started reports it
            self.send(orders, until_s=time.monotonic() + _START_WAIT_S)

    def wait_started(self) -> Sandbox:
        """Wait until the process is confined and starts its program; returns self.

        IsolationMissing when a requested protection is not available, RewardError when the sandbox does not start.
        """
        try:
            report = self.receive(until_s=time.monotonic() + _START_WAIT_S)
        except SandboxEnded as error:
            raise RewardError(f"a sandbox did not start: {error.reason}", code="sandbox.not_started") from error
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
            raise SandboxEnded("time_limit") from None
        except OSError as error:
            raise SandboxEnded("ended") from error

    def receive(self, *, until_s: float) -> Any:
        """The next message. SandboxEnded as for `ask`, or when the message is too large or invalid."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise SandboxEnded("too_large")
            try:
                self._channel.settimeout(max(1e-3, until_s - time.monotonic()))
                data = self._channel.recv(_READ_BYTES)
            except TimeoutError:
                raise SandboxEnded("time_limit") from None
            except OSError:
                data = b""
            if not data:
                raise SandboxEnded("ended")
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        if line.count(b"[") + line.count(b"{") > _MAX_CONTAINERS:
            raise SandboxEnded("too_large")
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SandboxEnded("invalid_message") from error

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
        if not self.isolation.bubblewrap:
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


def visible_paths(packages: list[str]) -> list[str]:
    """The files and folders that a program in namespaces can read, outer ones first: what Python needs, and `packages`.

    Each is listed by its name and, where that contains a symbolic link, also by its real path.
    """
    needed = [sysconfig.get_path("stdlib"), f"{sys.base_prefix}/lib", *packages, *_SYSTEM_LIBRARIES]
    existing = {form for path in needed if os.path.exists(path) for form in (path, os.path.realpath(path))}
    return [path for path in sorted(existing) if not any(path.startswith(f"{outer}/") for outer in existing)]


def _bubblewrap(visible: list[str], folder_bytes: int) -> list[str]:
    """The command that starts Python in namespaces made by bwrap, with the same contents as in `enter_namespaces`."""
    python = os.path.realpath(sys.executable)
    shown = [*visible, python, f"{_ROOT}/areal/__init__.py", f"{_ROOT}/areal/reward"]
    # /tmp first: Python may be installed below it.
    binds = ["--size", str(folder_bytes), "--tmpfs", "/tmp", "--dev-bind", "/dev/null", "/dev/null"]
    binds += [word for path in shown for word in ("--ro-bind", path, path)]
    return ["bwrap", "--unshare-all", "--die-with-parent", "--as-pid-1", *binds, "--remount-ro", "/", python]


def available_isolation() -> tuple[Isolation, list[str]]:
    """The protections that this machine offers without bubblewrap, and why others are missing."""
    missing: list[str] = []
    for isolation in (
        Isolation(),
        Isolation(namespaces=False),
        Isolation(system_calls=False),
        Isolation(namespaces=False, system_calls=False),
    ):
        try:
            try_isolation(isolation)
        except IsolationMissing as error:
            missing.append(str(error))
            continue
        return isolation, list(dict.fromkeys(missing))
    raise RewardError("no sandbox can be started", code="sandbox.not_started")


def try_isolation(isolation: Isolation) -> None:
    """Start an empty program. The errors of `Sandbox.wait_started`."""
    with Sandbox("program", "", limits=SandboxLimits(), isolation=isolation, keep_s=_START_WAIT_S) as sandbox:
        sandbox.wait_started()
