"""Owns the policy-gradient losses: one function per variant, from one record of named tensors to per-token losses.

A loss is the function `loss(tokens, options) -> PolicyLoss` of the module of its name in `areal.algorithm.losses`. How
to add one is told in `areal.api.config.policy_losses`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from areal.algorithm.aggregate import TokenStat, require_same_shape
from areal.api.config import PolicyLossOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """What a policy loss may look at. Per-token tensors are [T], float32 or float64, predicted-token aligned."""

    logprobs: Tensor  # log pi_theta, with gradient
    old_logprobs: Tensor  # log of the policy the ratio is taken against (pi_prox when decoupled)
    rollout_logprobs: Tensor  # log of the policy that sampled the tokens
    advantages: Tensor
    mask: Tensor  # bool
    sequence_index: Tensor  # [T] int64
    num_sequences: int
    chosen: Tensor | None = None
    """[T] bool: tokens that a loss treats apart, chosen over the whole batch before the update."""

    def __post_init__(self) -> None:
        require_same_shape(
            logprobs=self.logprobs,
            old_logprobs=self.old_logprobs,
            rollout_logprobs=self.rollout_logprobs,
            advantages=self.advantages,
            mask=self.mask,
            sequence_index=self.sequence_index,
            chosen=self.mask if self.chosen is None else self.chosen,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Per-token losses, 0 where the mask is off, and what to log about them."""

    losses: Tensor  # [T] with gradient
    stats: dict[str, TokenStat]


PolicyLossFn = Callable[[PolicyTokens, PolicyLossOptions], PolicyLoss]


def policy_loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """The loss that `options.policy_loss` names: `loss` of `areal.algorithm.losses.NAME`, with its own options."""
    module = importlib.import_module(f"areal.algorithm.losses.{options.policy_loss}")
    compute = cast("PolicyLossFn", module.loss)
    return compute(tokens, options)


def weighted_log_likelihood(tokens: PolicyTokens, weights: Tensor, advantages: Tensor) -> Tensor:
    """-w A log pi of each token, [T]: a policy gradient whose weights are constants; 0 where the mask is off."""
    logprobs = torch.where(tokens.mask, tokens.logprobs, 0.0)
    return torch.where(tokens.mask, -weights.detach() * advantages * logprobs, 0.0)


def k3_from_samples(log_new_over_old: Tensor) -> Tensor:
    """Low-variance, non-negative estimate of KL(old || new) at tokens sampled from the old policy."""
    return torch.expm1(log_new_over_old) - log_new_over_old


def chosen_tokens(tokens: PolicyTokens) -> Tensor:
    """`tokens.chosen`, [T] bool within the mask. ValueError when nobody has chosen."""
    if tokens.chosen is None:
        raise ValueError("the batch has no chosen_tokens: call with_chosen_tokens after with_advantages")
    return tokens.chosen & tokens.mask
