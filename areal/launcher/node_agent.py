"""The agent of one node: starts processes of a run there on behalf of a launcher elsewhere, and reports their state.

`python -m areal.launcher.node_agent` reads messages of the launcher from standard input and writes its own to standard
output, one JSON object per line; ssh, srun or a container command connects the two. Its loop waits for a message or
for the next report. It ends all its processes when the connection closes, or when the launcher is silent: a launcher
that has lost the node may start the same processes elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import platform
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import psutil
from pydantic import Field, TypeAdapter

import areal
from areal.api.errors import ArealError, LaunchError
from areal.launcher.backend import LocalBackend, LogTail
from areal.launcher.job import PlannedProcess
from areal.system.device import cpu_count, visible_gpus
from areal.system.network import LOOPBACK, is_loopback
from areal.system.process import run_main, watch_parent
from areal.system.run_paths import RunPaths

_LOOK_S = 0.05
_HELLO_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of the launcher: the run, and what the agent must check."""

    do: Literal["hello"] = "hello"
    run_dir: str
    folder: str
    """Working directory of the processes."""
    env: dict[str, str]
    """Added to the agent's environment. It may contain the run's token."""
    silence_s: float
    """Silence of the launcher, in seconds, after which the agent ends its processes. Both write ten times as often."""
    peers: tuple[str, ...] = ()
    """Names or addresses of the other machines: the node's own address is the one that reaches them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    do: Literal["start"] = "start"
    id: int
    planned: PlannedProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    do: Literal["signal"] = "signal"
    name: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Request for the stacks of a process."""

    do: Literal["stacks"] = "stacks"
    id: int
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Request for the last log lines of a process."""

    do: Literal["lines"] = "lines"
    id: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End processes; `grace_s` 0 also ends the grace period of an earlier Stop."""

    do: Literal["stop"] = "stop"
    names: tuple[str, ...]
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    do: Literal["ping"] = "ping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Answer to Hello: what a plan needs to know about the node."""

    do: Literal["facts"] = "facts"
    hostname: str
    address: str
    """Address under which the other machines reach the node."""
    cores: int
    gpus: tuple[str, ...]
    memory_bytes: int
    python: str
    areal: str
    clock_s: float
    """Seconds since 1970."""
    sees_run_dir: bool
    """The launcher's run folder is there: the folder is shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer to a message with an id. `error` is empty on success."""

    do: Literal["reply"] = "reply"
    id: int
    pid: int = 0
    lines: tuple[str, ...] = ()
    written_ns: int = 0
    done: bool = True
    error: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A process has ended. Negative `code` = by this signal."""

    do: Literal["exit"] = "exit"
    name: str
    pid: int
    code: int
    lines: tuple[str, ...]
    written_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """The agent works."""

    do: Literal["alive"] = "alive"
    resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """All processes of a Stop have ended."""

    do: Literal["stopped"] = "stopped"
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The agent ends because of an error."""

    do: Literal["failed"] = "failed"
    error: str
    code: str


ToAgent = Annotated[Hello | Start | Signal | Stacks | Lines | Stop | Ping, Field(discriminator="do")]
FromAgent = Annotated[Facts | Reply | Exit | Alive | Stopped | Failed, Field(discriminator="do")]
TO_AGENT: TypeAdapter[ToAgent] = TypeAdapter(ToAgent)
FROM_AGENT: TypeAdapter[FromAgent] = TypeAdapter(FromAgent)


