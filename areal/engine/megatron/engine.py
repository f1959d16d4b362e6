"""The Megatron-Core train engine: micro-batches through pipeline stages, optimiser steps, loading and saving."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_CLASSES,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as SEQUENCE_CLASSES,
)

from areal.api.batch import CANDIDATE_IDS, LossFn, MicroBatch, TokenOutputs, TrainBatch
from areal.api.config import TrainEngineConfig
from areal.api.data import WeightSpec
from areal.api.engine import ReduceOp
from areal.api.errors import StageError
from areal.api.metrics import Metric, Metrics, merge_metrics
from areal.data.pack import token_positions
from areal.engine.checkpoint import HostCopies, Piece, RecoveryReader, StagedPieces, export_model, write_folder
from areal.engine.megatron.model import HeadPlan, use_chunks
from areal.engine.megatron.model_config import row_multiple, varies_rows
from areal.engine.megatron.optimizer import MegatronOptimizer
from areal.engine.megatron.weight_map import HEAD, MappedWeight
from areal.engine.megatron.weights import RankWeights, copy_weights, key_of
from areal.engine.mesh import TrainerMesh
from areal.engine.micro_batch import (
    ModelInput,
    checked_ids,
    dummy_input,
    make_micro_batch,
    over_context,
    padded,
    plan_micro_batches,
)
from areal.engine.routing import EXPERT_BIAS, Routing
from areal.engine.token_model import policy_outputs

# ----------------------------------------------------------------------------------------------------------------------
# Recovery state of a Megatron-Core model by Hugging Face name: any mesh of any engine loads it.

# pyright: reportMissingImports=false


def staged_pieces(weights: RankWeights, optimizer: MegatronOptimizer | None, mesh: TrainerMesh) -> StagedPieces:
    """The weights and the optimiser's state, each part on one of the ranks that hold it; a collective."""
    kinds = () if optimizer is None else optimizer.kinds()
    step = None if optimizer is None or not kinds else torch.tensor(optimizer.num_updates())
    pieces: dict[str, Piece] = {}
    for number, (weight, parameter) in enumerate(weights.of_rank(with_copies=False)):
        group, state = weights.data_group(weight), {"value": parameter.detach()}
        if optimizer is not None:
            state = optimizer.state_of(weight, parameter, kinds)
        is_first = weights.tensor_group(weight).rank() == 0
        if weight.expert is None:
            pieces_of_weight = _pieces_of(weights, weight, state) if weight.split is not None or is_first else {}
        else:
            number = weight.layer or 0  # one rank writes the experts of a layer, which are one tensor
            pieces_of_weight = {kind: weights.gathered(weight, value) for kind, value in state.items()}
            pieces_of_weight = _joined_experts(weights, weight, pieces_of_weight, pieces) if is_first else {}
        if number % group.size() == group.rank():
            pieces |= pieces_of_weight
            if step is not None and is_first and len(state) > 1:
                pieces |= {_name("step", part.state_name): Piece(step, ()) for part in weight.parts}
    steps = 0 if optimizer is None else optimizer.num_steps
    return StagedPieces(pieces=pieces, rank=mesh.rank, world_size=mesh.world_size, num_steps=steps)


def _pieces_of(weights: RankWeights, weight: MappedWeight, state: Mapping[str, Tensor]) -> dict[str, Piece]:
    group = weights.tensor_group(weight)
    pieces: dict[str, Piece] = {}
    for kind, value in state.items():
        for part, tensor in zip(weight.parts, weight.divided(value), strict=True):
            region = weight.region(part, group.rank(), group.size())
            pieces[_name(kind, part.state_name)] = Piece(tensor.contiguous(), part.state_offsets(region))
    return pieces


def _joined_experts(
    weights: RankWeights, weight: MappedWeight, state: Mapping[str, list[Tensor]], pieces: Mapping[str, Piece]
) -> dict[str, Piece]:
    """The pieces of all experts of this rank in a layer, with the values of one expert filled in.

    `state`: the whole parts by kind. `pieces`: with those of the experts before it.
    """
    experts: dict[str, Piece] = {}
    for kind, parts in state.items():
        for part, value in zip(weight.parts, parts, strict=True):
            name, (expert, row, _) = _name(kind, part.state_name), part.state_offsets([slice(0, 0)] * value.dim())
            piece = experts.get(name) or pieces.get(name)
            if piece is None:
                whole = value.new_empty(weights.num_experts, *part.state_shape[1:])
                piece = Piece(whole, (expert, 0, 0))
            experts[name] = piece
            piece.values[expert - piece.offsets[0], row : row + len(value)] = value
    return experts


def _name(kind: str, weight: str) -> str:
    return f"weights/{weight}" if kind == "value" else f"optimizer/{weight}/{kind}"


