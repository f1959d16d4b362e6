"""Builds `FSDPEngine`: loads a Hugging Face model, chooses its head and attention, shards it."""

import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from areal.api.batch import OutputSpec
from areal.api.config import TrainEngineConfig
from areal.api.engine import ModelRole
from areal.api.errors import ConfigError
from areal.api.images import ImageStore
from areal.engine.adapter_format import with_values
from areal.engine.cpu_reduction import AddedParts
from areal.engine.expert_parallel import apply_expert_plan, expert_modules
from areal.engine.fsdp import FSDPEngine
from areal.engine.hf_model import (
    enable_checkpointing,
    fill_model,
    load_model,
    other_towers,
    require_compiler,
    resolve_model_folder,
    shard_units,
)
from areal.engine.liger_head import require_liger
from areal.engine.lora import Adapters
from areal.engine.mesh import TrainerMesh
from areal.engine.optimizer import ScheduledOptimizer
from areal.engine.packed_attention import SDPA, choose_attention
from areal.engine.routing import Routing
from areal.engine.tensor_plan import apply_tensor_plan
from areal.engine.token_model import PolicyModel, ScoreModel, TokenModel, ValueModel
from areal.engine.vision import VisionReader
from areal.system.mesh_rules import mesh_problem
from areal.system.model_shape import ModelShape
from areal.system.vision_layout import read_vision_layout
from areal.weights.output_head import has_float32_head
from areal.weights.routers import routers_of

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_fsdp_engine(
    config: TrainEngineConfig,
    *,
    role: ModelRole,
    total_steps: int,
    mesh: TrainerMesh,
    seed: int,
    outputs: OutputSpec | None = None,
    images: ImageStore | None = None,
) -> FSDPEngine:
    """Load the model that `config` names; a collective over all trainer ranks. Raises ConfigError or InputError.

    `total_steps`: optimiser steps of the learning-rate schedule. `seed`: of random initial weights. `outputs`: what
    `forward` returns besides log-probabilities (actor and ref only). A model with an optimiser keeps float32 weights
    and computes in config.dtype; one without is held in config.dtype.
    """
    if role in ("critic", "reward") and outputs not in (None, OutputSpec()):
        raise ValueError(f"a {role} model has no distribution over tokens, so it cannot compute {outputs}")
    if config.logprob_kernel == "liger":
        require_liger(mesh.device, outputs or OutputSpec(), tensor_ranks=mesh.dims.tp)
    compute = _DTYPES[config.dtype]
    stored = torch.float32 if config.optimizer is not None else compute  # of weights that are trained
    folder = resolve_model_folder(config.path)
    if (shape := ModelShape.read(str(folder))) is not None and (problem := mesh_problem(shape, mesh.dims)):
        raise ConfigError(f"model {folder}: {problem}", code="model.cannot_split")
    layout = read_vision_layout(str(folder))
    vision = None if layout is None or images is None else VisionReader(layout, images)
    kernel = "sdpa" if layout is not None and layout.is_bidirectional else config.attn_impl
    attention = choose_attention(kernel, mesh.device, compute, in_compiled=config.compile)
    is_sharded = mesh.world_size > 1 or stored != compute or config.fsdp.offload_params
    kind = {"is_critic": role in ("critic", "reward"), "seed": seed}
    how: dict[str, Any] = {"dtype": stored if config.lora is None else compute, "is_empty": is_sharded}
    hf_model = load_model(folder, config, **kind, **how, attention=attention, takes_images=vision is not None)
    routing = Routing(routers_of(hf_model), hf_model.config.get_text_config(), config)
    adapters = _prepare(hf_model, config, mesh)
    model = _token_model(hf_model, config, role, mesh, outputs, () if layout is None else layout.banned_ids)
    model.offloads_activations = config.gradient_checkpointing and config.checkpointing == "offload"
    if is_sharded:
        _shard(model, config, mesh, compute=compute, stored=stored, runs_towers=vision is not None)
        device = torch.device("cpu") if config.fsdp.offload_params else mesh.device
        fill_model(hf_model, model.form, folder, config, **kind, device=device)
    else:
        model.to(mesh.device)  # nothing to shard or cast: the plain model is exact and faster
    lora = None if adapters is None else with_values(adapters, folder, config, seed, compute)
    return FSDPEngine(
        model,
        mesh=mesh,
        optimizer=None if config.optimizer is None else _optimizer(hf_model, config, total_steps, mesh),
        mb_spec=config.mb_spec,
        dtype=compute,
        source=folder,
        lora=lora,
        shard_size=config.fsdp.shard_size,
        syncs_every_pass=config.fsdp.gradient_sync == "every",
        gathers_once=_gathers_once(config, mesh),
        routing=routing,
        repeats_passes=not _draws_in_training(hf_model, config),
        shares_prompts=_shares_prompts(hf_model, config, mesh, attention),
        vision=vision,
    )


