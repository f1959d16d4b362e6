"""The value model in training: values before the update, value updates and their metrics."""

from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from areal.algorithm.aggregate import (
    LossAggregation,
    TokenStat,
    local_denominator,
    loss_scale,
    loss_weights,
    to_metrics,
)
from areal.algorithm.value_loss import value_loss
from areal.api.batch import LossFn, LossOutput, MicroBatch, TokenOutputs, TrainBatch, required
from areal.api.config import PPOCriticConfig
from areal.api.engine import TrainEngine
from areal.api.metrics import Metrics
from areal.data.sessions import with_session_tokens
from areal.trainer.minibatch import Passes, prefixed, train_on_minibatches
from areal.trainer.progress import updating


class Critic:
    """The value model on all trainer ranks; every method is called by every rank."""

    def __init__(self, engine: TrainEngine, config: PPOCriticConfig, *, seed: int = 0) -> None:
        """`seed`: of the run; it determines the order of sequences in later epochs of a batch."""
        self._engine = engine
        self._config = config
        self._seed = seed
        self._aggregation: LossAggregation = cast("LossAggregation", config.loss_aggregation)

    def with_values(self, batch: TrainBatch) -> TrainBatch:
        """Add the values at the start of the update; a collective."""
        return replace(batch, values=required(self._engine.forward(batch).values, "values"))

    def update(self, batch: TrainBatch, *, step: int = 0) -> Metrics:
        """`ppo_epochs` times `ppo_n_minibatches` optimiser steps towards `batch.returns` in train step `step`.

        A collective. Metrics of this rank's tokens.
        """
        config = self._config
        passes = Passes(
            num_minibatches=config.ppo_n_minibatches, num_epochs=config.ppo_epochs, seed=self._seed, step=step
        )
        with updating("critic", step):
            return prefixed("critic", train_on_minibatches(self._engine, batch, passes, self))

    def with_weights(self, mini: TrainBatch) -> TrainBatch:
        """The mini-batch with the numbers of trained tokens of whole sessions."""
        return with_session_tokens(mini, mini.loss_mask)

    def local_denominators(self, mini: TrainBatch) -> Tensor:
        """This rank's part of the denominator of a mini-batch, [1] float64."""
        return local_denominator(
            mini.loss_mask,
            mini.sequence_index,
            mini.num_sequences,
            self._aggregation,
            self._config.loss_scale_tokens,
            mini.session_tokens,
        )

    def loss_fn(self, denominators: list[float]) -> LossFn:
        """The loss of the micro-batches of a mini-batch with this global denominator."""
        scale = loss_scale(self._aggregation, denominators[0], self._config.loss_scale_tokens)
        return partial(self._loss, scale=scale)

    def names_only(self) -> Metrics:
        """Every metric that an update reports, of no tokens."""
        nothing, no_mask = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
        return self._metrics(nothing, nothing, nothing, no_mask, no_mask)

    def _loss(self, outputs: TokenOutputs, micro: MicroBatch, *, scale: float) -> LossOutput:
        """Sum of weighted token losses of a micro-batch; the engine divides by the global denominator."""
        batch, values, config = micro.batch, required(outputs.values, "values"), self._config
        old, returns, mask = required(batch.values, "values"), required(batch.returns, "returns"), batch.loss_mask
        result = value_loss(values, old, returns, mask, eps_clip=config.eps_clip, huber_delta=config.huber_delta)
        weights = scale * loss_weights(
            mask, batch.sequence_index, batch.num_sequences, self._aggregation, batch.session_tokens
        )
        metrics = self._metrics(result.losses, values, returns, result.clipped, mask)
        return LossOutput(loss=(weights * result.losses).sum(), metrics=metrics)

    @staticmethod
    def _metrics(losses: Tensor, values: Tensor, returns: Tensor, clipped: Tensor, mask: Tensor) -> Metrics:
        errors = (values.detach() - returns).square()
        stats = {"loss": losses, "value": values, "squared_error": errors, "clip_ratio": clipped}
        return to_metrics({name: TokenStat(found, mask) for name, found in stats.items()})
