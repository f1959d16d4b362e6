"""The FSDP2 train engine: micro-batched passes over packed rows, optimiser steps, loading and saving of weights."""

import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from areal.api.allocation import ParallelDims
from areal.api.batch import CANDIDATE_IDS, LossFn, MicroBatch, OutputSpec, TokenOutputs, TrainBatch
from areal.api.config import MicroBatchSpec, TrainEngineConfig
from areal.api.data import WeightSpec
from areal.api.engine import ModelRole, ReduceOp
from areal.api.errors import ConfigError, InputError, StageError
from areal.api.images import ImageStore, VisionLayout
from areal.api.metrics import Metric, Metrics, merge_metrics
from areal.data.pack import token_positions
from areal.data.prefix_tree import SortedRows
from areal.engine.adapter_format import PeftAdapter, with_values
from areal.engine.checkpoint import (
    HostCopies,
    RecoveryReader,
    StagedPieces,
    empty_like,
    export_adapter,
    export_model,
    own_pieces,
    write_folder,
)
from areal.engine.float8 import Float8Layers
from areal.engine.hf_model import (
    compute_buffers,
    copy_stored_part,
    enable_checkpointing,
    fill_model,
    load_model,
    other_towers,
    require_compiler,
    resolve_model_folder,
    shard_units,
)
from areal.engine.linear_logprobs import require_liger
from areal.engine.lora import Adapters, frozen_experts
from areal.engine.mesh import TrainerMesh, copy_part, whole_tensor
from areal.engine.micro_batch import (
    ModelInput,
    TreeKey,
    TreeRow,
    checked_ids,
    dummy_input,
    make_micro_batch,
    over_context,
    plan_micro_batches,
    rows_that_share,
    with_images,
)
from areal.engine.optimizer import ScheduledOptimizer, StepSettings
from areal.engine.packed_attention import choose_attention
from areal.engine.parallel_plan import apply_expert_plan, apply_tensor_plan, expert_modules
from areal.engine.routing import EXPERT_BIAS, Routing
from areal.engine.token_model import PolicyModel, ScoreModel, TokenModel, ValueModel
from areal.engine.vision import VisionReader
from areal.models.mesh_rules import mesh_problem
from areal.models.model_shape import ModelShape
from areal.models.output_head import has_float32_head, routers_of
from areal.models.recurrent_layers import choosing_layers, state_layers
from areal.models.stored_form import StoredPart
from areal.models.tree_states import continues_state
from areal.models.vision_layout import read_vision_layout
from areal.observe.log import get_logger

# ----------------------------------------------------------------------------------------------------------------------
# The reduction of FSDP's gradients on CPU ranks. gloo's own sums the whole buffer on every rank: twice the bytes.


class AddedParts:
    """Implements FSDP's `ReduceScatter`: ranks send each other parts, and add what they get in the order of ranks."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup | None,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> None:
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        assert not async_op
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(-1, output_tensor.numel()), 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(dist.get_world_size(group))


class ComputeCopies:
    """Mixed precision on one CPU rank: passes run with copies of the float32 weights in the compute type.

    FSDP on one rank computes the same, but copies weights and gradients two more times.
    """

    def __init__(self, model: nn.Module, compute: torch.dtype, *, exact: Sequence[nn.Module]) -> None:
        """`exact`: modules whose weights keep their type."""
        kept = {id(weight) for module in exact for weight in module.parameters()}
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is None or id(weight) in kept or weight.dtype == compute:
                    continue
                self._places.append((module._parameters, name, weight))
                if weight not in self._copies:
                    copy = nn.Parameter(weight.detach().to(compute), requires_grad=weight.requires_grad)
                    self._copies[weight] = copy
                    if weight.requires_grad:
                        copy.register_post_accumulate_grad_hook(partial(_add_gradient, weight))

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Replace the weights by their copies. A backward pass adds to the gradients of the weights, in float32."""
        with torch.no_grad():
            for weight, copy in self._copies.items():
                copy.copy_(weight)
        for parameters, name, weight in self._places:
            parameters[name] = self._copies[weight]
        try:
            yield
        finally:
            for parameters, name, weight in self._places:
                parameters[name] = weight


def _add_gradient(weight: nn.Parameter, copy: Tensor) -> None:
    """Move the gradient of one backward pass to the weight."""
    assert copy.grad is not None
    if weight.grad is None:
        weight.grad = copy.grad.to(weight.dtype)
    else:
        weight.grad += copy.grad
    copy.grad = None


