"""Training on pairs of answers: what reward models and DPO share. Pairs are packed as chosen, rejected, chosen, ..."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from areal.algorithm.aggregate import TokenStat, to_metrics
from areal.algorithm.preference import PairPlaces, pair_places
from areal.api.batch import LossOutput, MicroBatch, TokenOutputs, TrainBatch
from areal.api.config import TrainEngineConfig
from areal.api.engine import TrainEngine
from areal.api.metrics import Metrics, merge_metrics
from areal.data.pack import rows_to_train_batch
from areal.data.preference_rows import EncodedPair
from areal.observe.phase import phase
from areal.trainer.row_loop import one_step

PER_PAIR = 2


class PairTask(ABC):
    """Implements `RowTask` for pairs. A subclass compares the two answers of each pair."""

    def __init__(self, role: str, engine: TrainEngine) -> None:
        self._engine = engine
        self.engines = {role: engine}

    @abstractmethod
    def _compare(self, outputs: TokenOutputs, batch: TrainBatch, pairs: PairPlaces) -> dict[str, Tensor]:
        """Numbers of each of P pairs, [P], by the name of their metric; `loss` has the gradient."""

    def _with_reference(self, batch: TrainBatch) -> TrainBatch:
        """Add what the comparison needs besides the model's outputs; a collective."""
        return batch

    def batch_of(self, rows: Sequence[EncodedPair]) -> TrainBatch:
        """The reward of a chosen answer is the margin of its pair."""
        sides = [side for pair in rows for side in (pair.chosen, pair.rejected)]
        batch = rows_to_train_batch([side.token_ids for side in sides], [side.loss_mask for side in sides])
        margins = [margin for pair in rows for margin in (pair.margin, 0.0)]
        groups = torch.arange(len(rows)).repeat_interleave(PER_PAIR)
        return replace(batch, rewards=torch.tensor(margins, dtype=torch.float32), group_ids=groups)

    def update(self, batch: TrainBatch) -> Metrics:
        """One optimiser step; a collective."""
        batch = self._with_reference(batch)
        num_pairs = torch.tensor([batch.num_sequences // PER_PAIR], dtype=torch.float64)
        with phase("update"):
            found = one_step(self._engine, batch, self._loss, local_denominator=num_pairs)
        nothing = torch.zeros(0)  # a rank without pairs reports the same names
        empty = replace(self.batch_of([]), ref_logprobs=nothing)
        names = self._compare(TokenOutputs(logprobs=nothing, scores=nothing), empty, _places_of(empty))
        return merge_metrics(_means(names), found)

    def measure(self, batch: TrainBatch) -> Metrics:
        """Loss and accuracy on held-out pairs; a collective."""
        batch = self._with_reference(batch)
        return _means(self._compare(self._engine.forward(batch), batch, _places_of(batch)))

    def _loss(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Sum of pair losses of a micro-batch; the engine divides by the number of pairs on all ranks."""
        found = self._compare(outputs, micro.batch, _places_of(micro.batch, micro.source_index))
        return LossOutput(loss=found["loss"].sum(), metrics=_means(found))


def with_whole_pairs(config: TrainEngineConfig) -> TrainEngineConfig:
    """The same model with micro-batches of whole pairs."""
    return replace(config, mb_spec=replace(config.mb_spec, granularity=PER_PAIR))


def _places_of(batch: TrainBatch, source_index: Sequence[int] | None = None) -> PairPlaces:
    """The pairs of a micro-batch, or of a whole batch, on the batch's device."""
    found = pair_places(list(range(batch.num_sequences)) if source_index is None else source_index)
    device = batch.input_ids.device
    return PairPlaces(chosen=found.chosen.to(device), rejected=found.rejected.to(device))


def _means(by_name: dict[str, Tensor]) -> Metrics:
    """Means over pairs. Without pairs the metrics have count 0."""
    return to_metrics(
        {name: TokenStat(values, torch.ones_like(values, dtype=torch.bool)) for name, values in by_name.items()}
    )
