"""PPO, GSPO, Clip-Cov and KL-Cov: surrogates around the old policy, at the level of the token or of the sequence."""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from areal.algorithm.aggregate import TokenStat
from areal.algorithm.policy_loss import (
    PolicyLoss,
    PolicyRatio,
    PolicyTokens,
    chosen_tokens,
    clipped_ratio,
    policy_ratio,
    ratio_stats,
)
from areal.algorithm.registered import KlCovOptions
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7) with asymmetric and dual clip.

    l = max(-A rho, -A clip(rho, 1 - eps_clip, 1 + eps_clip_higher)); rho as in `policy_ratio`.
    eps_clip_higher None = eps_clip (DAPO raises it, arXiv 2503.14476); a negative epsilon removes that side.
    c_clip > 1 adds the dual clip (Ye et al. 2020, arXiv 1912.09729): l = min(l, c |A|), effective only where A < 0.
    A NaN in a trained token makes its loss NaN. Raises ValueError when c_clip <= 1.
    """
    if options.c_clip is not None and options.c_clip <= 1:
        raise ValueError(f"c_clip must be above 1, got {options.c_clip}")
    ratio = policy_ratio(tokens, options)
    losses, clipped = clipped_surrogate(ratio, options)
    dual_clipped = torch.zeros_like(tokens.mask)
    if options.c_clip is not None:
        bound = options.c_clip * ratio.advantages.abs()
        dual_clipped = tokens.mask & (losses > bound)
        losses = torch.minimum(losses, bound)
    stats = ratio_stats(tokens, ratio, clipped)
    stats["dual_clip_ratio"] = TokenStat(dual_clipped.detach(), tokens.mask)
    return PolicyLoss(losses=torch.where(tokens.mask, losses, 0.0), stats=stats)


def gspo_loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071, eq. 5): `loss` with importance_sampling_level=sequence."""
    return loss(tokens, replace(options, importance_sampling_level="sequence"))


def clipped_surrogate(ratio: PolicyRatio, options: PolicyLossOptions) -> tuple[Tensor, Tensor]:
    """max(-A rho, -A clip(rho)), and where the clip decides (gradient 0); both [T]."""
    plain = -ratio.advantages * ratio.value
    bounded = -ratio.advantages * clipped_ratio(ratio.value, options)
    return torch.maximum(plain, bounded), bounded > plain


def clip_cov_loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """Clip-Cov (arXiv 2505.22617): PPO's clipped surrogate, 0 at the chosen tokens.

    `areal.algorithm.policy_loss` chooses them before the update; they stay in the denominator.
    """
    chosen = chosen_tokens(tokens)
    ratio = policy_ratio(tokens, options)
    losses, clipped = clipped_surrogate(ratio, options)
    stats = ratio_stats(tokens, ratio, clipped)
    stats["covariance_chosen_ratio"] = TokenStat(chosen, tokens.mask)
    return PolicyLoss(losses=torch.where(tokens.mask & ~chosen, losses, 0.0), stats=stats)


def kl_cov_loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """KL-Cov (arXiv 2505.22617): l = -A rho, and -A rho + coef |log rho| at the chosen tokens.

    The penalty is the absolute log-ratio to the old policy, as in the paper's code and verl. There is no clip.
    `areal.algorithm.policy_loss` chooses the tokens before the update.
    """
    chosen = chosen_tokens(tokens)
    ratio = policy_ratio(tokens, options)
    loss_options = cast("KlCovOptions", options.policy_loss)
    penalty = torch.where(chosen, loss_options.coef * ratio.log.abs(), 0.0)
    losses = -ratio.advantages * ratio.value + penalty
    stats = ratio_stats(tokens, ratio)
    stats["covariance_chosen_ratio"] = TokenStat(chosen, tokens.mask)
    return PolicyLoss(losses=torch.where(tokens.mask, losses, 0.0), stats=stats)