FLOAT32_HEAD = "score.weight"
"""The critic's head: computes in float32 and is exported in float32."""


@dataclass(frozen=True, slots=True)
class _Target:
    """The target of a loaded weight: a tensor of the model, or a part of it."""

    name: str
    """The same for all names of tied weights."""
    tensor: Tensor
    part: StoredPart | None = None


class FSDPEngine:
    """Implements `areal.api.engine.TrainEngine`: the model is sharded over all ranks with FSDP2, or whole on one rank.

    The ranks of a data-parallel rank compute the same losses from the outputs of all tokens of its share. A context
    rank has the gradients of its tokens; FSDP averages them over data and context ranks.
    """

    def __init__(
        self,
        model: TokenModel,
        *,
        mesh: TrainerMesh,
        optimizer: ScheduledOptimizer | None,
        mb_spec: MicroBatchSpec,
        dtype: torch.dtype,
        source: Path,
        lora: PeftAdapter | None = None,
        shard_size: int | None = None,
        syncs_every_pass: bool = False,
        gathers_once: bool = False,
        routing: Routing | None = None,
        as_trees: bool = False,
        repeats_passes: bool = True,
        vision: VisionReader | None = None,
        copies: ComputeCopies | None = None,
        float8: Float8Layers | None = None,
    ) -> None:
        """`dtype` is the compute type; `source` the checkpoint folder whose tokenizer goes into exports.
        `shard_size`: ranks that split the weights together with the tensor ranks (None: all data and context ranks);
        `syncs_every_pass`: gradients are reduced over the ranks after each micro-batch, not after the last of a call.
        `gathers_once`: gathered weights stay until the last micro-batch of a call.
        `as_trees`: tokens that the sequences of a micro-batch share are computed once, where that saves enough.
        `repeats_passes`: a pass in training gives the log-probabilities of `forward`, as there is no dropout.
        `vision`: reads the images of batches (None: the model takes none).
        `copies`: of the weights of a model that is whole and not in `dtype`. `float8`: layers that compute in 8 bits.
        """
        self.repeats_passes = repeats_passes
        self._model = model
        self._mesh = mesh
        self._optimizer = optimizer
        self._mb_spec = mb_spec
        self._dtype = dtype
        self._source = source
        self._lora = lora
        self._shard_size = shard_size or mesh.dims.dp * mesh.dims.cp
        self._syncs_every_pass = syncs_every_pass
        self._gathers_once = gathers_once
        self._host_copies = HostCopies()
        self._routing = routing
        self._as_trees = as_trees
        keeps_last = model.needs_last or (routing is not None and routing.has_experts)  # whose load is counted
        self._trees = ChainMap[TreeKey, TreeRow]()
        """Of the newest three passes over a batch: a step with two minibatches computes the rows of the second before
        its updates and in the last one."""
        self._micro_batch = partial(make_micro_batch, device=mesh.device, keeps_last=keeps_last, trees=self._trees)
        self._vision = vision
        self._copies = copies
        self._float8 = float8
        self._runs_tower = False
        """Whether any rank has images in the batch of the running call."""
        towers = (
            set()
            if vision is not None
            else {
                id(value) for tower in other_towers(model.model) for value in tower.state_dict(keep_vars=True).values()
            }
        )
        self._unused = {name for name, value in model.named_tensors() if id(value) in towers}
        """Weights that only images use."""
        self._loss = torch.zeros(())
        """Sum of the losses of this rank since the last optimiser step, on the device."""

    @property
    def lora(self) -> PeftAdapter | None:
        """The adapters, if the model has some."""
        return self._lora

    @property
    def dp_rank(self) -> int:
        return self._mesh.dp_rank

    @property
    def dp_size(self) -> int:
        return self._mesh.dp_size

    def forward(self, batch: TrainBatch, *, with_adapters: bool = True) -> TokenOutputs:
        if not with_adapters and self._lora is not None:
            with self._lora.adapters.disabled():
                return self.forward(batch)
        self._model.eval()
        whole: list[Tensor] = []
        with torch.no_grad(), self._in_compute_type():
            plan, rows = self._plan(batch)
            for indices in plan:
                positions = torch.zeros(0, dtype=torch.int64)
                if indices:
                    micro, inputs = self._micro_batch(batch, indices, rows=rows)
                    positions, _ = token_positions(batch.cu_seqlens, micro.source_index)
                else:
                    micro, inputs = None, dummy_input(batch, self._mesh.device)
                local = self._own(self._with_images(inputs, micro))
                if self._routing is not None:
                    self._routing.begin(local.routed_experts, is_counting=False)
                outputs: tuple[Tensor, ...] = self._model(local)
                if not whole:
                    shapes = [(batch.num_tokens, *values.shape[1:]) for values in outputs]
                    whole = [torch.zeros(s, dtype=v.dtype) for s, v in zip(shapes, outputs, strict=True)]
                for target, values in zip(whole, outputs, strict=True):
                    if indices:
                        target[positions] = values.cpu()
        if isinstance(self._model, FSDPModule):
            self._model.reshard()  # without a backward pass the root's full weights stay in memory
        return self._model.as_outputs(whole)

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, denominator: float) -> Metrics:
        if not denominator > 0:
            raise ValueError(f"the denominator of a loss must be above 0, but is {denominator}")
        if self._model.spec.candidates:
            batch.column(CANDIDATE_IDS)  # those that forward returned
        self._model.train()
        scale = self.dp_size * self._mesh.context.size / denominator  # FSDP averages over data and context ranks
        plan, rows = self._plan(batch)
        metrics: Metrics = {"tree_ratio": Metric(0.0, 0.0)} if self._as_trees else {}
        num_tokens = 0.0
        if self._routing is not None and self._routing.has_loss:
            num_tokens = self.all_reduce(torch.tensor([float(batch.num_tokens)], dtype=torch.float64)).item()
        with self._in_compute_type():
            for number, indices in enumerate(plan, start=1):
                if isinstance(self._model, FSDPModule):
                    self._model.set_requires_gradient_sync(self._syncs_every_pass or number == len(plan))
                    self._model.set_reshard_after_backward(not self._gathers_once or number == len(plan))
                if not indices:
                    inputs = self._with_images(dummy_input(batch, self._mesh.device), None)
                    values, balance = self._routed_pass(inputs, num_tokens, is_dummy=True)
                    (values[0].sum() * 0.0 + balance).backward()
                    continue
                micro, inputs = self._micro_batch(batch, indices, rows=rows)
                values, balance = self._routed_pass(self._with_images(inputs, micro), num_tokens)
                result = loss_fn(self._model.as_outputs(values), micro)
                (result.loss * scale + balance).backward()
                self._loss = self._loss.to(result.loss.device) + result.loss.detach()
                metrics = merge_metrics(metrics, result.metrics)
                if self._as_trees:
                    ratio = Metric(float(micro.batch.num_tokens), float(inputs.input_ids.numel()))
                    metrics = merge_metrics(metrics, {"tree_ratio": ratio})
        return metrics

    def _in_compute_type(self) -> AbstractContextManager[None]:
        if self._float8 is not None:
            self._float8.scale_weights()
        return nullcontext() if self._copies is None else self._copies.in_model()

    def _routed_pass(
        self, inputs: ModelInput, num_tokens: float, *, is_dummy: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | float]:
        """The outputs, and this rank's part of the load-balance loss times the ranks over which FSDP averages."""
        local, routing, ranks = self._own(inputs), self._routing, self._mesh.context
        if routing is None:
            return self._model(local), 0.0
        routing.begin(local.routed_experts, is_counting=True)
        values: tuple[Tensor, ...] = self._model(local)
        place = torch.arange(local.input_ids.numel(), device=local.input_ids.device) * ranks.size + ranks.rank
        valid = place < (0 if is_dummy else inputs.input_ids.numel())
        valid = valid if local.tree is None else local.tree.counts
        loss = routing.finish(valid, self._mesh.all_reduce, num_tokens)
        return values, 0.0 if loss is None else loss * (self.dp_size * ranks.size)

    def _with_images(self, inputs: ModelInput, micro: MicroBatch | None) -> ModelInput:
        reader = self._vision
        if reader is None:
            return inputs
        return with_images(inputs, None if micro is None else micro.batch, reader, runs_tower=self._runs_tower)

    def _own(self, inputs: ModelInput) -> ModelInput:
        ranks = self._mesh.context
        return over_context(inputs, ranks) if ranks.size > 1 else inputs

    def optimizer_step(self, settings: StepSettings | None = None) -> Metrics:
        """`settings`: instead of those of the configuration."""
        loss, self._loss = self._loss, torch.zeros(())
        optimizer = self.optimizer
        metrics = optimizer.step(self._mesh.all_reduce, loss, settings)  # shards of a gradient are on all ranks
        return metrics if self._routing is None else metrics | self._routing.optimizer_step(self._mesh.all_reduce)

    def discard_gradients(self) -> None:
        """Forget the gradients and losses since the last optimiser step. Local."""
        self._loss = torch.zeros(())
        self.optimizer.clear_gradients()

    def all_reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self._mesh.dp_all_reduce(values, op)

    def named_weights(self, *, stored: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The weights in the compute type, float32 heads excepted; `stored`: in the type that the optimiser updates."""
        for name, weight in self._model.named_tensors():
            value = weight.detach() if self._lora is None else self._lora.adapters.merged(name, weight.detach())
            value = value.to(self._mesh.device)
            # Before the ranks exchange it: the same bits in half the bytes.
            value = value if stored else value.to(self._dtype_outside(name, value))
            yield from self._model.form.views(name, whole_tensor(value))

    def weight_specs(self) -> list[WeightSpec]:
        return [
            WeightSpec(
                name=part.name, shape=[*part.shape], dtype=str(self._dtype_outside(name, weight))[len("torch.") :]
            )
            for name, weight in self._model.named_tensors()
            for dtype in [str(self._dtype_outside(name, weight))]
            for part in self._model.form.parts(name)
        ]

    def _dtype_outside(self, name: str, weight: Tensor) -> torch.dtype:
        is_exact = name == FLOAT32_HEAD or name.endswith(EXPERT_BIAS) or name in self._unused
        return self._dtype if weight.is_floating_point() and not is_exact else weight.dtype

    def save(self, path: Path, *, with_optimizer: bool, with_gradients: bool = False) -> None:
        """`with_gradients`: also those since the last optimiser step, which `load` sets again."""
        if not with_optimizer:
            model, options = self._model.model, {"source": self._source, "mesh": self._mesh}
            name = type(model).__name__
            return export_model(path, self, model.config, architecture=name, dtype=self._dtype, **options)
        staged = self.stage(copies=False, with_gradients=with_gradients)
        write_folder(path, self._mesh, staged.write)

    def stage(self, *, copies: bool, with_gradients: bool = False) -> StagedPieces:
        optimizer, changing = self._optimizer, self._changing()
        tensors = {f"weights/{name}": value for name, value in changing.items()}
        if with_gradients:
            tensors |= {
                f"gradients/{name}": weight.grad for name, weight in changing.items() if weight.grad is not None
            }
        if optimizer is not None:
            tensors |= {f"optimizer/{name}": value for name, value in optimizer.state().items()}
        pieces = own_pieces(tensors, self._mesh.rank, self._mesh.world_size)
        return StagedPieces(
            pieces=self._host_copies.of(pieces) if copies else pieces,
            rank=self._mesh.rank,
            world_size=self._mesh.world_size,
            num_steps=0 if optimizer is None else optimizer.num_steps,
            base=self._base,
        )

    def load(self, path: Path) -> None:
        changing = self._changing()
        reader = RecoveryReader(path, {name: tuple(weight.shape) for name, weight in changing.items()}, self._base)
        state: dict[str, Tensor] = {}
        for name, weight in changing.items() if self._optimizer is not None else ():
            for kind, stored in reader.kinds(name).items():
                state[f"{name}/{kind}"] = empty_like(weight, stored)
        weights = {f"weights/{name}": weight.detach() for name, weight in changing.items()}
        gradients: dict[str, Tensor] = {}
        for name, weight in changing.items():
            if (stored := reader.gradient(name)) is not None:
                weight.grad = gradients[f"gradients/{name}"] = empty_like(weight, stored)
        weights |= gradients
        reader.fill(weights | {f"optimizer/{name}": value for name, value in state.items()})
        if self._optimizer is not None:
            self._optimizer.load_state(state, reader.num_steps)

    def save_adapter(self, path: Path) -> None:
        """Write the adapter alone, as `peft` does. Raises InputError on every rank as `save`, and without LoRA."""
        if self._lora is None:
            raise InputError("this model was trained without actor.lora: export it whole", code="adapter.none")
        export_adapter(path, self._lora, self._mesh)

    def _changing(self) -> dict[str, Tensor]:
        """What training changes, by name; with LoRA the adapters."""
        return dict(self._model.named_tensors()) if self._lora is None else self._lora.adapters.state()

    @property
    def _base(self) -> str:
        """`StagedPieces.base` of this model."""
        return "" if self._lora is None else self._lora.identity

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        named, form, targets = dict(self._model.named_tensors()), self._model.form, dict[str, _Target]()
        for name, first in [*((name, name) for name in named), *self._model.tied_names().items()]:
            parts = form.parts(name)
            for part, target in zip(parts, form.parts(first), strict=True):
                targets[part.name] = _Target(target.name, named[first], part if len(parts) > 1 else None)
        self._copy(weights, targets, "the given weights")

    def reset_optimizer(self) -> None:
        self.optimizer.clear_state()

    def _plan(self, batch: TrainBatch) -> tuple[list[list[int]], SortedRows | None]:
        """Micro-batches of this rank, the same number on every rank, and its rows if they are computed as trees.

        Raises InputError on every rank when any rank holds a token id outside the vocabulary.
        """
        vocab_size = self._model.model.config.get_text_config().vocab_size
        if self._vision is None and batch.images:
            raise InputError("a batch has images, and the model takes none", code="model.no_images")

        def all_max(facts: Tensor) -> Tensor:
            maxima = self._mesh.all_reduce(torch.cat([facts, facts.new_tensor([float(len(batch.images))])]), op="max")
            self._runs_tower = self._vision is not None and bool(maxima[-1])
            return maxima[:-1]

        reduce_max = checked_ids(batch, vocab_size, all_max, with_candidates=self._model.spec.candidates is not None)
        patches = () if self._vision is None else self._vision.num_patches(batch)
        self._trees.maps = [{}, *self._trees.maps[:2]]
        rows = rows_that_share(batch, self._vision) if self._as_trees and batch.num_sequences > 1 else None
        return plan_micro_batches(batch.sequence_lengths, self._mb_spec, reduce_max, patches, rows), rows

    @torch.no_grad()
    def _copy(self, weights: Iterable[tuple[str, Tensor]], targets: dict[str, _Target], source: str) -> None:
        """Copy by name; a DTensor takes its shard of the full value. InputError names `source`."""
        missing = {target.name for target in targets.values()}
        for given_name, value in weights:
            target_part = targets.get(given_name)
            if target_part is None:
                continue
            target, part = target_part.tensor, target_part.part
            shape = target.shape if part is None else part.shape
            if tuple(shape) != tuple(value.shape):
                message = f"{source}: {given_name} has shape {list(value.shape)}, the model's has {list(shape)}"
                raise InputError(message, code="model.weights_do_not_fit")
            if part is not None:
                copy_stored_part(target, part, value)
            else:
                copy_part(target, value)
            missing.discard(target_part.name)
        if missing:
            message = f"{source}: {len(missing)} weights of the model are missing, among them {min(missing)}"
            raise InputError(message, code="model.weights_do_not_fit")

    @property
    def optimizer(self) -> ScheduledOptimizer:
        """Raises StageError for a frozen model."""
        if self._optimizer is None:
            raise StageError("optimizer")  # it was built for a frozen model
        return self._optimizer


# ----------------------------------------------------------------------------------------------------------------------
# Builds `FSDPEngine`: loads a Hugging Face model, chooses its head and attention, shards it.

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
    and computes in `compute_dtype`, in which one without, or whose optimiser rounds weights, is held.
    """
    if role in ("critic", "reward") and outputs not in (None, OutputSpec()):
        raise ValueError(f"a {role} model has no distribution over tokens, so it cannot compute {outputs}")
    if config.logprob_kernel == "liger":
        require_liger(mesh.device, outputs or OutputSpec(), tensor_ranks=mesh.dims.tp)
    compute = _DTYPES[config.compute_dtype]
    stored = torch.float32 if config.has_masters else compute  # of weights that are trained
    folder = resolve_model_folder(config.path)
    if (shape := ModelShape.read(str(folder))) is not None and (problem := mesh_problem(shape, mesh.dims)):
        raise ConfigError(f"model {folder}: {problem}", code="model.cannot_split")
    layout = read_vision_layout(str(folder))
    vision = None if layout is None or images is None else VisionReader(layout, images)
    kernel = "sdpa" if layout is not None and layout.is_bidirectional else config.attn_impl
    attention = choose_attention(kernel, mesh.device, compute, in_compiled=config.compile)
    is_mixed = stored != compute
    is_whole = mesh.world_size == 1 and not config.fsdp.offload_params
    if is_mixed:
        is_whole &= mesh.device.type == "cpu" and config.grad_reduce_dtype == "float32"
    kind = {"is_critic": role in ("critic", "reward"), "seed": seed}
    how: dict[str, Any] = {
        "device": mesh.device,
        "dtype": stored if config.lora is None else compute,
        "is_empty": not is_whole,
    }
    hf_model = load_model(folder, config, **kind, **how, attention=attention, takes_images=vision is not None)
    _require_whole_states(hf_model, mesh.dims)
    routing = Routing(routers_of(hf_model), hf_model.config.get_text_config(), config)
    adapters, float8 = _prepare(hf_model, config, mesh, is_sharded=not is_whole)
    model = _token_model(hf_model, config, role, mesh, outputs, () if layout is None else layout.banned_ids)
    model.offloads_activations = config.gradient_checkpointing and config.checkpointing == "offload"
    copies: ComputeCopies | None = None
    if is_whole:  # nothing to shard: the plain model is exact and faster
        model.to(mesh.device)
        exact = [] if vision is not None else other_towers(hf_model)
        exact += [hf_model.get_submodule("score")] if isinstance(model, ValueModel) else []
        exact += [] if float8 is None else float8.exact
        copies = ComputeCopies(model, compute, exact=exact) if is_mixed else None
    else:
        _shard(model, config, mesh, compute=compute, stored=stored, runs_towers=vision is not None)
        device = torch.device("cpu") if config.fsdp.offload_params else mesh.device
        fill_model(hf_model, model.form, folder, config, **kind, device=device)
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
        as_trees=_as_trees(hf_model, config, mesh.dims, mesh.device, layout),
        vision=vision,
        copies=copies,
        float8=float8,
    )


