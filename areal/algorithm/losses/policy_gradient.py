"""Losses of the form -w A log pi, whose weights w carry no gradient: GPG, CISPO, AIPO, TOPR, DPPO and Kimi k1.5."""

from typing import cast

import torch
from torch import Tensor

from areal.algorithm.aggregate import TokenStat, sequence_sums, trained_counts
from areal.algorithm.policy_loss import (
    PolicyLoss,
    PolicyRatio,
    PolicyTokens,
    clip_bounds,
    clipped_ratio,
    policy_ratio,
    ratio_stats,
    weighted_log_likelihood,
)
from areal.algorithm.registered import AipoOptions, CispoOptions, DppoOptions, Kimi15Options, ToprOptions
from areal.api.config import PolicyLossOptions


def gpg_loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """GPG (arXiv 2504.02546; REINFORCE): l = -A log pi. The ratio is only logged."""
    ratio = policy_ratio(tokens, options)
    losses = weighted_log_likelihood(tokens, torch.ones_like(ratio.log), ratio.advantages)
    return PolicyLoss(losses=losses, stats=ratio_stats(tokens, ratio))


def cispo_loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): l = -sg(clip(rho)) A log pi; every token keeps its gradient.

    MiniMax clips only above (eps_clip < 0). eps_clip < 0 with eps_clip_higher = 0 is the truncated importance
    sampling of ROLL, -sg(min(rho, 1)) A log pi. cispo.unified_mask (eq. 6 and 7) sets the loss to 0 where A > 0 and
    rho is above the clip, and where A < 0 and rho is below it, as PPO does. `clip_ratio` counts clipped weights.
    """
    loss_options = cast("CispoOptions", options.policy_loss)
    ratio = policy_ratio(tokens, options)
    value = ratio.value.detach()
    weight = clipped_ratio(value, options)
    losses = weighted_log_likelihood(tokens, weight, ratio.advantages)
    if loss_options.unified_mask:
        beyond = ((ratio.advantages > 0) & (value > weight)) | ((ratio.advantages < 0) & (value < weight))
        losses = torch.where(beyond, 0.0, losses)
    return PolicyLoss(losses=losses, stats=ratio_stats(tokens, ratio, value != weight))


def aipo_loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """AIPO (LlamaRL, arXiv 2505.24034): policy gradient with the weight min(rho, c), c = aipo.rho.

    truncation=weight (paper): l = -sg(min(rho, c)) A log pi; a token with rho > c keeps a gradient, with weight c.
    truncation=objective (cosmos-rl): l = -A min(rho, c); a token with rho > c has no gradient.
    For rho <= c both have the gradient -A rho grad log pi.
    """
    loss_options = cast("AipoOptions", options.policy_loss)
    ratio = policy_ratio(tokens, options)
    cut = ratio.value.clamp(max=loss_options.rho)
    if loss_options.truncation == "weight":
        losses = weighted_log_likelihood(tokens, cut, ratio.advantages)
    else:
        losses = torch.where(tokens.mask, -ratio.advantages * cut, 0.0)
    return PolicyLoss(losses=losses, stats=ratio_stats(tokens, ratio, ratio.value.detach() > loss_options.rho))


def topr_loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """TOPR (arXiv 2503.14286, eq. 8): l = -w A log pi with w = 1 where A >= 0, and sg(min(rho, 1)) where A < 0.

    rho = pi(y) / pi_old(y) of the whole answer, the product over its trained tokens (topr.ratio=trajectory), or of
    the token (ROLL). The sign is that of the advantage; ROLL uses the sign of the reward. w is multiplied by
    positive_weight or negative_weight. `clip_ratio` counts negative tokens whose rho is truncated.
    """
    loss_options = cast("ToprOptions", options.policy_loss)
    ratio = policy_ratio(tokens, options)
    if loss_options.ratio == "trajectory":
        sums = sequence_sums(ratio.token_log.double(), tokens.mask, tokens.sequence_index, tokens.num_sequences)
        log = torch.where(tokens.mask, sums.to(ratio.log.dtype)[tokens.sequence_index], 0.0)
        ratio = PolicyRatio(log=log, advantages=ratio.advantages, token_log=ratio.token_log)
    negative = ratio.advantages < 0
    truncated = loss_options.negative_weight * ratio.log.detach().clamp(max=0.0).exp()
    weight = torch.where(negative, truncated, loss_options.positive_weight)
    losses = weighted_log_likelihood(tokens, weight, ratio.advantages)
    return PolicyLoss(losses=losses, stats=ratio_stats(tokens, ratio, negative & (ratio.log.detach() > 0)))


def dppo_loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """DPPO, binary form (arXiv 2602.04879): l = -sg(min(rho, dppo.max_ratio)) A log pi, 0 outside the trust region.

    A token is outside when its divergence D is above eps_clip_higher while A > 0 and pi > pi_old, or above eps_clip
    while A <= 0 and pi < pi_old. With p and q the new and the old probability of the token:
    tv: D = |p - q|. kl: D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)).
    `clip_ratio` counts the tokens outside.
    """
    loss_options = cast("DppoOptions", options.policy_loss)
    ratio = policy_ratio(tokens, options)
    new = torch.where(tokens.mask, tokens.logprobs.detach(), 0.0)
    old = torch.where(tokens.mask, tokens.old_logprobs.detach(), 0.0)
    divergence = (new.exp() - old.exp()).abs() if loss_options.divergence == "tv" else _binary_kl(old, new)
    low, high = clip_bounds(options)
    nowhere = torch.zeros_like(tokens.mask)
    above = nowhere if high is None else (new > old) & (divergence > high)
    below = nowhere if low is None else (new < old) & (divergence > low)
    is_outside = torch.where(ratio.advantages > 0, above, below)
    losses = weighted_log_likelihood(tokens, ratio.value.clamp(max=loss_options.max_ratio), ratio.advantages)
    return PolicyLoss(losses=torch.where(is_outside, 0.0, losses), stats=ratio_stats(tokens, ratio, is_outside))


def _binary_kl(old: Tensor, new: Tensor) -> Tensor:
    """KL(old || new) of the distributions over {this token, any other}, from log-probabilities [T]; in nats."""
    tiny = torch.finfo(old.dtype).tiny
    rest_old, rest_new = -torch.expm1(old), -torch.expm1(new)
    other = rest_old * (rest_old.clamp(min=tiny).log() - rest_new.clamp(min=tiny).log())
    return old.exp() * (old - new) + other


def kimi15_loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """Kimi k1.5 (arXiv 2501.12599, eq. 3): l = -A log pi + tau / 2 (log pi / pi_old)^2.

    kimi15.ratio=trajectory (paper): the log-ratio is the sum over the answer, and its square is divided by the number
    of its trained tokens, so that the sum over tokens counts it once. token (ROLL): the log-ratio of each token.
    """
    loss_options = cast("Kimi15Options", options.policy_loss)
    ratio = policy_ratio(tokens, options)
    plain = weighted_log_likelihood(tokens, torch.ones_like(ratio.log), ratio.advantages)
    penalty = 0.5 * loss_options.tau * ratio.log.square()
    if loss_options.ratio == "trajectory":
        where = (tokens.mask, tokens.sequence_index, tokens.num_sequences)
        square = sequence_sums(ratio.log.double(), *where).square() / trained_counts(*where).clamp(min=1)
        penalty = 0.5 * loss_options.tau * square.to(ratio.log.dtype)[tokens.sequence_index]
    penalty = torch.where(tokens.mask, penalty, 0.0)
    stats = ratio_stats(tokens, ratio)
    stats["log_ratio_penalty"] = TokenStat(penalty, tokens.mask)
    return PolicyLoss(losses=plain + penalty, stats=stats)
