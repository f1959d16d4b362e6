"""The record that every policy loss takes and the record that it returns; `areal.algorithm.losses` holds the losses."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal.algorithm.aggregate import Reduce, TokenStat, require_same_shape, sequence_means
from areal.api.columns import ColumnSpec
from areal.api.config import AdaptiveEntropyConfig, PolicyLossOptions, ResamplingConfig
from areal.api.config.policy_losses import loss_facts
from areal.api.errors import StageError

# ----------------------------------------------------------------------------------------------------------------------
# Log-ratios between two policies, and the estimates of their KL divergence that sampled tokens give.

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-this before exp: e^20 = 4.9e8 is far outside every clip range and safe in float32."""


def log_ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log(pi / pi_base) of each token, clamped to +-LOG_RATIO_LIMIT, 0 where the mask is off.

    All [T]; float32 or float64, mask bool. Masked positions (NaN and infinity too) affect neither value nor gradient.
    Elsewhere NaN stays NaN, and an infinite log-probability is clamped.
    Raises ValueError on unequal shapes.
    """
    require_same_shape(logprobs=logprobs, base_logprobs=base_logprobs, mask=mask)
    difference = torch.where(mask, logprobs, 0.0) - torch.where(mask, base_logprobs, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_of_samples(d: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(p || q) at tokens sampled from p, from d = log q - log p (Schulman 2020, "Approximating KL").

    k1 = -d (unbiased, of either sign);  k2 = d^2 / 2 (biased, low variance);
    k3 = exp(d) - 1 - d (unbiased, never negative);  abs = |d|.
    Raises ValueError for any other name.
    """
    match estimator:
        case "k1":
            return -d
        case "k2":
            return 0.5 * d.square()
        case "k3":
            return torch.expm1(d) - d
        case "abs":
            return d.abs()
        case _:
            raise ValueError(f"unknown KL estimator {estimator!r}: choose k1, k2, k3 or abs")


# ----------------------------------------------------------------------------------------------------------------------
# Clip-Cov and KL-Cov: the tokens of a batch whose update reduces the entropy most.
#
# Both (Cui et al. 2025, arXiv 2505.22617) treat the tokens differently whose covariance
#
#     Cov_t = (log pi(t) - mean of log pi) * (A_t - mean of A)
#
# is high, with means over the N tokens of the batch. The choice is made once per batch over all ranks, with the policy
# before the update and hashes as random numbers, so it does not depend on micro-batches and a replay repeats it. (verl
# chooses within a micro-batch, with the policy in training.)

_DIGIT_BITS = 16
_NUM_DIGITS = 4
_LOW_31_BITS = 0x7FFFFFFF
_LOW_32_BITS = 0xFFFFFFFF


def token_covariances(advantages: Tensor, logprobs: Tensor, mask: Tensor, *, reduce: Reduce) -> Tensor:
    """Cov_t of each token with the means over the trained tokens of all ranks, [T] float64, 0 where the mask is off."""
    require_same_shape(advantages=advantages, logprobs=logprobs, mask=mask)
    a = torch.where(mask, advantages, 0.0).double()
    b = torch.where(mask, logprobs, 0.0).double()
    sums = reduce(torch.stack([a.sum(), b.sum(), mask.sum().double()]).cpu()).to(a.device)
    count = sums[2].clamp(min=1)
    return torch.where(mask, (a - sums[0] / count) * (b - sums[1] / count), 0.0)


def highest_covariances(covariances: Tensor, draw: Tensor, mask: Tensor, *, ratio: float, reduce: Reduce) -> Tensor:
    """KL-Cov: the max(1, int(ratio N)) trained tokens of highest covariance on all ranks, [T] bool.

    `draw` [T] int64 below 2^31 decides among covariances that are equal in float32.
    """
    return largest_keys((ordered_bits(covariances) << 31) | draw, mask, _part_of(mask, ratio, reduce), reduce=reduce)


def drawn_between(
    covariances: Tensor, draw: Tensor, mask: Tensor, *, low: float, high: float, ratio: float, reduce: Reduce
) -> Tensor:
    """Clip-Cov: max(1, int(ratio N)) of the trained tokens with low < Cov < high on all ranks, [T] bool.

    Those with the largest `draw`, [T] int64 below 2^31, see `token_draws`.
    """
    eligible = mask & (covariances > low) & (covariances < high)
    return largest_keys(draw, eligible, _part_of(mask, ratio, reduce), reduce=reduce)