def _draws_in_training(hf_model: PreTrainedModel, config: TrainEngineConfig) -> bool:
    """Whether a pass in training draws random numbers, for dropout or for routers."""
    text = hf_model.config.get_text_config()
    found = any(isinstance(module, nn.Dropout) and module.p > 0 for module in hf_model.modules())
    found |= any(getattr(text, name, 0.0) for name in ("attention_dropout", "router_jitter_noise"))
    return found or (config.lora is not None and config.lora.dropout > 0)


def _shares_prompts(hf_model: PreTrainedModel, config: TrainEngineConfig, mesh: TrainerMesh, attention: str) -> bool:
    """Whether the model may compute a common prompt once: its attention can, and each token is equal in every answer.

    Routers count tokens, dropout is drawn for each, and images belong to sequences. In bfloat16 the gradients of the
    answers would be added with rounding.
    """
    is_exact = mesh.device.type == "cpu" and config.dtype == "float32" and attention == SDPA
    is_text = getattr(hf_model.config, "vision_config", None) is None and not routers_of(hf_model)
    return (
        config.shared_prompts
        and is_exact
        and mesh.context.size == 1
        and is_text
        and not _draws_in_training(hf_model, config)
    )


def _optimizer(
    hf_model: PreTrainedModel, config: TrainEngineConfig, total_steps: int, mesh: TrainerMesh
) -> ScheduledOptimizer:
    assert config.optimizer is not None
    trained = {name: weight for name, weight in hf_model.named_parameters() if weight.requires_grad}
    offloads = config.fsdp.offload_optimizer and not config.fsdp.offload_params
    return ScheduledOptimizer(
        trained, config.optimizer, total_steps, world_size=mesh.world_size, offloads_state=offloads
    )


