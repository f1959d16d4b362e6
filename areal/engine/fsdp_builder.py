"""Builds `FSDPEngine`: loads a Hugging Face model, chooses its head and attention, shards it."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from areal.api.batch import OutputSpec
from areal.api.config import TrainEngineConfig
from areal.api.engine import ModelRole
from areal.engine.adapter_format import with_values
from areal.engine.fsdp import FSDPEngine
from areal.engine.hf_model import enable_checkpointing, fill_model, load_model, resolve_model_folder, shard_units
from areal.engine.liger_head import require_liger
from areal.engine.lora import Adapters
from areal.engine.mesh import TrainerMesh
from areal.engine.optimizer import ScheduledOptimizer
from areal.engine.packed_attention import choose_attention
from areal.engine.token_model import PolicyModel, ScoreModel, TokenModel, ValueModel
from areal.weights.output_head import has_float32_head

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_fsdp_engine(
    config: TrainEngineConfig,
    *,
    role: ModelRole,
    total_steps: int,
    mesh: TrainerMesh,
    seed: int,
    outputs: OutputSpec | None = None,
) -> FSDPEngine:
    """Load the model that `config` names; a collective over all trainer ranks. Raises ConfigError or InputError.

    `total_steps`: optimiser steps of the learning-rate schedule. `seed`: of random initial weights. `outputs`: what
    `forward` returns besides log-probabilities (actor and ref only). A model with an optimiser keeps float32 weights
    and computes in config.dtype; one without is held in config.dtype.
    """
    if role in ("critic", "reward") and outputs not in (None, OutputSpec()):
        raise ValueError(f"a {role} model has no distribution over tokens, so it cannot compute {outputs}")
    if config.logprob_kernel == "liger":
        require_liger(mesh.device, outputs or OutputSpec())
    compute = _DTYPES[config.dtype]
    stored = torch.float32 if config.optimizer is not None else compute  # of weights that are trained
    folder = resolve_model_folder(config.path)
    attention = choose_attention(config.attn_impl, mesh.device, compute)
    has_head = role in ("critic", "reward")
    is_sharded = mesh.world_size > 1 or stored != compute or config.fsdp.offload_params
    held = stored if config.lora is None else compute
    kind = {"is_critic": has_head, "seed": seed}
    hf_model = load_model(folder, config, **kind, dtype=held, attention=attention, is_empty=is_sharded)
    if config.optimizer is None:
        hf_model.requires_grad_(False)
    adapters = None if config.lora is None else Adapters(hf_model, config.lora)
    if config.optimizer is not None and config.gradient_checkpointing:
        enable_checkpointing(hf_model)
    model: TokenModel
    if has_head:
        hf_model.get_submodule("score").float()  # also of a frozen model
        model = ScoreModel(hf_model) if role == "reward" else ValueModel(hf_model)
    else:
        model = PolicyModel(
            hf_model,
            config.temperature,
            outputs,
            with_liger=config.logprob_kernel == "liger",
            float32_head=has_float32_head(config.head_dtype, mesh.device, compute),
        )
    if is_sharded:
        _shard(model, config, mesh.device_mesh(), compute=compute, stored=stored)
        device = torch.device("cpu") if config.fsdp.offload_params else mesh.device
        fill_model(hf_model, model.form, folder, config, **kind, device=device)
    else:
        model.to(mesh.device)  # nothing to shard or cast: the plain model is exact and faster
    lora = None if adapters is None else with_values(adapters, folder, config, seed, compute)
    optimizer = None
    if config.optimizer is not None:
        trained = {name: weight for name, weight in hf_model.named_parameters() if weight.requires_grad}
        optimizer = ScheduledOptimizer(trained, config.optimizer, total_steps)
    return FSDPEngine(
        model, mesh=mesh, optimizer=optimizer, mb_spec=config.mb_spec, dtype=compute, source=folder, lora=lora
    )


def _shard(
    model: TokenModel, config: TrainEngineConfig, device_mesh: DeviceMesh, *, compute: torch.dtype, stored: torch.dtype
) -> None:
    """Apply FSDP2 to every block, to a critic's head (in float32), and to the rest, which holds a policy's head."""
    reduce = _DTYPES[config.grad_reduce_dtype]
    policy = MixedPrecisionPolicy(param_dtype=None if compute == stored else compute, reduce_dtype=reduce)
    offload: OffloadPolicy = OffloadPolicy()
    if config.fsdp.offload_params:
        offload = CPUOffloadPolicy(pin_memory=device_mesh.device_type == "cuda")
    wrap = config.fsdp.wrap_policy
    units = shard_units(model.model, wrap.transformer_layer_cls_to_wrap if wrap is not None else None)
    head = model.model.get_output_embeddings()
    head_weights = [] if head is None else [id(weight) for weight in head.parameters()]
    for unit in units:
        # the head, and what is tied to it, belong to the outermost unit: they are whole whenever the model runs
        if not any(id(weight) in head_weights for weight in unit.parameters()):
            fully_shard(unit, mesh=device_mesh, mp_policy=policy, offload_policy=offload)
    if isinstance(model, ValueModel):
        exact = MixedPrecisionPolicy(reduce_dtype=reduce)
        fully_shard(model.model.get_submodule("score"), mesh=device_mesh, mp_policy=exact, offload_policy=offload)
    fully_shard(model, mesh=device_mesh, mp_policy=policy, offload_policy=offload)
