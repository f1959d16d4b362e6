"""Correction of a policy loss for rollouts of another policy: weights, rejected tokens and the statistics to log."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from areal.algorithm.aggregate import Reduce, TokenStat, identity_reduce, require_same_shape
from areal.algorithm.correction_rules import Spans, at_level, broken_by, first_of_units, outside, ratio_at_level
from areal.algorithm.importance import log_ratio
from areal.algorithm.policy_loss import PolicyLoss
from areal.algorithm.second_moment import second_moment_kept
from areal.api.config import RolloutCorrectionConfig
from areal.api.config.off_policy import WEIGHT_LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The factors of the token losses, and the tokens that are not rejected."""

    weights: Tensor  # [T] dtype of the log-probabilities, no gradient: 0 for rejected tokens and outside the mask
    kept: Tensor  # [T] bool: tokens of the mask that are not rejected
    stats: dict[str, TokenStat]


def weighted(loss: PolicyLoss, weights: Tensor | None) -> PolicyLoss:
    """l' = w l with weights [T] without gradient; None = 1. Weight 0 gives 0, also for an infinite loss."""
    if weights is None:
        return loss
    require_same_shape(losses=loss.losses, weights=weights)
    return replace(loss, losses=torch.where(weights != 0, weights * loss.losses, 0.0))


def correct(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    spans: Spans,
    options: RolloutCorrectionConfig,
    *,
    m2_threshold: float | None = None,
    reduce: Reduce = identity_reduce,
) -> Correction:
    """w = pi_old / pi_rollout at the level and within the bounds of `options`, and the tokens that bounds reject.

    Decoupled PPO (Hilton et al. 2021, arXiv 2110.00641; AReaL, 2505.24298) at the token level; truncated importance
    sampling, masks and veto as in verl; rules as in verl and ROLL. Log-probabilities [T] float32 or float64. With
    d_t = log old - log rollout of a token, clamped to +-20:

    1. Every bound reads the same d_t of all tokens of the mask, independently of the others: the bounds of mode=mask,
       the veto (d_t < log veto_threshold at one token rejects its sequence), the mask rules. A token is kept if it
       passes all of them.
    2. m2_threshold reads the tokens that are kept after 1.
    3. Weights exp(d) at the level, clamped to the bounds of mode (truncate, clamp), then of each clamp rule in order.
    4. batch_normalize divides the weights by their mean over all ranks. normalize_by=kept_tokens: over the kept
       tokens. units (verl): over the units of the level (tokens, segments or sequences), one weight each, rejected
       ones included; a weight outside the bounds of mode=mask counts 0.

    Only m2_threshold and batch_normalize look beyond a sequence. `reduce` is called once for batch_normalize and up
    to 5 times, equally on all ranks, for m2_threshold. NaN in a trained token is kept and gives a NaN weight.
    """
    mask = spans.mask
    ratio_log = log_ratio(old_logprobs.detach(), rollout_logprobs.detach(), mask).double()
    raw = torch.ones_like(ratio_log)
    if options.mode != "off":
        raw = ratio_at_level(ratio_log, WEIGHT_LEVELS[options.level], spans)
    kept, stats = _kept(ratio_log, raw, spans, options)
    if m2_threshold is not None:
        before = kept
        kept = second_moment_kept(ratio_log, before, m2_threshold, reduce=reduce)
        stats["m2_masked"] = TokenStat(before & ~kept, mask)
        stats["m2"] = TokenStat(ratio_log.square(), before)
        stats["m2_kept"] = TokenStat(ratio_log.square(), kept)
    weights = raw
    if options.mode != "off":
        weights, moved = _bounded(raw, ratio_log, spans, options)
        if options.batch_normalize:
            counted, where = weights, kept
            if options.normalize_by == "units":
                where = first_of_units(WEIGHT_LEVELS[options.level], spans)
                if options.mode == "mask":
                    counted = torch.where(outside(raw, *options.bounds), 0.0, weights)
            weights = weights / _global_mean(counted, where, reduce)
        stats |= moved
        stats["weight"] = TokenStat(weights, kept)
        stats["weight_max"] = TokenStat(weights, kept, "max")
        stats["weight_min"] = TokenStat(weights, kept, "min")
    if not options.apply_weights:
        weights = torch.ones_like(weights)
    stats["left_out"] = TokenStat(mask & ~kept, mask)
    factors = torch.where(kept, weights, 0.0).to(old_logprobs.dtype)
    return Correction(weights=factors, kept=kept, stats={f"correction/{name}": stat for name, stat in stats.items()})


def _kept(
    ratio_log: Tensor, raw: Tensor, spans: Spans, options: RolloutCorrectionConfig
) -> tuple[Tensor, dict[str, TokenStat]]:
    """Step 1: the tokens within every bound that rejects, and the fraction of the tokens that each bound rejects."""
    mask = spans.mask
    taken: dict[str, Tensor] = {}
    if options.mode == "mask":
        taken["masked"] = mask & outside(raw, *options.bounds)
    if options.veto_threshold is not None:
        low = outside(ratio_log.exp(), options.veto_threshold, None)
        taken["vetoed"] = mask & (at_level(low.double(), "sequence_max", spans) > 0)
    for i, rule in enumerate(options.rules):
        if rule.action == "mask":
            taken[f"rule{i}_masked"] = broken_by(rule, ratio_log, spans)
    kept = mask
    for tokens in taken.values():
        kept = kept & ~tokens
    stats = {name: TokenStat(tokens, mask) for name, tokens in taken.items()}
    if "vetoed" in taken:
        stats["vetoed_sequences"] = TokenStat(taken["vetoed"], first_of_units("sequence_sum", spans))
    return kept, stats


def _bounded(
    raw: Tensor, ratio_log: Tensor, spans: Spans, options: RolloutCorrectionConfig
) -> tuple[Tensor, dict[str, TokenStat]]:
    """Step 3: the weights within their bounds, and the fraction of the tokens that each bound moves."""
    weights, stats = raw, dict[str, TokenStat]()
    if options.mode in ("truncate", "clamp"):
        weights = _clamped(weights, *options.bounds)
        stats["clamped"] = TokenStat(outside(raw, *options.bounds), spans.mask)
    for i, rule in enumerate(options.rules):
        if rule.action == "clamp":
            weights = _clamped(weights, rule.lower, rule.upper)
            stats[f"rule{i}_clamped"] = TokenStat(broken_by(rule, ratio_log, spans), spans.mask)
    return weights, stats


def _clamped(weights: Tensor, lower: float | None, upper: float | None) -> Tensor:
    return weights if lower is None and upper is None else weights.clamp(lower, upper)


def _global_mean(weights: Tensor, where: Tensor, reduce: Reduce) -> float:
    """The mean weight at the positions `where`, over all ranks; 1 when it is 0 or there is none."""
    local = torch.stack([torch.where(where, weights, 0.0).sum(), where.sum().double()])
    total, count = reduce(local.cpu()).unbind()
    return float(total / count) if float(count) and float(total) else 1.0
