"""Owns the stage against stale rollouts: which policy the loss is around, and what a batch must hold for it."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from areal.algorithm.aggregate import Reduce
from areal.algorithm.importance import behaviour_weights as token_weights
from areal.api.batch import TrainBatch
from areal.api.config import PPOActorConfig
from areal.api.metrics import Metrics


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


def with_correction(batch: TrainBatch, config: PPOActorConfig, *, reduce: Reduce) -> tuple[TrainBatch, Metrics]:
    """Decide once for the whole batch which tokens the policy loss leaves out, and what weighs the others.

    Also how far apart the policies are: the same metrics on every rank, of all ranks' tokens. A collective.
    """
    if not config.use_decoupled_loss:
        return batch, {}
    found = token_weights(
        old_logprobs(batch, config), batch.rollout_logprobs, batch.trained, config.behav_imp_weight_cap
    )
    return replace(batch, behaviour_weights=found.weights), {}


def behaviour_weights(batch: TrainBatch, config: PPOActorConfig) -> Tensor | None:
    """The factor of each token's loss, [T], or None when there is none. ValueError when it was not computed yet."""
    if config.use_decoupled_loss and batch.behaviour_weights is None:
        raise ValueError("the batch has no behaviour_weights: call with_correction before update")
    return batch.behaviour_weights
