"""GPG: the plain policy gradient."""

from __future__ import annotations

import torch

from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, weighted_log_likelihood
from areal.algorithm.ratio import policy_ratio, ratio_stats
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """GPG (arXiv 2504.02546; REINFORCE): l = -A log pi. The ratio is only logged."""
    ratio = policy_ratio(tokens, options)
    losses = weighted_log_likelihood(tokens, torch.ones_like(ratio.log), ratio.advantages)
    return PolicyLoss(losses=losses, stats=ratio_stats(tokens, ratio))
