"""What simulated runs of a setting say: the figures of the steady state, with intervals over seeds."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np

from areal.api.config import PPOConfig
from areal.api.metrics import rounded
from areal.planner.simulation import Outcome, Setting, coarse, part_of, simulate

SEEDS = 3
"""Simulations of a setting whose figures are printed."""
SETTLING_STEPS = 4
"""Steps, besides the maximum staleness, that are unlike the others: at the start, when servers are empty, and at the
end, when no batch needs more answers."""
_LEAST_STEPS, _MOST_STEPS, _ANSWERS = 10, 60, 4000
"""Steps whose figures count, and enough answers in all of them: the mean length of few is unlike that of the run."""
BOUND_SHARE = 0.1
"""Share of the time that the trainers wait, from which on what they wait for bounds the run."""
_T = 4.30
"""Quantile 0.975 of Student's t for `SEEDS` values."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the 95% interval over the seeds of the simulation; of one seed without an interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        mean = fmean(values)
        half = _T * stdev(values) / math.sqrt(SEEDS) if len(values) == SEEDS else 0.0
        return cls(mean, mean - half, mean + half)

    def __str__(self) -> str:
        return f"{rounded(self.mean, 3)} [{rounded(max(0.0, self.low), 3)}, {rounded(self.high, 3)}]"

    @property
    def percent(self) -> str:
        return f"{self.mean:.0%} [{max(0.0, self.low):.0%}, {self.high:.0%}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The steady state of a simulated run."""

    step_s: Interval
    steps_per_hour: Interval
    generated_tokens_per_s: Interval
    trained_tokens_per_s: Interval
    """Tokens of the batches, prompts included."""
    staleness_mean: Interval
    staleness_p99: Interval
    dropped: Interval
    """Episodes of each step that are dropped as stale."""
    recomputed: Interval
    """Prompt tokens that servers compute again after interruptions, for each generated token."""
    waits_batch: Interval
    """Share of the time in which the trainers wait for a batch."""
    waits_servers: Interval
    """The same for servers that install weights."""
    servers_busy: Interval
    """Share of the time in which a server computes."""
    running: Interval
    """Sequences of a server that computes."""

    @property
    def bound(self) -> str:
        """generation, publication or training."""
        if self.waits_batch.mean >= BOUND_SHARE:
            return "generation"
        return "publication" if self.waits_servers.mean >= BOUND_SHARE else "training"


def steps_for(config: PPOConfig) -> int:
    """Train steps of a simulation that has a steady state."""
    answers = config.train_dataset.batch_size * config.gconfig.n_samples
    settling = config.rollout.max_head_offpolicyness + SETTLING_STEPS
    return 2 * settling + max(_LEAST_STEPS, min(_MOST_STEPS, _ANSWERS // answers))


def simulated(setting: Setting, seeds: int) -> Figures:
    """Figures of a part of the run, if it is large; `seeds` is 1 or `SEEDS`."""
    part = coarse(part_of(setting))
    outcomes = [simulate(replace(part, seed=part.seed + 17 * place)) for place in range(seeds)]
    return figures_of(outcomes, setting.config.rollout.max_head_offpolicyness)


def figures_of(outcomes: Sequence[Outcome], staleness: int) -> Figures:
    """Figures of simulations that differ in their seeds. `staleness`: the maximum that admission allows for."""
    steady = [_steady(outcome, staleness + SETTLING_STEPS) for outcome in outcomes]
    return Figures(**{name: Interval.of([figures[name] for figures in steady]) for name in steady[0]})


def _steady(outcome: Outcome, settling: int) -> dict[str, float]:
    steps = outcome.steps[settling:-settling]
    if not steps:
        raise ValueError(f"{len(outcome.steps)} steps have no steady state: {2 * settling + 1} are needed")
    seconds = steps[-1].end_s - outcome.steps[settling - 1].end_s
    counts = sum((step.by_staleness for step in steps), Counter[int]())
    values, weights = list(counts), list(counts.values())
    return {
        "step_s": seconds / len(steps),
        "steps_per_hour": 3600 * len(steps) / seconds,
        "generated_tokens_per_s": sum(step.generated for step in steps) / seconds,
        "trained_tokens_per_s": sum(step.tokens for step in steps) / seconds,
        "staleness_mean": float(np.average(values, weights=weights)),
        "staleness_p99": float(np.percentile(values, 99, weights=weights, method="inverted_cdf")),
        "dropped": fmean(step.dropped for step in steps),
        "recomputed": max(0.0, outcome.prefilled - outcome.prompts) / sum(step.generated for step in outcome.steps),
        "waits_batch": sum(step.wait_batch_s for step in steps) / seconds,
        "waits_servers": sum(step.wait_servers_s for step in steps) / seconds,
        "servers_busy": outcome.busy,
        "running": outcome.running,
    }


def figure_lines(figures: Figures, *, devices: int, steps: int | None, note: str) -> list[str]:
    """The figures as text. `note` is added to each figure."""
    waits = f"{figures.waits_batch.percent} of the time for batches, {figures.waits_servers.percent} for servers"
    lost = f"{figures.dropped} episodes of a step are dropped; {figures.recomputed} tokens computed again per token"
    rows = {
        "steps per hour": f"{figures.steps_per_hour}, {figures.step_s} s each",
        "generated": f"{figures.generated_tokens_per_s} tokens/s",
        "trained": f"{figures.trained_tokens_per_s} tokens/s",
        "trainers wait": f"{waits} that install weights",
        "servers compute": f"{figures.servers_busy.percent} of the time, {figures.running} sequences each",
        "staleness": f"mean {figures.staleness_mean}, 99% {figures.staleness_p99}",
        "lost": lost,
    }
    if steps is not None:
        each = figures.step_s
        hours = Interval(*(steps * seconds * devices / 3600 for seconds in (each.mean, each.low, each.high)))
        rows["device hours"] = f"{hours} for {steps} steps on {devices} devices"
    return [f"{name:<16} {text}{note}" for name, text in rows.items()]
