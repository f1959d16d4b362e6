"""Processes of a run on several nodes, through one agent per node (`areal.launcher.node_agent`)."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from areal.api.config.launcher import ClusterSpecConfig
from areal.api.errors import LaunchError
from areal.launcher import node_messages as wire
from areal.launcher.backend import LogTail, ProcessBackend
from areal.launcher.job import LaunchPlan, PlannedProcess, moved
from areal.launcher.node_link import CommandTransport, Ended, NodeLink
from areal.launcher.placement import Machine, Place, place_again
from areal.launcher.preflight import check_ports
from areal.launcher.restart_rules import Role
from areal.launcher.status import StatusLine
from areal.system.heartbeat import Beat
from areal.system.network import Host
from areal.system.process import ERROR_PREFIX, TRANSIENT_EXIT
from areal.system.run_paths import RunPaths

# ----------------------------------------------------------------------------------------------------------------------
# The node on which a process starts: the planned one, or another one while that one is lost.

_RETURN_LIMIT_S = 1.0
"""The supervisor's loop waits at most this long for a lost node; the attempt then continues while the loop does."""


class NodeChoice:
    """The connections to the nodes of a run: connects lost ones again, and finds nodes for their processes."""

    def __init__(
        self,
        links: dict[str, NodeLink],
        machines: Sequence[Machine],
        *,
        gpu_limit: int,
        connect_limit_s: float,
        connect: Callable[[str], NodeLink],
        open_run: Callable[[NodeLink], None],
        moved_to: Callable[[NodeLink], Machine] | None = None,
    ) -> None:
        """`connect` starts a connection to the node with this name, and does not wait for it. `moved_to`: the machine
        that has this name after it was lost; None = machines do not change. Servers then stay on their own."""
        self._moved_to = moved_to
        self._links = links
        self._machines = {machine.host.node: machine for machine in machines}
        self._gpu_limit = gpu_limit
        self._connect = connect
        self._connect_limit_s = connect_limit_s
        self._since_s: dict[str, float] = {}  # Node -> start of the pending connection.
        self._open_run = open_run
        self._pending: dict[str, NodeLink] = {}
        self._placed: dict[str, tuple[NodeLink, Place]] = {}  # Process -> place of its last start.

    def is_connected(self, name: str) -> bool:
        return name in self._links and not self._links[name].lost

    def is_connecting(self, name: str) -> bool:
        return name in self._pending

    def has_tried(self, name: str) -> bool:
        """Begin or continue to connect a node; False until it is known whether it can be used."""
        self._return(name)
        return name not in self._pending

    def drop(self, name: str) -> None:
        """Close the connection to a node that is given back."""
        for links in (self._links, self._pending):
            if name in links:
                links.pop(name).close()
        self._machines.pop(name, None)

    def agent_for(self, planned: PlannedProcess) -> tuple[NodeLink, PlannedProcess]:
        """The agent that starts a process, and what it starts. LaunchError when no node is alive and has room."""
        self._placed.pop(planned.name, None)
        cause = self._return(planned.host.node)
        machine = self._machines.get(planned.host.node)
        if machine is None:  # of an added server, not connected yet
            raise LaunchError(cause, code="launch.node_unreachable")
        gpus = planned.gpus if set(planned.gpus) <= set(machine.gpus) else machine.gpus[: len(planned.gpus)]
        wanted = Place(machine=machine, gpus=gpus)
        alive = [
            node
            for name, node in self._machines.items()
            if not self._links[name].lost and node.role in (None, planned.role)
        ]
        if self._moved_to is not None and planned.role == "server":
            alive = [node for node in alive if node is machine]
        in_use = [place for name, (link, place) in self._placed.items() if link.ended(name) is None]
        place = place_again(wanted, alive, in_use, gpu_limit=self._gpu_limit)
        if place is None:
            room = f" with {len(planned.gpus)} free GPUs" if planned.gpus else ""
            message = f"{planned.name} needs another node{room}, and there is none: {cause}"
            raise LaunchError(message, code="launch.node_lost")
        link = self._links[place.machine.host.node]
        self._placed[planned.name] = link, place
        is_as_planned = (place.machine.host, place.gpus) == (planned.host, planned.gpus)
        return link, planned if is_as_planned else moved(planned, place.machine.host, place.gpus)

    @property
    def pending(self) -> Collection[NodeLink]:
        """Connections that are started and not yet in use."""
        return self._pending.values()

    def _return(self, name: str) -> str:
        """Try to connect a lost node again. Returns why it is still lost; empty when it is not."""
        if self.is_connected(name):
            return ""
        lost = self._links[name].lost if name in self._links else "it is new"
        is_new = name not in self._pending
        if is_new:
            try:
                self._pending[name] = self._connect(name)
            except LaunchError as error:
                return str(error)
            self._since_s[name] = time.monotonic()
        link = self._pending[name]
        is_late = time.monotonic() - self._since_s[name] > self._connect_limit_s
        if not link.has_answered(_RETURN_LIMIT_S if is_new else 0.0) and not is_late:
            return f"node {name} is lost: {lost}"
        del self._pending[name]
        try:
            link.finish_connecting(0.0)
        except LaunchError as error:  # it has closed the connection
            return str(error)
        try:
            self._open_run(link)
        except LaunchError as error:
            link.close()
            return str(error)
        self._links[name] = link
        if self._moved_to is not None:
            self._machines[name] = self._moved_to(link)
        return ""