def token_draws(input_ids: Tensor, rollout_logprobs: Tensor, cu_seqlens: Tensor, sequence_index: Tensor) -> Tensor:
    """A pseudo-random number from 0 to 2^31 - 1 for each token, [T] int64.

    A hash of its position in its sequence, of the token before it and of its rollout log-probability, so it does not
    depend on the partition of the batch, and a replay repeats it.
    """
    place = torch.arange(input_ids.numel(), device=input_ids.device) - cu_seqlens.long()[sequence_index]
    sampled = rollout_logprobs.float().contiguous().view(torch.int32).long()
    mixed = mixed_bits(mixed_bits(mixed_bits(place) ^ input_ids) ^ (sampled & _LOW_32_BITS))
    return mixed & _LOW_31_BITS


def ordered_bits(values: Tensor) -> Tensor:
    """Integers from 0 to 2^32 - 1 in the order of `values` as float32; 0 and -0 are equal. [N] float -> [N] int64."""
    bits = (values.float() + 0.0).view(torch.int32).long() & _LOW_32_BITS
    return torch.where(bits > _LOW_31_BITS, ~bits & _LOW_32_BITS, bits + _LOW_31_BITS + 1)


def mixed_bits(values: Tensor) -> Tensor:
    """Hash of 64-bit integers; products wrap around."""
    values = (values ^ ((values >> 32) & _LOW_32_BITS)) * 0x2545F4914F6CDD1D + 0x14057B7EF767814F
    values = (values ^ ((values >> 29) & ((1 << 35) - 1))) * 0x369DEA0F31A53F85
    return values ^ ((values >> 32) & _LOW_32_BITS)


def _part_of(mask: Tensor, ratio: float, reduce: Reduce) -> int:
    """max(1, int(ratio N)) for the N trained tokens of all ranks."""
    total = float(reduce(mask.sum().double().reshape(1).cpu())[0])
    return max(1, int(ratio * total))


def largest_keys(keys: Tensor, eligible: Tensor, count: int, *, reduce: Reduce) -> Tensor:
    """The eligible entries whose key is among the `count` largest of all ranks, with ties at the end. [N] bool.

    keys [N] int64, not negative. The threshold is found digit by digit from histograms: ranks exchange 512 KiB in each
    of four rounds. All eligible entries when there are at most `count`.
    """
    base = 1 << _DIGIT_BITS
    threshold, wanted = 0, float(count)
    undecided = eligible
    for place in reversed(range(_NUM_DIGITS)):
        digits = (keys >> (_DIGIT_BITS * place)) & (base - 1)
        histogram = reduce(torch.bincount(digits[undecided], minlength=base).double().cpu())
        at_least = histogram.flip(0).cumsum(0).flip(0)
        if place == _NUM_DIGITS - 1 and float(at_least[0]) <= wanted:
            wanted = float(at_least[0])
        reached = torch.nonzero(at_least >= wanted)
        digit = int(reached[-1]) if wanted > 0 else base - 1
        wanted -= float(at_least[digit]) - float(histogram[digit])
        threshold |= digit << (_DIGIT_BITS * place)
        undecided = undecided & (digits == digit)
    return eligible & (keys >= threshold)


