"""The FSDP2 train engine: micro-batched passes over packed rows, optimiser steps, loading and saving of weights."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from areal.api.batch import LossFn, MicroBatch, TokenOutputs, TrainBatch, required
from areal.api.config import MicroBatchSpec
from areal.api.data import WeightSpec
from areal.api.engine import ReduceOp
from areal.api.errors import InputError, StageError
from areal.api.metrics import Metrics, merge_metrics
from areal.data.split import token_positions
from areal.engine.adapter_format import PeftAdapter
from areal.engine.checkpoint import export_adapter, export_model, write_folder
from areal.engine.hf_model import other_towers
from areal.engine.mesh import TrainerMesh
from areal.engine.micro_batch import (
    ModelInput,
    checked_ids,
    dummy_input,
    make_micro_batch,
    over_context,
    plan_micro_batches,
    with_images,
)
from areal.engine.optimizer import ScheduledOptimizer
from areal.engine.recovery import HostCopies, RecoveryReader, StagedPieces, empty_like, own_pieces
from areal.engine.region import copy_part, whole_tensor
from areal.engine.routing import EXPERT_BIAS, Routing
from areal.engine.sharded_load import copy_stored_part
from areal.engine.token_model import TokenModel
from areal.engine.vision import VisionReader
from areal.weights.stored_form import StoredPart

FLOAT32_HEAD = "score.weight"
"""The critic's head: computes in float32 and is exported in float32."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a loaded weight goes: a tensor of the model, or a part of it."""

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
        shares_prompts: bool = False,
        repeats_passes: bool = True,
        vision: VisionReader | None = None,
    ) -> None:
        """`dtype` is the compute type; `source` the checkpoint folder whose tokenizer goes into exports.
        `shard_size`: ranks that split the weights together with the tensor ranks (None: all data and context ranks);
        `syncs_every_pass`: gradients are reduced over the ranks after each micro-batch, not after the last of a call.
        `gathers_once`: gathered weights stay until the last micro-batch of a call.
        `repeats_passes`: a pass in training gives the log-probabilities of `forward`, as there is no dropout.
        `vision`: reads the images of batches (None: the model takes none).
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
        self._micro_batch = partial(
            make_micro_batch, device=mesh.device, shares_prompts=shares_prompts, needs_last=model.needs_last
        )
        self._vision = vision
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
        with torch.no_grad():
            for indices in self._plan(batch):
                positions = torch.zeros(0, dtype=torch.int64)
                if indices:
                    micro, inputs = self._micro_batch(batch, indices)
                    positions, _ = token_positions(batch.cu_seqlens, micro.source_index)
                else:
                    micro, inputs = None, dummy_input(batch, self._mesh.device)
                own = self._own(self._with_images(inputs, micro))
                if self._routing is not None:
                    self._routing.begin(own.routed_experts, is_counting=False)
                found: tuple[Tensor, ...] = self._model(own)
                if not whole:
                    shapes = [(batch.num_tokens, *values.shape[1:]) for values in found]
                    whole = [torch.zeros(s, dtype=v.dtype) for s, v in zip(shapes, found, strict=True)]
                for target, values in zip(whole, found, strict=True):
                    if indices:
                        target[positions] = values.cpu()
        if isinstance(self._model, FSDPModule):
            self._model.reshard()  # without a backward pass the root's full weights stay in memory
        return self._model.as_outputs(whole)

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, denominator: float) -> Metrics:
        if not denominator > 0:
            raise ValueError(f"the denominator of a loss must be above 0, but is {denominator}")
        if self._model.spec.candidates:
            required(batch.candidate_ids, "candidate_ids")  # those that forward returned
        self._model.train()
        scale = self.dp_size * self._mesh.context.size / denominator  # FSDP averages over data and context ranks
        metrics: Metrics = {}
        plan = self._plan(batch)
        num_tokens = 0.0
        if self._routing is not None and self._routing.has_loss:
            num_tokens = self.all_reduce(torch.tensor([float(batch.num_tokens)], dtype=torch.float64)).item()
        for number, indices in enumerate(plan, start=1):
            if isinstance(self._model, FSDPModule):
                self._model.set_requires_gradient_sync(self._syncs_every_pass or number == len(plan))
                self._model.set_reshard_after_backward(not self._gathers_once or number == len(plan))
            if not indices:
                inputs = self._with_images(dummy_input(batch, self._mesh.device), None)
                values, balance = self._routed_pass(inputs, num_tokens, is_dummy=True)
                (values[0].sum() * 0.0 + balance).backward()
                continue
            micro, inputs = self._micro_batch(batch, indices)
            values, balance = self._routed_pass(self._with_images(inputs, micro), num_tokens)
            result = loss_fn(self._model.as_outputs(values), micro)
            (result.loss * scale + balance).backward()
            self._loss = self._loss.to(result.loss.device) + result.loss.detach()
            metrics = merge_metrics(metrics, result.metrics)
        return metrics

    def _routed_pass(
        self, inputs: ModelInput, num_tokens: float, *, is_dummy: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | float]:
        """The outputs, and this rank's part of the load-balance loss times the ranks over which FSDP averages."""
        own, routing, ranks = self._own(inputs), self._routing, self._mesh.context
        if routing is None:
            return self._model(own), 0.0
        routing.begin(own.routed_experts, is_counting=True)
        values: tuple[Tensor, ...] = self._model(own)
        place = torch.arange(own.input_ids.numel(), device=own.input_ids.device) * ranks.size + ranks.rank
        valid = place < (0 if is_dummy else inputs.input_ids.numel())
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

    def optimizer_step(self) -> Metrics:
        loss, self._loss = self._loss, torch.zeros(())
        metrics = self._require_optimizer().step(self._mesh.all_reduce, loss)  # shards of a gradient are on all ranks
        return metrics if self._routing is None else metrics | self._routing.optimizer_step(self._mesh.all_reduce)

    def all_reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self._mesh.dp_all_reduce(values, op)

    def named_weights(self, *, stored: bool = False) -> Iterator[tuple[str, Tensor]]:
        """In the compute type, except for float32 heads; `stored`: in the type that the optimiser updates."""
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

    def save(self, path: Path, *, with_optimizer: bool) -> None:
        if not with_optimizer:
            model, options = self._model.model, {"source": self._source, "mesh": self._mesh}
            name = type(model).__name__
            return export_model(path, self, model.config, architecture=name, dtype=self._dtype, **options)
        staged = self.stage(copies=False)
        write_folder(path, self._mesh, staged.write)

    def stage(self, *, copies: bool) -> StagedPieces:
        optimizer = self._optimizer
        tensors = {f"weights/{name}": value for name, value in self._changing().items()}
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
        own = self._changing()
        reader = RecoveryReader(path, {name: tuple(weight.shape) for name, weight in own.items()}, self._base)
        state: dict[str, Tensor] = {}
        for name, weight in own.items() if self._optimizer is not None else ():
            for kind, found in reader.kinds(name).items():
                state[f"{name}/{kind}"] = empty_like(weight, found)
        weights = {f"weights/{name}": weight.detach() for name, weight in own.items()}
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
        own, form, targets = dict(self._model.named_tensors()), self._model.form, dict[str, _Target]()
        for name, first in [*((name, name) for name in own), *self._model.tied_names().items()]:
            parts = form.parts(name)
            for part, target in zip(parts, form.parts(first), strict=True):
                targets[part.name] = _Target(target.name, own[first], part if len(parts) > 1 else None)
        self._copy(weights, targets, "the given weights")

    def reset_optimizer(self) -> None:
        self._require_optimizer().clear_state()

    def _plan(self, batch: TrainBatch) -> list[list[int]]:
        """Micro-batches of this rank, the same number on every rank.

        Raises InputError on every rank when any rank holds a token id outside the vocabulary.
        """
        vocab_size = self._model.model.config.get_text_config().vocab_size
        if self._vision is None and batch.images:
            raise InputError("a batch has images, and the model takes none", code="model.no_images")

        def all_max(facts: Tensor) -> Tensor:
            found = self._mesh.all_reduce(torch.cat([facts, facts.new_tensor([float(len(batch.images))])]), op="max")
            self._runs_tower = self._vision is not None and bool(found[-1])
            return found[:-1]

        reduce_max = checked_ids(batch, vocab_size, all_max, with_candidates=self._model.spec.candidates is not None)
        patches = () if self._vision is None else self._vision.num_patches(batch)
        return plan_micro_batches(batch.sequence_lengths, self._mb_spec, reduce_max, patches)

    @torch.no_grad()
    def _copy(self, weights: Iterable[tuple[str, Tensor]], targets: dict[str, _Target], source: str) -> None:
        """Copy by name; a DTensor takes its shard of the full value. InputError names `source`."""
        missing = {target.name for target in targets.values()}
        for given_name, value in weights:
            found = targets.get(given_name)
            if found is None:
                continue
            target, part = found.tensor, found.part
            shape = target.shape if part is None else part.shape
            if tuple(shape) != tuple(value.shape):
                message = f"{source}: {given_name} has shape {list(value.shape)}, the model's has {list(shape)}"
                raise InputError(message, code="model.weights_do_not_fit")
            if part is not None:
                copy_stored_part(target, part, value)
            else:
                copy_part(target, value)
            missing.discard(found.name)
        if missing:
            message = f"{source}: {len(missing)} weights of the model are missing, among them {min(missing)}"
            raise InputError(message, code="model.weights_do_not_fit")

    def _require_optimizer(self) -> ScheduledOptimizer:
        if self._optimizer is None:
            raise StageError("optimizer")  # it was built for a frozen model
        return self._optimizer