class NodeAgent:
    """Serves one launcher: starts and observes processes of its run on this node."""

    def __init__(self, input_descriptor: int, output_descriptor: int) -> None:
        self._input = input_descriptor
        self._output = output_descriptor
        self._selector = selectors.DefaultSelector()
        self._selector.register(input_descriptor, selectors.EVENT_READ)
        self._unread = b""
        self._arrived: deque[ToAgent] = deque()
        self._closed = False
        self._heard_s = time.monotonic()
        self._silence_s = _HELLO_LIMIT_S
        self._reported_s = 0.0
        self._running: dict[str, int] = {}
        self._hurry = False

    def run(self) -> None:
        """Serve until the launcher closes the connection or is silent, then end all processes."""
        hello = self._hello()
        if hello is None:
            return
        backend = LocalBackend(RunPaths(Path(hello.run_dir)))
        try:
            while not self._is_abandoned:
                for message in self._receive(_LOOK_S):
                    self._handle(message, backend)
                self._report(backend)
        finally:
            backend.stop(list(self._running), 0.0, hurry=lambda: True)

    @property
    def _is_abandoned(self) -> bool:
        return self._closed or time.monotonic() - self._heard_s > self._silence_s

    def _hello(self) -> Hello | None:
        """Wait for the first message and answer it. None when the connection closes."""
        while not self._is_abandoned:
            for message in self._receive(_LOOK_S):
                if isinstance(message, Hello):
                    try:
                        self._send(_prepared(message))
                    except ArealError as error:
                        self._send(Failed(error=str(error), code=error.code))
                        return None
                    self._silence_s, self._heard_s = message.silence_s, time.monotonic()
                    return message
        return None

    def _receive(self, limit_s: float) -> Iterator[ToAgent]:
        """The messages that have arrived; waits at most `limit_s` for the first. What is not taken stays for later."""
        if not self._closed and not self._arrived and self._selector.select(limit_s):
            block = os.read(self._input, 1 << 16)
            self._closed = not block
            *lines, self._unread = (self._unread + block).split(b"\n")
            self._arrived += [TO_AGENT.validate_json(line) for line in lines]
        while self._arrived:
            self._heard_s = time.monotonic()
            yield self._arrived.popleft()

    def _handle(self, message: ToAgent, backend: LocalBackend) -> None:
        match message:
            case Start():
                try:
                    pid = self._running[message.planned.name] = backend.start(message.planned)
                except ArealError as error:
                    self._send(Reply(id=message.id, error=str(error), code=error.code))
                else:
                    self._send(Reply(id=message.id, pid=pid))
            case Signal():
                with contextlib.suppress(KeyError):  # it was never started here
                    backend.signal(message.name, signal.Signals(message.number))
            case Stacks():
                is_done = message.name in self._running and backend.request_stacks(message.name, message.reason)
                self._send(Reply(id=message.id, done=is_done))
            case Lines():
                tail = backend.last_lines(message.name) if message.name in self._running else LogTail([], 0)
                self._send(Reply(id=message.id, lines=tuple(tail.lines), written_ns=tail.written_ns))
            case Stop():
                self._stop(message, backend)
            case Hello() | Ping():
                pass

    def _stop(self, stop: Stop, backend: LocalBackend) -> None:
        """End processes while messages and reports continue."""
        self._hurry = stop.grace_s <= 0

        def hurry() -> bool:
            for message in self._receive(0.0):
                self._hurry = self._hurry or (isinstance(message, Stop) and message.grace_s <= 0)
            self._report(backend)
            return self._hurry or self._is_abandoned

        backend.stop(stop.names, stop.grace_s, hurry=hurry)
        self._report(backend)
        self._send(Stopped(names=stop.names))

    def _report(self, backend: LocalBackend) -> None:
        """Send each exit once, and a sign of life at intervals."""
        for name, pid in list(self._running.items()):
            if (code := backend.poll(name)) is not None:
                del self._running[name]
                tail = backend.last_lines(name)
                lines, written_ns = tuple(tail.lines), tail.written_ns
                self._send(Exit(name=name, pid=pid, code=code, lines=lines, written_ns=written_ns))
        if time.monotonic() - self._reported_s >= self._silence_s / 10:
            self._reported_s = time.monotonic()
            self._send(Alive(resident_bytes=backend.resident_bytes()))

    def _send(self, message: FromAgent) -> None:
        data = memoryview(FROM_AGENT.dump_json(message) + b"\n")
        try:
            while data:
                data = data[os.write(self._output, data) :]
        except BrokenPipeError:
            self._closed = True


def _prepared(hello: Hello) -> Facts:
    """Enter the launcher's folder and environment. Returns what this machine is, for the plan of a launch.

    LaunchError when the folder does not exist here, or when a name of `peers` cannot be resolved.
    """
    try:
        os.chdir(hello.folder)
    except OSError as error:
        message = f"{socket.gethostname()}: {hello.folder}: {error.strerror}: the folder must exist on each node"
        raise LaunchError(message, code="launch.folder_not_shared") from error
    os.environ.update(hello.env)
    return Facts(
        hostname=socket.gethostname(),
        address=own_address(hello.peers),
        cores=cpu_count(),
        gpus=tuple(visible_gpus()),
        memory_bytes=psutil.virtual_memory().total,
        python=platform.python_version(),
        areal=areal.__version__,
        clock_s=time.time(),
        sees_run_dir=Path(hello.run_dir).is_dir(),
    )


def own_address(peers: Iterable[str]) -> str:
    """The address of this machine on its route to the first of `peers` that is another machine.

    When all peers are this machine: the first of its addresses among them that others can reach, else loopback.
    LaunchError when a name cannot be resolved.
    """
    own: list[str] = []
    for peer in peers:
        try:
            family, _, _, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        except socket.gaierror as error:
            message = f"{socket.gethostname()} cannot resolve the node name {peer!r}: {error.strerror}"
            raise LaunchError(message, code="launch.node_unreachable") from error
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect(target)  # sends nothing: the system only chooses the route
            address = probe.getsockname()[0]
            if address != target[0] and not is_loopback(address):
                return address
            own.append(address)
    return next((address for address in own if not is_loopback(address)), LOOPBACK)


def main() -> None:
    watch_parent()
    descriptor = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may write between the messages
    NodeAgent(sys.stdin.fileno(), descriptor).run()


if __name__ == "__main__":
    run_main(main)
