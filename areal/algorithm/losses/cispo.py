"""CISPO: the log-likelihood, weighted by a clipped ratio."""

from __future__ import annotations

import torch

from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, weighted_log_likelihood
from areal.algorithm.ratio import clipped_ratio, policy_ratio, ratio_stats
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): l = -sg(clip(rho)) A log pi; every token keeps its gradient.

    MiniMax clips only above (eps_clip < 0). eps_clip < 0 with eps_clip_higher = 0 is the truncated importance
    sampling of ROLL, -sg(min(rho, 1)) A log pi. cispo.unified_mask (eq. 6 and 7) sets the loss to 0 where A > 0 and
    rho is above the clip, and where A < 0 and rho is below it, as PPO does. `clip_ratio` counts clipped weights.
    """
    ratio = policy_ratio(tokens, options)
    value = ratio.value.detach()
    weight = clipped_ratio(value, options)
    losses = weighted_log_likelihood(tokens, weight, ratio.advantages)
    if options.cispo.unified_mask:
        beyond = ((ratio.advantages > 0) & (value > weight)) | ((ratio.advantages < 0) & (value < weight))
        losses = torch.where(beyond, 0.0, losses)
    return PolicyLoss(losses=losses, stats=ratio_stats(tokens, ratio, value != weight))
