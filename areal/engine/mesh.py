"""The trainer ranks: rendezvous, process groups, one device per rank.

`TrainerMesh.open` waits up to `timeout_s` for the store of rank 0 to be registered, then for the other ranks.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from areal.api.allocation import ParallelDims
from areal.api.engine import Ranks, ReduceOp
from areal.api.errors import ConfigError, LaunchError, ServerUnavailable
from areal.system.device import pick_device
from areal.system.discovery import NameRegistry
from areal.system.network import (
    LOOPBACK,
    TOKEN_VARIABLE,
    Host,
    bind_collectives,
    is_loopback,
    listen,
    required_token,
    run_token,
    store_prefix,
)
from areal.system.process import ProcessContext
from areal.system.relay import TokenRelay, TokenTunnel
from areal.weights.update_group import serve_store

# ----------------------------------------------------------------------------------------------------------------------
# Which part of a whole weight a rank holds: one interval in each dimension.

Region = tuple[slice, ...]
Splits = tuple[tuple[str, int], ...]
"""(dimension of the mesh, dimension of the tensor that it splits), in the order of splitting: tensor or expert ranks
split a weight first, the data and context ranks split the part of each."""


def splits_of(tensor: Tensor) -> Splits:
    """How the ranks of the mesh split a weight; empty when each has all of it."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    splits = [
        (name, placement.dim)  # pyright: ignore[reportAttributeAccessIssue] - a Shard or a _StridedShard
        for name, placement in zip(names, tensor.placements, strict=True)
        if not isinstance(placement, Replicate)
    ]
    return tuple(sorted(splits, key=lambda split: split[0] not in ("tensor", "expert")))


