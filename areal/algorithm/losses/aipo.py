"""AIPO: a policy gradient whose importance weights are truncated on one side."""

from __future__ import annotations

import torch

from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, weighted_log_likelihood
from areal.algorithm.ratio import policy_ratio, ratio_stats
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """AIPO (LlamaRL, arXiv 2505.24034): policy gradient with the weight min(rho, c), c = aipo.rho.

    truncation=weight (paper): l = -sg(min(rho, c)) A log pi; a token with rho > c keeps a gradient, with weight c.
    truncation=objective (cosmos-rl): l = -A min(rho, c); a token with rho > c has no gradient.
    For rho <= c both have the gradient -A rho grad log pi.
    """
    ratio = policy_ratio(tokens, options)
    cut = ratio.value.clamp(max=options.aipo.rho)
    if options.aipo.truncation == "weight":
        losses = weighted_log_likelihood(tokens, cut, ratio.advantages)
    else:
        losses = torch.where(tokens.mask, -ratio.advantages * cut, 0.0)
    return PolicyLoss(losses=losses, stats=ratio_stats(tokens, ratio, ratio.value.detach() > options.aipo.rho))
