"""Owns the correction of a policy loss for rollouts of another policy: weights, tokens left out, what to log."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from areal.algorithm.aggregate import Reduce, TokenStat, identity_reduce, require_same_shape
from areal.algorithm.correction_rules import at_level, broken_by, first_trained, outside, ratio_at_level
from areal.algorithm.importance import log_ratio
from areal.algorithm.policy_loss import PolicyLoss
from areal.algorithm.second_moment import second_moment_kept
from areal.api.config import RolloutCorrectionConfig
from areal.api.config.off_policy import WEIGHT_LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What a loss is multiplied by, and which tokens it learns from."""

    weights: Tensor  # [T] dtype of the log-probabilities, no gradient: 0 for tokens left out and outside the mask
    kept: Tensor  # [T] bool: tokens of the mask that are not left out
    stats: dict[str, TokenStat]


def weighted(loss: PolicyLoss, weights: Tensor | None) -> PolicyLoss:
    """l' = w l with weights [T] that carry no gradient; None = 1. Tokens of weight 0 give 0 whatever their loss is."""
    if weights is None:
        return loss
    require_same_shape(losses=loss.losses, weights=weights)
    # where, not only a product: weight 0 times an infinite loss would be NaN
    return replace(loss, losses=torch.where(weights != 0, weights * loss.losses, 0.0))


def correct(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    options: RolloutCorrectionConfig,
    *,
    m2_threshold: float | None = None,
    reduce: Reduce = identity_reduce,
) -> Correction:
    """w = pi_old / pi_rollout at the level and within the bounds of `options`, and what lies too far out.

    Decoupled PPO (Hilton et al. 2021, arXiv 2110.00641; AReaL, 2505.24298) at the token level; truncated importance
    sampling, masks and veto as in verl; rules as in verl and ROLL. All [T]: log-probabilities float32 or float64,
    mask bool, sequence_index int64. With d_t = log old - log rollout of a token, cut to +-20:

    1. Every bound looks at the same d_t of all tokens of the mask, whatever another one leaves out or moves: the
       bounds of mode=mask, then the veto (d_t < log veto_threshold of one token: its sequence), then the mask rules in
       their order. A token stays if it passes all of them.
    2. m2_threshold looks at the tokens that stay after 1.
    3. Weights exp(d) at the level, moved into the bounds of mode (truncate, clamp), then of each clamp rule in order.
    4. batch_normalize divides them by their mean over the tokens that stay, of all ranks.

    Nothing depends on the policy that is being trained, and only m2_threshold and batch_normalize look beyond a
    sequence. `reduce` is called 1 time for batch_normalize and up to 5 times, alike on all ranks, for m2_threshold.
    NaN in a trained token stays in and gives a NaN weight.
    """
    spans = (mask, sequence_index, num_sequences)
    ratio_log = log_ratio(old_logprobs.detach(), rollout_logprobs.detach(), mask).double()
    raw = torch.ones_like(ratio_log)
    if options.mode != "off":
        raw = ratio_at_level(ratio_log, WEIGHT_LEVELS[options.level], *spans)
    kept, stats = _kept(ratio_log, raw, spans, options)
    if m2_threshold is not None:
        before = kept
        kept = second_moment_kept(ratio_log, before, m2_threshold, reduce=reduce)
        stats["m2_masked"] = TokenStat(before & ~kept, mask)
        stats["m2"] = TokenStat(ratio_log.square(), before)
        stats["m2_kept"] = TokenStat(ratio_log.square(), kept)
    if options.mode != "off":
        weights, moved = _bounded(raw, ratio_log, spans, options)
        if options.batch_normalize:
            weights = weights / _global_mean(weights, kept, reduce)
        stats |= moved | _weight_stats(weights, kept)
    else:
        weights = raw
    if not options.apply_weights:
        weights = torch.ones_like(weights)
    stats["left_out"] = TokenStat(mask & ~kept, mask)
    factors = torch.where(kept, weights, 0.0).to(old_logprobs.dtype)
    return Correction(weights=factors, kept=kept, stats={f"correction/{name}": stat for name, stat in stats.items()})


_Spans = tuple[Tensor, Tensor, int]
"""mask, sequence_index, num_sequences"""


def _kept(
    ratio_log: Tensor, raw: Tensor, spans: _Spans, options: RolloutCorrectionConfig
) -> tuple[Tensor, dict[str, TokenStat]]:
    """Step 1: the tokens within every bound that masks, and the part of the tokens that each of them takes."""
    mask = spans[0]
    taken: dict[str, Tensor] = {}
    if options.mode == "mask":
        taken["masked"] = mask & outside(raw, *options.bounds)
    if options.veto_threshold is not None:
        low = outside(ratio_log.exp(), options.veto_threshold, None)
        taken["vetoed"] = mask & (at_level(low.double(), "sequence_max", *spans) > 0)
    for i, rule in enumerate(options.rules):
        if rule.action == "mask":
            taken[f"rule{i}_masked"] = broken_by(rule, ratio_log, *spans)
    kept = mask
    for tokens in taken.values():
        kept = kept & ~tokens
    stats = {name: TokenStat(tokens, mask) for name, tokens in taken.items()}
    if "vetoed" in taken:
        stats["vetoed_sequences"] = TokenStat(taken["vetoed"], first_trained(*spans))
    return kept, stats


def _bounded(
    raw: Tensor, ratio_log: Tensor, spans: _Spans, options: RolloutCorrectionConfig
) -> tuple[Tensor, dict[str, TokenStat]]:
    """Step 3: the weights within their bounds, and the part of the tokens that each bound moves."""
    mask = spans[0]
    weights, stats = raw, dict[str, TokenStat]()
    if options.mode in ("truncate", "clamp"):
        weights = _clamped(weights, *options.bounds)
        stats["clamped"] = TokenStat(outside(raw, *options.bounds), mask)
    for i, rule in enumerate(options.rules):
        if rule.action == "clamp":
            weights = _clamped(weights, rule.lower, rule.upper)
            stats[f"rule{i}_clamped"] = TokenStat(broken_by(rule, ratio_log, *spans), mask)
    return weights, stats


def _clamped(weights: Tensor, lower: float | None, upper: float | None) -> Tensor:
    return weights if lower is None and upper is None else weights.clamp(lower, upper)


def _global_mean(weights: Tensor, kept: Tensor, reduce: Reduce) -> float:
    """The mean weight of the tokens that stay, of all ranks; 1 where none does."""
    local = torch.stack([torch.where(kept, weights, 0.0).sum(), kept.sum().double()])
    total, count = reduce(local.cpu()).unbind()
    return float(total / count) if float(count) else 1.0


def _weight_stats(weights: Tensor, kept: Tensor) -> dict[str, TokenStat]:
    return {
        "weight": TokenStat(weights, kept),
        "weight_max": TokenStat(weights, kept, "max"),
        "weight_min": TokenStat(weights, kept, "min"),
    }
