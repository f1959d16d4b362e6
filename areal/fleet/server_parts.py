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


def announce_first_part(registry: NameRegistry, index: int, host: Host, bound: socket.socket) -> tuple[str, int]:
    """Register where part 0 of server `index` listens for the others: on the port of `bound`, which stays reserved."""
    address, port = host.advertise, bound.getsockname()[1]
    registry.add(f"parts/{index}", json.dumps({"address": address, "port": port}), replace=True)
    return address, port


def find_first_part(registry: NameRegistry, index: int, limit_s: float) -> tuple[str, int]:
    """Where part 0 of server `index` listens. ServerUnavailable when it is not registered in `limit_s` seconds."""
    found = json.loads(registry.wait(f"parts/{index}", limit_s))
    return str(found["address"]), int(found["port"])


def announce_part(registry: NameRegistry, process_name: str) -> None:
    """Register a part that serves no requests as ready."""
    registry.add(f"ready/{process_name}", json.dumps({"pid": os.getpid()}), replace=True)
