"""The steps from one reward per sequence to one advantage per token: shaping, token rewards, GAE, distillation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from areal.algorithm.aggregate import (
    Reduce,
    TokenStat,
    identity_reduce,
    require_same_shape,
    stats_problem,
    trained_counts,
)
from areal.algorithm.correction import Spans, first_of_units
from areal.algorithm.normalise import Scope, group_scope, normalise
from areal.algorithm.policy_loss import log_ratio
from areal.api.columns import ColumnSpec
from areal.api.config import AdvantageOptions, NormConfig
from areal.api.config.policy_losses import CustomFunctionOptions
from areal.api.errors import ConfigError
from areal.api.registry import ADVANTAGE_CALL, load_function, parse_function_path, registered

# ----------------------------------------------------------------------------------------------------------------------
# Baselines of sequence rewards beyond plain means; per group, by id, groups of any size.

_GRPO = NormConfig(mean_level="group", std_level="group")


def length_weighted(rewards: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """r - sum_j n_j r_j / sum_j n_j over the group: the variance-optimal baseline of OPO (arXiv 2505.23585, eq. 8).

    The paper weights each answer by its squared gradient norm and assumes that the norm grows with its length n.
    rewards [S] float, lengths [S] int (trained tokens), group_ids [S] int64 -> [S] of rewards' dtype, sums in float64.
    A group of one answer gives 0; a group without a trained token keeps its rewards. Raises ValueError on unequal
    shapes.
    """
    require_same_shape(rewards=rewards, lengths=lengths, group_ids=group_ids)
    scope, weight, reward = group_scope(group_ids), lengths.double(), rewards.double()
    total = scope.sums(weight)[0]
    baseline = scope.sums(weight * reward)[0] / torch.where(total > 0, total, 1.0)
    return (reward - baseline[scope.index]).to(rewards.dtype)


def best_of_group(rewards: Tensor, group_ids: Tensor, *, divide_by_std: bool = False) -> Tensor:
    """Best minus second-best reward for the best answer of a group, 0 for the others: the gradient of max@k.

    Source: Tang, Zheng, Synnaeve and Munos 2025, arXiv 2503.19595. divide_by_std: divided by the unbiased std of the
    group + 1e-6 (verl's default). rewards [S] float, group_ids [S] int64 -> [S] of rewards' dtype. A group of one
    answer, or with several best answers, gives 0; NaN in a group gives NaN. Raises ValueError on unequal shapes.
    """
    require_same_shape(rewards=rewards, group_ids=group_ids)
    scope = group_scope(group_ids)
    groups = scope.index
    lowest = torch.full((scope.size,), float("-inf"), dtype=rewards.dtype, device=rewards.device)
    best = lowest.scatter_reduce(0, groups, rewards, "amax")
    is_best = (rewards == best[groups]) | rewards.isnan()
    second = lowest.scatter_reduce(0, groups, torch.where(is_best, float("-inf"), rewards), "amax")
    holders, size = scope.sums(is_best.double())
    lead = torch.where((holders == 1) & (size > 1), best - second, 0.0)
    lead = torch.where(best.isnan(), best, lead)[groups]
    if divide_by_std:
        deviations = rewards.double() - scope.means(rewards.double())
        lead = (lead / scope.divisors(deviations, unbiased=True, eps=1e-6)).to(rewards.dtype)
    return torch.where(is_best, lead, 0.0)


def decoupled_rewards(parts: Tensor, weights: Sequence[float], group_ids: Tensor) -> Tensor:
    """sum_k w_k (r_k - mean_G r_k) / (std_G r_k + eps): GDPO (arXiv 2601.05242), before its norm over the batch.

    Each reward function is normalised within the group, so that functions of different scale count equally. parts
    [S, K] float, NaN where function k did not score the answer (its term is then 0), weights of length K, group_ids
    [S] int64 -> [S] of parts' dtype. std with n - 1, eps 1e-5 (verl: 1e-6); a function that is constant in a group
    gives 0.
    """
    total = torch.zeros_like(parts[:, 0]) if parts.shape[1] else parts.new_zeros(parts.shape[0])
    for part, weight in zip(parts.unbind(1), weights, strict=True):
        total = total + weight * normalise(part, _GRPO, group_ids, mask=~part.isnan())
    return total


def valid_sample_scale(rewards: Tensor, group_ids: Tensor, *, reduce: Reduce = identity_reduce) -> float:
    """N / N_valid over all ranks, N_valid = answers of groups whose rewards differ (GPG, arXiv 2504.02546, eq. 7).

    Groups of equal rewards have no gradient; the factor removes them from the mean over the answers.
    rewards [S] float, group_ids [S] int64; a collective (`reduce` once). 1.0 when no group is valid.
    """
    require_same_shape(rewards=rewards, group_ids=group_ids)
    valid = mixed_group(rewards, group_ids)
    counts = reduce(torch.tensor([float(rewards.numel()), float(valid.sum())], dtype=torch.float64))
    return float(counts[0] / counts[1]) if counts[1] else 1.0


def mixed_group(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Answers whose group has at least two different rewards; the others have no gradient under a group baseline.

    rewards [S] float, group_ids [S] int64 -> [S] bool.
    """
    scope = group_scope(group_ids)
    extremes = rewards.new_empty(2, scope.size)
    extremes[0].fill_(float("-inf")).scatter_reduce_(0, scope.index, rewards, "amax")
    extremes[1].fill_(float("inf")).scatter_reduce_(0, scope.index, rewards, "amin")
    return (extremes[0] != extremes[1])[scope.index]


# ----------------------------------------------------------------------------------------------------------------------
# The optimal token baseline: one baseline per token position of a group, weighted by squared gradient norms.

EPS = 1e-8
"""Added to the sum of weights of a position."""


VALUES = ColumnSpec("values", made_by="with_values")
"""[T] float32, of the critic before the update."""
RETURNS = ColumnSpec("returns", made_by="with_advantages")
"""[T] float32, the critic's targets."""
SCORE_NORMS = ColumnSpec("score_norms", made_by="with_prox_logprobs")
"""[T] float32, see `optimal_token_baseline`."""


def score_norms(logprobs: Tensor, squared_sums: Tensor) -> Tensor:
    """1 - 2 p + sum_v p_v^2 of each token: the squared norm of d log p / d logits. Both [T] -> [T]."""
    return 1.0 - 2.0 * logprobs.exp() + squared_sums


def optimal_token_baseline(
    returns: Tensor,
    norms: Tensor,
    group_ids: Tensor,
    spans: Spans,
    *,
    over_trained: bool,
    weights: Tensor | None = None,
) -> Tensor:
    """A_t = G_t - B_t with B_t = sum_j G_j,t W_j,t / (sum_j W_j,t + 1e-8) over the answers j of the group.

    W_t = sum of w_i^2 n_i over the trained tokens i <= t of the answer, n = `norms`, w = `weights` of the off-policy
    correction, None = 1 (verl: optimal_token_baseline, tir_optimal_token_baseline). Only answers with a trained token
    at position t count. Position: tokens since the first trained token of the answer, or with over_trained (TIR,
    multi-turn) the number of trained tokens before, so that the tool outputs of an answer do not shift its turns.
    B_t = 0 in a group of one answer, and for the tokens of the longest answer beyond the second longest.

    returns, norms, weights [T] float, group_ids [S] int64 -> [T] of returns' dtype, 0 where the mask is off; sums in
    float64. Groups are whole on a rank: no exchange. Raises ValueError on unequal shapes.
    """
    mask, index = spans.mask, spans.sequence_index
    require_same_shape(returns=returns, norms=norms, mask=mask, weights=mask if weights is None else weights)
    energy = torch.where(mask, norms, 0.0).double()
    if weights is not None:
        energy = energy * torch.where(mask, weights, 0.0).double().square()
    count = mask.long().cumsum(0) - 1 if over_trained else torch.arange(mask.numel(), device=mask.device)
    first = first_of_units("sequence_sum", spans)
    place = count - _of_sequences(count[first], first, spans)
    total = energy.cumsum(0)
    path = total - _of_sequences((total - energy)[first], first, spans)
    groups = group_scope(group_ids)
    extents = place.new_zeros(spans.num_sequences).scatter_reduce(0, index[mask], place[mask] + 1, "amax")
    width = int(extents.max()) + 1 if extents.numel() else 1
    slots = Scope(groups.index[index] * width + place.clamp(0, width - 1), groups.size * width, identity_reduce)
    gain = torch.where(mask, returns, 0.0).double()
    inside = torch.where(mask, path, 0.0)
    baseline = slots.sums(gain * inside)[0] / (slots.sums(inside)[0] + EPS)
    # tokens of the longest answer beyond the second longest; all tokens of a group of one answer
    lead = best_of_group(extents.double(), group_ids).long()
    size = groups.sums(extents.double())[1][groups.index]
    is_tail = place >= torch.where(size == 1, 0, extents - lead)[index]
    advantage = gain - torch.where(is_tail, 0.0, baseline[slots.index])
    return torch.where(mask, advantage, 0.0).to(returns.dtype)


def _of_sequences(values: Tensor, first: Tensor, spans: Spans) -> Tensor:
    """`values` at the first trained tokens (`first` [T] bool), at every position of their sequences. -> [T]"""
    each = values.new_zeros(spans.num_sequences).index_copy(0, spans.sequence_index[first], values)
    return each[spans.sequence_index]


# ----------------------------------------------------------------------------------------------------------------------
# Advantage estimators that are functions: of other packages, and those that the user names by path.


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedAnswers:
    """What an estimator reads: one rank's S answers of a train batch, packed into T tokens. Whole groups are on a rank.

    Per-token tensors are predicted-token aligned: position t refers to token t + 1 of its sequence.
    """

    rewards: Tensor  # [S] float32, after penalty, bias, scale, clip and mask_no_eos_with_zero
    token_rewards: Tensor  # [T] float32: the reward at the last trained token, minus the KL penalty at each
    mask: Tensor  # [T] bool: trained tokens
    sequence_index: Tensor  # [T] int64
    num_sequences: int
    group_ids: Tensor  # [S] int64, unique over all ranks
    finished: Tensor  # [S] bool: the answer was not cut by a length limit
    logprobs: Tensor  # [T] float32 of the trainer's policy before the update, or of the servers if not computed
    values: Tensor | None  # [T] float32 of the critic
    columns: Mapping[ColumnSpec, Tensor]
    """Further columns, [T] or [S]: those of the workflow, and reward/NAME, the score of each reward function."""
    reduce: Reduce
    """Sums a float64 tensor over all ranks; every rank must call it equally often, also one without answers."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an estimator may return in place of advantages alone."""

    advantages: Tensor  # [T]
    stats: dict[str, TokenStat]
    """Metrics `batch/estimator/NAME`; the same names for every batch, also without answers."""


def estimated(answers: RewardedAnswers, options: AdvantageOptions) -> Estimate:
    """Call the estimator of `options.adv_estimator` as estimator(answers, options) -> advantages [T], or an Estimate.

    The result is without gradient, in the dtype of token_rewards, 0 where the mask is off. Raises ConfigError when the
    function cannot be loaded, or does not return a floating-point tensor with one number per token.
    """
    name = options.adv_estimator.name
    estimate = registered("estimators", name, key="actor.adv_estimator").load()(answers, options)
    values, stats = (estimate.advantages, estimate.stats) if isinstance(estimate, Estimate) else (estimate, {})
    expected = tuple(answers.mask.shape)
    if not isinstance(values, Tensor) or not values.is_floating_point() or tuple(values.shape) != expected:
        what = f"{values.dtype} of shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ConfigError(
            f"{options.adv_estimator!r} returned {what}: a floating-point tensor with one number per token is "
            f"expected, {expected}",
            code="algorithm.custom_advantage",
        )
    if problem := stats_problem(stats):
        raise ConfigError(f"{options.adv_estimator!r} returned {problem}", code="algorithm.custom_advantage")
    values = torch.where(answers.mask, values.detach().to(answers.token_rewards.dtype), 0.0)
    return Estimate(values, stats)


