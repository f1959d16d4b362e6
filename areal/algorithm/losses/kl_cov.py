"""KL-Cov: a penalty on the tokens whose update reduces the entropy most."""

from __future__ import annotations

import torch

from areal.algorithm.aggregate import TokenStat
from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, chosen_tokens
from areal.algorithm.ratio import policy_ratio, ratio_stats
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """KL-Cov (arXiv 2505.22617): l = -A rho, and -A rho + coef |log rho| at the chosen tokens.

    The penalty is the absolute log-ratio to the old policy, as in the paper's code and verl. There is no clip.
    `areal.algorithm.covariance` chooses the tokens before the update.
    """
    chosen = chosen_tokens(tokens)
    ratio = policy_ratio(tokens, options)
    penalty = torch.where(chosen, options.kl_cov.coef * ratio.log.abs(), 0.0)
    losses = -ratio.advantages * ratio.value + penalty
    stats = ratio_stats(tokens, ratio)
    stats["covariance_chosen_ratio"] = TokenStat(chosen, tokens.mask)
    return PolicyLoss(losses=torch.where(tokens.mask, losses, 0.0), stats=stats)