def load_state(folder: Path, weights: RankWeights, optimizer: MegatronOptimizer | None) -> None:
    """Continue from the files of an engine. Raises InputError when they do not fit this model."""
    shapes = {part.state_name: part.state_shape for weight in weights.weights for part in weight.parts}
    reader = RecoveryReader(folder, shapes)
    for weight, parameter in weights.of_rank():
        kinds = {} if optimizer is None else reader.kinds(weight.parts[0].state_name)
        state = {kind: _local(reader, weights, weight, kind) for kind in ("value", *sorted(set(kinds) - {"step"}))}
        if optimizer is None:
            with torch.no_grad():
                parameter.copy_(state["value"])
            continue
        step = torch.zeros(())
        if "step" in kinds:
            reader.fill({_name("step", weight.parts[0].state_name): step})
        optimizer.set_state(parameter, state, float(step))
    if optimizer is not None:
        optimizer.num_steps = reader.num_steps


def _local(reader: RecoveryReader, weights: RankWeights, weight: MappedWeight, kind: str) -> Tensor:
    """This rank's part of a weight, or of the optimiser's state of it."""
    group = weights.tensor_group(weight)
    parts: list[Tensor] = []
    for part in weight.parts:
        region = weight.region(part, group.rank(), group.size())
        offsets = part.state_offsets(region)
        values = torch.empty([each.stop - each.start for each in region])
        target = values.view(*[1] * (len(offsets) - values.dim()), *values.shape)
        reader.fill_pieces({_name(kind, part.state_name): Piece(target, offsets)})
        parts.append(values)
    return weight.joined(parts)


# pyright: reportMissingImports=false


@dataclass(frozen=True, slots=True)
class _Work:
    """One micro-batch: what every stage computes; `micro` is None for a rank without sequences."""

    inputs: ModelInput
    num_tokens: int
    micro: MicroBatch | None
    positions: Tensor
    """Positions of its tokens in the batch."""


