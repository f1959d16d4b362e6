"""Owns KL-Cov's loss: a penalty at the tokens that would cost the most entropy."""

from __future__ import annotations

import torch

from areal.algorithm.aggregate import TokenStat
from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, chosen_tokens
from areal.algorithm.ratio import policy_ratio, ratio_stats
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """KL-Cov (arXiv 2505.22617): l = -A rho, and -A rho + coef |log rho| at the chosen tokens.

    The penalty is the paper's code's (verl too): the absolute log-ratio to the old policy. No clip.
    Which tokens are chosen is decided before the update, see `areal.algorithm.covariance`.
    """
    chosen = chosen_tokens(tokens)
    ratio = policy_ratio(tokens, options)
    penalty = torch.where(chosen, options.kl_cov.coef * ratio.log.abs(), 0.0)
    losses = -ratio.advantages * ratio.value + penalty
    stats = ratio_stats(tokens, ratio)
    stats["covariance_chosen_ratio"] = TokenStat(chosen, tokens.mask)
    return PolicyLoss(losses=torch.where(tokens.mask, losses, 0.0), stats=stats)
