"""Processes of a run on several nodes, through one agent per node (`areal.launcher.node_agent`)."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
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
from areal.launcher.job import LaunchPlan, PlannedProcess
from areal.launcher.placement import Machine
from areal.launcher.transport import CommandTransport, Transport
from areal.system.network import Host
from areal.system.process import ERROR_PREFIX, TRANSIENT_EXIT
from areal.system.run_paths import RunPaths

_START_LIMIT_S = 20.0
_ANSWER_LIMIT_S = 3.0
"""The supervisor's loop waits at most this long for log lines or stacks of a node."""
_CLOSE_LIMIT_S = 5.0
_KEPT_LINES = 50


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

    def __init__(self, node: str, transport: Transport, hello: wire.Hello, *, connect_limit_s: float) -> None:
        """Wait for the facts of the node with this name. LaunchError when that fails or takes too long."""
        self.node = node
        self._transport = transport
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
        self._reader = threading.Thread(target=self._read, name=f"node {node}", daemon=True)
        self._reader.start()
        self.send(hello)
        self.facts = self._connected(connect_limit_s)

    def send(self, message: wire.ToAgent) -> None:
        """Send and return. A lost node receives nothing."""
        with self._sending, contextlib.suppress(OSError, ValueError):  # the reader finds out that it is lost
            self._transport.write(wire.TO_AGENT.dump_json(message) + b"\n")

    def open(self, paths: RunPaths, secrets: Mapping[str, str]) -> None:
        """Name the run, whose folder exists. LaunchError when the node does not share the folder, or is lost."""
        number = next(self._ids)
        text = uuid.uuid4().hex
        probe = paths.root / f".probe-{self.node}-{number}"
        probe.write_text(text)
        try:
            message = wire.Open(
                id=number, run_dir=str(paths.root), secrets=dict(secrets), probe=probe.name, probe_text=text
            )
            self._answer(message, number, _START_LIMIT_S)
            if [path.read_text() for path in paths.root.glob(f"{probe.name}.*")] != [text]:
                reason = f"a file that it writes to {paths.root} does not appear here: all nodes must share this folder"
                raise LaunchError(f"node {self.node}: {reason}", code="launch.folder_not_shared")
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
        error = f"{ERROR_PREFIX}node {self.node} is lost: {self.lost} [launch.node_lost]"
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
        with self._sending:
            self._transport.close_input()
        if not self._transport.agent_ended(_CLOSE_LIMIT_S):
            self._transport.kill()
        self._reader.join()

    def _connected(self, limit_s: float) -> wire.Facts:
        with self._changed:
            self._changed.wait_for(lambda: self._facts or self._failed or self.lost, limit_s)
        if self._facts is not None and self._facts.areal == areal.__version__:
            return self._facts
        failed, lost = self._failed, self.lost
        self.close()
        if self._facts is not None:
            found, own = self._facts.areal, areal.__version__
            message = f"node {self.node} has areal {found}, this machine {own}: install one version"
            raise LaunchError(message, code="launch.other_version")
        if failed is not None:
            raise LaunchError(f"node {self.node}: {failed.error}", code=failed.code)
        reason = lost or f"no answer within {limit_s:g} s{self._last_error()}"
        raise LaunchError(f"node {self.node} cannot be reached: {reason}", code="launch.node_unreachable")

    def _answer(self, message: wire.ToAgent, number: int, limit_s: float) -> wire.Reply:
        """The reply to a message. LaunchError when it is an error or does not arrive."""
        reply = self._ask(message, number, limit_s)
        if reply is None:
            text = f"node {self.node}: {self.lost or f'no answer within {limit_s:g} s'}"
            raise LaunchError(text, code="launch.node_lost")
        if reply.error:
            raise LaunchError(f"node {self.node}: {reply.error}", code=reply.code)
        return reply

    def _ask(self, message: wire.ToAgent, number: int, limit_s: float) -> wire.Reply | None:
        """The reply to a message; None when none arrives in time or the node is lost."""
        self.send(message)
        with self._changed:
            self._changed.wait_for(lambda: number in self._replies or self.lost, limit_s)
            return self._replies.pop(number, None)

    def _read(self) -> None:
        """Read messages until the connection ends or the agent is silent for too long."""
        output, errors = self._transport.output, self._transport.errors
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
        agent_ended = self._transport.agent_ended(self._ping_s)
        if self._facts is not None and not agent_ended:
            while time.monotonic() - heard_s < self._lost_s and not self._is_closing:
                time.sleep(self._ping_s / 10)
        self._transport.kill()
        with self._changed:
            self.lost = f"{cause}{self._last_error()}"
            self._changed.notify_all()

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

    def backend(self, plan: LaunchPlan, paths: RunPaths, secrets: Mapping[str, str]) -> NodesBackend:
        def agent_for(planned: PlannedProcess) -> tuple[NodeLink, PlannedProcess]:
            name = planned.host.node
            if self._links[name].lost:
                link = self._connected(name)
                try:
                    link.open(paths, secrets)
                except LaunchError:
                    link.close()
                    raise
                self._links[name] = link
            return self._links[name], planned

        for link in self._links.values():
            link.open(paths, secrets)
        return NodesBackend(agent_for)

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _connected(self, name: str) -> NodeLink:
        node = self._nodes[name]
        peers = (socket.gethostname(), *(other.address for other in self._nodes.values() if other.name != name))
        hello = wire.Hello(folder=os.getcwd(), silence_s=self._silence_s, peers=peers)
        return NodeLink(name, CommandTransport(node.command), hello, connect_limit_s=self._limit_s)


