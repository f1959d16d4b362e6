"""Owns AIPO's loss: importance weights truncated on one side."""

from __future__ import annotations

import torch

from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, weighted_log_likelihood
from areal.algorithm.ratio import policy_ratio, ratio_stats
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """AIPO (LlamaRL, arXiv 2505.24034): the policy gradient weighted by min(rho, aipo.rho).

    truncation=weight, the paper: l = -sg(min(rho, c)) A log pi; a token above the cut keeps a gradient of weight c.
    truncation=objective, cosmos-rl: l = -A min(rho, c); a token above the cut has none.
    Below the cut both have the gradient -A rho grad log pi.
    """
    ratio = policy_ratio(tokens, options)
    cut = ratio.value.clamp(max=options.aipo.rho)
    if options.aipo.truncation == "weight":
        losses = weighted_log_likelihood(tokens, cut, ratio.advantages)
    else:
        losses = torch.where(tokens.mask, -ratio.advantages * cut, 0.0)
    return PolicyLoss(losses=losses, stats=ratio_stats(tokens, ratio, ratio.value.detach() > options.aipo.rho))
