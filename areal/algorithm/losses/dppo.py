"""Owns DPPO's loss: tokens leave when the probability itself has moved too far, not its ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, weighted_log_likelihood
from areal.algorithm.ratio import clip_bounds, policy_ratio, ratio_stats
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """DPPO, binary form (arXiv 2602.04879): l = -sg(min(rho, dppo.max_ratio)) A log pi, 0 for tokens gone too far.

    A token has gone too far when its divergence D is above eps_clip_higher while A > 0 and pi > pi_old, or above
    eps_clip while A <= 0 and pi < pi_old. With p, q the new and old probability of the token:
    tv: D = |p - q|. kl: D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)).
    `clip_ratio` counts the tokens gone too far.
    """
    ratio = policy_ratio(tokens, options)
    new = torch.where(tokens.mask, tokens.logprobs.detach(), 0.0)
    old = torch.where(tokens.mask, tokens.old_logprobs.detach(), 0.0)
    divergence = (new.exp() - old.exp()).abs() if options.dppo.divergence == "tv" else _binary_kl(old, new)
    low, high = clip_bounds(options)
    nowhere = torch.zeros_like(tokens.mask)
    above = nowhere if high is None else (new > old) & (divergence > high)
    below = nowhere if low is None else (new < old) & (divergence > low)
    gone = torch.where(ratio.advantages > 0, above, below)
    losses = weighted_log_likelihood(tokens, ratio.value.clamp(max=options.dppo.max_ratio), ratio.advantages)
    return PolicyLoss(losses=torch.where(gone, 0.0, losses), stats=ratio_stats(tokens, ratio, gone))


def _binary_kl(old: Tensor, new: Tensor) -> Tensor:
    """KL of two distributions over {this token, another} from log-probabilities of this one, [T] in nats."""
    tiny = torch.finfo(old.dtype).tiny
    rest_old, rest_new = -torch.expm1(old), -torch.expm1(new)
    other = rest_old * (rest_old.clamp(min=tiny).log() - rest_new.clamp(min=tiny).log())
    return old.exp() * (old - new) + other
