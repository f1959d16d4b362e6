"""SAPO: a smooth gate instead of the clip."""

from typing import cast

import torch

from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, policy_ratio, ratio_stats
from areal.algorithm.registered import SapoOptions
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """SAPO (arXiv 2511.20347, eq. 5 and 6): l = -A (4 / tau) sigmoid(tau (rho - 1)).

    tau = tau_pos where A > 0, else tau_neg. At rho = 1 the gradient is that of -A rho; it decreases on both sides.
    """
    loss_options = cast("SapoOptions", options.policy_loss)
    ratio = policy_ratio(tokens, options)
    advantages = ratio.advantages
    positive = (advantages > 0).to(advantages.dtype)
    tau = loss_options.tau_neg + (loss_options.tau_pos - loss_options.tau_neg) * positive
    gate = 4.0 / tau * torch.sigmoid(tau * (ratio.value - 1.0))
    return PolicyLoss(losses=torch.where(tokens.mask, -advantages * gate, 0.0), stats=ratio_stats(tokens, ratio))