def _machine(link: NodeLink) -> Machine:
    found = link.facts
    host = Host(bind=found.address, advertise=found.address, node=link.node)
    return Machine(cores=found.cores, gpus=found.gpus, host=host)


class NodesBackend:
    """Processes on several nodes. Implements `ProcessBackend`."""

    def __init__(self, agent_for: Callable[[PlannedProcess], tuple[NodeLink, PlannedProcess]]) -> None:
        """`agent_for` returns the agent that runs a process, connected again if it was lost, and what it starts."""
        self._agent_for = agent_for
        self._links: dict[str, NodeLink] = {}
        """By name of the process."""
        self._unreachable: dict[str, _Ended] = {}

    def start(self, planned: PlannedProcess) -> int:
        """Start a process. A node that cannot be reached counts as the death of the process."""
        self._unreachable.pop(planned.name, None)
        try:
            link, adapted = self._agent_for(planned)
            self._links[planned.name] = link
            return link.start(adapted)
        except LaunchError as error:
            if error.code not in ("launch.node_lost", "launch.node_unreachable"):
                raise
            self._unreachable[planned.name] = _Ended(
                TRANSIENT_EXIT, LogTail([f"{ERROR_PREFIX}{error} [{error.code}]"], 0)
            )
            return 0

    def poll(self, name: str) -> int | None:
        ended = self._unreachable.get(name) or self._links[name].ended(name)
        return None if ended is None else ended.code

    def signal(self, name: str, number: signal.Signals) -> None:
        if name in self._links:
            self._links[name].send(wire.Signal(name=name, number=number))

    def last_lines(self, name: str) -> LogTail:
        unreachable = self._unreachable.get(name)
        return self._links[name].last_lines(name) if unreachable is None else unreachable.tail

    def request_stacks(self, name: str, reason: str) -> bool:
        return name in self._links and self._links[name].request_stacks(name, reason)

    def stop(self, names: Iterable[str], grace_s: float, *, hurry: Callable[[], bool]) -> None:
        by_link: dict[NodeLink, list[str]] = {}
        for name in names:
            if name in self._links:
                by_link.setdefault(self._links[name], []).append(name)
        for link, own in by_link.items():
            link.stop(own, grace_s)
        was_hurried = grace_s <= 0
        while not all(link.has_stopped(own) for link, own in by_link.items()):
            if not was_hurried and hurry():
                was_hurried = True
                for link, own in by_link.items():
                    link.stop(own, 0.0)
            time.sleep(0.02)

    def resident_bytes(self) -> int:
        return psutil.Process().memory_info().rss + sum(link.resident_bytes for link in set(self._links.values()))