def check_model(config: TrainEngineConfig, *, role: ModelRole, dims: ParallelDims) -> PreTrainedModel:
    """The model of a local folder, without weights, from its configuration alone. Raises the error with which
    `build_fsdp_engine` refuses it, ConfigError or InputError.
    """
    folder, compute, mesh = Path(config.path), _DTYPES[config.compute_dtype], TrainerMesh.open(None)
    layout = read_vision_layout(config.path)
    attention = choose_attention("sdpa", mesh.device, compute)
    is_critic = role in ("critic", "reward")
    model = load_model(
        folder,
        config,
        is_critic=is_critic,
        seed=0,
        device=mesh.device,
        dtype=compute,
        attention=attention,
        is_empty=True,
    )
    _require_whole_states(model, dims)
    if config.shared_prefixes == "tree":
        _as_trees(model, config, dims, mesh.device, layout)
    Routing(routers_of(model), model.config.get_text_config(), config)
    # its compiler may be on the machines of the trainers alone
    _prepare(model, replace(config, compile=False), mesh, is_sharded=True)
    _token_model(model, config, role, mesh, None, () if layout is None else layout.banned_ids)
    if dims.world_size > 1 or compute != torch.float32:
        compute_buffers(model, mesh.device)
    return model


def _require_whole_states(model: PreTrainedModel, dims: ParallelDims) -> None:
    if dims.cp > 1 and (states := state_layers(model)):
        text = f"c{dims.cp} splits sequences, along which {next(iter(states))} of {type(model).__name__} keeps a state"
    elif dims.cp > 1 and choosing_layers(model):
        text = f"c{dims.cp} splits sequences, of which tokens of {type(model).__name__} choose those that they see"
    else:
        return
    raise ConfigError(f"{text}: use d{dims.dp * dims.cp}, without c", code="model.cannot_split")


