"""Correction of a policy loss for rollouts of another policy: weights, rejected tokens and the statistics to log."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor

from areal.algorithm.aggregate import Reduce, TokenStat, identity_reduce, require_same_shape, to_metrics
from areal.algorithm.policy_loss import LOG_RATIO_LIMIT, PolicyLoss, kl_of_samples, log_ratio
from areal.api.config import CorrectionRule, RolloutCorrectionConfig
from areal.api.config.algorithm import WEIGHT_LEVELS
from areal.api.metrics import Metric, Metrics

# ----------------------------------------------------------------------------------------------------------------------
# The quantities that the bounds of an off-policy correction read: log-ratios and KL estimates of tokens or units.


@dataclass(frozen=True, slots=True)
class Spans:
    """The trained tokens of packed sequences."""

    mask: Tensor  # [T] bool
    sequence_index: Tensor  # [T] int64 ascending
    num_sequences: int

    def __post_init__(self) -> None:
        require_same_shape(mask=self.mask, sequence_index=self.sequence_index)


def segment_index(spans: Spans) -> Tensor:
    """Number of the segment that each position is in or follows, from 0; a segment is one run of trained tokens.

    -> [T] int64. Runs end at untrained tokens (a prompt, a tool's answer) and at the end of a sequence. Positions
    before the first segment get 0.
    """
    return (first_of_units("segment_sum", spans).cumsum(0) - 1).clamp(min=0)


def first_of_units(level: str, spans: Spans) -> Tensor:
    """The first trained token of each unit (token, segment or sequence) of `level`, to count units. -> [T] bool"""
    mask, index = spans.mask, spans.sequence_index
    if level == "token":
        return mask
    if level.startswith("segment"):
        continues = torch.zeros_like(mask)
        continues[1:] = mask[:-1] & (index[1:] == index[:-1])
        return mask & ~continues
    places = torch.arange(mask.numel(), device=mask.device)
    none = places.new_full((spans.num_sequences,), mask.numel())
    return places == none.scatter_reduce(0, index[mask], places[mask], "amin")[index]


def at_level(values: Tensor, level: str, spans: Spans) -> Tensor:
    """`values` of trained tokens reduced over each unit of `level`, at every token of the unit; 0 outside the mask.

    values [T] float64; level: token, or segment or sequence with _sum, _mean or _max -> [T] float64. Values outside
    the mask are not read. Raises ValueError for an unknown level or unequal shapes.
    """
    mask = spans.mask
    require_same_shape(values=values, mask=mask)
    if level == "token":
        return torch.where(mask, values, 0.0)
    unit, _, how = level.partition("_")
    if unit not in ("segment", "sequence") or how not in ("sum", "mean", "max"):
        raise ValueError(f"unknown level {level!r}: token, or segment or sequence with _sum, _mean or _max")
    index, size = spans.sequence_index, spans.num_sequences
    if unit == "segment":
        index, size = segment_index(spans), int(mask.numel())
    chosen, places = values[mask], index[mask]
    if how == "max":
        reduced = values.new_full((size,), float("-inf")).scatter_reduce(0, places, chosen, "amax")
    else:
        reduced = values.new_zeros(size).index_add(0, places, chosen)
    if how == "mean":
        reduced = reduced / torch.bincount(places, minlength=size).clamp(min=1)
    return torch.where(mask, reduced[index], 0.0)


def ratio_at_level(log_ratio: Tensor, level: str, spans: Spans) -> Tensor:
    """exp of the log-ratios reduced over `level`, the logarithm clamped to +-20 again; 1 outside the mask."""
    return at_level(log_ratio, level, spans).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def outside(values: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Mask of the `values` below `lower` or above `upper`. NaN is not in it, so that it stays visible in the loss."""
    result = torch.zeros_like(values, dtype=torch.bool)
    if lower is not None:
        result |= values < lower
    if upper is not None:
        result |= values > upper
    return result


def broken_by(rule: CorrectionRule, log_ratio: Tensor, spans: Spans) -> Tensor:
    """The trained tokens whose metric is outside the bounds of `rule`. log_ratio [T] float64 -> [T] bool."""
    if rule.metric == "ratio":
        values = ratio_at_level(log_ratio, rule.level, spans)
    else:
        values = at_level(kl_of_samples(log_ratio, rule.metric), rule.level, spans)
    return spans.mask & outside(values, rule.lower, rule.upper)


# ----------------------------------------------------------------------------------------------------------------------
# M2PO's mask: the tokens that are kept to bound the second moment of the log-ratios over all ranks.

_STEP_BITS = 40
_DIGIT_BITS = 10
_NUM_DIGITS = 5  # Second moments are counted in steps of 2^-40; the largest, 20^2 * 2^40, has 49 of the 50 bits.
_HALF = 20  # Sums are taken of the upper and the lower 20 bits apart: both stay exact in float64 up to 2e7 tokens.


def second_moment_kept(log_ratio: Tensor, mask: Tensor, threshold: float, *, reduce: Reduce) -> Tensor:
    """M2PO (arXiv 2510.01161): remove the tokens of largest (log ratio)^2 until the mean of the rest <= threshold.

    log_ratio [T] clamped to +-20, mask [T] bool -> [T] bool, the tokens of the mask that are kept. The result is that
    of sorting the tokens of all ranks, computed from histograms added by `reduce`; it is exact because squares are
    multiples of 2^-40. Equal squares are kept or removed together. The tokens with the smallest square are always
    kept. NaN is kept, so that it reaches the loss, and is not counted.
    """
    require_same_shape(log_ratio=log_ratio, mask=mask)
    counted = mask & ~log_ratio.isnan()
    squares = torch.where(counted, log_ratio, 0.0).double().square()
    steps = (squares * 2.0**_STEP_BITS).round().long()
    limit = _largest_kept(steps[counted], Fraction(threshold) * 2**_STEP_BITS, reduce)
    return mask & (~counted | (steps <= limit))


def _largest_kept(steps: Tensor, threshold: Fraction, reduce: Reduce) -> int:
    """The largest kept square, found digit by digit: the mean of all squares up to c grows with c."""
    first, count, total = 0, 0, 0
    for digit in reversed(range(_NUM_DIGITS)):
        shift = digit * _DIGIT_BITS
        same_before = (steps >> (shift + _DIGIT_BITS)) == (first >> (shift + _DIGIT_BITS))
        for value, (more, added) in enumerate(_sums_by_digit(steps[same_before], shift, reduce)):
            if (total + added) * threshold.denominator > threshold.numerator * (count + more):
                first |= value << shift
                break
            count, total = count + more, total + added
        else:
            return 2 ** (_DIGIT_BITS * _NUM_DIGITS)  # only at the first digit: the mean of all is low enough
    return first - 1 if count else first


def _sums_by_digit(steps: Tensor, shift: int, reduce: Reduce) -> list[tuple[int, int]]:
    """(count, sum) of the `steps` of all ranks for each value of one digit."""
    size = 1 << _DIGIT_BITS
    digits = (steps >> shift) & (size - 1)
    parts = torch.stack([torch.ones_like(steps), steps >> _HALF, steps & ((1 << _HALF) - 1)]).double()
    local = parts.new_zeros(3, size).index_add(1, digits, parts)
    numbers = reduce(local.cpu().reshape(-1)).reshape(3, size).long()
    rows = cast("list[list[int]]", numbers.T.tolist())  # pyright: ignore[reportUnknownMemberType]
    return [(more, (high << _HALF) + low) for more, high, low in rows]


# ----------------------------------------------------------------------------------------------------------------------
# Approximations of the proximal policy's log-probabilities, used instead of a forward pass.
#
# A policy's version is the number of weight updates before it, and the batch of step k is trained with weights k: the
# proximal policy, at the start of the update, has version k. Its update takes M optimiser steps to version k + 1, so
# after j of them the policy in training has version v_theta = k + j / M. A token was sampled at version v <= k. If the
# log-probability of a token is a linear function of the version,
#
#     log pi_prox = log pi_old + alpha (log pi_theta - log pi_old)
#
#     alpha = (k - v) / (v_theta - v) = (k - v) / (k - v + j / M),
#
# and alpha = 1 at j = 0, where the policy in training is the proximal one (for v = k too, where it is 0 / 0).
# For example, v = k - 1 half way through the update gives 1 / 1.5. docs/algorithms.md describes how AReaL differs.


def prox_position(output_versions: Tensor, *, version: int, progress: float) -> Tensor:
    """alpha of each token, [T] float32 from 0 (the rollout policy) to 1 (the policy in training).

    output_versions [T] int64: the version v that sampled token t+1, -1 for none, which gives 0. `version` is k,
    `progress` is j / M, from 0 to below 1. A version above k counts as k.
    """
    staleness = (version - output_versions).clamp(min=0).float()
    alpha = staleness / (staleness + progress) if progress > 0 else torch.ones_like(staleness)
    return torch.where(output_versions < 0, 0.0, alpha)


def loglinear_logprobs(logprobs: Tensor, rollout_logprobs: Tensor, alpha: Tensor) -> Tensor:
    """log pi_old + alpha (log pi_theta - log pi_old), [T], no gradient. At alpha 0 or 1 exactly one of the two."""
    require_same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, alpha=alpha)
    now = logprobs.detach()
    between = rollout_logprobs + alpha.to(now.dtype) * (now - rollout_logprobs)
    return torch.where(alpha == 1, now, torch.where(alpha == 0, rollout_logprobs.to(now.dtype), between))


