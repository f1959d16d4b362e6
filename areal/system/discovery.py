"""The name registry through which the processes of a run find each other."""

import json
import os
import socket
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from areal.api.config import BaseExperimentConfig
from areal.system.etcd import EtcdRegistry
from areal.system.file_registry import FileRegistry
from areal.system.run_paths import RunPaths


class NameRegistry(Protocol):
    """Maps names like `servers/0` to short JSON values, for all processes of a run. Its methods are thread-safe.

    A registry that needs a server raises ServerUnavailable when that does not answer for its time limit, except from
    `get` and `list` after their first success: these then answer from what was last known.
    """

    def add(self, name: str, value: str, *, replace: bool = False) -> None:
        """Register a value. LaunchError when the name is taken and `replace` is false."""
        ...

    def get(self, name: str) -> str | None: ...

    def list(self, prefix: str) -> dict[str, str]:
        """All names below `prefix` (a whole path such as `servers`), in order."""
        ...

    def remove(self, name: str) -> None:
        """Remove a name, if it is there."""
        ...

    def wait(self, name: str, timeout_s: float) -> str:
        """Block until the name is registered. ServerUnavailable after `timeout_s`."""
        ...

    def clear(self) -> None:
        """Remove all names of the run."""
        ...

    def close(self) -> None:
        """End the threads of this registry. What it has registered stays until others remove it or it expires."""
        ...


def registry_of(config: BaseExperimentConfig) -> NameRegistry:
    """The registry of the configured run."""
    options = config.cluster.name_resolve
    if options.type.startswith("etcd"):
        return EtcdRegistry(
            options.etcd3_addr,
            f"{config.experiment_name}/{config.trial_name}",
            lease_s=options.etcd_lease_s,
            timeout_s=options.etcd_timeout_s,
        )
    if options.nfs_record_root:
        root = Path(options.nfs_record_root).expanduser().absolute()
        return FileRegistry(root / config.experiment_name / config.trial_name)
    return FileRegistry(RunPaths.of(config).names)


def announce_server(registry: NameRegistry, index: int, process_name: str, address: str) -> None:
    """Register a server at `address`, and this process, which serves there or hosts the server, as ready."""
    pid = os.getpid()
    registry.add(f"servers/{index}", json.dumps({"address": address, "pid": pid}), replace=True)
    registry.add(f"ready/{process_name}", json.dumps({"pid": pid}), replace=True)


def has_server(registry: NameRegistry, address: str) -> bool:
    """Whether a registered server, or a part of one, is on the machine with this address. It may look names up."""
    urls = [json.loads(value)["address"] for value in registry.list("servers").values()]
    hosts = {urlsplit(url).hostname or "" for url in urls} | set(registry.list("part_hosts").values())
    return address in hosts or any(address in _addresses(host) for host in hosts)


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