CHOSEN = ColumnSpec("chosen_tokens", "u1", made_by="with_chosen_tokens")
"""[T] bool: the tokens of Clip-Cov and KL-Cov, chosen over the whole batch before the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """The inputs of a policy loss. Per-token tensors are [T], float32 or float64, predicted-token aligned."""

    logprobs: Tensor  # log pi_theta, with gradient
    old_logprobs: Tensor  # log of the policy the ratio is taken against (pi_prox when decoupled)
    rollout_logprobs: Tensor  # log of the policy that sampled the tokens
    advantages: Tensor
    mask: Tensor  # bool
    sequence_index: Tensor  # [T] int64
    num_sequences: int
    columns: Mapping[ColumnSpec, Tensor] = field(default_factory=dict[ColumnSpec, Tensor])
    """Further columns of the batch, [T, ...] or [S, ...]."""

    def __post_init__(self) -> None:
        require_same_shape(
            logprobs=self.logprobs,
            old_logprobs=self.old_logprobs,
            rollout_logprobs=self.rollout_logprobs,
            advantages=self.advantages,
            mask=self.mask,
            sequence_index=self.sequence_index,
        )

    def column(self, spec: ColumnSpec) -> Tensor:
        """A further column. Where no trajectory of the batch has it, its `fill`; StageError, which names it and the
        stage that adds it, if it has none and there are tokens."""
        if spec in self.columns:
            return self.columns[spec]
        if spec.fill is None and self.mask.numel():
            raise StageError(spec.name, spec.made_by)
        size = self.num_sequences if spec.per == "sequence" else self.mask.numel()
        return self.logprobs.new_full((size,), spec.fill or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Per-token losses, 0 where the mask is off, and the statistics to log."""

    losses: Tensor  # [T] with gradient
    stats: dict[str, TokenStat]


PolicyLossFn = Callable[[PolicyTokens, PolicyLossOptions], PolicyLoss]


def weighted_log_likelihood(tokens: PolicyTokens, weights: Tensor, advantages: Tensor) -> Tensor:
    """-w A log pi of each token, [T], 0 where the mask is off; no gradient flows through the weights w."""
    logprobs = torch.where(tokens.mask, tokens.logprobs, 0.0)
    return torch.where(tokens.mask, -weights.detach() * advantages * logprobs, 0.0)


def chosen_tokens(tokens: PolicyTokens) -> Tensor:
    """CHOSEN within the mask, [T] bool. Raises StageError when it is missing."""
    return tokens.column(CHOSEN).bool() & tokens.mask


# ----------------------------------------------------------------------------------------------------------------------
# The ratio of a policy loss, at the level of the token or of its sequence, and the statistics about it.


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
    if options.importance_sampling_level == "token" or not loss_facts(options.policy_loss).takes_sequence_ratio:
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


# ----------------------------------------------------------------------------------------------------------------------
# Terms added to the policy-gradient loss: the entropy bonus and its coefficient, likelihood of good answers.


def entropy_loss(entropy: Tensor, mask: Tensor) -> Tensor:
    """-H of each trained token, without the coefficient of the bonus (Williams and Peng 1991).

    entropy [T] with gradient, mask [T] bool -> [T], 0 where the mask is off. StageError when gradients are recorded and
    the entropy has none: the bonus would have no effect.
    """
    require_same_shape(entropy=entropy, mask=mask)
    if torch.is_grad_enabled() and entropy.numel() and not entropy.requires_grad:
        raise StageError("entropy with gradient")
    return torch.where(mask, -entropy, 0.0)


def adapted_entropy_coef(coef: float, entropy: float, options: AdaptiveEntropyConfig) -> float:
    """The coefficient of the entropy bonus after a step with this mean entropy in nats (AEnt, arXiv 2509.03493).

    coef - coef_lr (min(0, H - entropy_low) + max(0, H - entropy_high)), clamped to [coef_low, coef_high]. A NaN or an
    infinite entropy changes nothing.
    """
    if not math.isfinite(entropy):
        return coef
    outside = min(0.0, entropy - options.entropy_low) + max(0.0, entropy - options.entropy_high)
    return min(max(coef - options.coef_lr * outside, options.coef_low), options.coef_high)


def positive_mask(rewards: Tensor, mask: Tensor, sequence_index: Tensor) -> Tensor:
    """Trained tokens of sequences whose reward is above 0. rewards [S], mask [T] bool, sequence_index [T] -> [T]."""
    require_same_shape(mask=mask, sequence_index=sequence_index)
    return mask & (rewards > 0)[sequence_index]


def positive_nll(logprobs: Tensor, good: Tensor) -> Tensor:
    """-log pi of the tokens `good` (`positive_mask`), 0 elsewhere; both [T] (VAPO, arXiv 2504.05118, section 4.3).

    Its denominator is the number of good tokens of the mini-batch on all ranks. Raises ValueError on unequal shapes.
    """
    require_same_shape(logprobs=logprobs, good=good)
    return torch.where(good, -logprobs, 0.0)