FORWARDED = ("HF_", "NCCL_", "WANDB_", "SWANLAB_", "AREAL_TEACHER_", "PYTHONPATH")
"""Environment variables of the launcher that processes on other machines also get, by the beginning of their names."""
_CLOCK_S = 2.0  # A larger difference of two clocks is reported.


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of a run, and how its agent is started."""

    name: str
    address: str
    """Host name or address under which the other nodes find it."""
    command: tuple[str, ...]
    """Connects standard input and output to an agent there, for example `ssh node2 python -m ...node_agent`."""
    role: Role | None = None
    """The role whose processes run there; None = all roles."""


class NodeCluster:
    """The nodes of a run, with an agent on each. Implements `Cluster`."""

    def __init__(
        self, nodes: Sequence[Node], config: ClusterSpecConfig, renew: Callable[[str], Node] | None = None
    ) -> None:
        """`renew`: the node with a name that was lost, before it is connected again; None = nodes do not change."""
        self._renew = renew
        self._nodes = {node.name: node for node in nodes}
        self._limit_s = config.node_connect_s
        self._silence_s = config.node_silence_s
        self._gpu_limit = config.n_gpus_per_node
        self._links: dict[str, NodeLink] = {}
        self._choice: NodeChoice | None = None
        self._say = StatusLine().say

    def machines(self) -> Sequence[Machine]:
        """Connect to all nodes. LaunchError when one cannot be reached or has another version of areal."""
        for name in self._nodes:
            self._links[name] = link = self._connected(name, waits=True)
            if abs(link.clock_s) > _CLOCK_S:
                where = "ahead of" if link.clock_s > 0 else "behind"
                text = f"the clock of node {name} is {abs(link.clock_s):.0f} s {where} that of the launcher"
                self._say(f"areal: warning: {text}: times in its logs differ")
        return [self._machine(link) for link in self._links.values()]

    def backend(self, plan: LaunchPlan, paths: RunPaths, secrets: Mapping[str, str]) -> NodesBackend:
        return NodesBackend(self.open_run(paths, secrets).agent_for)

    def open_run(self, paths: RunPaths, secrets: Mapping[str, str]) -> NodeChoice:
        """Name the run to all nodes. LaunchError when one does not share its folder."""
        for link in self._links.values():
            link.open(paths, secrets)
        measured = "; ".join(
            f"{name} writes in {written_s * 1e3:.0f} ms, seen after {seen_s * 1e3:.0f} ms"
            for name, (written_s, seen_s) in ((name, link.folder_s) for name, link in self._links.items())
        )
        self._say(f"areal: shared folder {paths.root}: {measured}")
        check_ports({name: (link, link.facts.address) for name, link in self._links.items()})
        self._choice = NodeChoice(
            self._links,
            [self._machine(link) for link in self._links.values()],
            gpu_limit=self._gpu_limit,
            connect_limit_s=self._limit_s,
            connect=self._connected_again,
            open_run=lambda link: link.open(paths, secrets),
            moved_to=None if self._renew is None else self._machine,
        )
        return self._choice

    def close(self) -> None:
        pending = () if self._choice is None else self._choice.pending
        for link in (*self._links.values(), *pending):
            link.close()

    def _connected_again(self, name: str) -> NodeLink:
        if self._renew is not None:
            self._nodes[name] = self._renew(name)
        return self._connected(name, waits=False)

    def _connected(self, name: str, *, waits: bool) -> NodeLink:
        node = self._nodes[name]
        peers = (socket.gethostname(), *(other.address for other in self._nodes.values() if other.name != name))
        hello = wire.Hello(folder=os.getcwd(), silence_s=self._silence_s, peers=peers)
        return NodeLink(name, CommandTransport(node.command), hello, connect_limit_s=self._limit_s, waits=waits)

    def _machine(self, link: NodeLink) -> Machine:
        facts = link.facts
        host = Host(bind=facts.address, advertise=facts.address, node=link.node)
        role = self._nodes[link.node].role
        return Machine(cores=facts.cores, memory_bytes=facts.memory_bytes, gpus=facts.gpus, host=host, role=role)


class NodesBackend(ProcessBackend):
    """Processes on several nodes."""

    def __init__(self, agent_for: Callable[[PlannedProcess], tuple[NodeLink, PlannedProcess]]) -> None:
        """`agent_for` returns the agent that runs a process, connected again if it was lost, and what it starts."""
        self._agent_for = agent_for
        self._forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        self._links: dict[str, NodeLink] = {}  # Process -> link to its node.
        self._places: dict[str, tuple[Host, tuple[str, ...]]] = {}
        self._unreachable: dict[str, Ended] = {}

    def start(self, planned: PlannedProcess) -> int:
        """Start a process. A node that cannot be reached counts as the death of the process."""
        self._unreachable.pop(planned.name, None)
        try:
            link, adapted = self._agent_for(planned)
            self._links[planned.name], self._places[planned.name] = link, (adapted.host, adapted.gpus)
            return link.start(dataclasses.replace(adapted, env=self._forwarded | adapted.env))
        except LaunchError as error:
            if error.code not in ("launch.node_lost", "launch.node_unreachable"):
                raise
            self._unreachable[planned.name] = Ended(
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
        numbers = {link: link.stop(unit_names, grace_s) for link, unit_names in by_link.items()}
        was_hurried = grace_s <= 0
        while not all(link.has_stopped(number) for link, number in numbers.items()):
            if not was_hurried and hurry():
                was_hurried = True
                for link, unit_names in by_link.items():
                    link.stop(unit_names, 0.0)
            time.sleep(0.02)

    def place_of(self, planned: PlannedProcess) -> tuple[Host, tuple[str, ...]]:
        return self._places.get(planned.name, (planned.host, planned.gpus))

    def resident_bytes(self) -> int:
        return psutil.Process().memory_info().rss + sum(link.resident_bytes for link in set(self._links.values()))

    def beats(self) -> dict[str, Beat]:
        return {name: link.beats[name] for name, link in self._links.items() if name in link.beats}
