"""DPPO: a trust region on the probability of a token instead of on its ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, weighted_log_likelihood
from areal.algorithm.ratio import clip_bounds, policy_ratio, ratio_stats
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """DPPO, binary form (arXiv 2602.04879): l = -sg(min(rho, dppo.max_ratio)) A log pi, 0 outside the trust region.

    A token is outside when its divergence D is above eps_clip_higher while A > 0 and pi > pi_old, or above eps_clip
    while A <= 0 and pi < pi_old. With p and q the new and the old probability of the token:
    tv: D = |p - q|. kl: D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)).
    `clip_ratio` counts the tokens outside.
    """
    ratio = policy_ratio(tokens, options)
    new = torch.where(tokens.mask, tokens.logprobs.detach(), 0.0)
    old = torch.where(tokens.mask, tokens.old_logprobs.detach(), 0.0)
    divergence = (new.exp() - old.exp()).abs() if options.dppo.divergence == "tv" else _binary_kl(old, new)
    low, high = clip_bounds(options)
    nowhere = torch.zeros_like(tokens.mask)
    above = nowhere if high is None else (new > old) & (divergence > high)
    below = nowhere if low is None else (new < old) & (divergence > low)
    is_outside = torch.where(ratio.advantages > 0, above, below)
    losses = weighted_log_likelihood(tokens, ratio.value.clamp(max=options.dppo.max_ratio), ratio.advantages)
    return PolicyLoss(losses=torch.where(is_outside, 0.0, losses), stats=ratio_stats(tokens, ratio, is_outside))


def _binary_kl(old: Tensor, new: Tensor) -> Tensor:
    """KL(old || new) of the distributions over {this token, any other}, from log-probabilities [T]; in nats."""
    tiny = torch.finfo(old.dtype).tiny
    rest_old, rest_new = -torch.expm1(old), -torch.expm1(new)
    other = rest_old * (rest_old.clamp(min=tiny).log() - rest_new.clamp(min=tiny).log())
    return old.exp() * (old - new) + other
