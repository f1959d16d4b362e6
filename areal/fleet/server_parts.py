"""The placeholders in the command of a foreign server, and how the parts of a server over several machines meet."""

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence

from areal.system.discovery import NameRegistry
from areal.system.network import Host

_PORT = re.compile(r"\{port(?:_[a-z]+)?\}")
_FIRST = re.compile(r"\{first(?:_address|_port)?\}")
_INDEX = re.compile(r"\{index(?:\+(\d+))?\}")


def port_names(command: Sequence[str]) -> list[str]:
    """The different port placeholders of a command."""
    return sorted({found for word in command for found in _PORT.findall(word)})


def filled_in(
    command: Sequence[str], ports: Mapping[str, int], index: int, first: tuple[str, int] = ("", 0)
) -> list[str]:
    """The command with its placeholders replaced. `first`: where part 0 listens for the others."""
    address, port = first
    both = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    by_name = {"{first}": both, "{first_address}": address, "{first_port}": str(port)}
    with_first = [_FIRST.sub(lambda found: by_name[found[0]], word) for word in command]
    with_ports = [_PORT.sub(lambda found: str(ports[found[0]]), word) for word in with_first]
    return [_INDEX.sub(lambda found: str(index + int(found[1] or 0)), word) for word in with_ports]


def first_part(
    registry: NameRegistry | None, index: int, host: Host, bound: socket.socket | None, limit_s: float
) -> tuple[str, int]:
    """Address and port where part 0 of server `index` listens for the others.

    Part 0 registers them: the port of `bound`, which stays reserved. In the other parts `bound` is None.
    ServerUnavailable when nothing is registered in `limit_s` seconds.
    """
    assert registry is not None, "the parts of a server find each other by the registry of their run"
    if bound is not None:
        address, port = host.advertise, int(bound.getsockname()[1])
        registry.add(f"parts/{index}", json.dumps({"address": address, "port": port}), replace=True)
        return address, port
    found = json.loads(registry.wait(f"parts/{index}", limit_s))
    return str(found["address"]), int(found["port"])


def announce_part(registry: NameRegistry, index: int, part: int, process_name: str, gateway: str) -> None:
    """Register a part that serves no requests as ready, and its `gateway` if it has one."""
    if gateway:
        registry.add(f"gateways/{index}-{part}", gateway, replace=True)
    registry.add(f"ready/{process_name}", json.dumps({"pid": os.getpid()}), replace=True)


def gateways_of_parts(registry: NameRegistry | None, index: int, num_parts: int, limit_s: float) -> list[str]:
    """The gateways of the other parts of server `index`. ServerUnavailable when one is not registered in `limit_s`."""
    if registry is None:
        return []
    return [registry.wait(f"gateways/{index}-{part}", limit_s) for part in range(1, num_parts)]