def _draws_in_training(hf_model: PreTrainedModel, config: TrainEngineConfig) -> bool:
    """Whether a pass in training draws random numbers, for dropout or for routers."""
    text = hf_model.config.get_text_config()
    draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in hf_model.modules())
    draws |= any(getattr(text, name, 0.0) for name in ("attention_dropout", "router_jitter_noise"))
    return draws or (config.lora is not None and config.lora.dropout > 0)


def _as_trees(
    hf_model: PreTrainedModel,
    config: TrainEngineConfig,
    dims: ParallelDims,
    device: torch.device,
    vision: VisionLayout | None,
) -> bool:
    """Whether tokens that rows share are computed once. ConfigError when shared_prefixes=tree cannot be."""
    is_asked = config.shared_prefixes == "tree"
    if not is_asked and (config.shared_prefixes == "off" or device.type != "cpu" or dims.cp > 1):
        return False
    text, compute, text_config = None, _DTYPES[config.compute_dtype], hf_model.config.get_text_config()
    if choosing_layers(hf_model):
        text = "has layers that choose the tokens that they see"
    elif vision is not None and vision.is_bidirectional:
        text = "lets the tokens of an image see later ones"
    elif _draws_in_training(hf_model, config):
        text = "draws random numbers for each token, for dropout or routers"
    for kind, layer in {type(layer): layer for layer in state_layers(hf_model).values()}.items():
        if text is None and not continues_state(layer, text_config, device, compute):
            text = f"has {kind.__name__} layers, whose functions cannot continue a state where rows fork"
    if text is not None and is_asked:
        message = f"shared_prefixes=tree: {type(hf_model).__name__} {text}: use auto or off"
        raise ConfigError(message, code="model.unsupported")
    return text is None


