"""TOPR: REINFORCE with a truncated weight on answers of negative advantage."""

from __future__ import annotations

import torch

from areal.algorithm.aggregate import sequence_sums
from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, weighted_log_likelihood
from areal.algorithm.ratio import PolicyRatio, policy_ratio, ratio_stats
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """TOPR (arXiv 2503.14286, eq. 8): l = -w A log pi with w = 1 where A >= 0, and sg(min(rho, 1)) where A < 0.

    rho = pi(y) / pi_old(y) of the whole answer, the product over its trained tokens (topr.ratio=trajectory), or of
    the token (ROLL). The sign is that of the advantage; ROLL uses the sign of the reward. w is multiplied by
    positive_weight or negative_weight. `clip_ratio` counts negative tokens whose rho is truncated.
    """
    ratio = policy_ratio(tokens, options)
    if options.topr.ratio == "trajectory":
        sums = sequence_sums(ratio.token_log.double(), tokens.mask, tokens.sequence_index, tokens.num_sequences)
        log = torch.where(tokens.mask, sums.to(ratio.log.dtype)[tokens.sequence_index], 0.0)
        ratio = PolicyRatio(log=log, advantages=ratio.advantages, token_log=ratio.token_log)
    negative = ratio.advantages < 0
    truncated = options.topr.negative_weight * ratio.log.detach().clamp(max=0.0).exp()
    weight = torch.where(negative, truncated, options.topr.positive_weight)
    losses = weighted_log_likelihood(tokens, weight, ratio.advantages)
    return PolicyLoss(losses=losses, stats=ratio_stats(tokens, ratio, negative & (ratio.log.detach() > 0)))