def custom_advantages(answers: RewardedAnswers, options: AdvantageOptions) -> Any:
    """Call the function at `adv_estimator.path`, which finds its arguments in options.adv_estimator.args."""
    return _function(cast("CustomFunctionOptions", options.adv_estimator).path)(answers, options)


def median_baseline(answers: RewardedAnswers, options: AdvantageOptions) -> Tensor:
    """An example: A = scale (r - median of r in the group), scale from options.adv_estimator.args."""
    centred = torch.zeros_like(answers.rewards)
    groups = group_scope(answers.group_ids)
    for group in range(groups.size):
        members = groups.index == group
        centred[members] = answers.rewards[members] - answers.rewards[members].median()
    scale_options = cast("CustomFunctionOptions", options.adv_estimator)
    return float(scale_options.args["scale"]) * centred[answers.sequence_index]


@cache
def _function(path: str) -> Callable[..., Any]:
    return load_function(parse_function_path(path, key="adv_estimator.path"), ADVANTAGE_CALL)


def no_answers() -> RewardedAnswers:
    """An empty batch, to call an estimator before the first rollouts."""
    tokens, index = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    return RewardedAnswers(
        rewards=tokens,
        token_rewards=tokens,
        mask=index.bool(),
        sequence_index=index,
        num_sequences=0,
        group_ids=index,
        finished=index.bool(),
        logprobs=tokens,
        values=None,
        columns={},
        reduce=identity_reduce,
    )


