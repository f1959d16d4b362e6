"""The agent of one node: starts processes of a run there on behalf of a launcher elsewhere, and reports their state.

`python -m areal.launcher.node_agent` reads messages of the launcher from standard input and writes its own to standard
output, one JSON object per line; ssh, srun or a container command connects the two. Its loop waits for a message or
for the next report. It ends all its processes when the connection closes, or when the launcher is silent: a launcher
that has lost the node may start the same processes elsewhere.
"""

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
from pathlib import Path

import areal
from areal.api.errors import ArealError, LaunchError
from areal.launcher.backend import LocalBackend, LogTail
from areal.launcher.node_messages import (
    FROM_AGENT,
    TO_AGENT,
    Alive,
    Exit,
    Facts,
    FromAgent,
    Hello,
    Lines,
    Listen,
    Open,
    Ping,
    Reach,
    Reply,
    Signal,
    Stacks,
    Start,
    Stop,
    ToAgent,
)
from areal.launcher.preflight import PortProbe, unreachable
from areal.system.device import cpu_count, host_memory_bytes, visible_gpus
from areal.system.durable import write_atomic
from areal.system.network import LOOPBACK, is_loopback
from areal.system.process import run_main, watch_parent
from areal.system.run_paths import RunPaths

_LOOK_S = 0.05
_HELLO_LIMIT_S = 30.0
_REPORT_S = 1.0  # The longest time between two reports, which contain the heartbeats.


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
        self._probe = PortProbe()

    def run(self) -> None:
        """Serve until the launcher closes the connection or is silent, then end all processes."""
        if not self._greet():
            return
        backend = self._opened()
        if backend is None:
            return
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

    def _greet(self) -> bool:
        """Wait for the first message and answer it. False when the launcher cannot use this node."""
        while not self._is_abandoned:
            for message in self._receive(_LOOK_S):
                if isinstance(message, Hello):
                    try:
                        self._send(_prepared(message))
                    except ArealError as error:
                        self._send(Reply(error=str(error), code=error.code))
                        return False
                    self._silence_s, self._heard_s = message.silence_s, time.monotonic()
                    return True
        return False

    def _opened(self) -> LocalBackend | None:
        """Wait for the run. None when the launcher closes the connection before it sends one."""
        while not self._is_abandoned:
            for message in self._receive(_LOOK_S):
                if isinstance(message, Open):
                    self._await_folder(message)
                    began_s = time.monotonic()
                    error = folder_problem(message)
                    code, seconds = "launch.folder_not_shared" if error else "", time.monotonic() - began_s
                    self._send(Reply(id=message.id, error=error, code=code, seconds=seconds))
                    if not error:
                        return LocalBackend(RunPaths(Path(message.run_dir)), message.secrets)
            self._show_life(None)
        return None

    def _await_folder(self, run: Open) -> None:
        """Wait until the node sees the run folder, at most `limit_s`."""
        until_s = time.monotonic() + run.limit_s
        while not _sees_run(run) and time.monotonic() < until_s and not self._is_abandoned:
            for _ in self._receive(_LOOK_S):
                pass  # the launcher sends only pings until it has the reply
            self._show_life(None)

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
            case Listen() | Reach():
                self._check_ports(message, backend)
            case Hello() | Open() | Ping():
                pass

    def _check_ports(self, message: Listen | Reach, backend: LocalBackend) -> None:
        try:
            if isinstance(message, Listen):
                self._send(Reply(id=message.id, port=self._probe.open_port(message.address)))
                return
        except ArealError as error:
            self._send(Reply(id=message.id, error=str(error), code=error.code))
            return
        failures = unreachable(message.targets, message.limit_s, lambda: self._show_life(backend))
        advice = "open all TCP ports between the nodes"
        text = f"it cannot connect to {failures}: {advice}" if failures else ""
        self._send(Reply(id=message.id, error=text, code="launch.port_closed" if failures else ""))

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
        self._send(Reply(id=stop.id))

    def _report(self, backend: LocalBackend) -> None:
        """Send each exit once, and a sign of life at intervals."""
        for name, pid in list(self._running.items()):
            if (code := backend.poll(name)) is not None:
                del self._running[name]
                tail = backend.last_lines(name)
                lines, written_ns = tuple(tail.lines), tail.written_ns
                self._send(Exit(name=name, pid=pid, code=code, lines=lines, written_ns=written_ns))
        self._show_life(backend)

    def _show_life(self, backend: LocalBackend | None) -> None:
        if time.monotonic() - self._reported_s >= min(self._silence_s / 10, _REPORT_S):
            self._reported_s = time.monotonic()
            if backend is None:
                self._send(Alive(resident_bytes=0))
            else:
                self._send(Alive(resident_bytes=backend.resident_bytes(), beats=backend.beats()))

    def _send(self, message: FromAgent) -> None:
        data = memoryview(FROM_AGENT.dump_json(message) + b"\n")
        try:
            while data:
                data = data[os.write(self._output, data) :]
        except BrokenPipeError:
            self._closed = True


def _prepared(hello: Hello) -> Facts:
    """Enter the launcher's working directory. Returns what this machine is, for the plan of a launch.

    LaunchError when the folder does not exist here, or when a name of `peers` cannot be resolved.
    """
    try:
        os.chdir(hello.folder)
    except OSError as error:
        message = f"{socket.gethostname()}: {hello.folder}: {error.strerror}: the folder must exist on each node"
        raise LaunchError(message, code="launch.folder_not_shared") from error
    return Facts(
        hostname=socket.gethostname(),
        address=own_address(hello.peers),
        cores=cpu_count(),
        gpus=tuple(visible_gpus()),
        memory_bytes=host_memory_bytes(),
        python=platform.python_version(),
        areal=areal.__version__,
        clock_s=time.time(),
    )


def _sees_run(run: Open) -> bool:
    """An NFS client remembers for up to a minute that a name does not exist, unless its folder is opened."""
    probe = Path(run.run_dir) / run.probe
    for folder in reversed(probe.parents):
        with contextlib.suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    return os.path.exists(probe)  # no error, unlike Path.exists


def folder_problem(run: Open) -> str:
    """Why the launcher's run folder is not usable here; empty when it is."""
    folder = Path(run.run_dir)
    advice = "cluster.fileroot must be a folder that all nodes share"
    try:
        text = (folder / run.probe).read_text()
        write_atomic(folder / f"{run.probe}.{socket.gethostname()}", run.probe_text.encode())
    except OSError as error:
        return f"{socket.gethostname()}: {error.filename or folder}: {error.strerror or error}: {advice}"
    return "" if text == run.probe_text else f"{socket.gethostname()}: {folder} is another folder there: {advice}"


def own_address(peers: Iterable[str]) -> str:
    """The address of this machine on its route to the first of `peers` that is another machine.

    When all peers are this machine: the first of its addresses among them that others can reach, else loopback.
    LaunchError when a name cannot be resolved.
    """
    addresses: list[str] = []
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
            addresses.append(address)
    return next((address for address in addresses if not is_loopback(address)), LOOPBACK)


def main() -> None:
    watch_parent()
    descriptor = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may write between the messages
    NodeAgent(sys.stdin.fileno(), descriptor).run()


if __name__ == "__main__":
    run_main(main)
