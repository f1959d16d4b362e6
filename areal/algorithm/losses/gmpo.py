"""Owns GMPO's loss: the geometric mean of a sequence's ratios, each clipped in log space."""

from __future__ import annotations

import torch

from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens
from areal.algorithm.ratio import PolicyRatio, clip_bounds, policy_ratio, ratio_stats, spread_means
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """GMPO (arXiv 2507.20673; geo_mean in verl): l_t = -A exp(mean over the sequence of b_t).

    b_t = min(log rho_t, eps_clip_higher) where A > 0 and max(log rho_t, -eps_clip) where A < 0: the clip is
    [exp(-eps_clip), exp(eps_clip_higher)] in terms of ratios (the paper takes 0.4) and only on the side that the
    advantage pushes to. A is the mean over the sequence, as the paper has one for each. Every token of a sequence
    holds the same loss, so that seq-mean-token-mean gives the paper's average over sequences.
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
