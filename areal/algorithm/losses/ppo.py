"""Owns PPO's loss: the clipped surrogate around the old policy."""

from __future__ import annotations

from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, clipped_objective, ratio_stats
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """`clipped_objective` with the clip ranges of `options`."""
    objective = clipped_objective(
        tokens, eps_clip=options.eps_clip, eps_clip_higher=options.eps_clip_higher, c_clip=options.c_clip
    )
    return PolicyLoss(losses=objective.losses, stats=ratio_stats(tokens, objective))
