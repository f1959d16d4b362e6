"""The policy in training: the stages of a batch in their order, and the coefficients that change between steps."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from areal.algorithm.advantage import (
    RETURNS,
    SCORE_NORMS,
    VALUES,
    RewardedAnswers,
    adaptive_lambda,
    best_of_group,
    decoupled_rewards,
    estimated,
    generalised_advantages,
    last_trained,
    length_weighted,
    mixed_group,
    no_answers,
    optimal_token_baseline,
    overlong_penalty,
    score_norms,
    shape_rewards,
    token_rewards,
    turn_token_rewards,
    valid_sample_scale,
    withhold_unfinished,
)
from areal.algorithm.aggregate import Reduce, TokenStat, to_metrics, trained_counts
from areal.algorithm.correction import Spans
from areal.algorithm.kl import KLController
from areal.algorithm.normalise import normalise, normalised
from areal.algorithm.policy_loss import (
    CHOSEN,
    adapted_entropy_coef,
    drawn_between,
    highest_covariances,
    resampled_counts,
    resampling_weights,
    sequence_draws,
    token_covariances,
    token_draws,
)
from areal.algorithm.registered import ClipCovOptions, KlCovOptions, PasskOptions
from areal.algorithm.shared_prefix import contested_prefixes
from areal.api.batch import TrainBatch, required
from areal.api.config import PPOActorConfig, TeacherConfig
from areal.api.config.algorithm import AdvantageRecipe, GdpoOptions
from areal.api.config.policy_losses import loss_facts
from areal.api.data import BASELINE, TURN_REWARDS, reward_parts
from areal.api.engine import TrainEngine
from areal.api.errors import InputError
from areal.api.metrics import Metric, Metrics
from areal.data.pack import SESSION_IDS, by_session, session_view, take
from areal.trainer.first_pass import FirstPass
from areal.trainer.kl_term import REF_KL, kl_penalty, num_candidates, with_candidates
from areal.trainer.minibatch import FILTERED, Passes, global_mean, prefixed, train_on_minibatches, without_filtered
from areal.trainer.off_policy import BEHAVIOUR_WEIGHTS, with_correction
from areal.trainer.policy_update import PolicyUpdate
from areal.trainer.progress import updating
from areal.trainer.recover import ActorState
from areal.trainer.teacher_servers import TEACHER_LOGPROBS

# ----------------------------------------------------------------------------------------------------------------------
# Filters of a train batch: answers and tokens that are removed from the policy loss.
#
# A filter removes tokens from `TrainBatch.policy_mask` only. Rewards, baselines, advantages, their norms and the critic
# use `loss_mask`, which still contains them.


def with_filters(batch: TrainBatch, config: PPOActorConfig) -> tuple[TrainBatch, Metrics]:
    """Remove tokens by the configured filters, in order; the metrics count those that each filter removed first.

    Groups are whole on a rank, so the ranks exchange nothing.
    """
    index = batch.sequence_index
    taken: dict[str, Tensor] = {}
    if config.mask_truncated:
        taken["truncated"] = ~batch.finished[index]
    if config.dynamic_sampling:
        taken["uniform_group"] = ~mixed_group(batch.rewards, batch.group_ids)[index]
    if config.shared_prefix_min_tokens is not None:
        taken["shared_prefix"] = contested_prefixes(
            batch.input_ids,
            batch.loss_mask,
            index,
            batch.cu_seqlens,
            batch.group_ids,
            batch.rewards,
            min_tokens=config.shared_prefix_min_tokens,
        )
    if not taken:
        return batch, {}
    kept, metrics = batch.trained, Metrics()
    for name, tokens in taken.items():
        removed = kept & tokens
        metrics[f"filter/{name}_tokens"] = Metric(float(removed.sum()), 1.0, "sum")
        metrics[f"filter/{name}_sequences"] = Metric(float(torch.unique(index[removed]).numel()), 1.0, "sum")
        kept = kept & ~tokens
    metrics["filter/kept_tokens"] = Metric(float(kept.sum()), 1.0, "sum")
    filtered = trained_counts(kept, index, batch.num_sequences) == 0
    return replace(batch, policy_mask=kept).with_column(FILTERED, filtered), metrics


# ----------------------------------------------------------------------------------------------------------------------
# The stage from rewards to advantages: shaping, baseline, KL penalty, GAE and normalisation.


def with_advantages(
    batch: TrainBatch,
    config: PPOActorConfig,
    *,
    kl_coef: float,
    reduce: Reduce,
    max_new_tokens: int | None = None,
    critic_lambda: float | None = None,
    stats: dict[str, TokenStat] | None = None,
) -> TrainBatch:
    """Rewards -> shaping -> baseline -> token rewards with KL penalty -> GAE -> normalisation.

    A session that was cut into several sequences counts as one, whose tokens are in order of time. A collective.
    `kl_coef`: weight of the KL penalty in this step. `reduce`: sum over all ranks. `max_new_tokens`: limit of an
    answer, which the overlong penalty needs. `critic_lambda`: lambda of the critic's targets (VAPO's decoupled GAE,
    arXiv 2504.05118, section 4.1); None = that of the advantages.
    `stats` gets the statistics of the estimator.
    """
    view = session_view(batch)
    result = _with_advantages(
        batch if view is None else view.batch,
        config,
        kl_coef=kl_coef,
        reduce=reduce,
        max_new_tokens=max_new_tokens,
        critic_lambda=critic_lambda,
        stats=stats,
    )
    if view is None:
        return result
    size, returns = batch.num_tokens, result.columns.get(RETURNS)
    batch = replace(batch, advantages=view.scattered(required(result.advantages, "advantages"), size))
    return batch if returns is None else batch.with_column(RETURNS, view.scattered(returns, size))


def _with_advantages(
    batch: TrainBatch,
    config: PPOActorConfig,
    *,
    kl_coef: float,
    reduce: Reduce,
    max_new_tokens: int | None,
    critic_lambda: float | None,
    stats: dict[str, TokenStat] | None,
) -> TrainBatch:
    recipe = config.recipe
    mask, sequence_index = batch.loss_mask, batch.sequence_index
    rewards = _shape(batch.rewards + _penalty(batch, config, max_new_tokens), config)
    rewards, factors = centred(rewards, batch, config, recipe, reduce=reduce)
    if config.mask_no_eos_with_zero:
        rewards, factors = (withhold_unfinished(values, batch.finished) for values in (rewards, factors))
    kl = kl_penalty(batch, config) if kl_coef else None
    per_token = token_rewards(rewards, mask, sequence_index, kl=kl, kl_coef=kl_coef)
    if (turn_rewards := batch.columns.get(TURN_REWARDS)) is not None:
        turn_rewards = torch.where(turn_rewards.isnan(), batch.rewards[sequence_index], turn_rewards)
        factors = config.reward_scaling * factors
        per_token = per_token + turn_token_rewards(turn_rewards, batch.rewards, factors, mask, sequence_index)
    estimate = partial(
        generalised_advantages,
        per_token,
        batch.columns.get(VALUES),
        mask,
        sequence_index,
        batch.num_sequences,
        discount=config.discount,
        bootstrap=bootstrap_values(batch) if config.mask_no_eos_with_zero else None,
    )
    policy_lambda: float | Tensor = recipe.gae_lambda
    if config.gae_length_alpha is not None and recipe.is_composed:
        lengths = trained_counts(mask, sequence_index, batch.num_sequences)
        policy_lambda = adaptive_lambda(lengths, config.gae_length_alpha)
    result = estimate(gae_lambda=policy_lambda)
    advantages = result.advantages
    if recipe.has_function:
        estimate_ = estimated(_answers(batch, rewards, per_token, reduce=reduce), config)
        advantages = estimate_.advantages
        if stats is not None:
            stats |= estimate_.stats
    if recipe.token_baseline != "none":
        advantages = optimal_token_baseline(
            advantages,
            batch.column(SCORE_NORMS),
            batch.group_ids,
            Spans(mask, sequence_index, batch.num_sequences),
            over_trained=recipe.token_baseline == "trained_token",
            weights=batch.columns.get(BEHAVIOUR_WEIGHTS),
        )
    if recipe.adv_norm is not None:
        groups = batch.group_ids[sequence_index]
        advantages = normalise(advantages, recipe.adv_norm, groups, mask=mask, reduce=reduce)
    batch = replace(batch, advantages=advantages)
    if VALUES not in batch.columns:
        return batch
    targets = result if critic_lambda is None else estimate(gae_lambda=critic_lambda)
    return batch.with_column(RETURNS, targets.returns)


def _answers(batch: TrainBatch, rewards: Tensor, per_token: Tensor, *, reduce: Reduce) -> RewardedAnswers:
    """What a custom estimator reads."""
    return RewardedAnswers(
        rewards=rewards,
        token_rewards=per_token,
        mask=batch.loss_mask,
        sequence_index=batch.sequence_index,
        num_sequences=batch.num_sequences,
        group_ids=batch.group_ids,
        finished=batch.finished,
        logprobs=batch.rollout_logprobs if batch.prox_logprobs is None else batch.prox_logprobs,
        values=batch.columns.get(VALUES),
        columns=batch.columns,
        reduce=reduce,
    )


def centred(
    rewards: Tensor, batch: TrainBatch, config: PPOActorConfig, recipe: AdvantageRecipe, *, reduce: Reduce
) -> tuple[Tensor, Tensor]:
    """Shaped rewards minus their baseline, normalised, [S]; and the factors of the normalisation, [S].

    A collective for some recipes. The factors of `decoupled` and `best_of_group`, which multiply no reward, are 1.
    """
    scale = valid_sample_scale(rewards, batch.group_ids, reduce=reduce) if recipe.rescale_valid else 1.0
    match recipe.baseline:
        case "length_weighted":
            lengths = trained_counts(batch.loss_mask, batch.sequence_index, batch.num_sequences)
            rewards = length_weighted(rewards, lengths, batch.group_ids)
        case "best_of_group":
            rewards = best_of_group(
                rewards, batch.group_ids, divide_by_std=cast("PasskOptions", config.adv_estimator).std
            )
        case "decoupled":
            rewards = _decoupled(batch, config)
        case "greedy":
            rewards = rewards - _shape(batch.column(BASELINE), config)
        case "none":
            pass
    factors = torch.ones_like(rewards)
    if recipe.reward_norm is not None:
        rewards, factors = normalised(rewards, recipe.reward_norm, batch.group_ids, reduce=reduce)
    return rewards * scale, factors * scale


def _decoupled(batch: TrainBatch, config: PPOActorConfig) -> Tensor:
    """GDPO's sum of normalised scores, [S]. InputError, equal on all ranks, when no weighted function scored the batch.

    A batch may lack some of the functions: those of the data sources that it does not contain. A run of one reward
    function records no separate scores: its rewards are that function's.
    """
    weights_of_option = cast("GdpoOptions", config.adv_estimator).weights
    parts: dict[str, Tensor] = reward_parts(batch.columns)
    if not any("/" not in name for name in parts) and not weights_of_option:  # name/key: a further result of one
        parts = {"reward": batch.rewards}
    if weights_of_option and not weights_of_option.keys() & parts.keys():
        raise InputError(
            f"actor.adv_estimator.weights names {', '.join(weights_of_option)}, but the train batch has scores of "
            f"{', '.join(parts) or 'no function'}: use the names of reward functions in the metrics",
            code="algorithm.no_reward_parts",
        )
    weights = [weights_of_option.get(name, 0.0) if weights_of_option else float("/" not in name) for name in parts]
    return decoupled_rewards(torch.stack([*parts.values()], 1), weights, batch.group_ids)


def _shape(rewards: Tensor, config: PPOActorConfig) -> Tensor:
    return shape_rewards(rewards, bias=config.reward_bias, scale=config.reward_scaling, clip=config.reward_clip)


def penalty_metrics(batch: TrainBatch, config: PPOActorConfig, max_new_tokens: int | None) -> Metrics:
    """Statistics of the overlong penalty over this rank's sequences; empty without one."""
    if not config.overlong_reward_penalty:
        return {}
    penalty = _penalty(by_session(batch), config, max_new_tokens)
    each = torch.ones_like(penalty, dtype=torch.bool)
    return to_metrics({"overlong_penalty": TokenStat(penalty, each), "overlong_ratio": TokenStat(penalty < 0, each)})


