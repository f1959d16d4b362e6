"""Owns what the roles that train share: minibatches, their global denominators, names of metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from areal.api.batch import LossFn, TrainBatch
from areal.api.engine import TrainEngine
from areal.api.metrics import Metric, Metrics, merge_metrics
from areal.data.split import balanced_parts, take


def minibatches(batch: TrainBatch, num_minibatches: int) -> list[TrainBatch]:
    """Cut this rank's share into exactly `num_minibatches` parts of about equal token counts; some may be empty.

    A pure function of the sequence lengths (a replay cuts alike); sequences keep their order within a part.
    """
    if num_minibatches == 1:
        return [batch]
    return [take(batch, part) for part in balanced_parts(batch.sequence_lengths, num_minibatches)]


class UpdateRule(Protocol):
    """How a role learns from minibatches."""

    def local_denominators(self, mini: TrainBatch) -> Tensor:
        """This rank's part of what divides the sums of a minibatch, [k] float64; the first divides the whole loss."""
        ...

    def loss_fn(self, denominators: list[float]) -> LossFn:
        """The loss of the micro-batches of a minibatch with these global denominators."""
        ...


def train_on_minibatches(engine: TrainEngine, parts: Iterable[TrainBatch], rule: UpdateRule) -> Metrics:
    """One optimiser step a minibatch; a collective. Returns the metrics of this rank's tokens, merged.

    The i-th minibatches of all ranks make one optimiser step with one denominator. One without any trained token on
    any rank is left out on every rank: no gradient would still move the weights by momentum and decay.
    """
    metrics: Metrics = {}
    num_steps = 0
    for mini in parts:
        denominators: list[float] = engine.all_reduce(rule.local_denominators(mini)).tolist()
        if denominators[0] == 0:
            continue
        found = engine.forward_backward(mini, rule.loss_fn(denominators), denominator=denominators[0])
        metrics = merge_metrics(metrics, found, engine.optimizer_step())
        num_steps += 1
    return metrics | {"optimizer_steps": Metric(float(num_steps), 1.0, "max")}


def prefixed(prefix: str, metrics: Metrics) -> Metrics:
    """The same metrics under `prefix/name`."""
    return {f"{prefix}/{name}": metric for name, metric in metrics.items()}
