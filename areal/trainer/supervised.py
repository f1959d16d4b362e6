"""Supervised fine-tuning: loss and metrics. `row_loop` holds the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from areal.algorithm.aggregate import (
    LossAggregation,
    TokenStat,
    local_denominator,
    loss_weights,
    sequence_means,
    sequence_sums,
    to_metrics,
)
from areal.algorithm.preference import (
    PairPlaces,
    dpo_losses,
    ipo_losses,
    pair_places,
    preference_accuracy,
    preference_log_ratios,
)
from areal.api.batch import LossOutput, MicroBatch, TokenOutputs, TrainBatch, required
from areal.api.config import DPOConfig, DPOOptions, SFTConfig, SFTOptions, TrainEngineConfig
from areal.api.engine import TrainEngine
from areal.api.metrics import Metric, Metrics, merge_metrics
from areal.data.image_files import MemoryImages
from areal.data.images import ImageWriter
from areal.data.pack import rows_to_train_batch
from areal.data.supervised_rows import EncodedPair, EncodedRow
from areal.observe.phase import phase
from areal.trainer.row_loop import EngineBuilder, RowTask, RowTrainer, one_step


class SFTTask:
    """Implements `RowTask`: a language model learns the tokens that the loss mask selects."""

    def __init__(
        self,
        engine: TrainEngine,
        options: SFTOptions,
        images: MemoryImages | None = None,
        writer: ImageWriter | None = None,
    ) -> None:
        """`images`: what the engine reads images of rows from. `writer`: puts them there; None = rows have none."""
        self._engine = engine
        self._images = images or MemoryImages()
        self._writer = writer
        self._aggregation: LossAggregation = cast("LossAggregation", options.loss_aggregation)
        self._scale_tokens = options.loss_scale_tokens

    @property
    def engines(self) -> dict[str, TrainEngine]:
        return {"model": self._engine}

    def batch_of(self, rows: Sequence[EncodedRow]) -> TrainBatch:
        self._images.clear()
        writer = self._writer
        images = () if writer is None else [writer.store(row.images) for row in rows]
        return rows_to_train_batch([row.token_ids for row in rows], [row.loss_mask for row in rows], images)

    def update(self, batch: TrainBatch) -> Metrics:
        """One optimiser step; a collective."""
        with phase("update"):
            metrics = one_step(self._engine, batch, self._loss, local_denominator=self._denominator(batch))
        # a rank without rows reports the same names
        return merge_metrics({"loss": Metric(0.0, 0.0), "perplexity": Metric(0.0, 0.0)}, metrics)

    def measure(self, batch: TrainBatch) -> Metrics:
        """The training loss as a mean over held-out rows; a collective."""
        return self._metrics(batch, required(self._engine.forward(batch).logprobs, "logprobs"))

    def _loss(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Sum of weighted -log p over the trained tokens of a micro-batch; the engine divides by the denominator."""
        batch, logprobs = micro.batch, required(outputs.logprobs, "logprobs")
        return LossOutput(loss=self._sum(batch, logprobs), metrics=self._metrics(batch, logprobs.detach()))

    def _sum(self, batch: TrainBatch, logprobs: Tensor) -> Tensor:
        mask = batch.loss_mask
        weights = loss_weights(mask, batch.sequence_index, batch.num_sequences, self._aggregation)
        return -(weights * torch.where(mask, logprobs, 0.0)).sum()

    def _denominator(self, batch: TrainBatch) -> Tensor:
        return local_denominator(
            batch.loss_mask, batch.sequence_index, batch.num_sequences, self._aggregation, self._scale_tokens
        )

    def _metrics(self, batch: TrainBatch, logprobs: Tensor) -> Metrics:
        """The loss, and the mean over sequences of exp(mean -log p)."""
        means, trained = sequence_means(logprobs, batch.loss_mask, batch.sequence_index, batch.num_sequences)
        loss = Metric(float(self._sum(batch, logprobs)), float(self._denominator(batch)))
        return {"loss": loss} | to_metrics({"perplexity": TokenStat(torch.exp(-means.double()), trained)})


class SFTTrainer(RowTrainer[SFTConfig, EncodedRow]):
    """Fine-tunes `config.model` on encoded rows, in every trainer rank."""

    def _build_task(self, build: EngineBuilder, *, total_steps: int) -> RowTask[EncodedRow]:
        engine = build(self._config.model, role="actor", total_steps=total_steps)
        return SFTTask(engine, self._config.sft, self._images, ImageWriter.of(self._config, self._images))


# ----------------------------------------------------------------------------------------------------------------------
# Direct preference optimisation: a policy learns from pairs of answers, relative to a frozen reference.