def shape_rewards(rewards: Tensor, *, bias: float = 0.0, scale: float = 1.0, clip: float | None = None) -> Tensor:
    """r' = clip((r + bias) * scale, -clip, clip) of sequence rewards [S], same dtype; clip None = no limits."""
    shaped = (rewards + bias) * scale
    return shaped if clip is None else shaped.clamp(-clip, clip)


def overlong_penalty(lengths: Tensor, *, max_tokens: int, tail_tokens: int, factor: float) -> Tensor:
    """Penalty of long answers (DAPO, arXiv 2503.14476, eq. 13), added to the reward of a sequence.

    -factor * clip((n - (max_tokens - tail_tokens)) / tail_tokens, 0, 1) of n trained tokens. lengths [S] int -> [S]
    float32.
    """
    beyond = (lengths - (max_tokens - tail_tokens)).float() / tail_tokens
    return -factor * beyond.clamp(0.0, 1.0)


def withhold_unfinished(rewards: Tensor, finished: Tensor) -> Tensor:
    """Task reward 0 for answers that a length limit truncated. rewards [S] float, finished [S] bool.

    Applied after normalisation: a truncated answer counts in the statistics of its group, and 0 is the baseline.
    """
    require_same_shape(rewards=rewards, finished=finished)
    return torch.where(finished, rewards, 0.0)