class MegatronEngine:
    """Implements `areal.api.engine.TrainEngine`: tensor, pipeline, context, expert and data ranks of Megatron-Core.

    The last pipeline stage computes the losses, equal on the tensor and context ranks of a data-parallel rank; outputs
    and metrics then go to the other stages.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        *,
        hf: Any,
        head: HeadPlan,
        weights: RankWeights,
        config: TrainEngineConfig,
        mesh: TrainerMesh,
        groups: ProcessGroupCollection,
        optimizer: MegatronOptimizer | None,
        routing: Routing | None,
        dtype: torch.dtype,
        source: Path,
    ) -> None:
        self._chunks, self._hf, self._head, self._weights = list(chunks), hf, head, weights
        self._config, self._mesh, self._groups = config, mesh, groups
        self._optimizer, self._dtype, self._source = optimizer, dtype, source
        self._routing = routing
        self._is_last = mesh.stage == mesh.dims.pp - 1
        self._host_copies = HostCopies()
        self._loss = torch.zeros(())
        """Sum of the losses of this rank since the last optimiser step."""
        if optimizer is not None:
            optimizer.clear_gradients()

    @property
    def dp_rank(self) -> int:
        return self._mesh.dp_rank

    @property
    def dp_size(self) -> int:
        return self._mesh.dp_size

    def all_reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self._mesh.dp_all_reduce(values, op)

    def forward(self, batch: TrainBatch, *, with_adapters: bool = True) -> TokenOutputs:
        for chunk in self._chunks:
            chunk.eval()
        results: list[tuple[_Work, tuple[Tensor, ...]]] = []
        with torch.no_grad():
            self._run(batch, lambda work, outputs: results.append((work, outputs)))
        whole: list[Tensor] = []
        for work, outputs in results:
            if not whole:
                whole = [torch.zeros((batch.num_tokens, *v.shape[1:]), dtype=v.dtype) for v in outputs]
            for target, values in zip(whole, outputs, strict=True):
                if work.micro is not None:
                    target[work.positions] = values.cpu()
        return self._as_outputs(self._from_last(whole))

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, denominator: float) -> Metrics:
        if not denominator > 0:
            raise ValueError(f"the denominator of a loss must be above 0, but is {denominator}")
        if self._head.spec.candidates:
            batch.column(CANDIDATE_IDS)  # those that forward returned
        self._require_optimizer()
        for chunk in self._chunks:
            chunk.train()
        metrics: list[Metrics] = []

        def loss_of(work: _Work, outputs: tuple[Tensor, ...]) -> Tensor:
            if work.micro is None:
                return outputs[0].sum() * 0.0
            result = loss_fn(self._as_outputs(outputs), work.micro)
            self._loss = self._loss.to(result.loss.device) + result.loss.detach()
            metrics.append(result.metrics)
            return result.loss / denominator

        self._run(batch, loss_of, with_backward=True)
        return self._metrics_from_last(merge_metrics(*metrics))

    def optimizer_step(self) -> Metrics:
        optimizer, loss = self._require_optimizer(), self._loss
        self._loss = torch.zeros(())
        finalize_model_grads(self._chunks, pg_collection=self._groups)  # pyright: ignore[reportArgumentType]
        metrics = optimizer.step(loss)
        return metrics if self._routing is None else metrics | self._routing.optimizer_step(self._mesh.all_reduce)

    def reset_optimizer(self) -> None:
        self._require_optimizer().clear_state()

    def named_weights(self, *, stored: bool = False) -> Iterator[tuple[str, Tensor]]:
        if self._optimizer is not None:
            self._optimizer.gather_weights()
        for weight in self._weights.weights:
            local, dtype = self._weights.parameters.get(key_of(weight)), self._dtype_of(weight)
            if stored and self._optimizer is not None:
                dtype = torch.float32
                local = None if local is None else self._optimizer.state_of(weight, local, ())["value"]
            parts = self._weights.whole(weight, local, dtype)
            for part, value in zip(weight.parts, parts, strict=True):
                yield part.name, value

    def weight_specs(self) -> list[WeightSpec]:
        return [
            WeightSpec(name=part.name, shape=[*part.shape], dtype=str(self._dtype_of(weight))[len("torch.") :])
            for weight in self._weights.weights
            for part in weight.parts
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        copy_weights(self._weights, weights, Tensor.copy_ if self._optimizer is None else self._optimizer.set_value)

    def save(self, path: Path, *, with_optimizer: bool) -> None:
        if with_optimizer:
            return write_folder(path, self._mesh, self.stage(copies=False).write)
        names = SEQUENCE_CLASSES if self._head.has_score else CAUSAL_CLASSES
        export_model(
            path,
            self,
            self._hf,
            architecture=str(names[self._hf.model_type]),
            dtype=self._dtype,
            source=self._source,
            mesh=self._mesh,
        )

    def stage(self, *, copies: bool) -> StagedPieces:
        staged = staged_pieces(self._weights, self._optimizer, self._mesh)
        return replace(staged, pieces=self._host_copies.of(staged.pieces)) if copies else staged

    def load(self, path: Path) -> None:
        load_state(path, self._weights, self._optimizer)

    def _dtype_of(self, weight: MappedWeight) -> torch.dtype:
        is_exact = weight.parts[0].name == HEAD or weight.name.endswith(EXPERT_BIAS)
        return torch.float32 if is_exact else self._dtype

    def _as_outputs(self, values: Sequence[Tensor]) -> TokenOutputs:
        if self._head.role == "critic":
            return TokenOutputs(values=values[0])
        return (
            TokenOutputs(scores=values[0]) if self._head.role == "reward" else policy_outputs(self._head.spec, values)
        )

    def _run(
        self,
        batch: TrainBatch,
        use: Callable[[_Work, tuple[Tensor, ...]], Tensor | None],
        *,
        with_backward: bool = False,
    ) -> None:
        """Send the micro-batches of a batch through the stages; `use` gets the outputs on the last one."""
        plan, chunks = self._plan(batch), len(self._chunks)
        if chunks > 1:  # the interleaved schedule wants a multiple of the stages
            plan += [[] for _ in range(-len(plan) % self._mesh.dims.pp)]
        multiple = self._multiple(batch, plan)
        use_chunks(chunks)
        config = get_model_config(self._chunks[0])
        # gradients are divided by the data and context ranks where the collective averages them
        scale = 1.0 if config.calculate_per_token_loss else float(len(plan) * self._mesh.dp_size)

        def take_loss(work: _Work, outputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
            loss_of_outputs = use(work, tuple(values[: work.num_tokens] for values in outputs))
            loss = outputs[0].sum() * 0.0 if loss_of_outputs is None else loss_of_outputs * scale
            count = torch.zeros((), dtype=torch.int, device=loss.device)
            return (loss, count, {}) if config.calculate_per_token_loss else (loss, {})

        num_tokens = self._num_tokens(batch) if with_backward else 0.0

        def step(works: Iterator[_Work], model: nn.Module) -> tuple[Any, Any]:
            work = next(works)
            if self._routing is None:
                return model(work.inputs), partial(take_loss, work)
            valid = self._valid(work)
            recorded = None if work.inputs.routed_experts is None else self._of_tensor_rank(work.inputs.routed_experts)
            self._routing.begin(recorded, is_counting=with_backward, valid=valid if with_backward else None)
            outputs = model(work.inputs)
            if with_backward:
                self._routing.finish(valid, self._mesh.all_reduce, num_tokens)
            return outputs, partial(take_loss, work)

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[self._works(batch, plan, multiple) for _ in range(chunks)],
            model=self._chunks,
            num_microbatches=len(plan),
            seq_length=multiple,  # unused with one chunk: the stages exchange the shapes
            micro_batch_size=1,
            forward_only=not with_backward,
        )

    def _multiple(self, batch: TrainBatch, plan: list[list[int]]) -> int:
        """What divides the tokens of every micro-batch; where these must not vary, their number."""
        dims = self._mesh.dims
        options = self._config.megatron
        ranks = dims.cp * (dims.tp if self._splits_tokens else 1) * row_multiple(options)
        if varies_rows(options):
            return ranks
        lengths = batch.sequence_lengths
        longest = max([2, *(sum(lengths[place] for place in indices) for indices in plan)])  # 2: a row without work
        if options.moe_token_dispatcher_type == "allgather":
            longest = int(self._mesh.all_reduce(torch.tensor([float(longest)]), "max").item())
        return ranks * -(-longest // ranks)

    def _works(self, batch: TrainBatch, plan: list[list[int]], multiple: int) -> Iterator[_Work]:
        mesh = self._mesh
        for indices in plan:
            micro, positions = None, torch.zeros(0, dtype=torch.int64)
            if indices:
                micro, inputs = make_micro_batch(batch, indices, mesh.device)
                positions, _ = token_positions(batch.cu_seqlens, micro.source_index)
            else:
                inputs = dummy_input(batch, mesh.device)
            count = inputs.input_ids.numel()
            inputs = padded(inputs, multiple)
            if mesh.context.size > 1:
                inputs = over_context(inputs, mesh.context)
            yield _Work(inputs, count, micro, positions)

    def _num_tokens(self, batch: TrainBatch) -> float:
        """Tokens of the whole batch on all ranks, divided by what the collective of the gradients divides."""
        if self._routing is None or not self._routing.has_loss:
            return 0.0
        total = self.all_reduce(torch.tensor([float(batch.num_tokens)], dtype=torch.float64)).item()
        is_sum = get_model_config(self._chunks[0]).calculate_per_token_loss
        return total if is_sum else total / (self._mesh.dp_size * self._mesh.context.size)

    def _valid(self, work: _Work) -> Tensor:
        """Which of the tokens that the layers of this rank see are of sequences of the batch: [T] bool."""
        ids, ranks = work.inputs.input_ids, self._mesh.context
        place = torch.arange(ids.numel(), device=ids.device) * ranks.size + ranks.rank
        return self._of_tensor_rank(place < (0 if work.micro is None else work.num_tokens))

    def _of_tensor_rank(self, values: Tensor) -> Tensor:
        """The part of this tensor rank of values per token."""
        ranks = self._mesh.tensor
        return values.chunk(ranks.size)[ranks.rank] if self._splits_tokens else values

    @property
    def _splits_tokens(self) -> bool:
        return bool(get_model_config(self._chunks[0]).sequence_parallel)

    def _plan(self, batch: TrainBatch) -> list[list[int]]:
        all_max, with_candidates = partial(self._mesh.all_reduce, op="max"), self._head.spec.candidates is not None
        reduce_max = checked_ids(batch, self._hf.vocab_size, all_max, with_candidates=with_candidates)
        return plan_micro_batches(batch.sequence_lengths, self._config.mb_spec, reduce_max)

    def _from_last(self, whole: list[Tensor]) -> list[Tensor]:
        """The outputs of the last stage on every stage."""
        group = self._groups.pp
        if group.size() == 1:
            return whole
        shapes = [[*value.shape] for value in whole]
        dtypes = [str(value.dtype)[len("torch.") :] for value in whole]
        facts = self._text_from_last(json.dumps([shapes, dtypes]))
        result: list[Tensor] = []
        for place, (shape, dtype) in enumerate(zip(*json.loads(facts), strict=True)):
            value = whole[place] if self._is_last else torch.empty(shape, dtype=getattr(torch, dtype))
            value = value.to(self._mesh.device).contiguous()
            dist.broadcast(value, group_src=group.size() - 1, group=group)
            result.append(value.cpu())
        return result

    def _metrics_from_last(self, metrics: Metrics) -> Metrics:
        if self._groups.pp.size() == 1:
            return metrics
        text = json.dumps({name: asdict(metric) for name, metric in metrics.items()})
        return {name: Metric(**fields) for name, fields in json.loads(self._text_from_last(text)).items()}

    def _text_from_last(self, text: str) -> str:
        group, device = self._groups.pp, self._mesh.device
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
        size = torch.tensor([content.numel()], device=device)
        dist.broadcast(size, group_src=group.size() - 1, group=group)
        if not self._is_last:
            content = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
        dist.broadcast(content, group_src=group.size() - 1, group=group)
        return bytes(content.cpu().tolist()).decode()

    def _require_optimizer(self) -> MegatronOptimizer:
        if self._optimizer is None:
            raise StageError("optimizer")  # it was built for a frozen model
        return self._optimizer
