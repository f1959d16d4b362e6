"""The update loop that actor and critic share: minibatches, global denominators, epochs, names of metrics."""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from areal.api.batch import LossFn, TrainBatch
from areal.api.columns import ColumnSpec
from areal.api.engine import TrainEngine
from areal.api.metrics import Metric, Metrics, merge_metrics
from areal.data.balance import balanced_parts
from areal.data.pack import session_units, take

# ----------------------------------------------------------------------------------------------------------------------
# Reduction of metrics over the data-parallel ranks.


def reduce_metrics(metrics: Metrics, engine: TrainEngine) -> Metrics:
    """Merge the metrics of all data-parallel ranks; a collective. Metrics with a total count of 0 are left out.

    Raises RuntimeError on every rank when the names differ between ranks.
    """
    names = sorted(metrics)
    fingerprint = float(zlib.crc32("\n".join(names).encode()))
    extremes = [fingerprint, -fingerprint]
    for name in names:
        metric = metrics[name]
        if metric.kind in ("max", "min"):
            sign = 1.0 if metric.kind == "max" else -1.0
            extremes.append(sign * metric.total if metric.count else float("-inf"))
    highest: list[float] = engine.all_reduce(torch.tensor(extremes, dtype=torch.float64), "max").tolist()
    if highest[0] != -highest[1]:
        raise RuntimeError("the trainer ranks report different metrics; names on this rank: " + ", ".join(names))
    flat = [number for name in names for number in (metrics[name].total, metrics[name].count)]
    summed: list[float] = engine.all_reduce(torch.tensor(flat or [0.0], dtype=torch.float64), "sum").tolist()
    merged: Metrics = {}
    extreme = iter(highest[2:])
    for index, name in enumerate(names):
        kind = metrics[name].kind
        total, count = summed[2 * index], summed[2 * index + 1]
        if kind in ("max", "min"):
            total = next(extreme) * (1.0 if kind == "max" else -1.0)
        if count:
            merged[name] = Metric(total, count, kind)
    return merged


PER_EPOCH = ("approx_kl", "clip_ratio", "entropy")
"""Metrics that are also reported per epoch, when there are several."""


FILTERED = ColumnSpec("filtered", "u1", per="sequence", show="", made_by="with_filters")
"""[S] bool: filters left no token of the sequence in the policy loss, so its update does not compute it."""


def sequences_in_loss(batch: TrainBatch) -> list[int]:
    """The sequences that filters did not remove, in order."""
    if FILTERED not in batch.columns:
        return list(range(batch.num_sequences))
    return (~batch.columns[FILTERED]).nonzero().flatten().tolist()  # pyright: ignore[reportUnknownMemberType]


