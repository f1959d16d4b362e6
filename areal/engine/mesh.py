"""The trainer ranks: rendezvous, process groups, one device per rank.

`TrainerMesh.open` waits up to `timeout_s` for the store of rank 0 to be registered, then for the other ranks.
"""

import json
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from areal.api.engine import ReduceOp
from areal.api.errors import LaunchError, ServerUnavailable
from areal.system.device import pick_device
from areal.system.discovery import NameRegistry
from areal.system.network import TOKEN_VARIABLE, Host, bind_collectives, listen, required_token, run_token, store_prefix
from areal.system.process import ProcessContext

STORE_NAME = "trainer/store"
_PRESENT = "present"
"""Key that rank 0 sets: a rank that does not find it has another token."""


class TrainerMesh:
    """Implements `areal.api.engine.Ranks`. A single rank needs no process group until a model is sharded over it.

    Ranks are laid out with the data-parallel dimension outermost: rank = dp_rank * (world_size / dp_size) + i, where i
    counts the ranks that hold one share of the batch together.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        *,
        dp_size: int | None = None,
        store: Store | None = None,
    ) -> None:
        """`dp_size` None: every rank is a data-parallel rank."""
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.dp_size = dp_size or world_size
        self._ranks_per_share, rest = divmod(world_size, self.dp_size)
        if rest:
            raise ValueError(f"{world_size} trainer ranks cannot form {dp_size} data-parallel ranks of equal size")
        self.dp_rank = rank // self._ranks_per_share
        self._store = store  # rank 0 serves it to the others: it must live as long as the mesh
        self._owns_group = False
        self._dp_group: dist.ProcessGroup | None = None
        self._device_mesh: DeviceMesh | None = None

    @classmethod
    def open(
        cls,
        context: ProcessContext | None,
        registry: NameRegistry | None = None,
        *,
        dp_size: int | None = None,
        timeout_s: float = 120.0,
    ) -> Self:
        """Connect to the other ranks. Without a context there is one rank."""
        device = torch.device(pick_device("auto") if context is None else context.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        bind_collectives(context.host if context else Host())
        if context is None or context.world_size == 1:
            return cls(0, 1, device)
        if registry is None:
            raise ValueError("several trainer ranks need a name registry to find each other")
        store = _open_store(context, registry, timeout_s)
        mesh = cls(context.index, context.world_size, device, dp_size=dp_size, store=store)
        mesh._join(store, timeout_s)
        return mesh

    def device_mesh(self) -> DeviceMesh:
        """The ranks as torch's one-dimensional mesh."""
        if self._device_mesh is None:
            if self.world_size == 1 and not dist.is_initialized():
                bind_collectives(Host())
                self._join(HashStore(), timeout_s=60.0)
            self._device_mesh = init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("fsdp",))
        return self._device_mesh

    def all_reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce a CPU tensor over all ranks; the argument is unchanged."""
        return values if self.world_size == 1 else _reduced(values, op, None)

    def dp_all_reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce a CPU tensor over one rank of each data-parallel rank; the argument is unchanged."""
        return values if self.dp_size == 1 else _reduced(values, op, self._dp_group)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Leave the process groups, if any."""
        self._device_mesh = self._dp_group = None
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False
        self._store = None

    def _join(self, store: Store, timeout_s: float) -> None:
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=max(timeout_s, 1800.0)),
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self._owns_group = True
        if self.dp_size == self.world_size:
            return
        for place in range(self._ranks_per_share):  # every rank must create every group
            group = dist.new_group(range(place, self.world_size, self._ranks_per_share))
            if isinstance(group, dist.ProcessGroup) and self.rank % self._ranks_per_share == place:
                self._dp_group = group


def _reduced(values: Tensor, op: ReduceOp, group: dist.ProcessGroup | None) -> Tensor:
    """`group` None: all ranks."""
    result = values.clone()
    operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    dist.all_reduce(result, op=operation, group=group)
    return result


def _open_store(context: ProcessContext, registry: NameRegistry, timeout_s: float) -> PrefixStore:
    """Rank 0 serves and registers; the others look it up. `run_id` identifies this start of the ranks.

    All keys carry a prefix made from the run's token, so a process without the token can neither read nor write them.
    """
    timeout = timedelta(seconds=timeout_s)
    host, name = context.host, f"{STORE_NAME}/{context.run_id}"
    if context.index == 0:
        token = required_token("the store of the trainer ranks")
        prefix = store_prefix(token, STORE_NAME)
        listening = listen(host, token)
        port = listening.getsockname()[1]
        listener = listening.detach()
        store = TCPStore(
            host.advertise, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener
        )
        named = PrefixStore(prefix, store)
        named.set(_PRESENT, "")
        value = json.dumps({"host": host.advertise, "port": port})
        registry.add(name, value, replace=True)
        return named
    try:
        found = json.loads(registry.wait(name, timeout_s))
    except ServerUnavailable as error:
        code = "process.rank_missing" if error.code == "process.not_registered" else error.code
        raise ServerUnavailable(f"trainer-0 of start {context.run_id}: {error}", code=code) from None
    store = TCPStore(found["host"], found["port"], is_master=False, wait_for_workers=False, timeout=timeout)
    named = PrefixStore(store_prefix(run_token(), STORE_NAME), store)
    if not named.check([_PRESENT]):
        message = f"{context.name} has another {TOKEN_VARIABLE} than trainer-0: give all processes the same"
        raise LaunchError(message, code="launch.token_mismatch")
    return named
