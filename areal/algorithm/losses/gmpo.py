"""GMPO: the geometric mean of the ratios of a sequence, each clipped in log space."""

import torch

from areal.algorithm.policy_loss import (
    PolicyLoss,
    PolicyRatio,
    PolicyTokens,
    clip_bounds,
    policy_ratio,
    ratio_stats,
    spread_means,
)
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """GMPO (arXiv 2507.20673; geo_mean in verl): l_t = -A exp(mean over the sequence of b_t).

    b_t = min(log rho_t, eps_clip_higher) where A > 0 and max(log rho_t, -eps_clip) where A < 0: the clip is
    [exp(-eps_clip), exp(eps_clip_higher)] in terms of ratios (the paper uses 0.4), and only on the side to which the
    advantage pushes. The paper has one advantage per sequence: A is the mean over the sequence and decides the sign
    for all its tokens (verl takes the sign of each token's advantage). Every token of a sequence has the same loss,
    so seq-mean-token-mean is the paper's average over sequences.
    """
    ratio = policy_ratio(tokens, options)
    low, high = clip_bounds(options)
    advantages = spread_means(ratio.advantages, tokens)
    log = ratio.log
    above = log if high is None else log.clamp(max=high)
    below = log if low is None else log.clamp(min=-low)
    bounded = torch.where(advantages > 0, above, torch.where(advantages < 0, below, log))
    geometric = spread_means(bounded, tokens)
    of_sequence = PolicyRatio(log=geometric, advantages=advantages, token_log=ratio.token_log)
    losses = torch.where(tokens.mask, -advantages * of_sequence.value, 0.0)
    return PolicyLoss(losses=losses, stats=ratio_stats(tokens, of_sequence, bounded != log))
