"""Devices of a draft: allocation_mode, the number of machines, and options of Megatron that several systems share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from areal.api.allocation import ParallelDims
from areal.importers.draft import Draft

_OPTIONS = {
    "use_distributed_optimizer": "ddp.use_distributed_optimizer",
    "overlap_grad_reduce": "ddp.overlap_grad_reduce",
    "overlap_param_gather": "ddp.overlap_param_gather",
} | {
    name: name
    for name in (
        "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
        "distribute_saved_activations", "moe_token_dispatcher_type", "moe_router_dtype", "moe_permute_fusion",
        "moe_shared_expert_overlap",
    )
}  # fmt: skip
"""Name in Megatron-Core -> option below actor.megatron, if both mean the same without stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A trainer of one data rank, which `set_devices` multiplies."""

    backend: str = "fsdp"
    sizes: ParallelDims


def megatron_trainer(draft: Draft, prefix: str, *more: str) -> Trainer:
    """The sizes of Megatron-Core below `prefix`, and its options there and below `more`."""
    tensor, pipeline, expert = (
        draft.whole(f"{prefix}{name}_model_parallel_size", 1) for name in ("tensor", "pipeline", "expert")
    )
    context = draft.whole(f"{prefix}context_parallel_size", 1)
    expert_tensor = draft.whole(f"{prefix}expert_tensor_parallel_size", 1)
    for place in (prefix, *more):
        for name, option in _OPTIONS.items():
            draft.keep(f"{place}{name}", f"actor.megatron.{option}")
    if pipeline > 1:
        draft.keep(f"{prefix}virtual_pipeline_model_parallel_size", "actor.megatron.virtual_pipeline_parallel_size")
    sizes = ParallelDims(tp=tensor, pp=pipeline, cp=context, ep=expert, etp=expert_tensor)
    return Trainer(backend="megatron", sizes=sizes)


def halves(total: int, server_size: int, trainer: Trainer) -> tuple[int, int, int]:
    """Replicas and size of servers, and GPUs of the trainer, where the source uses `total` GPUs for both in turn."""
    sizes = trainer.sizes
    unit = sizes.pp * math.lcm(sizes.world_size // sizes.pp, sizes.ep * sizes.etp)
    if total % unit:  # experts that the source cannot divide either
        unit = sizes.world_size
    while server_size > max(1, total // 2):
        server_size //= 2
    replicas = max(1, total // 2 // server_size)
    trained = max(unit, (total - replicas * server_size) // unit * unit)
    return max(1, (total - trained) // server_size), server_size, trained


def set_devices(
    draft: Draft,
    server: str,
    parts: tuple[int, int, int],
    trainer: Trainer,
    why: str,
    keys: Sequence[str],
    *,
    nodes: int = 1,
    per_node: int = 8,
) -> ParallelDims:
    """Set allocation_mode, and cluster.n_nodes where that needs more than `nodes`. `parts`: as `halves` returns them.

    There are at most as many data ranks as prompts in a batch. Returns the sizes of the trainer.
    """
    replicas, server_size, gpus = parts
    ranks, batch = max(1, gpus // trainer.sizes.world_size), int(draft.options["train_dataset.batch_size"].value)
    data = min(ranks, batch)
    why += f"; {data} of {ranks} data ranks: a batch has {batch} prompts" if data < ranks else ""
    sizes = replace(trainer.sizes, dp=data)
    if sizes.world_size // sizes.pp % (sizes.ep * sizes.etp):
        keys_of_experts = ("*expert*parallel_size", "policy.parallelism.ep_size")
        draft.lack(f"it does not divide the {data} data ranks and those of a model", *keys_of_experts, off=(1,))
        sizes = replace(sizes, ep=1, etp=1)
    servers = f"{server}:{ParallelDims(dp=replicas, tp=server_size)}+" if replicas else ""
    own = (key for key in keys if key not in draft.notes)
    draft.set("allocation_mode", f"{servers}{trainer.backend}:{sizes}", why, *own)
    needed = replicas * server_size + sizes.world_size
    keys_of_nodes = ("trainer.nnodes", "num_nodes")
    if needed > nodes * per_node:
        draft.set("cluster.n_nodes", -(-needed // per_node), f"{needed} GPUs of allocation_mode", *keys_of_nodes)
    return sizes
