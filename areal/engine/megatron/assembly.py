"""Puts a Megatron-Core model together: groups, chunks of layers, weights, data parallelism, optimiser."""
# pyright: reportMissingImports=false

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor, nn

from areal.api.batch import OutputSpec
from areal.api.config import TrainEngineConfig
from areal.api.engine import ModelRole
from areal.engine.hf_model import draw_head, drawn_weights, read_config
from areal.engine.megatron.engine import MegatronEngine
from areal.engine.megatron.model import HeadPlan, PackedModel, use_chunks
from areal.engine.megatron.model_config import (
    DTYPES,
    choose_kernels,
    ddp_config,
    require_mapped,
    transformer_config,
)
from areal.engine.megatron.optimizer import MegatronOptimizer
from areal.engine.megatron.weight_map import HEAD, Stages, has_experts, num_experts, tied_head, weight_map
from areal.engine.megatron.weights import CheckpointReader, Put, RankWeights, copy_weights, read_weights
from areal.engine.mesh import TrainerMesh
from areal.engine.packed_attention import attention_function
from areal.engine.routing import Routing
from areal.models.output_head import has_float32_head

ROUTER_DTYPES = {None: None, "fp32": torch.float32, "fp64": torch.float64}
_ORDER = "tp-cp-ep-dp-pp"
"""Tensor innermost, pipeline outermost: the ranks of `TrainerMesh`."""


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
    """See `areal.engine.build.build_megatron_engine`."""
    hf = read_config(folder, is_critic=role in ("critic", "reward"))
    require_mapped(hf, config)
    choose_kernels(config.megatron)
    dtype, count = DTYPES[config.compute_dtype], config.megatron.virtual_pipeline_parallel_size
    groups = _open_groups(mesh, seed)
    use_chunks(count)
    head = HeadPlan(
        role=role,
        spec=outputs,
        temperature=config.temperature,
        float32_head=has_float32_head(config.head_dtype, mesh.device, dtype),
        is_tied=bool(hf.tie_word_embeddings),
    )
    model_config = transformer_config(hf, config, mesh.dims, mesh.device, dtype=dtype, chunks=count)
    attend = attention_function(config.attn_impl, mesh.device, dtype)
    options: dict[str, Any] = {"router_dtype": ROUTER_DTYPES[config.megatron.moe_router_dtype], "groups": groups}
    plain = [
        PackedModel(model_config, hf, head, attend, tensor=mesh.tensor, stage=mesh.stage, chunk=chunk, **options)
        for chunk in range(count)
    ]
    for chunk in plain:
        chunk.to(mesh.device)
    routing = _routing(plain, hf, config)
    weights = rank_weights(hf, head, plain, mesh, groups, count)
    chunks: Sequence[nn.Module] = plain
    optimizer = None
    if config.optimizer is None:
        for chunk in plain:
            chunk.requires_grad_(False)
    else:
        wrapped = _wrapped(plain, model_config, config, groups)
        options = {"mesh": mesh, "groups": groups, "dtype": dtype, "total_steps": total_steps}
        weights = rank_weights(hf, head, plain, mesh, groups, count)  # the parameters moved into buffers
        chunks, optimizer = wrapped, MegatronOptimizer(wrapped, config, weights, **options)
    # after the optimiser, whose float32 weights have more digits than those of the model
    fill(weights, config, hf, folder, head, seed, Tensor.copy_ if optimizer is None else optimizer.set_value)
    return MegatronEngine(
        chunks,
        hf=hf,
        head=head,
        weights=weights,
        config=config,
        mesh=mesh,
        groups=groups,
        optimizer=optimizer,
        routing=routing,
        dtype=dtype,
        source=folder,
    )


def _routing(chunks: Sequence[PackedModel], hf: Any, config: TrainEngineConfig) -> Routing | None:
    """The routers of this stage; None for a model without experts."""
    layers = [layer for layer in range(hf.num_hidden_layers) if has_experts(hf, layer)]
    if not layers and not config.router_option:
        return None
    gates = {layer: gate for chunk in chunks for layer, gate in chunk.gates().items()}
    routing = Routing(gates, hf, config, layers=layers, num_experts=num_experts(hf))
    for chunk in chunks:
        chunk.use_routing(routing)
    return routing


def _open_groups(mesh: TrainerMesh, seed: int) -> ProcessGroupCollection:
    """The groups of all models of this process; a collective the first time."""
    if not parallel_state.is_initialized():
        mesh.require_groups()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=mesh.dims.tp,
            pipeline_model_parallel_size=mesh.dims.pp,
            context_parallel_size=mesh.dims.cp,
            expert_model_parallel_size=mesh.dims.ep,
            expert_tensor_parallel_size=mesh.dims.etp,
            order=_ORDER,
        )
        mesh.when_closed(parallel_state.destroy_model_parallel)
        model_parallel_cuda_manual_seed(seed)
    return ProcessGroupCollection.use_mpu_process_groups()


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
        weight_map(hf, has_score=head.has_score, splits_latents=not HAVE_TE),
        [tied_head(hf)] if has_copy else [],
        chunks,
        Stages(hf.num_hidden_layers, mesh.dims.pp, count),
        groups,
        num_experts(hf),
    )


def fill(
    weights: RankWeights, config: TrainEngineConfig, hf: Any, folder: Path, head: HeadPlan, seed: int, put: Put
) -> None:
    """Read this rank's parts of the weights, or draw them."""
    if config.init_from_scratch:
        copy_weights(weights, drawn_weights(hf, is_critic=head.has_score, seed=seed), put)
        return
    reader = CheckpointReader(folder)
    score = weights.parameters.get(HEAD)
    if head.has_score and config.optimizer is not None and not reader.has(HEAD):
        if score is not None:
            with torch.no_grad():
                draw_head(score, seed)
        weights = weights.without(HEAD)
    read_weights(weights, reader, put)


def _wrapped(
    chunks: Sequence[nn.Module], model_config: Any, config: TrainEngineConfig, groups: ProcessGroupCollection
) -> list[DistributedDataParallel]:
    """The chunks with Megatron's data parallelism, and what the schedules call of it."""
    is_whole = config.megatron.overlap_param_gather_with_optimizer_step
    result = [
        DistributedDataParallel(
            config=model_config,
            ddp_config=ddp_config(config),
            module=chunk,
            disable_bucketing=is_whole or place > 0,
            pg_collection=groups,
        )
        for place, chunk in enumerate(chunks)
    ]
    if config.megatron.ddp.overlap_grad_reduce:  # in the backward pass of the last micro-batch
        model_config.no_sync_func = [chunk.no_sync for chunk in result] if len(result) > 1 else result[0].no_sync
    if config.megatron.ddp.align_param_gather and len(result) > 1:
        model_config.param_sync_func = [chunk.start_param_sync for chunk in result]
    return result
