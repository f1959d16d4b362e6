"""Metrics over several answers to each prompt, as pure functions: mean@n, pass@k, majority vote, standard errors."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """One scored answer to a prompt."""

    reward: float
    answer: str | None = None
    """What it votes for; None = it has no final answer and does not vote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts."""

    mean: float
    stderr: float | None
    """Standard error over prompts; None with fewer than two prompts."""
    num_rows: int
    """Prompts that it is the mean of."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that k of n answers, drawn without replacement, contain a correct one: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of pass@k (Chen et al. 2021, arXiv 2107.03374, equation 1). ValueError unless
    0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@{k} of {num_correct} correct answers among {num_samples} is not defined")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_vote(samples: Sequence[Graded], correct_reward: float) -> float:
    """The share of correct answers among those that give the most frequent final answer; 0 when none votes.

    A tie counts as the mean over the tied answers: the expected result when one of them is drawn at random.
    """
    votes: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.answer is not None:
            votes[sample.answer].append(float(sample.reward >= correct_reward))
    most = max(map(len, votes.values()), default=0)
    return fmean([fmean(found) for found in votes.values() if len(found) == most]) if votes else 0.0


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per prompt, with s / sqrt(N) as its standard error (s: sample standard deviation).

    Answers to one prompt are not independent, so the prompt is the unit (Miller 2024, arXiv 2411.00640, section 2.2).
    """
    stderr = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(mean=fmean(values), stderr=stderr, num_rows=len(values))


def default_ks(num_samples: int) -> list[int]:
    """The powers of two up to `num_samples`, and `num_samples`."""
    return sorted({2**power for power in range(num_samples.bit_length())} | {num_samples})


def answer_metrics(
    rows: Sequence[Sequence[Graded]], *, num_samples: int, correct_reward: float, ks: Sequence[int] = ()
) -> dict[str, Estimate]:
    """mean@n, pass@k and, for n > 1, majority@n over prompts with n answers each.

    mean@n is the mean reward; an answer is correct with at least `correct_reward`. `ks` empty = `default_ks(n)`.
    Prompts whose answers partly failed count with those they have: pass@k over prompts with at least k answers, the
    others over prompts with at least one. A metric over no prompt is left out.
    """
    measures: Mapping[str, tuple[int, Callable[[Sequence[Graded]], float]]] = {
        f"mean@{num_samples}": (1, lambda row: fmean(sample.reward for sample in row)),
        **{f"pass@{k}": (k, _PassAt(k, correct_reward)) for k in ks or default_ks(num_samples)},
        **({f"majority@{num_samples}": (1, lambda row: majority_vote(row, correct_reward))} if num_samples > 1 else {}),
    }
    found: dict[str, Estimate] = {}
    for name, (at_least, measure) in measures.items():
        if values := [measure(row) for row in rows if len(row) >= at_least]:
            found[name] = estimate(values)
    return found


@dataclass(frozen=True, slots=True)
class _PassAt:
    k: int
    correct_reward: float

    def __call__(self, row: Sequence[Graded]) -> float:
        num_correct = sum(sample.reward >= self.correct_reward for sample in row)
        return pass_at_k(len(row), num_correct, self.k)
