"""Owns what the roles that train share: mini-batches, their global denominators, names of metrics."""

from __future__ import annotations

from areal.algorithm.aggregate import LossAggregation, local_denominator
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


def train_on_minibatches(
    engine: TrainEngine,
    batch: TrainBatch,
    loss_fn: LossFn,
    num_minibatches: int,
    aggregation: LossAggregation = "token-mean",
) -> Metrics:
    """One optimiser step a mini-batch; a collective. Returns the metrics of this rank's tokens, merged.

    The i-th mini-batches of all ranks make one optimiser step with one denominator. One without any trained token on
    any rank is left out on every rank: no gradient would still move the weights by momentum and decay.
    """
    metrics: Metrics = {}
    num_steps = 0
    for mini in minibatches(batch, num_minibatches):
        local = local_denominator(mini.loss_mask, mini.sequence_index, mini.num_sequences, aggregation)
        denominator = float(engine.all_reduce(local).item())
        if denominator == 0:
            continue
        metrics = merge_metrics(metrics, engine.forward_backward(mini, loss_fn, denominator=denominator))
        metrics = merge_metrics(metrics, engine.optimizer_step())
        num_steps += 1
    return metrics | {"optimizer_steps": Metric(float(num_steps), 1.0, "max")}


def prefixed(prefix: str, metrics: Metrics) -> Metrics:
    """The same metrics under `prefix/name`."""
    return {f"{prefix}/{name}": metric for name, metric in metrics.items()}
