"""The policy in training: the stages of a batch in their order, and the coefficients that change between steps."""

from dataclasses import replace

import torch
from torch import Tensor

from areal.algorithm.aggregate import Reduce
from areal.algorithm.covariance import drawn_between, highest_covariances, token_covariances, token_draws
from areal.algorithm.custom_advantage import custom_advantages, no_answers
from areal.algorithm.kl_control import KLController
from areal.algorithm.regularisers import adapted_entropy_coef
from areal.algorithm.resampling import resampled_counts, resampling_weights, sequence_draws
from areal.algorithm.token_baseline import score_norms
from areal.api.batch import TrainBatch, required
from areal.api.config import PPOActorConfig, TeacherConfig
from areal.api.engine import TrainEngine
from areal.api.errors import InputError
from areal.api.metrics import Metric, Metrics
from areal.data.sessions import by_session
from areal.data.split import take
from areal.trainer.advantages import penalty_metrics, with_advantages
from areal.trainer.filters import with_filters
from areal.trainer.first_pass import FirstPass, without_first
from areal.trainer.kl_term import kl_penalty, num_candidates, with_candidates
from areal.trainer.minibatch import Passes, global_mean, prefixed, train_on_minibatches
from areal.trainer.off_policy import needs_prox_logprobs, with_correction
from areal.trainer.policy_update import PolicyUpdate
from areal.trainer.progress import updating
from areal.trainer.recover import ActorState


