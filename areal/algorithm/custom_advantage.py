"""An advantage estimator that the user names by path."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from areal.algorithm.aggregate import Reduce, identity_reduce
from areal.algorithm.normalise import group_scope
from areal.api.config import AdvantageOptions
from areal.api.errors import ConfigError
from areal.api.functions import ADVANTAGE_CALL, load_function, parse_function_path


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
    reward_parts: Tensor | None  # [S, K] float32: the scores of the functions reward_names, NaN where one did not score
    reward_names: tuple[str, ...]
    reduce: Reduce
    """Sums a float64 tensor over all ranks; every rank must call it equally often, also one without answers."""


def custom_advantages(answers: RewardedAnswers, options: AdvantageOptions) -> Tensor:
    """Call the function at `custom_advantage.path` as estimator(answers, options) -> advantages [T].

    The result is without gradient, in the dtype of token_rewards, 0 where the mask is off. Raises ConfigError when the
    function cannot be loaded, or does not return a floating-point tensor with one number per token.
    """
    path = options.custom_advantage.path
    found = _function(path)(answers, options)
    expected = tuple(answers.mask.shape)
    if not isinstance(found, Tensor) or not found.is_floating_point() or tuple(found.shape) != expected:
        what = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(
            f"custom_advantage.path={path!r} returned {what}: a floating-point tensor with one number per token is "
            f"expected, {expected}",
            code="algorithm.custom_advantage",
        )
    return torch.where(answers.mask, found.detach().to(answers.token_rewards.dtype), 0.0)


def median_baseline(answers: RewardedAnswers, options: AdvantageOptions) -> Tensor:
    """An example: A = scale (r - median of r in the group), scale from options.custom_advantage.args."""
    centred = torch.zeros_like(answers.rewards)
    groups = group_scope(answers.group_ids)
    for group in range(groups.size):
        members = groups.index == group
        centred[members] = answers.rewards[members] - answers.rewards[members].median()
    return float(options.custom_advantage.args["scale"]) * centred[answers.sequence_index]


@cache
def _function(path: str) -> Callable[..., Any]:
    return load_function(parse_function_path(path, key="custom_advantage.path"), ADVANTAGE_CALL)


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
        reward_parts=None,
        reward_names=(),
        reduce=identity_reduce,
    )
