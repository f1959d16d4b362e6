"""Kimi k1.5: the policy gradient with a squared log-ratio as penalty."""

from __future__ import annotations

import torch

from areal.algorithm.aggregate import TokenStat, sequence_sums, trained_counts
from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, weighted_log_likelihood
from areal.algorithm.ratio import policy_ratio, ratio_stats
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """Kimi k1.5 (arXiv 2501.12599, eq. 3): l = -A log pi + tau / 2 (log pi / pi_old)^2.

    kimi15.ratio=trajectory (paper): the log-ratio is the sum over the answer, and its square is divided by the number
    of its trained tokens, so that the sum over tokens counts it once. token (ROLL): the log-ratio of each token.
    """
    ratio = policy_ratio(tokens, options)
    plain = weighted_log_likelihood(tokens, torch.ones_like(ratio.log), ratio.advantages)
    penalty = 0.5 * options.kimi15.tau * ratio.log.square()
    if options.kimi15.ratio == "trajectory":
        where = (tokens.mask, tokens.sequence_index, tokens.num_sequences)
        square = sequence_sums(ratio.log.double(), *where).square() / trained_counts(*where).clamp(min=1)
        penalty = 0.5 * options.kimi15.tau * square.to(ratio.log.dtype)[tokens.sequence_index]
    penalty = torch.where(tokens.mask, penalty, 0.0)
    stats = ratio_stats(tokens, ratio)
    stats["log_ratio_penalty"] = TokenStat(penalty, tokens.mask)
    return PolicyLoss(losses=plain + penalty, stats=stats)
