"""Owns the policy's role in training: proximal log-probabilities, advantages, policy updates and their metrics."""

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
from areal.algorithm.aggregate import TokenStat, loss_weights, to_metrics, trained_counts
from areal.algorithm.importance import log_ratio
from areal.algorithm.kl import kl_estimate
from areal.algorithm.normalise import group_index, normalise
from areal.algorithm.policy_loss import PolicyTokens, policy_loss
from areal.api.batch import LossOutput, MicroBatch, TokenOutputs, TrainBatch
from areal.api.config import PPOActorConfig
from areal.api.engine import TrainEngine
from areal.api.errors import InputError
from areal.api.metrics import Metrics, merge_metrics
from areal.trainer.minibatch import prefixed, train_on_minibatches


class PPOActor:
    """The policy on all trainer ranks; every method is called by every rank.

    Old policy of the loss: decoupled, or recompute_logprob -> `prox_logprobs` (the trainer's, at the start of the
    update); otherwise `rollout_logprobs` (the servers').
    """

    def __init__(self, engine: TrainEngine, config: PPOActorConfig) -> None:
        self._engine = engine
        self._config = config

    def with_prox_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Add the policy's log-probabilities at the start of the update, when the loss needs them."""
        if not needs_prox_logprobs(self._config):
            return batch
        logprobs = self._engine.forward(batch).logprobs
        if logprobs is None:
            raise ValueError("the actor's engine gave no log-probabilities: it was built as a critic")
        return replace(batch, prox_logprobs=logprobs)

    def with_advantages(self, batch: TrainBatch) -> TrainBatch:
        """Rewards -> shaping -> normalisation -> token rewards with KL penalty -> GAE -> normalisation.

        A collective (statistics are over all ranks). Raises InputError on every rank when a trained token or a reward
        of any rank is not finite.
        """
        config = self._config
        self._require_finite(batch)
        rewards = shape_rewards(
            batch.rewards, bias=config.reward_bias, scale=config.reward_scaling, clip=config.reward_clip
        )
        if config.reward_norm is not None:
            rewards = normalise(rewards, config.reward_norm, batch.group_ids, reduce=self._engine.all_reduce)
        if config.mask_no_eos_with_zero:
            rewards = withhold_unfinished(rewards, batch.finished)
        mask, sequence_index = batch.loss_mask, batch.sequence_index
        kl = self._kl_to_reference(batch)
        result = generalised_advantages(
            token_rewards(rewards, mask, sequence_index, kl=kl, kl_coef=config.kl_ctl),
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
            advantages = normalise(advantages, config.adv_norm, groups, mask=mask, reduce=self._engine.all_reduce)
        return replace(batch, advantages=advantages, returns=result.returns if batch.values is not None else None)

    def update(self, batch: TrainBatch) -> Metrics:
        """`ppo_n_minibatches` optimiser steps on this batch; a collective. Metrics of this rank's tokens."""
        # every rank reports the same names, also one that has no tokens
        names_only = self._token_loss(_no_tokens(), _empty_tokens()).metrics
        metrics = train_on_minibatches(self._engine, batch, self._loss, self._config.ppo_n_minibatches)
        return prefixed("actor", merge_metrics(names_only, metrics))

    def _kl_to_reference(self, batch: TrainBatch) -> Tensor | None:
        if batch.ref_logprobs is None or self._config.kl_ctl == 0:
            return None
        policy = batch.rollout_logprobs if batch.prox_logprobs is None else batch.prox_logprobs
        return kl_estimate(policy, batch.ref_logprobs, batch.loss_mask, self._config.kl_estimator)

    def _loss(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Sum of weighted token losses of a micro-batch; the engine divides by the global denominator."""
        if outputs.logprobs is None:
            raise ValueError("the actor's engine gave no log-probabilities: it was built as a critic")
        batch = micro.batch
        if batch.advantages is None:
            raise ValueError("the batch has no advantages: call with_advantages before update")
        tokens = PolicyTokens(
            logprobs=outputs.logprobs,
            old_logprobs=old_logprobs(batch, self._config),
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
            mask=batch.loss_mask,
            sequence_index=batch.sequence_index,
            num_sequences=batch.num_sequences,
        )
        return self._token_loss(outputs, tokens)

    def _token_loss(self, outputs: TokenOutputs, tokens: PolicyTokens) -> LossOutput:
        result = policy_loss(tokens, self._config)
        weights = loss_weights(tokens.mask, tokens.sequence_index, tokens.num_sequences)
        stats = {"loss": TokenStat(result.losses, tokens.mask), **result.stats}
        stats["logprobs"] = TokenStat(tokens.logprobs, tokens.mask)
        if outputs.entropy is not None:
            stats["entropy"] = TokenStat(outputs.entropy, tokens.mask)
        return LossOutput(loss=(weights * result.losses).sum(), metrics=to_metrics(stats))

    def _require_finite(self, batch: TrainBatch) -> None:
        """Every rank learns of bad numbers on any rank, so that all stop together instead of waiting for one."""
        names = ["rewards", "rollout_logprobs", "prox_logprobs", "ref_logprobs", "values"]
        trained = [batch.rollout_logprobs, batch.prox_logprobs, batch.ref_logprobs, batch.values]
        bad = [(~batch.rewards.isfinite()).sum()]
        for values in trained:
            found = torch.zeros((), dtype=torch.int64) if values is None else _num_bad(values, batch.loss_mask)
            bad.append(found)
        counts: list[float] = self._engine.all_reduce(torch.stack(bad).double().cpu()).tolist()
        if any(counts):
            listed = ", ".join(f"{int(count)} in {name}" for name, count in zip(names, counts, strict=True) if count)
            raise InputError(
                f"the train batch holds numbers that are not finite: {listed}; check the reward function and the "
                "log-probabilities of the model that made them"
            )


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


def batch_metrics(batch: TrainBatch) -> Metrics:
    """What the batch is made of, before the update: rewards, lengths, advantages, distance between the policies."""
    mask = batch.loss_mask
    lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).long()
    answer_lengths = trained_counts(mask, batch.sequence_index, batch.num_sequences)
    each = torch.ones(batch.num_sequences, dtype=torch.bool, device=mask.device)
    stats = {
        "num_sequences": TokenStat(each, each, "sum"),
        "num_tokens": TokenStat(torch.ones_like(mask), torch.ones_like(mask), "sum"),
        "num_trained_tokens": TokenStat(mask, mask, "sum"),
        "reward": TokenStat(batch.rewards, each),
        "reward_max": TokenStat(batch.rewards, each, "max"),
        "reward_min": TokenStat(batch.rewards, each, "min"),
        "sequence_length": TokenStat(lengths, each),
        "sequence_length_max": TokenStat(lengths, each, "max"),
        "answer_length": TokenStat(answer_lengths, each),
        "answer_length_max": TokenStat(answer_lengths, each, "max"),
        "answer_length_min": TokenStat(answer_lengths, each, "min"),
        "answer_length_rewarded": TokenStat(answer_lengths, batch.rewards > 0),
        "answer_length_unrewarded": TokenStat(answer_lengths, batch.rewards <= 0),
        "unfinished_ratio": TokenStat(~batch.finished, each),
        "uniform_reward_ratio": TokenStat(_in_uniform_group(batch.rewards, batch.group_ids), each),
    }
    for name, values in (("advantage", batch.advantages), ("return", batch.returns), ("value", batch.values)):
        if values is not None:
            stats[name] = TokenStat(values, mask)
    if batch.advantages is not None:
        stats["advantage_abs"] = TokenStat(batch.advantages.abs(), mask)
        stats["advantage_max"] = TokenStat(batch.advantages, mask, "max")
        stats["advantage_min"] = TokenStat(batch.advantages, mask, "min")
    stats |= _distance_stats(batch)
    return prefixed("batch", to_metrics(stats))


def _distance_stats(batch: TrainBatch) -> dict[str, TokenStat]:
    """How far the behaviour policy and the reference are from the policy at the start of the update."""
    mask = batch.loss_mask
    stats: dict[str, TokenStat] = {"rollout_logprobs": TokenStat(batch.rollout_logprobs, mask)}
    policy = batch.rollout_logprobs
    if batch.prox_logprobs is not None:
        policy = batch.prox_logprobs
        gap = log_ratio(policy, batch.rollout_logprobs, mask)
        stats["prox_logprobs"] = TokenStat(policy, mask)
        stats["prox_rollout_gap_abs"] = TokenStat(gap.abs(), mask)
        stats["prox_rollout_gap_max"] = TokenStat(gap.abs(), mask, "max")
    if batch.ref_logprobs is not None:
        stats["ref_kl"] = TokenStat(kl_estimate(policy, batch.ref_logprobs, mask, "k3"), mask)
    return stats


def _in_uniform_group(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Sequences whose whole group has one reward: they teach nothing under a group baseline. -> [S] bool"""
    member = group_index(group_ids)
    highest = torch.full_like(rewards, float("-inf")).scatter_reduce(0, member, rewards, "amax")
    lowest = torch.full_like(rewards, float("inf")).scatter_reduce(0, member, rewards, "amin")
    return (highest == lowest)[member]


def _num_bad(values: Tensor, mask: Tensor) -> Tensor:
    return (mask & ~values.isfinite()).sum()


def _no_tokens() -> TokenOutputs:
    return TokenOutputs(logprobs=torch.zeros(0), entropy=torch.zeros(0))


def _empty_tokens() -> PolicyTokens:
    nothing = torch.zeros(0)
    return PolicyTokens(
        logprobs=nothing,
        old_logprobs=nothing,
        rollout_logprobs=nothing,
        advantages=nothing,
        mask=torch.zeros(0, dtype=torch.bool),
        sequence_index=torch.zeros(0, dtype=torch.int64),
        num_sequences=0,
    )