def _penalty(batch: TrainBatch, config: PPOActorConfig, max_new_tokens: int | None) -> Tensor:
    """The overlong penalty of each sequence. -> [S]"""
    if not config.overlong_reward_penalty:
        return torch.zeros_like(batch.rewards)
    if max_new_tokens is None or config.overlong_tokens is None or config.overlong_penalty_factor is None:
        raise ValueError("the overlong penalty needs max_new_tokens, overlong_tokens and overlong_penalty_factor")
    lengths = trained_counts(batch.loss_mask, batch.sequence_index, batch.num_sequences)
    tail, factor = config.overlong_tokens, config.overlong_penalty_factor
    return overlong_penalty(lengths, max_tokens=max_new_tokens, tail_tokens=tail, factor=factor)


def bootstrap_values(batch: TrainBatch) -> Tensor | None:
    """The critic's value after the last trained token of each sequence: 0 if it finished. -> [S] or None (no critic).

    Only for answers whose task reward is withheld because a length limit cut them (mask_no_eos_with_zero): their return
    is unknown, and the critic estimates it. With a task reward the episode has ended and no reward follows. The value
    at the last trained token is used because the one after it is not recorded.
    """
    if (values := batch.columns.get(VALUES)) is None:
        return None
    last = last_trained(batch.loss_mask, batch.sequence_index, batch.num_sequences)
    padded = torch.cat([values, values.new_zeros(1)])  # index -1: a sequence without trained tokens
    return torch.where(batch.finished, 0.0, padded[last])


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
        self._first_pass: FirstPass | None = None  # That of the batch in training.
        self._teacher = teacher
        self._engine = engine
        self._config = config
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._frozen_steps = frozen_steps
        self._critic_lambda = critic_lambda
        self._entropy_coef = config.entropy_coef
        self._kl_control = KLController(config.kl_ctl, config.kl_control)
        self._estimator_stats: dict[str, TokenStat] = {}  # of the last batch with advantages
        self._kl_coef = config.kl_ctl  # Coefficient of the last batch with advantages.
        self._rule().names_only()  # detects an error in a loss of another package before the first rollouts
        if config.recipe.has_function:
            estimated(no_answers(), config)  # as for a loss

    def state(self) -> ActorState:
        """The adaptive coefficients, which a recovery checkpoint stores."""
        coefficients: dict[str, float] = {}
        if self._kl_control.is_adaptive:
            coefficients["kl_ctl"] = self._kl_control.coefficient
        if self._config.adaptive_entropy is not None:
            coefficients["entropy_coef"] = self._entropy_coef
        return ActorState(coefficients=coefficients)

    def load_state(self, state: ActorState) -> None:
        """Continue with the result of `state`. Coefficients that it lacks, and fixed ones, are as configured."""
        if self._kl_control.is_adaptive:
            self._kl_control.coefficient = state.coefficients.get("kl_ctl", self._config.kl_ctl)
        if self._config.adaptive_entropy is not None:
            self._entropy_coef = state.coefficients.get("entropy_coef", self._config.entropy_coef)

    def with_prox_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Add the policy's outputs before the update that the loss, the KL or the baseline needs."""
        config = self._config
        is_needed = config.needs_prox_logprobs
        if not (is_needed or config.has_token_baseline) and num_candidates(config) is None:
            return batch
        if self._shares_first_pass and not self._has_sessions(batch):
            self._first_pass = FirstPass(config, batch)
            return self._first_pass.with_other_logprobs(batch, self._engine)
        outputs = self._engine.forward(batch)
        logprobs = required(outputs.logprobs, "logprobs")
        if config.has_token_baseline:
            norms = score_norms(logprobs, required(outputs.squared_sums, "squared_sums"))
            batch = batch.with_column(SCORE_NORMS, norms)
        batch = replace(batch, prox_logprobs=logprobs) if is_needed else batch
        return with_candidates(batch, outputs, config)

    def _has_sessions(self, batch: TrainBatch) -> bool:
        """Whether any rank has sessions of several sequences; a collective."""
        has_sessions = torch.tensor([float(SESSION_IDS in batch.columns)], dtype=torch.float64)
        return bool(self._engine.all_reduce(has_sessions, "max").item())

    def with_correction(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """Add off-policy weights and rejections of the whole batch, and their metrics; a collective. While the first
        mini-batch lacks its proximal log-probabilities, there are no metrics."""
        if self._first_pass is not None and batch.prox_logprobs is None:
            return batch, {}
        batch, metrics = with_correction(batch, self._config, reduce=self._engine.all_reduce)
        return batch, {} if self._first_pass is not None else metrics

    def after_update(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """Add the proximal log-probabilities that the first mini-batch made in training, and the metrics of
        `with_correction`; a collective. Other batches are unchanged."""
        if self._first_pass is None:
            return batch, {}
        batch, self._first_pass = self._first_pass.completed(batch), None
        return batch, self.with_correction(batch)[1]

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
        self._estimator_stats = {}
        return with_advantages(
            batch,
            self._config,
            kl_coef=self._kl_coef,
            reduce=self._engine.all_reduce,
            max_new_tokens=self._max_new_tokens,
            critic_lambda=self._critic_lambda,
            stats=self._estimator_stats,
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

    def update(self, batch: TrainBatch, *, step: int = 0, before_step: Callable[[], None] = lambda: None) -> Metrics:
        """`ppo_epochs` times `ppo_n_minibatches` optimiser steps on this batch in train step `step`; a collective.

        Sequences that filters removed are not computed. `before_step`: see `train_on_minibatches`. Metrics of this
        rank's tokens.
        """
        batch = with_chosen_tokens(batch, self._config, reduce=self._engine.all_reduce)
        config, first_pass = self._config, self._first_pass
        passes = Passes(
            num_minibatches=config.ppo_n_minibatches,
            num_epochs=config.ppo_epochs if step >= self._frozen_steps else 0,
            seed=self._seed,
            step=step,
            keeps_groups=config.shared_prefixes == "tree",
            known=None if first_pass is None else first_pass.cut,
        )
        with updating("actor", step):
            metrics = train_on_minibatches(
                self._engine,
                without_filtered(batch),
                passes,
                self._rule(),
                target_kl=config.target_kl,
                before_step=before_step,
            )
        metrics |= penalty_metrics(batch, config, self._max_new_tokens) | to_metrics(self._estimator_stats)
        if batch.ref_logprobs is not None:
            metrics["kl_coef"] = Metric(self._kl_coef)
        if config.adaptive_entropy is not None:
            metrics["entropy_coef"] = Metric(self._entropy_coef)
            if step >= config.adaptive_entropy.warmup_steps:
                entropy = global_mean(self._engine, metrics["bonus_entropy"])
                self._entropy_coef = adapted_entropy_coef(self._entropy_coef, entropy, config.adaptive_entropy)
        return prefixed("actor", metrics)

    def _rule(self) -> PolicyUpdate:
        completed = None if self._first_pass is None else self._first_pass.in_training
        coef = self._entropy_coef
        return PolicyUpdate(self._config, entropy_coef=coef, teacher=self._teacher, completed=completed)

    def _require_finite(self, batch: TrainBatch) -> None:
        """Raise on every rank when any rank has a number that is not finite, so that no rank waits for another."""
        of_tokens = {
            "rollout_logprobs": batch.rollout_logprobs,
            "prox_logprobs": batch.prox_logprobs,
            "ref_logprobs": batch.ref_logprobs,
            **{spec.name: batch.columns.get(spec) for spec in (REF_KL, TEACHER_LOGPROBS, VALUES)},
        }
        names = ["rewards", BASELINE.name, *of_tokens]
        bad = [(~batch.rewards.isfinite()).sum(), _num_without_baseline(batch, self._config)]
        for values in of_tokens.values():
            none = torch.zeros((), dtype=torch.int64)
            bad.append(none if values is None else (batch.loss_mask & ~values.isfinite()).sum())
        counts: list[float] = self._engine.all_reduce(torch.stack(bad).double().cpu()).tolist()
        if any(counts):
            listed = ", ".join(f"{int(count)} in {name}" for name, count in zip(names, counts, strict=True) if count)
            message = f"the train batch contains numbers that are not finite: {listed}"
            raise InputError(
                f"{message}; check rewards, models and, for remax, greedy answers", code="algorithm.not_finite"
            )


def with_chosen_tokens(batch: TrainBatch, config: PPOActorConfig, *, reduce: Reduce) -> TrainBatch:
    """Clip-Cov's and KL-Cov's tokens of high covariance; other losses leave the batch unchanged. A collective.

    The policy of the covariance is the one before the update: the trainer's when it was recomputed, else the
    servers'. Raises StageError when the batch has no advantages.
    """
    if not loss_facts(config.policy_loss).chooses_tokens:
        return batch
    loss_options = cast("ClipCovOptions | KlCovOptions", config.policy_loss)
    logprobs = batch.rollout_logprobs if batch.prox_logprobs is None else batch.prox_logprobs
    covariances = token_covariances(required(batch.advantages, "advantages"), logprobs, batch.trained, reduce=reduce)
    draws = token_draws(batch.input_ids, batch.rollout_logprobs, batch.cu_seqlens, batch.sequence_index)
    if isinstance(loss_options, KlCovOptions):
        chosen = highest_covariances(covariances, draws, batch.trained, ratio=loss_options.ratio, reduce=reduce)
    else:
        box = loss_options
        chosen = drawn_between(
            covariances, draws, batch.trained, low=box.low, high=box.high, ratio=box.ratio, reduce=reduce
        )
    return batch.with_column(CHOSEN, chosen)


def _num_without_baseline(batch: TrainBatch, config: PPOActorConfig) -> Tensor:
    """Answers whose prompt has no greedy answer, where the estimator compares with it."""
    if config.recipe.baseline != "greedy":
        return torch.zeros((), dtype=torch.int64)
    if BASELINE not in batch.columns:
        return torch.tensor(batch.num_sequences)
    return (~batch.columns[BASELINE].isfinite()).sum()
