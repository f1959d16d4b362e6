"""Tries at the start of a run whether its nodes accept TCP connections from each other, which a firewall may forbid."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from areal.system.network import BACKLOG, bind_socket

if TYPE_CHECKING:
    from areal.launcher.node_link import NodeLink

Target = tuple[str, str, int]
"""Name, address and port of a node."""
_LIMIT_S = 3.0
_POLL_S = 0.05


def check_ports(nodes: Mapping[str, tuple[NodeLink, str]]) -> None:
    """Connect each node to a free port of every other one. LaunchError when a port does not accept.

    `nodes`: by name, the agent there and the address on which the processes of the run will listen. Each port is open
    during the check only; nothing is read from its connections.
    """
    targets = [(name, address, link.open_port(address)) for name, (link, address) in nodes.items()]
    asked = [
        (link, link.send_reach([target for target in targets if target[0] != name], _LIMIT_S))
        for name, (link, _) in nodes.items()
    ]
    for link, number in asked:
        link.await_reached(number, _LIMIT_S)
    for link, _ in nodes.values():
        link.open_port("")


class PortProbe:
    """The port of one node for this check."""

    def __init__(self) -> None:
        self._bound: socket.socket | None = None

    def open_port(self, address: str) -> int:
        """Accept connections on a free port, which is returned; an empty address ends this and returns 0."""
        if self._bound is not None:
            self._bound.close()
            self._bound = None
        if not address:
            return 0
        self._bound = bind_socket(address)
        self._bound.listen(BACKLOG)  # the system accepts; nothing reads or answers, so no token is needed
        return int(self._bound.getsockname()[1])


def unreachable(targets: Sequence[Target], limit_s: float, meanwhile: Callable[[], None]) -> str:
    """Which of `targets` do not accept a connection within `limit_s`, and why; empty when all do.

    `meanwhile` is called again and again until then.
    """
    deadline = time.monotonic() + limit_s
    failed: dict[Target, str] = {}
    with selectors.DefaultSelector() as selector:
        for target in targets:
            probe = socket.socket(socket.AF_INET6 if ":" in target[1] else socket.AF_INET)
            probe.setblocking(False)
            code = probe.connect_ex(target[1:])
            if code in (0, errno.EINPROGRESS):
                selector.register(probe, selectors.EVENT_WRITE, target)
            else:
                failed[target] = os.strerror(code)
                probe.close()
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(_POLL_S):
                probe = key.fileobj
                assert isinstance(probe, socket.socket)
                selector.unregister(probe)
                if code := probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failed[key.data] = os.strerror(code)
                probe.close()
            meanwhile()
        for key in list(selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
            failed[key.data] = f"no answer in {limit_s:g} s"
    return ", ".join(f"{name} at {address}:{port} ({why})" for (name, address, port), why in failed.items())