def _freeze(hf_model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Exclude the weights whose names match from training. ConfigError for a pattern without a match."""
    weights = dict(hf_model.named_parameters())
    for pattern in patterns:
        found = [name for name in weights if re.search(pattern, name)]
        if not found:
            text = f"freeze: no weight of the model matches {pattern!r}; the first one is {next(iter(weights))}"
            raise ConfigError(text, code="model.no_such_weight")
        for name in found:
            weights[name].requires_grad_(False)


def _prepare(hf_model: PreTrainedModel, config: TrainEngineConfig, mesh: TrainerMesh) -> Adapters | None:
    """What is between construction and sharding, in this order: adapters, tensor plan, checkpointing, compilation."""
    if config.optimizer is None:
        hf_model.requires_grad_(False)
    _freeze(hf_model, config.freeze)
    adapters = None if config.lora is None else Adapters(hf_model, config.lora)
    if mesh.tensor.size > 1:
        apply_tensor_plan(hf_model, mesh.device_mesh(config.fsdp.shard_size)["tensor"])
    if mesh.dims.ep > 1:
        apply_expert_plan(hf_model, mesh.expert_mesh(config.fsdp.shard_size)["expert"])
    if config.optimizer is not None and config.gradient_checkpointing:
        enable_checkpointing(hf_model, is_selective=config.checkpointing == "selective")
    units = _units(hf_model, config)  # an unknown class of fsdp.wrap_policy is an error on one rank too
    if config.compile:
        require_compiler(mesh.device)
        for unit in units:
            unit.forward = torch.compile(unit.forward, dynamic=True)  # FSDP's hooks remain outside
    return adapters


def _token_model(
    hf_model: PreTrainedModel,
    config: TrainEngineConfig,
    role: ModelRole,
    mesh: TrainerMesh,
    outputs: OutputSpec | None,
    banned_ids: Sequence[int],
) -> TokenModel:
    if role in ("critic", "reward"):
        hf_model.get_submodule("score").float()  # also of a frozen model
        return ScoreModel(hf_model) if role == "reward" else ValueModel(hf_model)
    return PolicyModel(
        hf_model,
        config.temperature,
        outputs,
        with_liger=config.logprob_kernel == "liger",
        float32_head=has_float32_head(config.head_dtype, mesh.device, _DTYPES[config.dtype]),
        tensor_ranks=mesh.tensor if mesh.tensor.size > 1 else None,
        banned_ids=banned_ids,
    )


def _shard(
    model: TokenModel,
    config: TrainEngineConfig,
    mesh: TrainerMesh,
    *,
    compute: torch.dtype,
    stored: torch.dtype,
    runs_towers: bool,
) -> None:
    """Apply FSDP2 to experts that ranks split, to every block, to a critic's head (in float32), and to the rest, which
    holds a policy's head."""
    device_mesh = _sharing(mesh.device_mesh(config.fsdp.shard_size))
    reduce = _DTYPES[config.grad_reduce_dtype]
    policy = MixedPrecisionPolicy(param_dtype=None if compute == stored else compute, reduce_dtype=reduce)
    offload: OffloadPolicy = OffloadPolicy()
    if config.fsdp.offload_params:
        offload = CPUOffloadPolicy(pin_memory=device_mesh.device_type == "cuda")
    options: dict[str, Any] = {
        "mesh": device_mesh,
        "offload_policy": offload,
        "reshard_after_forward": config.fsdp.reshard_after_forward and not _gathers_once(config, mesh),
    }
    head = model.model.get_output_embeddings()
    head_weights = [] if head is None else [id(weight) for weight in head.parameters()]
    sharded: list[FSDPModule] = []
    if mesh.dims.ep > 1:
        expert_options: dict[str, Any] = options | {"mesh": _sharing(mesh.expert_mesh(config.fsdp.shard_size))}
        for experts in expert_modules(model.model):
            fully_shard(experts, mp_policy=policy, **expert_options)
    towers = other_towers(model.model)
    for tower in towers:
        fully_shard(tower, mp_policy=policy if runs_towers else MixedPrecisionPolicy(), **options)
        _keep_records(tower)
    unused = {id(weight) for tower in towers for weight in tower.parameters()}
    for unit in _units(model.model, config):
        if any(id(weight) in unused for weight in unit.parameters()):
            continue
        # the head, and what is tied to it, belong to the outermost unit: they are whole whenever the model runs
        if not any(id(weight) in head_weights for weight in unit.parameters()):
            sharded.append(fully_shard(unit, mp_policy=policy, **options))
    if isinstance(model, ValueModel):
        exact = MixedPrecisionPolicy(reduce_dtype=reduce)
        fully_shard(model.model.get_submodule("score"), mp_policy=exact, **options)
    # its weights are the last of a forward pass and the first of the backward pass: gathered once for both
    options["reshard_after_forward"] = False
    fully_shard(model, mp_policy=policy, **options)
    for unit in (unit for unit in model.modules() if isinstance(unit, FSDPModule) and mesh.device.type == "cpu"):
        unit.set_custom_reduce_scatter(cast("Any", AddedParts()))
    _prefetch(sharded, config.fsdp.prefetch_blocks)


def _keep_records(tower: nn.Module) -> None:
    """Let a sharded tower record hidden states: transformers looks for the class of a model, which FSDP has changed."""
    if isinstance(tower, PreTrainedModel):
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(tower)), tower._can_record_outputs)  # also before 5.23


def _gathers_once(config: TrainEngineConfig, mesh: TrainerMesh) -> bool:
    """Whether a rank has all weights, so that gathering only converts them, and CPU memory for the converted ones."""
    return mesh.device.type == "cpu" and (config.fsdp.shard_size or mesh.dims.dp * mesh.dims.cp) == 1


def _sharing(mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions of (replicate, shard, ...) over which FSDP works."""
    replicate, shard, _ = mesh.mesh_dim_names or ("", "", "")
    return mesh[replicate, shard] if mesh.size(0) > 1 else mesh[shard]


def _prefetch(blocks: list[FSDPModule], count: int) -> None:
    """Let each block gather the weights of the next `count` ones while it runs, in both directions."""
    for place, block in enumerate(blocks if count else ()):
        block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + count])
        block.set_modules_to_backward_prefetch(blocks[max(place - count, 0) : place][::-1])


def _units(model: PreTrainedModel, config: TrainEngineConfig) -> list[nn.Module]:
    wrap = config.fsdp.wrap_policy
    return shard_units(model, wrap.transformer_layer_cls_to_wrap if wrap is not None else None)
