"""The ratio of a policy loss, at the level of the token or of its sequence, and the statistics about it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal.algorithm.aggregate import TokenStat, sequence_means
from areal.algorithm.importance import kl_of_samples, log_ratio
from areal.algorithm.policy_loss import PolicyTokens
from areal.api.config import PolicyLossOptions
from areal.api.config.policy_losses import WITH_SEQUENCE_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRatio:
    """rho = pi_theta / pi_old at the level of the loss, and the advantages at that level."""

    log: Tensor  # [T] log rho, with gradient; 0 where the mask is off
    advantages: Tensor  # [T], 0 where the mask is off
    token_log: Tensor  # [T] log-ratio of each token, no gradient

    @property
    def value(self) -> Tensor:
        """rho, [T] with gradient."""
        return self.log.exp()


def policy_ratio(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyRatio:
    """The ratio at the level that `options` name.

    token: log rho_t = log pi_theta - log pi_old, clamped to +-LOG_RATIO_LIMIT.
    sequence (GSPO, Zheng et al. 2025, arXiv 2507.18071, eq. 7): log s = mean over the trained tokens of the sequence
    of log rho_t, at most sequence_level.max_log_ratio. With gradient=own (GSPO-token, eq. 14) the value is the same,
    and the gradient at position t is that of log pi_theta(t) alone: sg(log s) + log pi - sg(log pi).
    With advantage=mean an advantage is the mean over its sequence.
    A NaN in a trained token makes its ratio NaN; at the sequence level, the ratio of its whole sequence.
    """
    advantages = torch.where(tokens.mask, tokens.advantages, 0.0)
    by_token = log_ratio(tokens.logprobs, tokens.old_logprobs.detach(), tokens.mask)
    if options.importance_sampling_level == "token" or options.policy_loss not in WITH_SEQUENCE_RATIO:
        return PolicyRatio(log=by_token, advantages=advantages, token_log=by_token.detach())
    how = options.sequence_level
    if how.advantage == "mean":
        advantages = spread_means(advantages, tokens)
    log = spread_means(by_token, tokens)
    if how.gradient == "own":
        log = torch.where(tokens.mask, log.detach() + (by_token - by_token.detach()), 0.0)
    if how.max_log_ratio is not None:
        log = log.clamp(max=how.max_log_ratio)
    return PolicyRatio(log=log, advantages=advantages, token_log=by_token.detach())


def spread_means(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """The mean over the sequence at each of its trained tokens, [T] in the dtype of `values`; 0 where masked."""
    means, _ = sequence_means(values.double(), tokens.mask, tokens.sequence_index, tokens.num_sequences)
    return torch.where(tokens.mask, means.to(values.dtype)[tokens.sequence_index], 0.0)


def clip_bounds(options: PolicyLossOptions) -> tuple[float | None, float | None]:
    """Clip widths below and above 1: (eps_clip, eps_clip_higher or eps_clip); None for a negative one (no clip)."""
    higher = options.eps_clip if options.eps_clip_higher is None else options.eps_clip_higher
    return (options.eps_clip if options.eps_clip >= 0 else None), (higher if higher >= 0 else None)


def clipped_ratio(ratio: Tensor, options: PolicyLossOptions) -> Tensor:
    """clip(rho, 1 - eps_clip, 1 + eps_clip_higher), without the disabled sides; rho is positive."""
    low, high = clip_bounds(options)
    return ratio.clamp(0.0 if low is None else 1.0 - low, float("inf") if high is None else 1.0 + high)


def ratio_stats(tokens: PolicyTokens, ratio: PolicyRatio, clipped: Tensor | None = None) -> dict[str, TokenStat]:
    """The statistics of every loss. `clipped` [T] bool: where the clip or truncation of the loss took effect."""
    value = ratio.log.detach().exp()
    stats = {
        "importance_weight": TokenStat(value, tokens.mask),
        "importance_weight_max": TokenStat(value, tokens.mask, "max"),
        "approx_kl": TokenStat(kl_of_samples(ratio.token_log, "k3"), tokens.mask),
    }
    if clipped is not None:
        stats["clip_ratio"] = TokenStat(clipped.detach() & tokens.mask, tokens.mask)
    return stats
