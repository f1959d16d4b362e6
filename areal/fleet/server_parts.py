"""The placeholders in the command of a foreign server, and how the parts of a server over several machines meet."""

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from areal.api.errors import ArealError
from areal.observe.log import get_logger
from areal.system.discovery import NameRegistry
from areal.system.network import LOOPBACK, Host, is_loopback
from areal.system.process import tied_to_this_process
from areal.system.relay import pass_on_to

_LOG = get_logger(__name__)

_PORT = re.compile(r"\{port(?:_[a-z]+)?\}")
_FIRST = re.compile(r"\{first(?:_address|_port)?\}")
STORE_COMMAND = (sys.executable, "-m", "areal.weights.parts_store")
"""Serves torch's store on loopback and prints its port. The host of a server itself does not import torch."""
STORE_START_S = 120.0
"""It imports torch, from a file system that may be slow."""
CLIENT_OF_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Environment of the parts: torch's ranks join the store at the given address, and none of them serves one."""
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
    registry: NameRegistry | None, index: int, part: int, host: Host, bound: socket.socket | None, limit_s: float
) -> tuple[str, int]:
    """Address and port where part 0 of server `index` listens for the others.

    Part 0 registers them: the port of `bound`. In the other parts, which register their addresses, `bound` is None.
    ServerUnavailable when nothing is registered in `limit_s` seconds.
    """
    assert registry is not None, "the parts of a server find each other by the registry of their run"
    if bound is not None:
        address, port = host.advertise, int(bound.getsockname()[1])
        registry.add(f"parts/{index}", json.dumps({"address": address, "port": port}), replace=True)
        return address, port
    registry.add(f"part_hosts/{index}-{part}", host.advertise, replace=True)
    found = json.loads(registry.wait(f"parts/{index}", limit_s))
    return str(found["address"]), int(found["port"])


def is_part(registry: NameRegistry | None, index: int, num_parts: int, host: Host, peer: str) -> bool:
    """Whether the machine with address `peer` has a part of server `index`, whose part 0 is on `host`."""
    assert registry is not None, "the parts of a server find each other by the registry of their run"
    names = (f"part_hosts/{index}-{part}" for part in range(1, num_parts))
    return is_loopback(peer) or peer in (host.bind, host.advertise, *map(registry.get, names))


@contextlib.asynccontextmanager
async def meeting_point(
    bound: socket.socket | None, may_join: Callable[[str], bool], command: Sequence[str] = STORE_COMMAND
) -> AsyncIterator[None]:
    """Relay connections at `bound` to the store of `command`, which starts with the first one; None = no store here.

    The store checks no token and listens on loopback. `may_join` is called with the address of each client, and may
    block; others are refused.
    """
    if bound is None:
        yield
        return
    store: asyncio.Task[tuple[asyncio.subprocess.Process, int]] | None = None

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal store
        peer = writer.get_extra_info("peername")[0]
        with contextlib.closing(writer):
            try:
                if not await asyncio.to_thread(may_join, peer):
                    _LOG.warning("refused a connection from %s: no part of this server is on that machine", peer)
                    return
                if store is None:
                    store = asyncio.create_task(_start_store(command), name="start the store of the parts")
                _, port = await asyncio.shield(store)
                await pass_on_to(LOOPBACK, port, reader, writer)
            except (ArealError, OSError, ValueError) as error:
                _LOG.error("%s cannot reach the store of the parts: %s", peer, error)
                return

    server = await asyncio.start_server(relay, sock=bound)
    try:
        yield
    finally:
        server.close()  # its connections end with the store
        if store is not None:
            store.cancel()  # ends only a store that still starts
            (started,) = await asyncio.gather(store, return_exceptions=True)
            if not isinstance(started, BaseException):
                await _end(started[0])


async def _start_store(command: Sequence[str]) -> tuple[asyncio.subprocess.Process, int]:
    """The process and the port that it printed; ValueError when it does not print one. It dies with this process."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, preexec_fn=tied_to_this_process()
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(STORE_START_S):
            line = await process.stdout.readline()
        if not line:
            raise ValueError(f"it ended with exit code {await process.wait()}")
        return process, int(line)
    except BaseException as error:
        await _end(process)
        if isinstance(error, TimeoutError):
            raise ValueError(f"it has no port after {STORE_START_S:g} s") from error
        raise


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


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
