"""Owns how trainer ranks meet: one store, one process group, one device per rank.

Waits for: the store of rank 0, by name, for as long as `timeout_s`; then for the other ranks.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Literal, Self

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from areal.api.errors import LaunchError, ServerUnavailable
from areal.system.device import pick_device
from areal.system.discovery import NameRegistry
from areal.system.network import LOOPBACK, TOKEN_VARIABLE, bind_socket, required_token, run_token, store_prefix
from areal.system.process import ProcessContext

STORE_NAME = "trainer/store"
_PRESENT = "present"
"""Key that rank 0 sets: a rank that does not find it has another token."""
_POLL_S = 0.05


class TrainerMesh:
    """All trainer ranks as one of them sees it. One rank needs no process group until something shards over it."""

    def __init__(self, rank: int, world_size: int, device: torch.device, store: Store | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._store = store  # rank 0's is the server of the others: it lives as long as the mesh
        self._owns_group = False
        self._device_mesh: DeviceMesh | None = None

    @classmethod
    def open(
        cls, context: ProcessContext | None, registry: NameRegistry | None = None, *, timeout_s: float = 120.0
    ) -> Self:
        """Meet the other ranks. Without a context, or alone, there is nobody to meet."""
        device = torch.device(pick_device("auto") if context is None else context.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if context is None or context.world_size == 1:
            return cls(0, 1, device)
        if registry is None:
            raise LaunchError("several trainer ranks need a name registry to find each other")
        store = _open_store(context, registry, timeout_s)
        mesh = cls(context.index, context.world_size, device, store)
        mesh._join(store, timeout_s, context.host.advertise)
        return mesh

    def device_mesh(self) -> DeviceMesh:
        """The ranks as torch's one-dimensional mesh."""
        if self._device_mesh is None:
            if self.world_size == 1 and not dist.is_initialized():
                self._join(HashStore(), timeout_s=60.0)
            self._device_mesh = init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("fsdp",))
        return self._device_mesh

    def all_reduce(self, values: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        """Reduce a CPU tensor over all ranks; the argument is left as it is."""
        if self.world_size == 1:
            return values
        result = values.clone()
        operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        dist.all_reduce(result, op=operation)
        return result

    def barrier(self) -> None:
        """Return once every rank is here."""
        self.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Leave the group; without one nothing happens."""
        self._device_mesh = None
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False
        self._store = None

    def _join(self, store: Store, timeout_s: float, address: str = LOOPBACK) -> None:
        if interface := _interface_of(address):  # gloo would take that of the machine's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=max(timeout_s, 1800.0)),
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self._owns_group = True


def _open_store(context: ProcessContext, registry: NameRegistry, timeout_s: float) -> PrefixStore:
    """Rank 0 serves and registers; the others look it up. `run_id` identifies the attempt.

    All keys carry a prefix made from the run's token, so a process without the token can neither read nor write them.
    """
    timeout = timedelta(seconds=timeout_s)
    host = context.host
    if context.index == 0:
        prefix = store_prefix(required_token(host, "the store of the trainer ranks"), STORE_NAME)
        listening = bind_socket(host.bind)
        listening.listen()
        port = listening.getsockname()[1]
        store = TCPStore(
            host.advertise,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listening.detach(),
        )
        named = PrefixStore(prefix, store)
        named.set(_PRESENT, "")
        value = json.dumps({"host": host.advertise, "port": port, "run_id": context.run_id})
        registry.add(STORE_NAME, value, replace=True)
        return named
    deadline = time.monotonic() + timeout_s
    while True:
        found = json.loads(registry.wait(STORE_NAME, max(deadline - time.monotonic(), 0.0)))
        if found["run_id"] == context.run_id:
            store = TCPStore(found["host"], found["port"], is_master=False, wait_for_workers=False, timeout=timeout)
            named = PrefixStore(store_prefix(run_token(), STORE_NAME), store)
            if not named.check([_PRESENT]):
                raise LaunchError(
                    f"{context.name} has another {TOKEN_VARIABLE} than trainer-0: give all processes the same",
                    code="launch.token_mismatch",
                )
            return named
        if time.monotonic() >= deadline:
            raise ServerUnavailable(f"waited {timeout_s:g} s for trainer-0 of attempt {context.run_id} to register")
        time.sleep(_POLL_S)


def _interface_of(address: str) -> str | None:
    """Name of the network interface with this address; None when no interface has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None