def _optimizer(
    hf_model: PreTrainedModel, config: TrainEngineConfig, total_steps: int, mesh: TrainerMesh
) -> ScheduledOptimizer:
    assert config.optimizer is not None
    trained = {name: weight for name, weight in hf_model.named_parameters() if weight.requires_grad}
    offloads = config.fsdp.offload_optimizer and not config.fsdp.offload_params
    return ScheduledOptimizer(
        trained,
        config.optimizer,
        total_steps,
        world_size=mesh.world_size,
        offloads_state=offloads,
        matrices=_matrices(hf_model),
    )


def _matrices(hf_model: PreTrainedModel) -> set[str]:
    """Names of the weights of linear layers, without the output head and heads of one output, and those of experts."""
    matrices: set[str] = set()
    for path, module in hf_model.named_modules():
        is_linear = isinstance(module, nn.Linear) and module is not hf_model.get_output_embeddings()
        for name, weight in module.named_parameters(recurse=False):
            is_of_experts = weight.ndim == 3 and not isinstance(module, nn.Conv1d) and not name.endswith("bias")
            if ((is_linear and weight.ndim == 2) or is_of_experts) and min(weight.shape[-2:]) > 1:
                matrices.add(f"{path}.{name}")
    return matrices


def _freeze(hf_model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Exclude the weights whose names match from training. ConfigError for a pattern without a match."""
    weights = dict(hf_model.named_parameters())
    for pattern in patterns:
        matching = [name for name in weights if re.search(pattern, name)]
        if not matching:
            text = f"freeze: no weight of the model matches {pattern!r}; the first one is {next(iter(weights))}"
            raise ConfigError(text, code="model.no_such_weight")
        for name in matching:
            weights[name].requires_grad_(False)


def _prepare(
    hf_model: PreTrainedModel, config: TrainEngineConfig, mesh: TrainerMesh, *, is_sharded: bool
) -> tuple[Adapters | None, Float8Layers | None]:
    """What is between construction and sharding, in this order: adapters, FP8, tensor plan, checkpointing,
    compilation."""
    if config.optimizer is None:
        hf_model.requires_grad_(False)
    _freeze(hf_model, config.freeze)
    adapters = None if config.lora is None else Adapters(hf_model, config.lora)
    if config.lora is not None and mesh.rank == 0 and (text := frozen_experts(hf_model, config.lora)):
        get_logger("engine").warning(text)
    float8 = None
    if config.fp8 is not None:
        shards = config.fsdp.shard_size or mesh.dims.dp * mesh.dims.cp
        # torchao loses the scale of a weight that FSDP copies from the CPU, and would reduce one for each weight.
        gathers = is_sharded and not config.fsdp.offload_params
        float8 = Float8Layers(hf_model, config.fp8, mesh=mesh, shards=shards, gathers=gathers)
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
    return adapters, float8


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
        float32_head=has_float32_head(config.head_dtype, mesh.device, _DTYPES[config.compute_dtype]),
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
