"""Owns the policy's role in training: the stages of a batch in their order, and the state that outlives a step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from areal.api.batch import TrainBatch
from areal.api.config import PPOActorConfig
from areal.api.engine import TrainEngine
from areal.api.errors import InputError
from areal.api.metrics import Metrics, merge_metrics
from areal.trainer.advantages import with_advantages
from areal.trainer.minibatch import minibatches, prefixed, train_on_minibatches
from areal.trainer.off_policy import needs_prox_logprobs, with_correction
from areal.trainer.policy_update import PolicyUpdate


class PPOActor:
    """The policy on all trainer ranks; every method is called by every rank.

    Old policy of the loss: decoupled, or recompute_logprob -> `prox_logprobs` (the trainer's, at the start of the
    update); otherwise `rollout_logprobs` (the servers').
    """

    def __init__(self, engine: TrainEngine, config: PPOActorConfig, *, max_new_tokens: int | None = None) -> None:
        """`max_new_tokens` is the limit of an answer, which the overlong penalty needs."""
        self._engine = engine
        self._config = config
        self._max_new_tokens = max_new_tokens
        self._rule = PolicyUpdate(config)

    def with_prox_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Add the policy's log-probabilities at the start of the update, when the loss needs them."""
        if not needs_prox_logprobs(self._config):
            return batch
        logprobs = self._engine.forward(batch).logprobs
        if logprobs is None:
            raise ValueError("the actor's engine gave no log-probabilities: it was built as a critic")
        return replace(batch, prox_logprobs=logprobs)

    def with_correction(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """What is done about stale tokens, decided over the whole batch, and what to log of it; a collective."""
        return with_correction(batch, self._config, reduce=self._engine.all_reduce)

    def with_advantages(self, batch: TrainBatch) -> TrainBatch:
        """Rewards -> advantages; a collective (statistics are over all ranks).

        Raises InputError on every rank when a trained token or a reward of any rank is not finite.
        """
        self._require_finite(batch)
        return with_advantages(
            batch,
            self._config,
            kl_coef=self._config.kl_ctl,
            reduce=self._engine.all_reduce,
            max_new_tokens=self._max_new_tokens,
        )

    def update(self, batch: TrainBatch) -> Metrics:
        """`ppo_n_minibatches` optimiser steps on this batch; a collective. Metrics of this rank's tokens."""
        parts = minibatches(batch, self._config.ppo_n_minibatches)
        metrics = train_on_minibatches(self._engine, parts, self._rule)
        return prefixed("actor", merge_metrics(self._rule.names_only(), metrics))

    def _require_finite(self, batch: TrainBatch) -> None:
        """Every rank learns of bad numbers on any rank, so that all stop together instead of waiting for one."""
        names = ["rewards", "baselines", "rollout_logprobs", "prox_logprobs", "ref_logprobs", "values"]
        trained = [batch.rollout_logprobs, batch.prox_logprobs, batch.ref_logprobs, batch.values]
        bad = [(~batch.rewards.isfinite()).sum(), _num_without_baseline(batch, self._config)]
        for values in trained:
            found = torch.zeros((), dtype=torch.int64) if values is None else _num_bad(values, batch.loss_mask)
            bad.append(found)
        counts: list[float] = self._engine.all_reduce(torch.stack(bad).double().cpu()).tolist()
        if any(counts):
            listed = ", ".join(f"{int(count)} in {name}" for name, count in zip(names, counts, strict=True) if count)
            raise InputError(
                f"the train batch holds numbers that are not finite: {listed}; check the reward function, the "
                "log-probabilities of the model that made them and, for remax, that the workflow draws greedy answers"
            )


def _num_without_baseline(batch: TrainBatch, config: PPOActorConfig) -> Tensor:
    """Answers whose prompt has no greedy answer, where the estimator compares with it."""
    if config.adv_estimator != "remax":
        return torch.zeros((), dtype=torch.int64)
    if batch.baselines is None:
        return torch.tensor(batch.num_sequences)
    return (~batch.baselines.isfinite()).sum()


def _num_bad(values: Tensor, mask: Tensor) -> Tensor:
    return (mask & ~values.isfinite()).sum()
