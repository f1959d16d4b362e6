"""Distances between the policy that sampled a batch and the old policy of the loss, over all ranks."""

import torch
from torch import Tensor

from areal.algorithm.aggregate import Reduce, TokenStat, to_metrics
from areal.algorithm.correction_rules import Spans, at_level, first_of_units, ratio_at_level
from areal.algorithm.importance import kl_of_samples, log_ratio
from areal.api.metrics import Metric, Metrics


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
    found, count = _global_means(means, mask, each, reduce)
    rollout, old = found["nll_rollout"].exp(), found["nll_old"].exp()
    values = {name: found[name] for name in ("k1", "k2", "k3", "ratio")}
    values |= {"ppl_rollout": rollout, "ppl_old": old, "ppl_gap": old - rollout, "ppl_ratio": old / rollout}
    for level, mean in (("token", found["ratio"]), ("sequence", found["ratio_sequence"])):
        values[f"chi2_{level}"] = found[f"square_{level}"] - 1.0
        values[f"ess_{level}"] = mean.square() / found[f"square_{level}"]
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
