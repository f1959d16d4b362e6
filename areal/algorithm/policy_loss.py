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
from areal.algorithm.importance import log_ratio
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

    def __post_init__(self) -> None:
        require_same_shape(
            logprobs=self.logprobs,
            old_logprobs=self.old_logprobs,
            rollout_logprobs=self.rollout_logprobs,
            advantages=self.advantages,
            mask=self.mask,
            sequence_index=self.sequence_index,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Per-token losses, 0 where the mask is off, and what to log about them."""

    losses: Tensor  # [T] with gradient
    stats: dict[str, TokenStat]


PolicyLossFn = Callable[[PolicyTokens, PolicyLossOptions], PolicyLoss]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedObjective:
    """The PPO objective of each token and where its clips took effect."""

    losses: Tensor  # [T]
    log_ratio: Tensor  # [T] theta - old, no gradient
    clipped: Tensor  # [T] bool: the clip of the ratio decides (gradient 0)
    dual_clipped: Tensor  # [T] bool: the dual clip decides (gradient 0)


def clipped_objective(
    tokens: PolicyTokens, *, eps_clip: float, eps_clip_higher: float | None = None, c_clip: float | None = None
) -> ClippedObjective:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7) with asymmetric and dual clip, as a loss.

    rho = exp(log pi_theta - log pi_old);  l = max(-A rho, -A clip(rho, 1 - eps_clip, 1 + eps_clip_higher)).
    eps_clip_higher None = eps_clip (DAPO raises it, arXiv 2503.14476); a negative epsilon removes that side.
    c_clip > 1 adds the dual clip (Ye et al. 2020, arXiv 1912.09729): l = min(l, c |A|), which only bites where A < 0.
    NaN in a trained token gives a NaN loss. Errors: ValueError when c_clip <= 1.
    """
    if c_clip is not None and c_clip <= 1:
        raise ValueError(f"c_clip must be above 1, got {c_clip}")
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    low = 1.0 - eps_clip if eps_clip >= 0 else 0.0
    high = 1.0 + higher if higher >= 0 else float("inf")
    advantages = torch.where(tokens.mask, tokens.advantages, 0.0)
    ratio_log = log_ratio(tokens.logprobs, tokens.old_logprobs.detach(), tokens.mask)
    ratio = ratio_log.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(low, high)
    losses = torch.maximum(plain, bounded)
    clipped = tokens.mask & (bounded > plain)
    dual_clipped = torch.zeros_like(clipped)
    if c_clip is not None:
        bound = c_clip * advantages.abs()
        dual_clipped = tokens.mask & (losses > bound)
        losses = torch.minimum(losses, bound)
    return ClippedObjective(
        losses=torch.where(tokens.mask, losses, 0.0),
        log_ratio=ratio_log.detach(),
        clipped=clipped.detach(),
        dual_clipped=dual_clipped.detach(),
    )


def policy_loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """The loss that `options.policy_loss` names: `loss` of `areal.algorithm.losses.NAME`, with its own options."""
    module = importlib.import_module(f"areal.algorithm.losses.{options.policy_loss}")
    compute = cast("PolicyLossFn", module.loss)
    return compute(tokens, options)


def ratio_stats(tokens: PolicyTokens, objective: ClippedObjective) -> dict[str, TokenStat]:
    """What every loss with a clipped ratio logs."""
    ratio = objective.log_ratio.exp()
    return {
        "importance_weight": TokenStat(ratio, tokens.mask),
        "importance_weight_max": TokenStat(ratio, tokens.mask, "max"),
        "approx_kl": TokenStat(k3_from_samples(objective.log_ratio), tokens.mask),
        "clip_ratio": TokenStat(objective.clipped, tokens.mask),
        "dual_clip_ratio": TokenStat(objective.dual_clipped, tokens.mask),
    }


def k3_from_samples(log_new_over_old: Tensor) -> Tensor:
    """Low-variance, non-negative estimate of KL(old || new) at tokens sampled from the old policy."""
    return torch.expm1(log_new_over_old) - log_new_over_old
