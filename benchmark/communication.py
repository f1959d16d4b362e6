"""What ranks of the FSDP engine exchange in a train step, and ranks whose exchanges are free: for `train_step.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from areal.api.allocation import ParallelDims
from areal.api.config import FSDPEngineConfig
from areal.api.engine import ReduceOp
from areal.engine.fsdp import AddedParts
from areal.engine.mesh import TrainerMesh

NOT_CACHED = 2**26
"""Bytes that a processor core writes between two operations, so that no cache has what was there before."""
REPEATS = 4
"""Timings of an operation in a round; the mean is the estimate for each of its kind in a step."""


class FreeMesh(TrainerMesh):
    """The same place in the same mesh, with groups that exchange nothing: a rank gets its own numbers, at the cost of a
    copy. A step of the engine on it computes what a step on `real` does, of other numbers. A collective."""

    def __init__(self, real: TrainerMesh) -> None:
        super().__init__(real.rank, real.world_size, real.device, dims=real.dims)
        every = list(range(real.world_size))
        for name, group in sorted(real._groups.items()):
            assert dist.get_process_group_ranks(group) == every, "of the ranks in several dimensions, each has a part"
            free = dist.new_group(every, backend="fake")
            assert isinstance(free, dist.ProcessGroup)
            self._groups[name] = self.group = free

    def all_reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        return values.clone()

    def _device_mesh(self, shard_size: int | None, shard: str, split: str, parts: int) -> DeviceMesh:
        size = shard_size or self.dims.dp * self.dims.cp
        names, shape = ("replicate", shard, split), (self.dims.dp * self.dims.cp // size, size, parts)
        if (size, shard) not in self._device_meshes:
            self._device_meshes[size, shard] = init_device_mesh(
                self.device.type, shape, mesh_dim_names=names, backend_override=dict.fromkeys(names, "fake")
            )
        return self._device_meshes[size, shard]


@dataclass(frozen=True)
class Exchange:
    """A collective operation of a step."""

    kind: str
    nbytes: int
    """Of the largest buffer of a rank."""
    count: int
    ranks: int

    @property
    def sent(self) -> float:
        """Bytes that a rank sends at least."""
        return (2 if self.kind == "all_reduce" else 1) * (self.ranks - 1) / self.ranks * self.nbytes


def exchanges(
    config: dict[str, Any], dims: ParallelDims, fsdp: FSDPEngineConfig, *, tokens: int, passes: int
) -> list[Exchange]:
    """Of a step of float32 of a Llama with tied weights: `passes` micro-batches, with `tokens` of a rank in each."""
    width, layers, hidden = 4, config["num_hidden_layers"], config["hidden_size"]
    sharing = dims.dp * dims.cp
    shards, heads, keys = fsdp.shard_size or sharing, config["num_attention_heads"], config["num_key_value_heads"]
    attention = 2 * hidden * (heads + keys) * config["head_dim"]
    block = (attention + 3 * hidden * config["intermediate_size"]) * width // dims.tp
    head = config["vocab_size"] * hidden * width // dims.tp  # embedding and output head
    result = [Exchange("all_reduce", 64, 3, dims.world_size)]  # micro-batches, and two of the optimiser
    reductions = passes if fsdp.gradient_sync == "every" else 1
    if shards > 1:
        for size, count, gathers in ((block, layers, 2 if fsdp.reshard_after_forward else 1), (head, 1, 1)):
            result.append(Exchange("all_gather", size, passes * gathers * count, shards))
            result.append(Exchange("reduce_scatter", size, reductions * count, shards))
    if (copies := sharing // shards) > 1:
        result += [Exchange("all_reduce", block // shards, reductions * layers, copies)]
        result += [Exchange("all_reduce", head // shards, reductions, copies)]
    states = tokens * hidden * width
    if dims.tp > 1:  # two sums forward and two backward in a layer; of the embedding, and of the head's gradient
        result.append(Exchange("all_reduce", states, passes * (4 * layers + 2), dims.tp))
        result.append(Exchange("all_reduce", tokens * width, passes * 4, dims.tp))
    if dims.cp > 1:  # queries, keys and values, then the outputs of attention; the same backward
        for size in (states * (heads + 2 * keys) // heads, states):
            result.append(Exchange("all_to_all", size, passes * 2 * layers, dims.cp))
        result.append(Exchange("all_gather", tokens * dims.cp * width, passes * 2, dims.cp))
    return result


def seconds_of(exchange: Exchange, mesh: TrainerMesh, free: FreeMesh) -> float:
    """What a collective operation over all ranks, which begin together, and a copy of its result take longer than with
    an operation of `free`: the difference of the means. As in a step, no cache has what is exchanged, and the result
    goes to memory that is allocated for it."""
    size = exchange.nbytes // 4
    whole, part = torch.ones(size), torch.ones(size // mesh.world_size)
    actions: dict[str, Callable[[dist.ProcessGroup | None], Tensor]] = {
        "all_reduce": lambda group: _done(dist.all_reduce, whole.clone(), group=group),
        "all_gather": lambda group: _done(dist.all_gather_into_tensor, torch.empty_like(whole), part, group=group),
        "reduce_scatter": lambda group: _done(AddedParts(), torch.empty_like(part), whole, group=group),
        "all_to_all": lambda group: _done(dist.all_to_all_single, torch.empty_like(whole), whole, group=group),
    }
    action, seconds = actions[exchange.kind], 0.0
    for _ in range(REPEATS):
        seconds += _from_memory(lambda: action(None).clone(), mesh)
        seconds -= _from_memory(lambda: action(free.group).clone(), mesh)
    return seconds / REPEATS


def seconds_of_meeting(mesh: TrainerMesh) -> float:
    """Of ranks that come at the same time: the mean."""
    return sum(_from_memory(mesh.barrier, mesh) for _ in range(REPEATS)) / REPEATS


def _from_memory(action: Callable[[], object], mesh: TrainerMesh) -> float:
    """Seconds of an action that all ranks begin together, with nothing in the caches."""
    torch.empty(NOT_CACHED // 4).fill_(1.0)
    mesh.barrier()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _done(operation: Callable[..., object], result: Tensor, *values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    operation(result, *values, group=group)
    return result