def region_in(shape: Sequence[int], splits: Splits, sizes: Mapping[str, int], places: Mapping[str, int]) -> Region:
    """The part of the rank at `places` in a mesh of `sizes`, split as `torch.chunk` does; it may be empty."""
    bounds = [[0, size] for size in shape]
    for name, dim in splits:
        low, high = bounds[dim]
        step = -(-(high - low) // sizes[name])
        first = min(low + step * places[name], high)
        bounds[dim] = [first, min(first + step, high)]
    return tuple(slice(low, high) for low, high in bounds)


def region_of(tensor: Tensor) -> Region:
    """The intervals of this rank's part of a weight."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    mesh = tensor.device_mesh
    names, coordinate = mesh.mesh_dim_names or (), mesh.get_coordinate() or []
    sizes = {name: mesh.size(dim) for dim, name in enumerate(names)}
    return region_in(tensor.shape, splits_of(tensor), sizes, dict(zip(names, coordinate, strict=True)))


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor from the parts of all ranks, on each of them; a collective. `DTensor.full_tensor` warns about weights
    that two dimensions of the mesh split."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, sizes = tensor.device_mesh, list(tensor.shape)
    whole: list[tuple[int, int, int]] = []  # mesh dimension, dimension of the tensor, its size before the split
    for name, dim in splits_of(tensor):
        mesh_dim = (mesh.mesh_dim_names or ()).index(name)
        whole.append((mesh_dim, dim, sizes[dim]))
        sizes[dim] = -(-sizes[dim] // mesh.size(mesh_dim))
    local = local_part(tensor)
    for mesh_dim, dim, size in reversed(whole):
        step = -(-size // mesh.size(mesh_dim))
        padded = list(local.shape)
        padded[dim] = step
        part = local if local.shape[dim] == step else local.new_zeros(padded)
        if part is not local:
            part.narrow(dim, 0, local.shape[dim]).copy_(local)
        parts = [torch.empty(padded, dtype=local.dtype, device=local.device) for _ in range(mesh.size(mesh_dim))]
        dist.all_gather(parts, part.contiguous(), group=mesh.get_group(mesh_dim))
        local = torch.cat(parts, dim).narrow(dim, 0, size)
    return local.contiguous()


def num_copies(tensor: Tensor, world_size: int) -> int:
    """How many of the ranks hold the same part."""
    shards = 1
    for name, _ in splits_of(tensor):
        assert isinstance(tensor, DTensor)
        shards *= tensor.device_mesh[name].size()
    return world_size // shards


def copies_of(tensor: Tensor, rank: int, world_size: int) -> tuple[int, int]:
    """How many ranks of the mesh hold the same part, and which of them `rank` is."""
    if not isinstance(tensor, DTensor):
        return world_size, rank
    mesh, copies, place = tensor.device_mesh, 1, 0
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            copies, place = copies * mesh.size(dim), place * mesh.size(dim) + mesh.get_local_rank(dim)
    return copies, place


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, sharing its memory; any other tensor itself."""
    detached = tensor.detach()
    local = detached.to_local() if isinstance(detached, DTensor) else detached
    return vars(local).get("_tensor", local)  # torchao wraps weights that ranks gather in 8 bits


def sharded_as(weight: Tensor, part: Tensor) -> Tensor:
    """This rank's part of optimiser state, which may be on another device or have a value for several columns of the
    weight, as a tensor sharded as the weight is. A plain tensor where the weight is one, and a number."""
    if not isinstance(weight, DTensor) or part.ndim < weight.ndim:
        return part
    local, shape = local_part(weight), weight.shape
    if part.shape != local.shape:
        shape = (*shape[:-1], shape[-1] * part.shape[-1] // local.shape[-1])
    stride = torch.empty(shape, device="meta").stride()
    place = (weight.device_mesh, weight.placements)
    return DTensor.from_local(part, *place, run_check=False, shape=torch.Size(shape), stride=stride)


@torch.no_grad()
def copy_part(target: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of `whole` into `target`."""
    local_part(target).copy_(whole[region_of(target)])


def view_of(module: nn.Module, own_part: Callable[[DTensor], Tensor], **changes: Any) -> nn.Module:
    """A module as its forward function sees it on one rank: with plain tensors in place of distributed parameters, and
    `changes` in place of other attributes or parameters."""
    result = object.__new__(type(module))
    weights: dict[str, Any] = dict(module._parameters)
    for name, weight in weights.items():
        if isinstance(weight, DTensor):
            weights[name] = changes[name] if name in changes else own_part(weight)
    result.__dict__.update(module.__dict__, _parameters=weights)
    result.__dict__.update((name, value) for name, value in changes.items() if name not in weights)
    return result


STORE_NAME = "trainer/store"
_PRESENT = "present"
"""Key that rank 0 sets: a rank that does not find it has another token."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks along one dimension of the mesh, as one of them sees them."""

    rank: int
    size: int
    group: dist.ProcessGroup | None


class TrainerMesh:
    """Implements `areal.api.engine.Ranks`. A single rank needs no process group until a model is sharded over it.

    Ranks are laid out as (pipeline, data, context, tensor) with tensor innermost: the ranks of a data-parallel rank
    hold one share of the batch, pipeline ranks compute different layers, context ranks different tokens of its rows,
    tensor ranks different heads and columns.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        *,
        dims: ParallelDims | None = None,
        store: Store | None = None,
        relay: TokenRelay | TokenTunnel | None = None,
    ) -> None:
        """`dims` None: every rank is a data-parallel rank."""
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.dims = dims or ParallelDims(dp=world_size)
        if self.dims.world_size != world_size:
            raise ValueError(f"{world_size} trainer ranks cannot form {self.dims}")
        self.dp_size = self.dims.dp
        self.stage, place = divmod(rank, world_size // self.dims.pp)
        self.dp_rank, place = divmod(place, self.dims.cp * self.dims.tp)
        self.context_rank, self.tensor_rank = divmod(place, self.dims.tp)
        self._store, self._relay = store, relay  # rank 0 serves them to the others: both live as long as the mesh
        self._owns_group = False
        self._when_closed = contextlib.ExitStack()
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._device_meshes: dict[tuple[int, str], DeviceMesh] = {}

    @classmethod
    def open(
        cls,
        context: ProcessContext | None,
        registry: NameRegistry | None = None,
        *,
        dims: ParallelDims | None = None,
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
        store, relay = _open_store(context, registry, timeout_s)
        mesh = cls(context.index, context.world_size, device, dims=dims, store=store, relay=relay)
        mesh._join(store, timeout_s)
        return mesh

    def device_mesh(self, shard_size: int | None = None) -> DeviceMesh:
        """The ranks as torch's mesh (replicate, shard, tensor).

        Each parameter is sharded over `shard_size` data and context ranks (None: all), which hold one copy of it.
        """
        return self._device_mesh(shard_size, "shard", "tensor", self.dims.tp)

    def expert_mesh(self, shard_size: int | None = None) -> DeviceMesh:
        """The ranks as (replicate, expert_shard, expert): the experts of each layer are split over the last dimension,
        and the parameters of the same experts over the second. Neighbouring ranks have different experts."""
        return self._device_mesh(shard_size, "expert_shard", "expert", self.dims.ep)

    def _device_mesh(self, shard_size: int | None, shard: str, split: str, parts: int) -> DeviceMesh:
        """`parts`: ranks that split the layers of the model before FSDP splits the parts."""
        sharing = self.dims.dp * self.dims.cp
        size = shard_size or sharing
        if sharing % size:
            raise ValueError(f"copies of {size} ranks do not divide the {sharing} data and context ranks")
        if size % parts and split == "expert":
            message = f"e{parts} does not divide the {size} ranks that share the weights: change e or fsdp.shard_size"
            raise ConfigError(message, code="model.cannot_split")
        if (size, shard) not in self._device_meshes:
            self.require_groups()
            shape = (sharing // size, size * self.dims.tp // parts, parts)
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", shard, split))
            self._device_meshes[size, shard] = mesh
        return self._device_meshes[size, shard]

    def require_groups(self) -> None:
        """Open torch's process group of a single rank, which else has none."""
        if self.world_size == 1 and not dist.is_initialized():
            bind_collectives(Host())
            self._join(HashStore(), timeout_s=60.0)

    def when_closed(self, action: Callable[[], None]) -> None:
        """Let `close` call `action` while the process groups exist."""
        self._when_closed.callback(action)

    @property
    def context(self) -> RankGroup:
        """The ranks that compute other tokens of the same rows."""
        return RankGroup(self.context_rank, self.dims.cp, self._groups.get("context"))

    @property
    def tensor(self) -> RankGroup:
        """The ranks that compute other heads and columns for the same tokens."""
        return RankGroup(self.tensor_rank, self.dims.tp, self._groups.get("tensor"))

    @property
    def pipeline(self) -> RankGroup:
        """The ranks that compute other layers for the same tokens."""
        return RankGroup(self.stage, self.dims.pp, self._groups.get("pipeline"))

    def all_reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce a CPU tensor over all ranks; the argument is unchanged."""
        return values if self.world_size == 1 else _reduced(values, op, None)

    def dp_all_reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce a CPU tensor over one rank of each data-parallel rank; the argument is unchanged."""
        return values if self.dp_size == 1 else _reduced(values, op, self._groups["data"])

    def gather(self, content: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
        """See `areal.api.engine.Ranks`."""
        return _gathered(content, self.rank, self.world_size, None)

    def for_thread(self) -> Ranks:
        """The same ranks in a process group of one other thread; a collective."""
        if self.world_size == 1:
            return self
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        return _ThreadRanks(self.rank, self.world_size, group)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Leave the process groups, if any."""
        self._when_closed.close()
        self._device_meshes.clear()
        self._groups.clear()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False
        self._store = None
        if self._relay is not None:
            self._relay.close()

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
        ranks = torch.arange(self.world_size).view(self.dims.pp, self.dims.dp, self.dims.cp, self.dims.tp)
        for dimension, name in enumerate(("pipeline", "data", "context", "tensor")):
            if ranks.shape[dimension] == 1:
                continue
            for members in ranks.movedim(dimension, -1).flatten(0, 2).tolist():  # every rank must create every group
                group = dist.new_group(members)
                if isinstance(group, dist.ProcessGroup) and self.rank in members:
                    self._groups[name] = group


@dataclass(frozen=True, slots=True)
class _ThreadRanks:
    """Implements `areal.api.engine.Ranks`."""

    rank: int
    world_size: int
    group: dist.ProcessGroup

    def all_reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        return _reduced(values, op, self.group)

    def gather(self, content: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
        return _gathered(content, self.rank, self.world_size, self.group)

    def for_thread(self) -> Ranks:
        return self


def _gathered(
    content: NDArray[np.uint8], rank: int, world_size: int, group: dist.ProcessGroup | None
) -> Iterator[NDArray[np.uint8]]:
    if rank == 0:
        return (_received(sender, group) for sender in range(1, world_size))
    dist.send(torch.tensor([len(content)]), 0, group=group)
    dist.send(torch.from_numpy(content), 0, group=group)
    return iter(())


def _received(sender: int, group: dist.ProcessGroup | None) -> NDArray[np.uint8]:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, sender, group=group)
    content = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(content, sender, group=group)
    return content.numpy()


def _reduced(values: Tensor, op: ReduceOp, group: dist.ProcessGroup | None) -> Tensor:
    """`group` None: all ranks. A NaN of any rank is in the result: alone, a maximum or minimum of gloo can drop it."""
    if op == "sum" or not values.is_floating_point():
        result = values.clone()
        operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        dist.all_reduce(result, op=operation, group=group)
        return result
    is_nan, sign = values.isnan(), 1 if op == "max" else -1
    both = torch.stack([torch.where(is_nan, 0.0, values * sign), is_nan.to(values.dtype)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return torch.where(both[1] > 0, torch.nan, both[0] * sign)


def _open_store(
    context: ProcessContext, registry: NameRegistry, timeout_s: float
) -> tuple[PrefixStore, TokenRelay | TokenTunnel | None]:
    """Rank 0 serves and registers; the others look it up. `run_id` identifies this start of the ranks.

    torch's store checks no token. It listens on loopback; ranks on several machines connect through a relay that
    requires the token, which must live as long as the store. All keys begin with a prefix made from the token, by which
    a rank with another one is noticed on loopback too.
    """
    token, is_local = run_token(), is_loopback(context.host.bind)
    name, prefix = f"{STORE_NAME}/{context.run_id}", store_prefix(token, STORE_NAME)
    if context.index == 0:
        token = required_token("the store of the trainer ranks")
        store = serve_store(context.host if is_local else Host(), token, timeout_s=timeout_s)
        named = PrefixStore(prefix, store)
        named.set(_PRESENT, "")
        relay = None if is_local else TokenRelay(listen(context.host, token), token, store.port)
        port = store.port if relay is None else relay.port
        registry.add(name, json.dumps({"host": context.host.advertise, "port": port}), replace=True)
        return named, relay
    try:
        address = json.loads(registry.wait(name, timeout_s))
    except ServerUnavailable as error:
        code = "process.rank_missing" if error.code == "process.not_registered" else error.code
        raise ServerUnavailable(f"trainer-0 of start {context.run_id}: {error}", code=code) from None
    tunnel = None if is_local else TokenTunnel(address["host"], address["port"], token)
    if tunnel is None or tunnel.is_admitted(timeout_s):
        host, port = (address["host"], address["port"]) if tunnel is None else (LOOPBACK, tunnel.port)
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        named = PrefixStore(prefix, store)
        if named.check([_PRESENT]):
            return named, tunnel
    message = f"{context.name} has another {TOKEN_VARIABLE} than trainer-0: give all processes the same"
    raise LaunchError(message, code="launch.token_mismatch")
