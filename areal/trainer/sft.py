"""Supervised fine-tuning: loss and metrics. `row_loop` holds the loop."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from areal.algorithm.aggregate import (
    LossAggregation,
    TokenStat,
    local_denominator,
    loss_weights,
    sequence_means,
    to_metrics,
)
from areal.api.batch import LossOutput, MicroBatch, TokenOutputs, TrainBatch, required
from areal.api.config import SFTConfig, SFTOptions
from areal.api.engine import TrainEngine
from areal.api.metrics import Metric, Metrics, merge_metrics
from areal.data.image_files import MemoryImages
from areal.data.images import ImageWriter
from areal.data.pack import rows_to_train_batch
from areal.data.supervised_rows import EncodedRow
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