def linear_logprobs(logprobs: Tensor, rollout_logprobs: Tensor, alpha: Tensor) -> Tensor:
    """The same line between probabilities: log((1 - alpha) pi_old + alpha pi_theta), [T], no gradient."""
    require_same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, alpha=alpha)
    share = alpha.to(logprobs.dtype)
    return torch.logaddexp(rollout_logprobs + torch.log1p(-share), logprobs.detach() + share.log())


def approximation_errors(
    logprobs: Tensor, rollout_logprobs: Tensor, prox_logprobs: Tensor, alpha: Tensor, mask: Tensor
) -> dict[str, TokenStat]:
    """|guess - log pi_prox| of each trained token, in nats, for every guess that needs no forward pass. All [T].

    Names: prox_error/loglinear, prox_error/linear, prox_error/rollout (the old policy in its place), each with _max.
    """
    guesses = {
        "loglinear": loglinear_logprobs(logprobs, rollout_logprobs, alpha),
        "linear": linear_logprobs(logprobs, rollout_logprobs, alpha),
        "rollout": rollout_logprobs,
    }
    stats: dict[str, TokenStat] = {}
    for name, guess in guesses.items():
        error = (guess - prox_logprobs).abs()
        stats[f"prox_error/{name}"] = TokenStat(error, mask)
        stats[f"prox_error/{name}_max"] = TokenStat(error, mask, "max")
    return stats


