"""The stage from rewards to advantages: shaping, baseline, KL penalty, GAE and normalisation."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from areal.algorithm.advantage import (
    adaptive_lambda,
    generalised_advantages,
    last_trained,
    overlong_penalty,
    shape_rewards,
    token_rewards,
    turn_token_rewards,
    withhold_unfinished,
)
from areal.algorithm.aggregate import Reduce, TokenStat, to_metrics, trained_counts
from areal.algorithm.baselines import best_of_group, decoupled_rewards, length_weighted, valid_sample_scale
from areal.algorithm.correction_rules import Spans
from areal.algorithm.custom_advantage import RewardedAnswers, custom_advantages
from areal.algorithm.estimators import AdvantageRecipe, recipe_of
from areal.algorithm.normalise import normalise, normalised
from areal.algorithm.token_baseline import optimal_token_baseline
from areal.api.batch import TrainBatch, required
from areal.api.config import PPOActorConfig
from areal.api.errors import InputError
from areal.api.metrics import Metrics
from areal.data.sessions import by_session, session_view
from areal.trainer.kl_term import kl_penalty


def with_advantages(
    batch: TrainBatch,
    config: PPOActorConfig,
    *,
    kl_coef: float,
    reduce: Reduce,
    max_new_tokens: int | None = None,
    critic_lambda: float | None = None,
) -> TrainBatch:
    """Rewards -> shaping -> baseline -> token rewards with KL penalty -> GAE -> normalisation.

    A session that was cut into several sequences counts as one, whose tokens are in order of time. A collective.
    `kl_coef`: weight of the KL penalty in this step. `reduce`: sum over all ranks. `max_new_tokens`: limit of an
    answer, which the overlong penalty needs. `critic_lambda`: lambda of the critic's targets (VAPO's decoupled GAE,
    arXiv 2504.05118, section 4.1); None = that of the advantages.
    """
    view = session_view(batch)
    found = _with_advantages(
        batch if view is None else view.batch,
        config,
        kl_coef=kl_coef,
        reduce=reduce,
        max_new_tokens=max_new_tokens,
        critic_lambda=critic_lambda,
    )
    if view is None:
        return found
    size, returns = batch.num_tokens, found.returns
    advantages = view.scattered(required(found.advantages, "advantages"), size)
    return replace(batch, advantages=advantages, returns=None if returns is None else view.scattered(returns, size))


def _with_advantages(
    batch: TrainBatch,
    config: PPOActorConfig,
    *,
    kl_coef: float,
    reduce: Reduce,
    max_new_tokens: int | None,
    critic_lambda: float | None,
) -> TrainBatch:
    recipe = recipe_of(config)
    mask, sequence_index = batch.loss_mask, batch.sequence_index
    rewards = _shape(batch.rewards + _penalty(batch, config, max_new_tokens), config)
    rewards, factors = centred(rewards, batch, config, recipe, reduce=reduce)
    if config.mask_no_eos_with_zero:
        rewards, factors = (withhold_unfinished(one, batch.finished) for one in (rewards, factors))
    kl = kl_penalty(batch, config) if kl_coef else None
    per_token = token_rewards(rewards, mask, sequence_index, kl=kl, kl_coef=kl_coef)
    if batch.turn_rewards is not None:
        factors = config.reward_scaling * factors
        per_token = per_token + turn_token_rewards(batch.turn_rewards, batch.rewards, factors, mask, sequence_index)
    estimate = partial(
        generalised_advantages,
        per_token,
        batch.values,
        mask,
        sequence_index,
        batch.num_sequences,
        discount=config.discount,
        bootstrap=bootstrap_values(batch) if config.mask_no_eos_with_zero else None,
    )
    policy_lambda: float | Tensor = recipe.gae_lambda
    if config.gae_length_alpha is not None and config.adv_estimator == "gae":
        lengths = trained_counts(mask, sequence_index, batch.num_sequences)
        policy_lambda = adaptive_lambda(lengths, config.gae_length_alpha)
    result = estimate(gae_lambda=policy_lambda)
    advantages = result.advantages
    if recipe.is_custom:
        advantages = custom_advantages(_answers(batch, rewards, per_token, reduce=reduce), config)
    if recipe.token_baseline != "none":
        advantages = optimal_token_baseline(
            advantages,
            required(batch.score_norms, "score_norms"),
            batch.group_ids,
            Spans(mask, sequence_index, batch.num_sequences),
            over_trained=recipe.token_baseline == "trained_token",
            weights=batch.behaviour_weights,
        )
    if recipe.adv_norm is not None:
        groups = batch.group_ids[sequence_index]
        advantages = normalise(advantages, recipe.adv_norm, groups, mask=mask, reduce=reduce)
    if batch.values is None:
        return replace(batch, advantages=advantages)
    targets = result if critic_lambda is None else estimate(gae_lambda=critic_lambda)
    return replace(batch, advantages=advantages, returns=targets.returns)


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
        values=batch.values,
        reward_parts=batch.reward_parts,
        reward_names=batch.reward_names,
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
            rewards = best_of_group(rewards, batch.group_ids, divide_by_std=config.passk_std)
        case "decoupled":
            rewards = _decoupled(batch, config)
        case "greedy":
            rewards = rewards - _shape(required(batch.baselines, "baselines"), config)
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
    parts, names = batch.reward_parts, batch.reward_names
    is_function = ["/" not in name for name in names]  # name/key: a further result of a function
    if not any(is_function) and not config.gdpo_weights:
        parts, names, is_function = batch.rewards.unsqueeze(1), ("reward",), [True]
    if parts is None or (config.gdpo_weights and not config.gdpo_weights.keys() & set(names)):
        raise InputError(
            f"actor.gdpo_weights names {', '.join(config.gdpo_weights)}, but the train batch has scores of "
            f"{', '.join(names) or 'no function'}: use the names of reward functions in the metrics",
            code="algorithm.no_reward_parts",
        )
    weights = [config.gdpo_weights.get(name, 0.0) for name in names] if config.gdpo_weights else is_function
    return decoupled_rewards(parts, weights, batch.group_ids)


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
    if batch.values is None:
        return None
    last = last_trained(batch.loss_mask, batch.sequence_index, batch.num_sequences)
    padded = torch.cat([batch.values, batch.values.new_zeros(1)])  # index -1: a sequence without trained tokens
    return torch.where(batch.finished, 0.0, padded[last])
