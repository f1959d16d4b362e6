"""The listening sockets of a running run: who listens where, and for what purpose."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

COLLECTIVE = frozenset({"trainer", "server"})
"""Roles whose collectives (gloo, NCCL, the store of an update group) listen on ports of their own."""


@dataclass(frozen=True)
class Listening:
    process: str
    """Name in the run, for example server-0; `launcher` for the launcher; another process has its own command line."""
    address: str
    port: int

    @property
    def is_on_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def listening_sockets(launcher: psutil.Process) -> set[Listening]:
    """All TCP sockets on which a launcher and its descendants listen now."""
    result: set[Listening] = set()
    for process, name in processes_of(launcher):
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:  # it has ended
            continue
        result |= {
            Listening(name, connection.laddr.ip, connection.laddr.port)
            for connection in connections
            if connection.status == psutil.CONN_LISTEN
        }
    return result


def processes_of(launcher: psutil.Process) -> Iterator[tuple[psutil.Process, str]]:
    """The processes of a run with their names. A child of a run's process that leads none has its parent's name."""
    yield launcher, "launcher"
    for process in launcher.children(recursive=True):
        try:
            context = json.loads(process.environ().get("AREAL_PROCESS", "{}"))
            index = "" if context.get("role") == "controller" else f"-{context.get('index')}"
            yield process, f"{context['role']}{index}" if context else " ".join(process.cmdline())
        except psutil.Error:
            continue


def purpose_of(listening: Listening, run: Path) -> str:
    """What a socket is for; empty when it is for nothing that areal knows."""
    names = run / "names"
    role = listening.process.partition("-")[0]
    if role in ("controller", "server"):
        index = listening.process.partition("-")[2]
        path = names / "controller.json" if role == "controller" else names / "servers" / f"{index}.json"
        if _registered_port(path, "address") in (listening.port, None):
            return f"http of a {role}"
    stores = (names / "trainer" / "store").glob("*.json")  # one for each start of the trainers
    if listening.process == "trainer-0" and listening.port in {_registered_port(path, "port") for path in stores}:
        return "store of the trainers"
    return "collective" if role in COLLECTIVE else ""


def _registered_port(path: Path, field: str) -> int | None:
    """The port in an entry of the name registry; None while it is not registered."""
    try:
        value = json.loads(path.read_text())[field]
    except (OSError, ValueError, KeyError):
        return None
    return value if isinstance(value, int) else int(value.rpartition(":")[2])


def files_with(secret: str, folder: Path) -> list[Path]:
    """Files below a folder whose content contains a secret."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and secret.encode() in path.read_bytes()]
