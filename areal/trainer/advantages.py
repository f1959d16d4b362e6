"""Owns the stage from rewards to advantages: shaping, normalisation, KL penalty, GAE, in the order of the docs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from areal.algorithm.advantage import (
    generalised_advantages,
    last_trained,
    shape_rewards,
    token_rewards,
    withhold_unfinished,
)
from areal.algorithm.aggregate import Reduce
from areal.algorithm.kl import kl_estimate
from areal.algorithm.normalise import normalise
from areal.api.batch import TrainBatch
from areal.api.config import PPOActorConfig


def with_advantages(batch: TrainBatch, config: PPOActorConfig, *, kl_coef: float, reduce: Reduce) -> TrainBatch:
    """Rewards -> shaping -> normalisation -> token rewards with KL penalty -> GAE -> normalisation.

    `kl_coef` weighs the KL penalty of this step; `reduce` sums over all ranks, and every rank calls.
    """
    rewards = shape_rewards(
        batch.rewards, bias=config.reward_bias, scale=config.reward_scaling, clip=config.reward_clip
    )
    if config.reward_norm is not None:
        rewards = normalise(rewards, config.reward_norm, batch.group_ids, reduce=reduce)
    if config.mask_no_eos_with_zero:
        rewards = withhold_unfinished(rewards, batch.finished)
    mask, sequence_index = batch.loss_mask, batch.sequence_index
    kl = _kl_to_reference(batch, config) if kl_coef else None
    result = generalised_advantages(
        token_rewards(rewards, mask, sequence_index, kl=kl, kl_coef=kl_coef),
        batch.values,
        mask,
        sequence_index,
        batch.num_sequences,
        discount=config.discount,
        gae_lambda=config.gae_lambda,
        bootstrap=bootstrap_values(batch) if config.mask_no_eos_with_zero else None,
    )
    advantages = result.advantages
    if config.adv_norm is not None:
        groups = batch.group_ids[sequence_index]
        advantages = normalise(advantages, config.adv_norm, groups, mask=mask, reduce=reduce)
    return replace(batch, advantages=advantages, returns=result.returns if batch.values is not None else None)


def _kl_to_reference(batch: TrainBatch, config: PPOActorConfig) -> Tensor | None:
    if batch.ref_logprobs is None:
        return None
    policy = batch.rollout_logprobs if batch.prox_logprobs is None else batch.prox_logprobs
    return kl_estimate(policy, batch.ref_logprobs, batch.loss_mask, config.kl_estimator)


def bootstrap_values(batch: TrainBatch) -> Tensor | None:
    """The critic's value after the last trained token of each sequence: 0 if it finished. -> [S] or None (no critic).

    Only for answers whose task reward was withheld because a limit cut them (mask_no_eos_with_zero): their return is
    unknown, so the critic stands in. With a task reward the episode has ended, cut or not, and nothing follows. The
    value at the last trained token is the nearest the record holds: the one after it is not kept.
    """
    if batch.values is None:
        return None
    last = last_trained(batch.loss_mask, batch.sequence_index, batch.num_sequences)
    padded = torch.cat([batch.values, batch.values.new_zeros(1)])  # index -1: a sequence without trained tokens
    return torch.where(batch.finished, 0.0, padded[last])