def without_filtered(batch: TrainBatch) -> TrainBatch:
    """The batch of `sequences_in_loss`; the batch itself, which may be large, if filters removed none."""
    return batch if FILTERED not in batch.columns else take(batch, sequences_in_loss(batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The minibatches of each epoch: a pure function of the batch, the seed of the run and the train step (from 0)."""

    num_minibatches: int
    num_epochs: int = 1
    seed: int = 0
    step: int = 0
    keeps_groups: bool = False
    """The sequences of a group, which share their prompt, stay together where there are as many groups as parts."""
    known: list[list[int]] | None = None
    """`rows` of epoch 0, if they were computed before."""

    def cut(self, batch: TrainBatch, epoch: int) -> list[TrainBatch]:
        """This rank's minibatches of epoch `epoch`: exactly `num_minibatches`, some may be empty.

        Each has whole sequences in their order, and about equally many tokens. The partition of the first epoch depends
        on the lengths only; later epochs partition at random, and sums differ by at most the longest sequence. The
        sequences of a session stay together, and its length is its number of trained tokens, which no cut changes.
        """
        if self.num_minibatches == 1:
            return [batch]
        return [take(batch, rows) for rows in self.rows(batch, epoch)]

    def rows(self, batch: TrainBatch, epoch: int) -> list[list[int]]:
        """The sequences of each minibatch of `cut`, in order."""
        if epoch == 0 and self.known is not None:
            return self.known
        units, lengths = self._units(batch)
        if epoch == 0:
            parts = balanced_parts(lengths, self.num_minibatches)
        else:
            # the generator hashes this text, so the orders of neighbouring steps and epochs are independent
            parts = dealt_parts(lengths, self.num_minibatches, random.Random(f"{self.seed}/{self.step}/{epoch}"))
        return [sorted(row for unit in part for row in units[unit]) for part in parts]

    def _units(self, batch: TrainBatch) -> tuple[list[list[int]], list[int]]:
        """The sequences of each unit that stays together, and its length."""
        groups, lengths = batch.group_ids.tolist() if self.keeps_groups else list[int](), batch.sequence_lengths
        if len({*groups}) < self.num_minibatches:
            return session_units(batch) or ([[row] for row in range(batch.num_sequences)], lengths)
        units: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            units.setdefault(group, []).append(row)
        return [*units.values()], [sum(lengths[row] for row in rows) for rows in units.values()]

    def progress(self, epoch: int, place: int) -> float:
        """Part of the update's optimiser steps before minibatch `place` of epoch `epoch`, from 0 to below 1."""
        return (epoch * self.num_minibatches + place) / (self.num_epochs * self.num_minibatches)


def dealt_parts(lengths: Sequence[int], num_parts: int, dice: random.Random) -> list[list[int]]:
    """Partition the indices of `lengths` at random into exactly `num_parts` ascending lists; some may be empty.

    Of each `num_parts` neighbours by length, every part gets one. So the sums of two parts differ by at most the
    greatest length, and each sequence is equally likely in every part.
    """
    by_length = list(range(len(lengths)))
    dice.shuffle(by_length)  # the order of equal lengths is random too
    by_length.sort(key=lambda i: -lengths[i])
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for first in range(0, len(by_length), num_parts):
        order = list(range(num_parts))
        dice.shuffle(order)
        for part, index in zip(order, by_length[first : first + num_parts], strict=False):
            parts[part].append(index)
    return [sorted(part) for part in parts]


class UpdateRule(Protocol):
    """The loss of a role and its denominators."""

    def with_weights(self, mini: TrainBatch) -> TrainBatch:
        """A whole minibatch with what the losses of its micro-batches need to know of sessions."""
        ...

    def local_denominators(self, mini: TrainBatch) -> Tensor:
        """This rank's part of what divides the sums of a minibatch, [k] float64; the first divides the whole loss."""
        ...

    def loss_fn(self, denominators: list[float]) -> LossFn:
        """The loss of the micro-batches of a minibatch with these global denominators."""
        ...

    def names_only(self) -> Metrics:
        """Every metric that an update reports, with count 0: a rank without tokens reports the same names."""
        ...


def train_on_minibatches(
    engine: TrainEngine,
    batch: TrainBatch,
    passes: Passes,
    rule: UpdateRule,
    *,
    target_kl: float | None = None,
    before_step: Callable[[], None] = lambda: None,
) -> Metrics:
    """One optimiser step per minibatch and epoch; a collective. Returns the merged metrics of this rank's tokens.

    The i-th minibatches of all ranks make one optimiser step with one denominator. It is skipped when no rank has a
    trained token, because momentum and weight decay would still change the weights. After a minibatch whose mean
    approx_kl over all ranks is above `target_kl`, the remaining ones are skipped. `before_step` is called once on all
    ranks, while the weights are still those before the update: after the first gradient, or without one at the end.
    """
    names = rule.names_only()
    metrics: Metrics = dict(names)
    num_steps, stopped = 0, False
    for epoch in range(passes.num_epochs):
        of_epoch: Metrics = dict(names)
        for place, part in enumerate([] if stopped else passes.cut(batch, epoch)):
            mini = rule.with_weights(replace(part, update_progress=passes.progress(epoch, place)))
            denominators: list[float] = engine.all_reduce(rule.local_denominators(mini)).tolist()
            if denominators[0] == 0:
                continue
            merged = merge_metrics(
                names, engine.forward_backward(mini, rule.loss_fn(denominators), denominator=denominators[0])
            )
            if num_steps == 0:
                before_step()
            metrics = merge_metrics(metrics, merged, engine.optimizer_step())
            of_epoch = merge_metrics(of_epoch, merged)
            num_steps += 1
            stopped = target_kl is not None and global_mean(engine, merged["approx_kl"]) > target_kl
            if stopped:
                break
        if passes.num_epochs > 1:
            metrics |= {f"epoch_{epoch}/{name}": of_epoch[name] for name in PER_EPOCH if name in of_epoch}
    if num_steps == 0:
        before_step()
    metrics["optimizer_steps"] = Metric(float(num_steps), 1.0, "max")
    metrics["update_skipped"] = Metric(float(num_steps == 0), 1.0, "max")
    if target_kl is not None:
        metrics["stopped_by_kl"] = Metric(float(stopped), 1.0, "max")
    return metrics


def global_mean(engine: TrainEngine, metric: Metric) -> float:
    """A mean over the tokens of all ranks, NaN when there is none; a collective."""
    total, count = engine.all_reduce(torch.tensor([metric.total, metric.count], dtype=torch.float64)).tolist()
    return total / count if count else float("nan")


def prefixed(prefix: str, metrics: Metrics) -> Metrics:
    """The same metrics under `prefix/name`."""
    return {f"{prefix}/{name}": metric for name, metric in metrics.items()}
