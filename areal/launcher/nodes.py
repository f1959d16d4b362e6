"""Processes of a run on several nodes, through one agent per node (`areal.launcher.node_agent`)."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

import areal
from areal.api.config.launcher import ClusterSpecConfig
from areal.api.errors import LaunchError
from areal.launcher import node_messages as wire
from areal.launcher.backend import LogTail
from areal.launcher.job import PlannedProcess
from areal.launcher.placement import Machine
from areal.system.network import Host
from areal.system.process import ERROR_PREFIX, TRANSIENT_EXIT, tied_to_this_process
from areal.system.run_paths import RunPaths

_START_LIMIT_S = 20.0
_ANSWER_LIMIT_S = 3.0
"""The supervisor's loop waits at most this long for log lines or stacks of a node."""
_CLOSE_LIMIT_S = 5.0
_KEPT_LINES = 50
_AGENT_ENDED = (0, 2, -signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a transport that come from the agent, whose processes end with it. 1 and 255 may be a lost network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of a run, and how its agent is started."""

    name: str
    address: str
    """Host name or address under which the other nodes find it."""
    command: tuple[str, ...]
    """Connects standard input and output to an agent there, for example `ssh node2 python -m ...node_agent`."""


@dataclass(frozen=True, slots=True)
class _Ended:
    code: int
    tail: LogTail


class NodeLink:
    """The connection to the agent of one node. A thread reads its messages and sends pings."""

    def __init__(self, node: Node, hello: wire.Hello, *, connect_limit_s: float) -> None:
        """Connect, and wait for the facts of the node. LaunchError when that fails or takes too long."""
        self.node = node
        self.lost = ""
        """Why the node is lost; empty while it is connected."""
        self.resident_bytes = 0
        self._errors: deque[bytes] = deque(maxlen=_KEPT_LINES)
        """The last lines that the transport and the agent wrote to standard error."""
        self._ping_s = hello.silence_s / 10
        self._lost_s = 1.5 * hello.silence_s  # later than the agent ends its processes
        self._ended: dict[str, _Ended] = {}
        self._replies: dict[int, wire.Reply] = {}
        self._stopped: set[str] = set()
        self._facts: wire.Facts | None = None
        self._failed: wire.Failed | None = None
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._is_closing = False
        try:
            self._transport = subprocess.Popen(
                node.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                process_group=0,
                preexec_fn=tied_to_this_process(),
            )
        except OSError as error:
            message = f"cannot start {node.command[0]}: {error.strerror or error}"
            raise LaunchError(message, code="process.cannot_start") from error
        self._reader = threading.Thread(target=self._read, name=f"node {node.name}", daemon=True)
        self._reader.start()
        self.send(hello)
        self.facts = self._connected(connect_limit_s)

    def send(self, message: wire.ToAgent) -> None:
        """Send and return. A lost node receives nothing."""
        data = memoryview(wire.TO_AGENT.dump_json(message) + b"\n")
        assert self._transport.stdin is not None
        with self._sending, contextlib.suppress(OSError, ValueError):  # the reader finds out that it is lost
            while data:
                data = data[self._transport.stdin.write(data) :]

    def open(self, paths: RunPaths, secrets: Mapping[str, str]) -> None:
        """Name the run, whose folder exists. LaunchError when the node does not share the folder, or is lost."""
        number = next(self._ids)
        text = uuid.uuid4().hex
        probe = paths.root / f".probe-{self.node.name}-{number}"
        probe.write_text(text)
        try:
            message = wire.Open(
                id=number, run_dir=str(paths.root), secrets=dict(secrets), probe=probe.name, probe_text=text
            )
            self._answer(message, number, _START_LIMIT_S)
            if [path.read_text() for path in paths.root.glob(f"{probe.name}.*")] != [text]:
                reason = f"a file that it writes to {paths.root} does not appear here: all nodes must share this folder"
                raise LaunchError(f"node {self.node.name}: {reason}", code="launch.folder_not_shared")
        finally:
            for path in paths.root.glob(f"{probe.name}*"):
                path.unlink()

    def start(self, planned: PlannedProcess) -> int:
        """Start a process; returns its id there. LaunchError when it cannot be started or the node is lost."""
        self._ended.pop(planned.name, None)
        self._stopped.discard(planned.name)
        number = next(self._ids)
        return self._answer(wire.Start(id=number, planned=planned), number, _START_LIMIT_S).pid

    def ended(self, name: str) -> _Ended | None:
        """How a process ended; None while it runs. When the node is lost, all its processes have ended."""
        if (found := self._ended.get(name)) is not None or not self.lost:
            return found
        error = f"{ERROR_PREFIX}node {self.node.name} is lost: {self.lost} [launch.node_lost]"
        return _Ended(TRANSIENT_EXIT, LogTail([error], 0))

    def last_lines(self, name: str) -> LogTail:
        if (found := self.ended(name)) is not None:
            return found.tail
        number = next(self._ids)
        reply = self._ask(wire.Lines(id=number, name=name), number, _ANSWER_LIMIT_S)
        return LogTail([], 0) if reply is None else LogTail(list(reply.lines), reply.written_ns)

    def request_stacks(self, name: str, reason: str) -> bool:
        number = next(self._ids)
        reply = self._ask(wire.Stacks(id=number, name=name, reason=reason), number, _ANSWER_LIMIT_S)
        return reply is not None and reply.done

    def stop(self, names: Sequence[str], grace_s: float) -> None:
        """Begin to end processes; `has_stopped` says when that is done."""
        self.send(wire.Stop(names=tuple(names), grace_s=grace_s))

    def has_stopped(self, names: Iterable[str]) -> bool:
        return bool(self.lost) or self._stopped.issuperset(names)

    def close(self) -> None:
        """End the agent, which ends its processes, and the transport."""
        self._is_closing = True
        assert self._transport.stdin is not None
        with self._sending, contextlib.suppress(OSError):
            self._transport.stdin.close()
        try:
            self._transport.wait(_CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._kill_transport()
        self._reader.join()

    def _connected(self, limit_s: float) -> wire.Facts:
        with self._changed:
            self._changed.wait_for(lambda: self._facts or self._failed or self.lost, limit_s)
        if self._facts is not None:
            return self._facts
        failed, lost = self._failed, self.lost
        self.close()
        if failed is not None:
            raise LaunchError(f"node {self.node.name}: {failed.error}", code=failed.code)
        reason = lost or f"no answer within {limit_s:g} s{self._last_error()}"
        raise LaunchError(f"node {self.node.name} cannot be reached: {reason}", code="launch.node_unreachable")

    def _answer(self, message: wire.ToAgent, number: int, limit_s: float) -> wire.Reply:
        """The reply to a message. LaunchError when it is an error or does not arrive."""
        reply = self._ask(message, number, limit_s)
        if reply is None:
            text = f"node {self.node.name}: {self.lost or f'no answer within {limit_s:g} s'}"
            raise LaunchError(text, code="launch.node_lost")
        if reply.error:
            raise LaunchError(f"node {self.node.name}: {reply.error}", code=reply.code)
        return reply

    def _ask(self, message: wire.ToAgent, number: int, limit_s: float) -> wire.Reply | None:
        """The reply to a message; None when none arrives in time or the node is lost."""
        self.send(message)
        with self._changed:
            self._changed.wait_for(lambda: number in self._replies or self.lost, limit_s)
            return self._replies.pop(number, None)

    def _read(self) -> None:
        """Read messages until the connection ends or the agent is silent for too long."""
        assert self._transport.stdout is not None
        assert self._transport.stderr is not None
        output, errors = self._transport.stdout.fileno(), self._transport.stderr.fileno()
        unread = {output: b"", errors: b""}
        selector = selectors.DefaultSelector()
        for descriptor in unread:
            selector.register(descriptor, selectors.EVENT_READ)
        heard_s, pinged_s, cause = time.monotonic(), 0.0, ""
        while not cause:
            now_s = time.monotonic()
            if now_s - pinged_s >= self._ping_s and not self._is_closing:
                pinged_s = now_s
                self.send(wire.Ping())
            for key, _ in selector.select(self._ping_s / 2):
                block = os.read(key.fd, 1 << 16)
                *lines, unread[key.fd] = (unread[key.fd] + block).split(b"\n")
                if key.fd == output:
                    heard_s = time.monotonic()
                    for line in lines:
                        self._take(line)
                    cause = cause or ("" if block else "its connection closed")
                else:
                    self._errors += [line for line in lines if line.strip()]
                if not block:
                    selector.unregister(key.fd)
            if self._facts is not None and time.monotonic() - heard_s > self._lost_s:
                cause = cause or f"silent for {self._lost_s:g} s"
        self._lose(cause, heard_s)

    def _take(self, line: bytes) -> None:
        try:
            message = wire.FROM_AGENT.validate_json(line)
        except ValueError:  # a login script that prints, for example; its text helps to find a failed start
            self._errors.append(line)
            return
        with self._changed:
            match message:
                case wire.Facts():
                    self._facts = message
                case wire.Failed():
                    self._failed = message
                case wire.Reply():
                    self._replies[message.id] = message
                case wire.Exit():
                    tail = LogTail(list(message.lines), message.written_ns)
                    self._ended[message.name] = _Ended(message.code, tail)
                case wire.Stopped():
                    self._stopped.update(message.names)
                case wire.Alive():
                    self.resident_bytes = message.resident_bytes
            self._changed.notify_all()

    def _lose(self, cause: str, heard_s: float) -> None:
        """Mark the node as lost, once its processes have certainly ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._transport.wait(self._ping_s)
        if self._facts is not None and self._transport.poll() not in _AGENT_ENDED:
            while time.monotonic() - heard_s < self._lost_s and not self._is_closing:
                time.sleep(self._ping_s / 10)
        self._kill_transport()
        with self._changed:
            self.lost = f"{cause}{self._last_error()}"
            self._changed.notify_all()

    def _kill_transport(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._transport.pid, signal.SIGKILL)
        self._transport.wait()

    def _last_error(self) -> str:
        """The last line that the transport or the agent wrote to standard error, in parentheses."""
        return f" ({self._errors[-1].decode(errors='replace').strip()})" if self._errors else ""


class NodeCluster:
    """The nodes of a run, with an agent on each. Implements `Cluster`."""

    def __init__(self, nodes: Sequence[Node], config: ClusterSpecConfig) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._limit_s = config.node_connect_s
        self._silence_s = config.node_silence_s
        self._links: dict[str, NodeLink] = {}

    def machines(self) -> Sequence[Machine]:
        """Connect to all nodes. LaunchError when one cannot be reached or has another version of areal."""
        for name in self._nodes:
            self._links[name] = self._connected(name)
        return [_machine(link) for link in self._links.values()]

    def backend(self, paths: RunPaths, secrets: Mapping[str, str]) -> NodesBackend:
        def connect(name: str) -> NodeLink:
            link = self._links[name] = self._connected(name)
            link.open(paths, secrets)
            return link

        for link in self._links.values():
            link.open(paths, secrets)
        return NodesBackend(self._links, connect)

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _connected(self, name: str) -> NodeLink:
        node = self._nodes[name]
        peers = (socket.gethostname(), *(other.address for other in self._nodes.values() if other.name != name))
        hello = wire.Hello(folder=os.getcwd(), silence_s=self._silence_s, peers=peers)
        link = NodeLink(node, hello, connect_limit_s=self._limit_s)
        if link.facts.areal != areal.__version__:
            link.close()
            message = f"node {name} has areal {link.facts.areal}, this machine {areal.__version__}: install one version"
            raise LaunchError(message, code="launch.other_version")
        return link


def _machine(link: NodeLink) -> Machine:
    found = link.facts
    host = Host(bind=found.address, advertise=found.address, node=link.node.name)
    return Machine(cores=found.cores, gpus=found.gpus, host=host)


class NodesBackend:
    """Processes on several nodes. Implements `ProcessBackend`; a process runs on the node that its `host` names."""

    def __init__(self, links: Mapping[str, NodeLink], connect: Callable[[str], NodeLink]) -> None:
        """`links` are open, by node name; `connect` opens the one of a node again after it was lost."""
        self._links = dict(links)
        self._connect = connect
        self._node_of: dict[str, str] = {}
        self._unreachable: dict[str, _Ended] = {}

    def start(self, planned: PlannedProcess) -> int:
        """Start a process. A node that cannot be reached counts as the death of the process."""
        node = self._node_of[planned.name] = planned.host.node
        self._unreachable.pop(planned.name, None)
        try:
            if self._links[node].lost:
                self._links[node] = self._connect(node)
            return self._links[node].start(planned)
        except LaunchError as error:
            if error.code not in ("launch.node_lost", "launch.node_unreachable"):
                raise
            self._unreachable[planned.name] = _Ended(
                TRANSIENT_EXIT, LogTail([f"{ERROR_PREFIX}{error} [{error.code}]"], 0)
            )
            return 0

    def poll(self, name: str) -> int | None:
        ended = self._unreachable.get(name) or self._link(name).ended(name)
        return None if ended is None else ended.code

    def signal(self, name: str, number: signal.Signals) -> None:
        self._link(name).send(wire.Signal(name=name, number=number))

    def last_lines(self, name: str) -> LogTail:
        unreachable = self._unreachable.get(name)
        return self._link(name).last_lines(name) if unreachable is None else unreachable.tail

    def request_stacks(self, name: str, reason: str) -> bool:
        return self._link(name).request_stacks(name, reason)

    def stop(self, names: Iterable[str], grace_s: float, *, hurry: Callable[[], bool]) -> None:
        by_node: dict[str, list[str]] = {}
        for name in names:
            if name in self._node_of:
                by_node.setdefault(self._node_of[name], []).append(name)
        for node, own in by_node.items():
            self._links[node].stop(own, grace_s)
        was_hurried = grace_s <= 0
        while not all(self._links[node].has_stopped(own) for node, own in by_node.items()):
            if not was_hurried and hurry():
                was_hurried = True
                for node, own in by_node.items():
                    self._links[node].stop(own, 0.0)
            time.sleep(0.02)

    def resident_bytes(self) -> int:
        return psutil.Process().memory_info().rss + sum(link.resident_bytes for link in self._links.values())

    def _link(self, name: str) -> NodeLink:
        return self._links[self._node_of[name]]