# ----------------------------------------------------------------------------------------------------------------------
# Distances between the policy that sampled a batch and the old policy of the loss, over all ranks.


def mismatch_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, spans: Spans, *, reduce: Reduce) -> Metrics:
    """Distances between pi_rollout, which sampled, and pi_old, over the trained tokens of all ranks; on every rank.

    Log-probabilities [T] float32 or float64. With d_t = log old - log rollout, clamped to +-20, of N trained tokens;
    r_t = exp(d_t); r_s = exp(sum of d_t of a sequence), its logarithm clamped to +-20; S sequences with a trained
    token:

    k1, k2, k3           estimates of KL(rollout || old): means of -d, d^2 / 2, r - 1 - d
    ppl_rollout, ppl_old exp of the mean of -log pi;  ppl_gap = ppl_old - ppl_rollout, ppl_ratio = ppl_old / ppl_rollout
    ppl_ratio_max        the largest of exp(mean of -d) of one sequence
    ratio, _max, _min    mean, largest and smallest r_t
    chi2_token, _sequence    estimates of the chi-square divergence of old from rollout: mean of r^2, minus 1
    ess_token, _sequence     effective sample size (Kish): (sum r)^2 / sum r^2, as a fraction of N or S

    Calls `reduce` once. Without a trained token on any rank the metrics have count 0. NaN in a trained token gives NaN.
    """
    mask = spans.mask
    gap = log_ratio(old_logprobs, rollout_logprobs, mask).double()
    each = first_of_units("sequence_sum", spans)
    token = gap.exp()
    sequence = ratio_at_level(gap, "sequence_sum", spans)
    means = {
        **{name: (kl_of_samples(gap, name), mask) for name in ("k1", "k2", "k3")},
        "nll_rollout": (-rollout_logprobs.double(), mask),
        "nll_old": (-old_logprobs.double(), mask),
        "ratio": (token, mask),
        "square_token": (token.square(), mask),
        "ratio_sequence": (sequence, each),
        "square_sequence": (sequence.square(), each),
    }
    global_means, count = _global_means(means, mask, each, reduce)
    rollout, old = global_means["nll_rollout"].exp(), global_means["nll_old"].exp()
    values = {name: global_means[name] for name in ("k1", "k2", "k3", "ratio")}
    values |= {"ppl_rollout": rollout, "ppl_old": old, "ppl_gap": old - rollout, "ppl_ratio": old / rollout}
    for level, mean in (("token", global_means["ratio"]), ("sequence", global_means["ratio_sequence"])):
        values[f"chi2_{level}"] = global_means[f"square_{level}"] - 1.0
        values[f"ess_{level}"] = mean.square() / global_means[f"square_{level}"]
    extremes = {
        "ratio_max": TokenStat(token, mask, "max"),
        "ratio_min": TokenStat(token, mask, "min"),
        "ppl_ratio_max": TokenStat((-at_level(gap, "sequence_mean", spans)).exp(), mask, "max"),
    }
    # every rank has the same value, so the mean over ranks that the step takes is that value
    shared = {name: Metric(float(value) if count else 0.0, float(count > 0)) for name, value in values.items()}
    return {f"mismatch/{name}": metric for name, metric in (shared | to_metrics(extremes)).items()}