class PPOActor:
    """The policy on all trainer ranks; every method is called by every rank.

    Old policy of the loss: decoupled, or recompute_logprob -> `prox_logprobs` (the trainer's, at the start of the
    update); otherwise `rollout_logprobs` (the servers').
    """

    def __init__(
        self,
        engine: TrainEngine,
        config: PPOActorConfig,
        *,
        max_new_tokens: int | None = None,
        seed: int = 0,
        frozen_steps: int = 0,
        critic_lambda: float | None = None,
        teacher: TeacherConfig | None = None,
        shares_first_pass: bool = False,
    ) -> None:
        """`max_new_tokens`: limit of an answer, which the overlong penalty needs. `seed`: of the run; it determines the
        order of sequences in later epochs. The first `frozen_steps` train steps change no weight. `critic_lambda`: of
        the critic's targets; None = that of the advantages. A custom loss and a custom estimator are called once
        without tokens: their errors are raised here, ConfigError when they return what is no loss or advantage.
        `shares_first_pass`: the first mini-batch makes its proximal log-probabilities in training where it can."""
        self._shares_first_pass = shares_first_pass
        self._first_pass: FirstPass | None = None
        """Of the running update."""
        self._teacher = teacher
        self._engine = engine
        self._config = config
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._frozen_steps = frozen_steps
        self._critic_lambda = critic_lambda
        self._entropy_coef = config.entropy_coef
        self._kl_control = KLController(config.kl_ctl, config.kl_control)
        self._kl_coef = config.kl_ctl
        """Of the last batch with advantages."""
        if config.policy_loss == "custom":
            self._rule().names_only()  # detects an error in the user's loss before the first rollouts
        if config.adv_estimator == "custom":
            custom_advantages(no_answers(), config)  # as for a custom loss

    def state(self) -> ActorState:
        """The adaptive coefficients, which a recovery checkpoint stores."""
        found: dict[str, float] = {}
        if self._kl_control.is_adaptive:
            found["kl_ctl"] = self._kl_control.coefficient
        if self._config.adaptive_entropy is not None:
            found["entropy_coef"] = self._entropy_coef
        return ActorState(coefficients=found)

    def load_state(self, state: ActorState) -> None:
        """Continue with the result of `state`. Coefficients that it lacks, and fixed ones, are as configured."""
        if self._kl_control.is_adaptive:
            self._kl_control.coefficient = state.coefficients.get("kl_ctl", self._config.kl_ctl)
        if self._config.adaptive_entropy is not None:
            self._entropy_coef = state.coefficients.get("entropy_coef", self._config.entropy_coef)

    def with_prox_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Add the policy's outputs before the update that the loss, the KL or the baseline needs."""
        config = self._config
        is_needed = needs_prox_logprobs(config)
        if not (is_needed or config.has_token_baseline) and num_candidates(config) is None:
            return batch
        if self._shares_first_pass and not self._has_sessions(batch):
            return self._with_later_logprobs(batch)
        outputs = self._engine.forward(batch)
        logprobs = required(outputs.logprobs, "logprobs")
        if config.has_token_baseline:
            norms = score_norms(logprobs, required(outputs.squared_sums, "squared_sums"))
            batch = replace(batch, score_norms=norms)
        batch = replace(batch, prox_logprobs=logprobs) if is_needed else batch
        return with_candidates(batch, outputs, config)

    def _has_sessions(self, batch: TrainBatch) -> bool:
        """Whether any rank has sessions of several sequences; a collective."""
        has_sessions = torch.tensor([float(batch.session_ids is not None)], dtype=torch.float64)
        return bool(self._engine.all_reduce(has_sessions, "max").item())

    def _with_later_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Add the proximal log-probabilities of all sequences but those of the first mini-batch."""
        batch, in_loss = replace(batch, shares_first_pass=True), sequences_in_loss(batch)
        cut = Passes(num_minibatches=self._config.ppo_n_minibatches).rows(without_filtered(batch), epoch=0)
        first = [in_loss[row] for row in cut[0]]
        self._first_pass = FirstPass(self._config, first, cut)
        others = sorted(set(range(batch.num_sequences)).difference(first))
        if self._config.ppo_n_minibatches == 1 and batch.filtered is None:  # on all ranks: the pass is a collective
            return batch
        logprobs = required(self._engine.forward(take(batch, others)).logprobs, "logprobs")
        return replace(batch, prox_logprobs=without_first(logprobs, batch, others))

    def with_first_pass(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """After `update`: add the proximal log-probabilities that the first mini-batch made, and the metrics of
        `with_correction`; a collective. Other batches are unchanged."""
        if not batch.shares_first_pass or self._first_pass is None:
            return batch, {}
        batch, self._first_pass = self._first_pass.completed(batch), None
        return batch, self.with_correction(batch)[1]

    def with_correction(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """Add off-policy weights and rejections of the whole batch, and their metrics; a collective."""
        return with_correction(batch, self._config, reduce=self._engine.all_reduce)

    def with_advantages(self, batch: TrainBatch) -> TrainBatch:
        """Rewards -> advantages; a collective (statistics are over all ranks).

        Raises InputError on every rank when a trained token or a reward of any rank is not finite.
        """
        self._require_finite(batch)
        self._kl_coef = self._kl_control.coefficient
        seen = by_session(batch) if self._kl_control.is_adaptive else batch
        kl = kl_penalty(seen, self._config) if self._kl_control.is_adaptive else None
        if kl is not None:  # the coefficient of the next batch
            self._kl_control.observe(
                kl, seen.loss_mask, seen.sequence_index, seen.num_sequences, reduce=self._engine.all_reduce
            )
        return with_advantages(
            batch,
            self._config,
            kl_coef=self._kl_coef,
            reduce=self._engine.all_reduce,
            max_new_tokens=self._max_new_tokens,
            critic_lambda=self._critic_lambda,
        )

    def with_filters(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """Remove filtered tokens from the policy loss, and count them."""
        return with_filters(batch, self._config)

    def with_resampling(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """The sequences to train on: each as often as pf_ppo resamples it; the batch itself without; a collective."""
        options = self._config.pf_ppo
        if options is None:
            return batch, {}
        reduce = self._engine.all_reduce
        draws = token_draws(batch.input_ids, batch.rollout_logprobs, batch.cu_seqlens, batch.sequence_index)
        uniform = sequence_draws(draws, batch.sequence_index, batch.num_sequences, seed=self._seed, step=batch.version)
        counts = resampled_counts(resampling_weights(batch.rewards, options, reduce=reduce), uniform, reduce=reduce)
        chosen: list[int] = torch.repeat_interleave(torch.arange(batch.num_sequences), counts).tolist()
        metrics = {
            "pf_ppo/distinct_sequences": Metric(float((counts > 0).sum()), 1.0, "sum"),
            "pf_ppo/sequences": Metric(float(len(chosen)), 1.0, "sum"),
        }
        return take(batch, chosen), metrics

    def update(self, batch: TrainBatch, *, step: int = 0) -> Metrics:
        """`ppo_epochs` times `ppo_n_minibatches` optimiser steps on this batch in train step `step`; a collective.

        Sequences that filters removed are not computed. Metrics of this rank's tokens.
        """
        batch = with_chosen_tokens(batch, self._config, reduce=self._engine.all_reduce)
        config, first_pass = self._config, self._first_pass if batch.shares_first_pass else None
        passes = Passes(
            num_minibatches=config.ppo_n_minibatches,
            num_epochs=config.ppo_epochs if step >= self._frozen_steps else 0,
            seed=self._seed,
            step=step,
            known=None if first_pass is None else first_pass.cut,
        )
        with updating("actor", step):
            metrics = train_on_minibatches(
                self._engine, without_filtered(batch), passes, self._rule(first_pass), target_kl=config.target_kl
            )
        metrics |= penalty_metrics(batch, config, self._max_new_tokens)
        if batch.ref_logprobs is not None:
            metrics["kl_coef"] = Metric(self._kl_coef)
        if config.adaptive_entropy is not None:
            metrics["entropy_coef"] = Metric(self._entropy_coef)
            if step >= config.adaptive_entropy.warmup_steps:
                entropy = global_mean(self._engine, metrics["bonus_entropy"])
                self._entropy_coef = adapted_entropy_coef(self._entropy_coef, entropy, config.adaptive_entropy)
        return prefixed("actor", metrics)

    def _rule(self, first_pass: FirstPass | None = None) -> PolicyUpdate:
        coef = self._entropy_coef
        return PolicyUpdate(self._config, entropy_coef=coef, teacher=self._teacher, first_pass=first_pass)

    def _require_finite(self, batch: TrainBatch) -> None:
        """Raise on every rank when any rank has a number that is not finite, so that no rank waits for another."""
        of_tokens = ("rollout_logprobs", "prox_logprobs", "ref_logprobs", "ref_full_kl", "teacher_logprobs", "values")
        names = ["rewards", "baselines", *of_tokens]
        bad = [(~batch.rewards.isfinite()).sum(), _num_without_baseline(batch, self._config)]
        for name in of_tokens:
            values: Tensor | None = getattr(batch, name)
            none = torch.zeros((), dtype=torch.int64)
            bad.append(none if values is None else (batch.loss_mask & ~values.isfinite()).sum())
        counts: list[float] = self._engine.all_reduce(torch.stack(bad).double().cpu()).tolist()
        if any(counts):
            listed = ", ".join(f"{int(count)} in {name}" for name, count in zip(names, counts, strict=True) if count)
            message = f"the train batch contains numbers that are not finite: {listed}"
            raise InputError(
                f"{message}; check rewards, models and, for remax, greedy answers", code="algorithm.not_finite"
            )


def sequences_in_loss(batch: TrainBatch) -> list[int]:
    """The sequences that filters did not remove, in order."""
    if batch.filtered is None:
        return list(range(batch.num_sequences))
    return (~batch.filtered).nonzero().flatten().tolist()  # pyright: ignore[reportUnknownMemberType]


def without_filtered(batch: TrainBatch) -> TrainBatch:
    """The batch of `sequences_in_loss`; the batch itself, which may be large, if filters removed none."""
    return batch if batch.filtered is None else take(batch, sequences_in_loss(batch))


def with_chosen_tokens(batch: TrainBatch, config: PPOActorConfig, *, reduce: Reduce) -> TrainBatch:
    """Clip-Cov's and KL-Cov's tokens of high covariance; other losses leave the batch unchanged. A collective.

    The policy of the covariance is the one before the update: the trainer's when it was recomputed, else the
    servers'. Raises StageError when the batch has no advantages.
    """
    if config.policy_loss not in ("clip_cov", "kl_cov"):
        return batch
    logprobs = batch.rollout_logprobs if batch.prox_logprobs is None else batch.prox_logprobs
    covariances = token_covariances(required(batch.advantages, "advantages"), logprobs, batch.trained, reduce=reduce)
    draws = token_draws(batch.input_ids, batch.rollout_logprobs, batch.cu_seqlens, batch.sequence_index)
    if config.policy_loss == "kl_cov":
        chosen = highest_covariances(covariances, draws, batch.trained, ratio=config.kl_cov.ratio, reduce=reduce)
    else:
        box = config.clip_cov
        chosen = drawn_between(
            covariances, draws, batch.trained, low=box.low, high=box.high, ratio=box.ratio, reduce=reduce
        )
    return replace(batch, chosen_tokens=chosen)


def _num_without_baseline(batch: TrainBatch, config: PPOActorConfig) -> Tensor:
    """Answers whose prompt has no greedy answer, where the estimator compares with it."""
    if config.adv_estimator != "remax":
        return torch.zeros((), dtype=torch.int64)
    if batch.baselines is None:
        return torch.tensor(batch.num_sequences)
    return (~batch.baselines.isfinite()).sum()