# ----------------------------------------------------------------------------------------------------------------------
# Training on pairs of answers: what reward models and DPO share. Pairs are packed as chosen, rejected, chosen, ...

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
            metrics = one_step(self._engine, batch, self._loss, local_denominator=num_pairs)
        nothing = torch.zeros(0)  # a rank without pairs reports the same names
        empty = replace(self.batch_of([]), ref_logprobs=nothing)
        names = self._compare(TokenOutputs(logprobs=nothing, scores=nothing), empty, _places_of(empty))
        return merge_metrics(_means(names), metrics)

    def measure(self, batch: TrainBatch) -> Metrics:
        """Loss and accuracy on held-out pairs; a collective."""
        batch = self._with_reference(batch)
        return _means(self._compare(self._engine.forward(batch), batch, _places_of(batch)))

    def _loss(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Sum of pair losses of a micro-batch; the engine divides by the number of pairs on all ranks."""
        compared = self._compare(outputs, micro.batch, _places_of(micro.batch, micro.source_index))
        return LossOutput(loss=compared["loss"].sum(), metrics=_means(compared))


def with_whole_pairs(config: TrainEngineConfig) -> TrainEngineConfig:
    """The same model with micro-batches of whole pairs."""
    return replace(config, mb_spec=replace(config.mb_spec, granularity=PER_PAIR))


def _places_of(batch: TrainBatch, source_index: Sequence[int] | None = None) -> PairPlaces:
    """The pairs of a micro-batch, or of a whole batch, on the batch's device."""
    places = pair_places(list(range(batch.num_sequences)) if source_index is None else source_index)
    device = batch.input_ids.device
    return PairPlaces(chosen=places.chosen.to(device), rejected=places.rejected.to(device))


def _means(by_name: dict[str, Tensor]) -> Metrics:
    """Means over pairs. Without pairs the metrics have count 0."""
    return to_metrics(
        {name: TokenStat(values, torch.ones_like(values, dtype=torch.bool)) for name, values in by_name.items()}
    )


class DPOTask(PairTask):
    """The chosen answer of a pair gains probability over the rejected one, relative to a reference."""

    def __init__(self, engine: TrainEngine, reference: TrainEngine | None, options: DPOOptions) -> None:
        """`reference` None: its log-probabilities are 0 (dpo.reference_free); `engine`: its base model without
        adapters."""
        super().__init__("actor", engine)
        self._reference = reference
        self._options = options

    def _with_reference(self, batch: TrainBatch) -> TrainBatch:
        if self._reference is None:
            return batch
        with phase("ref_logprobs"):
            is_base, ref = self._reference is self._engine, self._reference
            outputs = ref.forward(batch, with_adapters=False) if is_base else ref.forward(batch)
            return replace(batch, ref_logprobs=required(outputs.logprobs, "logprobs"))

    def _compare(self, outputs: TokenOutputs, batch: TrainBatch, pairs: PairPlaces) -> dict[str, Tensor]:
        """Rewards are implicit: beta (log pi - log ref)."""
        options, logprobs = self._options, required(outputs.logprobs, "logprobs")
        means, _ = sequence_means(logprobs, batch.loss_mask, batch.sequence_index, batch.num_sequences)
        loss = self._reduced(logprobs, batch)
        ref = torch.zeros_like(loss) if batch.ref_logprobs is None else self._reduced(batch.ref_logprobs, batch)
        chosen, rejected, chosen_mean = loss[pairs.chosen], loss[pairs.rejected], means[pairs.chosen]
        log_ratios = preference_log_ratios(chosen, rejected, ref[pairs.chosen], ref[pairs.rejected])
        if options.loss_type == "ipo":
            losses = ipo_losses(log_ratios, beta=options.beta)
        else:
            losses = dpo_losses(log_ratios, beta=options.beta, label_smoothing=options.label_smoothing)
        rewards = options.beta * (loss - ref)
        good, bad = rewards[pairs.chosen], rewards[pairs.rejected]
        return {
            "loss": losses - options.nll_coef * chosen_mean if options.nll_coef else losses,
            "accuracy": preference_accuracy(good, bad),
            "rewards/chosen": good,
            "rewards/rejected": bad,
            "rewards/margin": good - bad,
            "logps/chosen": chosen,
            "logps/rejected": rejected,
            "nll/chosen": -chosen_mean,
        }

    def _reduced(self, logprobs: Tensor, batch: TrainBatch) -> Tensor:
        """[T] -> [S]"""
        place = (batch.loss_mask, batch.sequence_index, batch.num_sequences)
        if self._options.logp_reduction == "mean":
            return sequence_means(logprobs, *place)[0]
        return sequence_sums(logprobs, *place)


class DPOTrainer(RowTrainer[DPOConfig, EncodedPair]):
    """Trains the policy `config.actor` on pairs, in every trainer rank."""

    def _build_task(self, build: EngineBuilder, *, total_steps: int) -> RowTask[EncodedPair]:
        config = self._config
        engine = build(with_whole_pairs(config.actor), role="actor", total_steps=total_steps)
        reference = None
        if config.ref is not None and not config.dpo.reference_free:
            is_base = config.reference_is_base
            reference = engine if is_base else build(with_whole_pairs(config.ref), role="ref", total_steps=0)
        return DPOTask(engine, reference, config.dpo)