def _global_means(
    values: dict[str, tuple[Tensor, Tensor]], mask: Tensor, each: Tensor, reduce: Reduce
) -> tuple[dict[str, Tensor], float]:
    """The mean of each of `values` where its mask is on, over all ranks, in float64; and the number of tokens."""
    sums = [torch.where(where, each_value, 0.0).sum() for each_value, where in values.values()]
    total = reduce(torch.stack([*sums, mask.sum().double(), each.sum().double()]).cpu())
    num_tokens, num_sequences = total[-2], total[-1]
    means: dict[str, Tensor] = {}
    for i, (name, (_, where)) in enumerate(values.items()):
        means[name] = total[i] / (num_sequences if where is each else num_tokens)
    return means, float(num_tokens)


def effective_sample_size(weights: Tensor, kept: Tensor, *, reduce: Reduce) -> Metric:
    """(sum w)^2 / (N sum w^2) of the N kept tokens of all ranks, the same on every rank; weights [T], kept [T] bool."""
    chosen = torch.where(kept, weights, 0.0).double()
    local = torch.stack([chosen.sum(), chosen.square().sum(), kept.sum().double()])
    total, squares, count = reduce(local.cpu()).unbind()
    return Metric(float(total.square() / (count * squares)), 1.0) if float(count) else Metric(0.0, 0.0)


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