def token_rewards(
    task_rewards: Tensor, mask: Tensor, sequence_index: Tensor, *, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Reward of each trained token: -kl_coef * KL_t, plus the task reward at the last trained token of its sequence.

    task_rewards [S] float, mask [T] bool, sequence_index [T] int64 ascending, kl [T] or None -> [T] of the dtype of
    task_rewards, 0 where the mask is off. A sequence without trained tokens gets nothing.
    """
    require_same_shape(mask=mask, sequence_index=sequence_index)
    rewards = torch.zeros_like(mask, dtype=task_rewards.dtype)
    if kl is not None:
        require_same_shape(mask=mask, kl=kl)
        rewards = torch.where(mask, -kl_coef * kl.to(rewards.dtype), 0.0)
    last = last_trained(mask, sequence_index, int(task_rewards.numel()))
    has_tokens = last >= 0
    return rewards.index_add(0, last[has_tokens], task_rewards[has_tokens])


def turn_token_rewards(
    turn_rewards: Tensor, rewards: Tensor, factors: Tensor, mask: Tensor, sequence_index: Tensor
) -> Tensor:
    """What is added to the token rewards of sessions so that the tokens of a turn k have the reward G_k, not r.

    f (G_k - G_{k+1}) at the last trained token of each turn and f (G_K - r) at that of the last: from turn k on they
    sum to f (G_k - r). turn_rewards [T] holds G at each trained token, in order of time; rewards r [S] as recorded;
    factors f [S], by which shaping and normalisation multiply rewards. mask [T] bool, sequence_index [T] int64
    ascending -> [T] of factors' dtype, 0 where the mask is off.
    """
    require_same_shape(turn_rewards=turn_rewards, mask=mask, sequence_index=sequence_index)
    positions = torch.nonzero(mask).flatten()
    sequence, token_rewards = sequence_index[positions], turn_rewards[positions].to(factors.dtype)
    following = rewards.to(factors.dtype)[sequence]
    if positions.numel() > 1:
        following[:-1] = torch.where(sequence[:-1] == sequence[1:], token_rewards[1:], following[:-1])
    zeros = torch.zeros_like(mask, dtype=factors.dtype)
    return zeros.index_copy(0, positions, factors[sequence] * (token_rewards - following))


def last_trained(mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Position of the last trained token of each sequence, -1 where there is none. -> [S] int64."""
    positions = torch.nonzero(mask).flatten()
    last = torch.full((num_sequences,), -1, dtype=torch.int64, device=mask.device)
    return last.scatter_reduce(0, sequence_index[positions], positions, "amax", include_self=True)


def adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """lambda = 1 - 1 / (alpha n) of n trained tokens, at least 0 (VAPO, arXiv 2504.05118, section 4.1).

    The sum of the weights lambda^t of GAE is then proportional to n. lengths [S] int -> [S] float64.
    """
    return (1.0 - 1.0 / (alpha * lengths.double())).clamp(min=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """The result of GAE; 0 where the mask is off."""

    advantages: Tensor  # [T]
    returns: Tensor  # [T] advantages + values: the critic's targets


def generalised_advantages(
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    *,
    discount: float = 1.0,
    gae_lambda: float | Tensor = 1.0,
    bootstrap: Tensor | None = None,
) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) over the trained tokens of packed sequences.

    Over the trained tokens i of one sequence:  delta_i = r_i + discount * V_{i+1} - V_i;
    A_i = delta_i + discount * gae_lambda * A_{i+1};  R_i = A_i + V_i.
    Untrained tokens between them (tool output, user turns) are neither discounted nor valued.
    V after the last trained token is `bootstrap` [S], None = 0 (the episode ended). values None = 0 everywhere.
    gae_lambda is one number, or [S] one for each sequence.

    rewards, values, mask [T]; sequence_index [T] int64 ascending. Computed in float64, returned in rewards' dtype.
    A_i is a linear recurrence with a constant factor per sequence, computed in log2(longest answer) vectorised steps
    over all sequences; the order of additions does not depend on the packing.
    """
    require_same_shape(rewards=rewards, mask=mask, sequence_index=sequence_index)
    positions = torch.nonzero(mask).flatten()
    sequence = sequence_index[positions]
    reward = rewards[positions].double()
    value = torch.zeros_like(reward) if values is None else values[positions].double()
    after = torch.zeros_like(value) if bootstrap is None else bootstrap.double()[sequence]
    if positions.numel() > 1:
        same = sequence[:-1] == sequence[1:]
        after[:-1] = torch.where(same, value[1:], after[:-1])
    advantage = reward + discount * after - value
    longest = int(trained_counts(mask, sequence_index, num_sequences).max()) if num_sequences else 0
    factor = discount * (gae_lambda.double()[sequence] if isinstance(gae_lambda, Tensor) else gae_lambda)
    stride = 1
    while stride < longest:
        # before: A_i covers `stride` terms of its sum; after: twice as many
        same = sequence[:-stride] == sequence[stride:]
        later = torch.where(same, advantage[stride:], 0.0)
        weight = factor[:-stride] ** stride if isinstance(factor, Tensor) else factor**stride
        advantage = torch.cat([advantage[:-stride] + weight * later, advantage[-stride:]])
        stride *= 2
    zeros = torch.zeros_like(rewards)
    return Advantages(
        advantages=zeros.index_copy(0, positions, advantage.to(rewards.dtype)),
        returns=zeros.index_copy(0, positions, (advantage + value).to(rewards.dtype)),
    )


def distilled_advantages(
    advantages: Tensor, logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, rl_weight: float, coef: float
) -> Tensor:
    """A' = rl_weight A + coef log(pi_teacher / pi) of each token, both policies without gradient.

    The score-function form of the reverse KL: over tokens sampled from pi the mean of -log(pi_teacher / pi) grad log pi
    is grad KL(pi || pi_teacher) (MiniLLM, arXiv 2306.08543, eq. 2, for one token at a time; GKD, arXiv 2306.13649).
    All [T], mask bool; log-ratios are clamped to +-20; 0 where the mask is off. Raises ValueError on unequal shapes.
    """
    require_same_shape(advantages=advantages, logprobs=logprobs, teacher_logprobs=teacher_logprobs, mask=mask)
    gap = log_ratio(teacher_logprobs.detach(), logprobs.detach(), mask)
    return torch.where(mask, rl_weight * advantages + coef * gap, 0.0)
