"""Owns the FSDP2 train engine: micro-batched passes over packed rows, one optimiser step, weights in and out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from areal.api.batch import LossFn, TokenOutputs, TrainBatch
from areal.api.config import MicroBatchSpec
from areal.api.data import WeightSpec
from areal.api.engine import TrainEngine
from areal.api.errors import InputError
from areal.api.metrics import Metrics, merge_metrics
from areal.data.split import token_positions
from areal.engine.checkpoint import RecoveryState, export_model, load_recovery, save_recovery
from areal.engine.mesh import TrainerMesh
from areal.engine.micro_batch import dummy_input, make_micro_batch, plan_micro_batches
from areal.engine.optimizer import ScheduledOptimizer, local_part
from areal.engine.token_model import TokenModel
from areal.weights.weight_files import read_weights

FLOAT32_HEAD = "score.weight"
"""The critic's head, which computes and is exported in float32."""


class FSDPEngine:
    """Implements `areal.api.engine.TrainEngine` for a model that is sharded with FSDP2, or whole on a single rank."""

    def __init__(
        self,
        model: TokenModel,
        *,
        mesh: TrainerMesh,
        optimizer: ScheduledOptimizer | None,
        mb_spec: MicroBatchSpec,
        dtype: torch.dtype,
        source: Path,
    ) -> None:
        """`dtype` is the compute type; `source` the checkpoint folder whose tokenizer goes into exports."""
        self._model = model
        self._mesh = mesh
        self._optimizer = optimizer
        self._mb_spec = mb_spec
        self._dtype = dtype
        self._source = source

    @property
    def dp_rank(self) -> int:
        return self._mesh.rank

    @property
    def dp_size(self) -> int:
        return self._mesh.world_size

    def forward(self, batch: TrainBatch) -> TokenOutputs:
        """Outputs for the whole batch in its own order, no gradient, on the CPU; a collective."""
        self._model.eval()
        whole: list[Tensor] = []
        with torch.no_grad():
            for indices in self._plan(batch):
                positions = torch.zeros(0, dtype=torch.int64)
                if indices:
                    micro, inputs = make_micro_batch(batch, indices, self._mesh.device)
                    positions, _ = token_positions(batch.cu_seqlens, micro.source_index)
                else:
                    inputs = dummy_input(batch, self._mesh.device)
                found: tuple[Tensor, ...] = self._model(inputs)
                if not whole:
                    shapes = [(batch.num_tokens, *values.shape[1:]) for values in found]
                    whole = [torch.zeros(s, dtype=v.dtype) for s, v in zip(shapes, found, strict=True)]
                for target, values in zip(whole, found, strict=True):
                    if indices:
                        target[positions] = values.cpu()
        if isinstance(self._model, FSDPModule):
            self._model.reshard()  # without a backward pass the root's full weights would stay in memory
        return self._model.as_outputs(whole)

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, denominator: float) -> Metrics:
        """Accumulate gradients of (sum of losses over all micro-batches and ranks) / denominator; a collective."""
        if not denominator > 0:
            raise ValueError(f"the denominator of a loss must be above 0, got {denominator}")
        if self._model.spec.candidates and batch.candidate_ids is None:
            raise ValueError("the batch has no candidate_ids: put those that forward gave into it")
        self._model.train()
        scale = self.dp_size / denominator  # FSDP averages gradients over the ranks
        metrics: Metrics = {}
        for indices in self._plan(batch):
            if not indices:
                nothing = self._model(dummy_input(batch, self._mesh.device))[0].sum() * 0.0
                nothing.backward()
                continue
            micro, inputs = make_micro_batch(batch, indices, self._mesh.device)
            result = loss_fn(self._model.as_outputs(self._model(inputs)), micro)
            (result.loss * scale).backward()
            metrics = merge_metrics(metrics, result.metrics)
        return metrics

    def optimizer_step(self) -> Metrics:
        return self._require_optimizer().step(self.all_reduce)

    def all_reduce(self, values: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        return self._mesh.all_reduce(values, op)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full weights in the compute type by Hugging Face name, tied ones once; a collective."""
        for name, weight in self._model.named_tensors():
            value = weight.detach().to(self._mesh.device)
            if isinstance(value, DTensor):
                value = value.full_tensor()
            yield name, value.to(self._dtype_outside(name, value))

    def weight_specs(self) -> list[WeightSpec]:
        """Name, full shape and dtype of each of the `named_weights`."""
        return [
            WeightSpec(
                name=name,
                shape=list(weight.shape),
                dtype=str(self._dtype_outside(name, weight)).removeprefix("torch."),
            )
            for name, weight in self._model.named_tensors()
        ]

    def _dtype_outside(self, name: str, weight: Tensor) -> torch.dtype:
        return self._dtype if weight.is_floating_point() and name != FLOAT32_HEAD else weight.dtype

    def save(self, path: Path, *, with_optimizer: bool) -> None:
        """False: Hugging Face export. True: recovery state (of a model without an optimiser, its weights).

        Whole or absent; a collective.
        """
        if not with_optimizer:
            hf_model = self._model.model
            export_model(
                path,
                self.named_weights(),
                hf_model.config,
                class_name=type(hf_model).__name__,
                dtype=self._dtype,
                source=self._source,
                mesh=self._mesh,
            )
            return
        optimizer = self._optimizer
        state = RecoveryState(
            weights={name: local_part(weight) for name, weight in self._model.named_tensors()},
            optimizer={} if optimizer is None else optimizer.state(),
            num_steps=0 if optimizer is None else optimizer.num_steps,
        )
        save_recovery(path, state, self._mesh)

    def load(self, path: Path, *, with_optimizer: bool) -> None:
        """False: weights of a Hugging Face checkpoint. True: everything that `save` wrote with True."""
        if with_optimizer:
            state = load_recovery(path, self._mesh)
            self._load_weights(state.weights.items(), path, are_local=True)
            if self._optimizer is not None:
                self._optimizer.load_state(state.optimizer, state.num_steps)
        else:
            self._load_weights(read_weights(path), path, are_local=False)

    def copy_weights(self, source: TrainEngine) -> None:
        """Take over the weights of an engine of the same model on the same ranks, shard by shard, in own types."""
        if not isinstance(source, FSDPEngine):
            raise ValueError(f"weights can be copied from an FSDPEngine, not from {type(source).__name__}")
        own = {name: local_part(weight) for name, weight in self._model.named_tensors()}
        given = {name: local_part(weight) for name, weight in source._model.named_tensors()}
        if {name: weight.shape for name, weight in own.items()} != {name: w.shape for name, w in given.items()}:
            raise InputError("weights can be copied between engines of one model only: these have other weights")
        for name, weight in own.items():
            weight.copy_(given[name])

    def reset_optimizer(self) -> None:
        """Forget what the optimiser gathered (moments, their age); the schedule goes on."""
        self._require_optimizer().clear_state()

    def offload(self) -> None:
        """Give the accelerator's memory back: weights and optimiser state go to the CPU until `onload`."""
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        self._move(self._mesh.device)

    def close(self) -> None:
        """Nothing is held beyond this object; the mesh is its opener's."""

    def _plan(self, batch: TrainBatch) -> list[list[int]]:
        """Micro-batches of this rank. InputError on every rank when any holds a token that the model does not have."""
        vocab_size = self._model.model.config.get_text_config().vocab_size
        ids = batch.input_ids
        if batch.candidate_ids is not None and self._model.spec.candidates is not None:
            ids = torch.cat([ids, batch.candidate_ids.flatten()])

        def reduce_max(facts: Tensor) -> Tensor:
            own = [float(ids.max()), -float(ids.min())] if ids.numel() else [0.0, 0.0]
            found = self.all_reduce(torch.cat([facts, torch.tensor(own, dtype=facts.dtype)]), "max")
            highest, lowest = int(found[-2]), -int(found[-1])
            if highest >= vocab_size or lowest < 0:
                raise InputError(
                    f"the train batch holds token id {highest if highest >= vocab_size else lowest}, the model's "
                    f"vocabulary has {vocab_size}: check what the workflow returns, or whether the tokenizer belongs "
                    "to the model"
                )
            return found[:-2]

        return plan_micro_batches(batch.sequence_lengths, self._mb_spec, reduce_max)

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]], path: Path, *, are_local: bool) -> None:
        own = dict(self._model.named_tensors())
        aliases = self._model.tied_names()
        missing = set(own)
        for name, value in weights:
            target = own.get(aliases.get(name, name))
            if target is None:
                continue
            whole = target.to_local() if are_local and isinstance(target, DTensor) else target
            if whole.shape != value.shape:
                raise InputError(
                    f"{path}: weight {name} has shape {list(value.shape)}, the model's has {list(whole.shape)}"
                )
            with torch.no_grad():
                if isinstance(whole, DTensor):
                    source = value.to(self._mesh.device, whole.dtype)
                    whole.copy_(distribute_tensor(source, whole.device_mesh, whole.placements, src_data_rank=None))
                else:
                    whole.copy_(value)
            missing.discard(aliases.get(name, name))
        if missing:
            raise InputError(f"{path} lacks {len(missing)} weights of the model, among them {min(missing)}")

    def _move(self, device: torch.device) -> None:
        if self._mesh.device.type == "cpu":
            return
        self._model.to(device)
        if self._optimizer is not None:
            self._optimizer.move_state(device)
        if device.type == "cpu":
            torch.cuda.empty_cache()

    def _require_optimizer(self) -> ScheduledOptimizer:
        if self._optimizer is None:
            raise ValueError("this engine has no optimiser: it was built for a model that is never trained")
        return self._optimizer