# ----------------------------------------------------------------------------------------------------------------------
# The loss of the critic.


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Per-token losses of a critic and where the clip took effect."""

    losses: Tensor  # [T] with gradient, 0 where the mask is off
    clipped: Tensor  # [T] bool: the clipped error decides


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    eps_clip: float | None,
    huber_delta: float | None = None,
) -> ValueLoss:
    """Error to the return, the larger of the plain and the clipped one (PPO implementation, Engstrom 2020).

    V' = V_old + clip(V - V_old, -eps_clip, eps_clip);  l = max(h(V - R), h(V' - R)); eps_clip None: l = h(V - R).
    h(e) = e^2 / 2, or with huber_delta d (Huber 1964)  e^2 / 2 where |e| <= d, else d (|e| - d / 2).
    All [T], mask bool; values outside the mask change neither value nor gradient, NaN inside it stays NaN.
    Raises ValueError on unequal shapes.
    """
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    value = torch.where(mask, values, 0.0)
    target = torch.where(mask, returns, 0.0).detach()
    plain = _error_loss(value - target, huber_delta)
    if eps_clip is None:
        return ValueLoss(losses=plain, clipped=torch.zeros_like(mask))
    old = torch.where(mask, old_values, 0.0).detach()
    bounded = _error_loss(old + (value - old).clamp(-eps_clip, eps_clip) - target, huber_delta)
    return ValueLoss(losses=torch.maximum(plain, bounded), clipped=(mask & (bounded > plain)).detach())


def _error_loss(error: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return 0.5 * error.square()
    size = error.abs()
    inner = size.clamp(max=huber_delta)
    return inner * (size - 0.5 * inner)


# ----------------------------------------------------------------------------------------------------------------------
# PF-PPO: sequences of a train batch are resampled with probabilities that depend on their rewards.

_MIN_WEIGHT = 1e-8


def resampling_weights(rewards: Tensor, options: ResamplingConfig, *, reduce: Reduce) -> Tensor:
    """Unnormalised probability of each sequence (PF-PPO, arXiv 2409.06957; verl `pf_ppo`), plus 1e-8.

    pow: |r|^power. max_min: 1 where r is the largest or the smallest reward of the batch on all ranks, else 0.
    max_random: 0.4 where r is the largest, else 0.1. rewards [S] float -> [S] float64; extremes are compared in
    float32. A collective: `reduce` is called equally on all ranks.
    """
    if options.method == "pow":
        return rewards.double().abs().pow(options.power) + _MIN_WEIGHT
    everyone = torch.ones_like(rewards, dtype=torch.bool)
    is_max = largest_keys(ordered_bits(rewards), everyone, 1, reduce=reduce)
    if options.method == "max_random":
        return 0.1 + 0.3 * is_max.double() + _MIN_WEIGHT
    is_min = largest_keys(ordered_bits(-rewards), everyone, 1, reduce=reduce)
    return (is_max | is_min).double() + _MIN_WEIGHT


def resampled_counts(weights: Tensor, draws: Tensor, *, reduce: Reduce) -> Tensor:
    """How often each sequence is trained on: N w / sum w over the N sequences of all ranks, rounded at random.

    The mean is that of N draws with replacement (verl), the variance is smaller. Each count is rounded up if its draw
    and its fraction sum to 1 or more, so ranks need no exchange and a replay repeats it.
    weights [S] float64, draws [S] in [0, 1) -> [S] int64. A collective (`reduce` once).
    """
    facts = torch.stack([weights.sum(), weights.new_tensor(float(weights.numel()))])
    total, count = reduce(facts.cpu()).unbind()
    expected = weights * float(count / total) if float(total) else torch.ones_like(weights)
    return (expected + draws).floor().long()


def sequence_draws(token_draws: Tensor, sequence_index: Tensor, num_sequences: int, *, seed: int, step: int) -> Tensor:
    """A uniform number of each sequence from the numbers of its tokens, the run's seed and the step; -> [S] float64.

    token_draws [T] int64, see `covariance.token_draws`: the result does not depend on how the batch is cut.
    """
    sums = token_draws.new_zeros(num_sequences).index_add(0, sequence_index, token_draws)
    salt = mixed_bits(mixed_bits(token_draws.new_tensor(seed)) ^ step)
    return (mixed_bits(sums ^ salt) & 0x7FFFFFFF).double() / 2.0**31
