"""The node on which a process starts: the planned one, or another one while that one is lost."""

import time
from collections.abc import Callable, Collection, Sequence

from areal.api.errors import LaunchError
from areal.launcher.job import PlannedProcess, moved
from areal.launcher.node_link import NodeLink
from areal.launcher.placement import Machine, Place, place_again

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
        self._since_s: dict[str, float] = {}
        """By node, when the pending connection began."""
        self._open_run = open_run
        self._pending: dict[str, NodeLink] = {}
        self._placed: dict[str, tuple[NodeLink, Place]] = {}
        """By process, where it was last started."""

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
            one
            for name, one in self._machines.items()
            if not self._links[name].lost and one.role in (None, planned.role)
        ]
        if self._moved_to is not None and planned.role == "server":
            alive = [one for one in alive if one is machine]
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
