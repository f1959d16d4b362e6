"""Clip-Cov: PPO without the gradient of some tokens whose update reduces the entropy most."""

from __future__ import annotations

import torch

from areal.algorithm.aggregate import TokenStat
from areal.algorithm.losses.ppo import clipped_surrogate
from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, chosen_tokens
from areal.algorithm.ratio import policy_ratio, ratio_stats
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """Clip-Cov (arXiv 2505.22617): PPO's clipped surrogate, 0 at the chosen tokens.

    `areal.algorithm.covariance` chooses them before the update; they stay in the denominator.
    """
    chosen = chosen_tokens(tokens)
    ratio = policy_ratio(tokens, options)
    losses, clipped = clipped_surrogate(ratio, options)
    stats = ratio_stats(tokens, ratio, clipped)
    stats["covariance_chosen_ratio"] = TokenStat(chosen, tokens.mask)
    return PolicyLoss(losses=torch.where(tokens.mask & ~chosen, losses, 0.0), stats=stats)
