"""Which part of a whole weight a rank holds: one interval in each dimension."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

Region = tuple[slice, ...]
Splits = tuple[tuple[str, int], ...]
"""(dimension of the mesh, dimension of the tensor that it splits), in the order of splitting: tensor or expert ranks
split a weight first, the data and context ranks split the part of each."""


def splits_of(tensor: Tensor) -> Splits:
    """How the ranks of the mesh split a weight; empty when each has all of it."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    found = [
        (name, placement.dim)  # pyright: ignore[reportAttributeAccessIssue] - a Shard or a _StridedShard
        for name, placement in zip(names, tensor.placements, strict=True)
        if not isinstance(placement, Replicate)
    ]
    return tuple(sorted(found, key=lambda split: split[0] not in ("tensor", "expert")))


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
    found = local_part(tensor)
    for mesh_dim, dim, size in reversed(whole):
        step = -(-size // mesh.size(mesh_dim))
        padded = list(found.shape)
        padded[dim] = step
        part = found if found.shape[dim] == step else found.new_zeros(padded)
        if part is not found:
            part.narrow(dim, 0, found.shape[dim]).copy_(found)
        parts = [torch.empty(padded, dtype=found.dtype, device=found.device) for _ in range(mesh.size(mesh_dim))]
        dist.all_gather(parts, part.contiguous(), group=mesh.get_group(mesh_dim))
        found = torch.cat(parts, dim).narrow(dim, 0, size)
    return found.contiguous()


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
    return detached.to_local() if isinstance(detached, DTensor) else detached


def sharded_as(weight: Tensor, part: Tensor) -> Tensor:
    """This rank's part of optimiser state, which may be on another device or have a value for several columns of the
    weight, as a tensor sharded as the weight is. A plain tensor where the weight is one, and a number."""
    if not isinstance(weight, DTensor) or part.ndim < weight.ndim:
        return part
    own, shape = local_part(weight), weight.shape
    if part.shape != own.shape:
        shape = (*shape[:-1], shape[-1] * part.shape[-1] // own.shape[-1])
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
    found = object.__new__(type(module))
    weights: dict[str, Any] = dict(module._parameters)
    for name, weight in weights.items():
        if isinstance(weight, DTensor):
            weights[name] = changes[name] if name in changes else own_part(weight)
    found.__dict__.update(module.__dict__, _parameters=weights)
    found.__dict__.update((name, value) for name, value in changes.items() if name not in weights)
    return found
