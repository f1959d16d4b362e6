"""Puts a Megatron-Core model together: groups, chunks of layers, weights, data parallelism, optimiser."""
# pyright: reportMissingImports=false

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from areal.api.batch import OutputSpec
from areal.api.config import TrainEngineConfig
from areal.api.engine import ModelRole
from areal.engine.hf_model import drawn_weights, read_config
from areal.engine.megatron.engine import MegatronEngine
from areal.engine.megatron.model import HeadPlan, model_chunks
from areal.engine.megatron.model_config import ddp_config, require_mapped, transformer_config
from areal.engine.megatron.optimizer import MegatronOptimizer
from areal.engine.megatron.ranks import open_groups
from areal.engine.megatron.weight_map import HEAD, Stages, num_experts, tied_head, weight_map
from areal.engine.megatron.weights import CheckpointReader, RankWeights, copy_weights, read_weights
from areal.engine.mesh import TrainerMesh
from areal.engine.packed_attention import attention_function
from areal.engine.sharded_load import draw_head
from areal.weights.output_head import has_float32_head

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def assembled_engine(
    config: TrainEngineConfig,
    folder: Path,
    *,
    role: ModelRole,
    total_steps: int,
    mesh: TrainerMesh,
    seed: int,
    outputs: OutputSpec,
) -> MegatronEngine:
    """See `areal.engine.megatron.builder.build_megatron_engine`."""
    hf = read_config(folder, is_critic=role in ("critic", "reward"))
    require_mapped(hf)
    dtype, count = _DTYPES[config.dtype], config.megatron.virtual_pipeline_parallel_size
    groups = open_groups(mesh, count, seed)
    head = HeadPlan(
        role=role,
        spec=outputs,
        temperature=config.temperature,
        float32_head=has_float32_head(config.head_dtype, mesh.device, dtype),
        is_tied=bool(hf.tie_word_embeddings),
    )
    model_config = transformer_config(hf, config, mesh.dims, mesh.device, dtype=dtype, chunks=count)
    attend = attention_function(config.attn_impl, mesh.device, dtype)
    plain = model_chunks(model_config, hf, head, attend, tensor=mesh.tensor, stage=mesh.stage, groups=groups)
    for chunk in plain:
        chunk.to(mesh.device)
    own = rank_weights(hf, head, plain, mesh, groups, count)
    fill(own, config, hf, folder, head, seed)
    chunks: Sequence[nn.Module] = plain
    optimizer = None
    if config.optimizer is None:
        for chunk in plain:
            chunk.requires_grad_(False)
    else:
        wrapped = [_with_ddp(chunk, model_config, config, place > 0, groups) for place, chunk in enumerate(plain)]
        options: dict[str, Any] = {"mesh": mesh, "groups": groups, "dtype": dtype, "total_steps": total_steps}
        own = rank_weights(hf, head, plain, mesh, groups, count)  # the parameters moved into buffers
        chunks, optimizer = wrapped, MegatronOptimizer(wrapped, config, own, **options)
    return MegatronEngine(
        chunks,
        hf=hf,
        head=head,
        own=own,
        config=config,
        mesh=mesh,
        groups=groups,
        optimizer=optimizer,
        dtype=dtype,
        source=folder,
    )


def rank_weights(
    hf: Any,
    head: HeadPlan,
    chunks: Sequence[nn.Module],
    mesh: TrainerMesh,
    groups: ProcessGroupCollection,
    count: int,
) -> RankWeights:
    has_copy = head.is_tied and not head.has_score and mesh.dims.pp > 1
    return RankWeights(
        weight_map(hf, has_score=head.has_score),
        [tied_head(hf)] if has_copy else [],
        chunks,
        Stages(hf.num_hidden_layers, mesh.dims.pp, count),
        groups,
        num_experts(hf),
    )


def fill(own: RankWeights, config: TrainEngineConfig, hf: Any, folder: Path, head: HeadPlan, seed: int) -> None:
    """Read this rank's parts of the weights, or draw them."""
    if config.init_from_scratch:
        copy_weights(own, drawn_weights(hf, is_critic=head.has_score, seed=seed), own.own)
        return
    reader = CheckpointReader(folder)
    score = own.own.get(HEAD)
    if head.has_score and config.optimizer is not None and not reader.has(HEAD):
        if score is not None:
            with torch.no_grad():
                draw_head(score, seed)
        own = own.without(HEAD)
    read_weights(own, reader)


def _with_ddp(
    chunk: nn.Module, model_config: Any, config: TrainEngineConfig, is_later: bool, groups: ProcessGroupCollection
) -> DistributedDataParallel:
    is_whole = is_later or config.megatron.overlap_param_gather_with_optimizer_step
    return DistributedDataParallel(
        config=model_config,
        ddp_config=ddp_config(config),
        module=chunk,
        disable_bucketing=is_whole,
        pg_collection=groups,
    )
