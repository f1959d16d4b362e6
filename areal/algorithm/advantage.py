"""From one reward per sequence to one advantage per token: reward shaping, token rewards, GAE, distillation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal.algorithm.aggregate import require_same_shape, trained_counts
from areal.algorithm.importance import log_ratio


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
    sequence, own = sequence_index[positions], turn_rewards[positions].to(factors.dtype)
    following = rewards.to(factors.dtype)[sequence]
    if positions.numel() > 1:
        following[:-1] = torch.where(sequence[:-1] == sequence[1:], own[1:], following[:-1])
    zeros = torch.zeros_like(mask, dtype=factors.dtype)
    return zeros.index_copy(0, positions, factors[sequence] * (own - following))


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
