"""Owns the correction of a policy loss for rollouts of an older policy: weights, tokens left out, what to log."""

from __future__ import annotations

import torch

from areal.algorithm.aggregate import TokenStat
from areal.algorithm.importance import behaviour_weights
from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, k3_from_samples


def corrected(loss: PolicyLoss, tokens: PolicyTokens, *, weight_cap: float | None = None) -> PolicyLoss:
    """Decoupled PPO (Hilton et al. 2021; AReaL, arXiv 2505.24298): the loss around pi_prox, weighted by its staleness.

    `tokens.old_logprobs` is the proximal policy (the trainer's at the start of the update).
    l' = w l with w = pi_prox / pi_rollout without gradient; tokens with w > weight_cap give 0 and stay in the
    denominator. Every note of `behaviour_weights` holds.
    """
    behaviour = behaviour_weights(tokens.old_logprobs, tokens.rollout_logprobs, tokens.mask, weight_cap)
    # where, not only a product: weight 0 times an infinite loss would be NaN
    losses = torch.where(behaviour.kept, behaviour.weights * loss.losses, 0.0)
    stats = {
        **loss.stats,
        "behave_imp_weight": TokenStat(behaviour.weights, behaviour.kept),
        "behave_imp_weight_max": TokenStat(behaviour.log_ratio.exp(), tokens.mask, "max"),
        "behave_approx_kl": TokenStat(k3_from_samples(behaviour.log_ratio), tokens.mask),
        "behave_above_cap_ratio": TokenStat(behaviour.above_cap, tokens.mask),
    }
    return PolicyLoss(losses=losses, stats=stats)
