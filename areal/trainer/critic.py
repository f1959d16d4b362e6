"""Owns the value model's role in training: values before the update, value updates and their metrics."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from areal.algorithm.aggregate import TokenStat, local_denominator, loss_weights, to_metrics
from areal.algorithm.value_loss import clipped_value_loss
from areal.api.batch import LossFn, LossOutput, MicroBatch, TokenOutputs, TrainBatch
from areal.api.config import PPOCriticConfig
from areal.api.engine import TrainEngine
from areal.api.metrics import Metrics, merge_metrics
from areal.trainer.minibatch import minibatches, prefixed, train_on_minibatches


class Critic:
    """The value model on all trainer ranks; every method is called by every rank."""

    def __init__(self, engine: TrainEngine, config: PPOCriticConfig) -> None:
        self._engine = engine
        self._config = config

    def with_values(self, batch: TrainBatch) -> TrainBatch:
        """Add the values at the start of the update; a collective."""
        return replace(batch, values=_values_of(self._engine.forward(batch)))

    def update(self, batch: TrainBatch) -> Metrics:
        """`ppo_n_minibatches` optimiser steps towards `batch.returns`; a collective. Metrics of this rank's tokens."""
        nothing, no_mask = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
        names_only = self._metrics(nothing, nothing, nothing, no_mask, no_mask)
        metrics = train_on_minibatches(self._engine, minibatches(batch, self._config.ppo_n_minibatches), self)
        return prefixed("critic", merge_metrics(names_only, metrics))

    def local_denominators(self, mini: TrainBatch) -> Tensor:
        """This rank's trained tokens of a minibatch, [1] float64."""
        return local_denominator(mini.loss_mask, mini.sequence_index, mini.num_sequences)

    def loss_fn(self, denominators: list[float]) -> LossFn:
        """The loss of the micro-batches of a minibatch."""
        return self._loss

    def _loss(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Sum of token losses of a micro-batch; the engine divides by the global denominator."""
        batch, values = micro.batch, _values_of(outputs)
        if batch.values is None or batch.returns is None:
            raise ValueError("the batch has no values or returns: call with_values and with_advantages before update")
        mask = batch.loss_mask
        result = clipped_value_loss(values, batch.values, batch.returns, mask, eps_clip=self._config.eps_clip)
        weights = loss_weights(mask, batch.sequence_index, batch.num_sequences)
        metrics = self._metrics(result.losses, values, batch.returns, result.clipped, mask)
        return LossOutput(loss=(weights * result.losses).sum(), metrics=metrics)

    @staticmethod
    def _metrics(losses: Tensor, values: Tensor, returns: Tensor, clipped: Tensor, mask: Tensor) -> Metrics:
        return to_metrics(
            {
                "loss": TokenStat(losses, mask),
                "value": TokenStat(values, mask),
                "squared_error": TokenStat((values.detach() - returns).square(), mask),
                "clip_ratio": TokenStat(clipped, mask),
            }
        )


def _values_of(outputs: TokenOutputs) -> Tensor:
    if outputs.values is None:
        raise ValueError("the critic's engine gave no values: it was built as a language model")
    return outputs.values
