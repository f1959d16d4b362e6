"""What simulated runs say about a configuration: figures with intervals, what bounds it, and what would move that."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import NamedTuple, Self

from areal.api.allocation import AllocationMode, ModelAllocation, ParallelDims
from areal.api.config import PPOConfig
from areal.api.config.validate import problems_of
from areal.api.errors import ArealError
from areal.planner.simulation import Outcome, Setting, part_of, simulate

SETTLING_STEPS, MEASURED_STEPS = 4, 10
"""Steps, besides the maximum staleness, that are unlike the others: at the start, when servers are empty, and at the
end, when no batch needs more answers. And the number of the others."""
BOUND_SHARE = 0.1
"""Share of the time that the trainers wait, from which on what they wait for bounds the run."""
LEAST_GAIN = 0.01
_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Quantile 0.975 of Student's t by the number of values."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the 95% interval over the seeds of the simulation."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        mean = fmean(values)
        half = _T[min(len(values), 8)] * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return cls(mean, mean - half, mean + half)

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{max(0.0, self.low):.3g}, {self.high:.3g}]"


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


def steps_for(staleness: int) -> int:
    """Train steps of a simulation that has a steady state."""
    return 2 * (staleness + SETTLING_STEPS) + MEASURED_STEPS


def figures_of(outcomes: Sequence[Outcome], staleness: int) -> Figures:
    """Of simulations that differ in their seeds. `staleness`: the maximum that admission allows for."""
    found = [_steady(outcome, staleness + SETTLING_STEPS) for outcome in outcomes]
    return Figures(**{name: Interval.of([one[name] for one in found]) for name in found[0]})


def _steady(outcome: Outcome, settling: int) -> dict[str, float]:
    first, last = settling - 1, len(outcome.steps) - 1 - settling
    if last <= first:
        raise ValueError(f"{len(outcome.steps)} steps have no steady state: {2 * settling + 1} are needed")
    steps = outcome.steps[first + 1 : last + 1]
    seconds = outcome.steps[last].end_s - outcome.steps[first].end_s
    by_staleness = Counter[int]()
    for step in steps:
        by_staleness.update(step.by_staleness)
    tokens = by_staleness.total() or 1
    generated = sum(step.generated for step in outcome.steps) or 1.0
    return {
        "step_s": seconds / len(steps),
        "steps_per_hour": 3600 * len(steps) / seconds,
        "generated_tokens_per_s": sum(step.generated for step in steps) / seconds,
        "trained_tokens_per_s": sum(step.tokens for step in steps) / seconds,
        "staleness_mean": sum(value * count for value, count in by_staleness.items()) / tokens,
        "staleness_p99": quantile(by_staleness, 0.99),
        "dropped": fmean(step.dropped for step in steps),
        "recomputed": max(0.0, outcome.prefilled - outcome.prompts) / generated,
        "waits_batch": sum(step.wait_batch_s for step in steps) / seconds,
        "waits_servers": sum(step.wait_servers_s for step in steps) / seconds,
        "servers_busy": outcome.busy,
        "running": outcome.running,
    }


def quantile(counts: Mapping[int, int], share: float) -> float:
    """Smallest value that is not below this share of all."""
    wanted, seen = share * sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= wanted:
            return float(value)
    return 0.0


# ----------------------------------------------------------------------------------------------------------------------
# Settings that differ from one another.


class Point(NamedTuple):
    """What a plan may change of a configuration."""

    allocation: str
    staleness: int
    episodes: int | None
    """Episodes in flight; None = batch size x (staleness + 1)."""
    micro_tokens: int | None
    """Tokens of a micro-batch; None = its default."""
    weight_update: str

    @classmethod
    def of(cls, config: PPOConfig) -> Self:
        rollout = config.rollout
        return cls(
            allocation=str(config.allocation),
            staleness=rollout.max_head_offpolicyness,
            episodes=rollout.max_concurrent_rollouts,
            micro_tokens=config.actor.mb_spec.max_tokens_per_mb,
            weight_update=rollout.weight_update,
        )

    def on(self, config: PPOConfig) -> PPOConfig:
        rollout = replace(
            config.rollout,
            max_head_offpolicyness=self.staleness,
            max_concurrent_rollouts=self.episodes,
            weight_update=self.weight_update,
        )
        actor = replace(config.actor, mb_spec=replace(config.actor.mb_spec, max_tokens_per_mb=self.micro_tokens))
        return replace(config, allocation_mode=self.allocation, rollout=rollout, actor=actor)

    def options(self, before: Self) -> dict[str, str | int | None]:
        """key -> value of what differs from another point."""
        keys = (
            "allocation_mode",
            "rollout.max_head_offpolicyness",
            "rollout.max_concurrent_rollouts",
            "actor.mb_spec.max_tokens_per_mb",
            "rollout.weight_update",
        )
        return {key: own for key, own, other in zip(keys, self, before, strict=True) if own != other}


Settings = Callable[[PPOConfig], Setting]
"""How a configuration is simulated."""


def resized(mode: AllocationMode, servers: ParallelDims, trainer: ParallelDims) -> AllocationMode:
    """The allocation with other sizes of the servers and of the first trainer."""
    found: list[ModelAllocation] = []
    for one in mode.allocations:
        dims = servers if one is mode.inference else trainer if one is mode.train[0] else one.parallel
        found.append(replace(one, parallel=dims))
    return replace(mode, allocations=tuple(found))


def simulated(setting: Setting, seeds: int) -> Figures:
    part = part_of(setting)
    outcomes = [simulate(replace(part, seed=part.seed + 17 * place)) for place in range(seeds)]
    return figures_of(outcomes, setting.config.rollout.max_head_offpolicyness)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What one change of a setting gives."""

    title: str
    options: Mapping[str, str | int | None]
    gain: float
    """Steps per hour more, as a share."""


def gains(config: PPOConfig, settings: Settings, say: Callable[[str], None]) -> list[Gain]:
    """Each change alone, the largest gain first. All are simulated with one seed, so that they differ by the change."""
    point, mode, trainer = Point.of(config), config.allocation, config.allocation.train[0].parallel
    assert mode.inference is not None
    servers, episodes = mode.inference.parallel, 2 * config.max_concurrent_rollouts
    more_servers = resized(mode, replace(servers, dp=servers.dp + 1), trainer)
    more_ranks = resized(mode, servers, replace(trainer, dp=2 * trainer.dp))
    changes = {
        "+1 server": point._replace(allocation=str(more_servers)),
        f"{2 * trainer.dp} instead of {trainer.dp} data-parallel trainers": point._replace(allocation=str(more_ranks)),
        f"staleness {point.staleness + 1} instead of {point.staleness}": point._replace(staleness=point.staleness + 1),
        f"{episodes} instead of {episodes // 2} episodes in flight": point._replace(episodes=episodes),
    }
    if point.weight_update != "keep_cache":
        title = f"weight_update keep_cache instead of {point.weight_update}"
        changes[title] = point._replace(weight_update="keep_cache")
    found: list[Gain] = []
    before = simulated(settings(config), 1).steps_per_hour.mean
    for title, change in changes.items():
        changed = change.on(config)
        if is_allowed(changed, config):
            say(title)
            with contextlib.suppress(ArealError):  # the changed run would fail
                gain = simulated(settings(changed), 1).steps_per_hour.mean / before - 1
                found.append(Gain(title=title, options=change.options(point), gain=gain))
    return sorted(found, key=lambda one: -one.gain)


def is_allowed(config: PPOConfig, before: PPOConfig) -> bool:
    """Whether a run would take the configuration: it has no problem that the one of before has not."""
    accepted = {problem.path for problem in problems_of(before)}
    is_filled = config.train_dataset.batch_size >= config.allocation.train[0].parallel.dp
    return is_filled and all(problem.path in accepted for problem in problems_of(config))


def figure_lines(found: Figures, *, devices: int, steps: int | None, note: str) -> list[str]:
    """For people. `note` is added to each figure."""
    rows = [
        ("steps per hour", f"{found.steps_per_hour}, {found.step_s} s each"),
        ("generated", f"{found.generated_tokens_per_s} tokens/s"),
        ("trained", f"{found.trained_tokens_per_s} tokens/s"),
        (
            "trainers wait",
            f"{_share(found.waits_batch)} of the time for batches, {_share(found.waits_servers)} for servers "
            "that install weights",
        ),
        ("servers compute", f"{_share(found.servers_busy)} of the time, {found.running} sequences each"),
        ("staleness", f"mean {found.staleness_mean}, 99% {found.staleness_p99}"),
        ("lost", f"{found.dropped} episodes of a step are dropped; {found.recomputed} tokens computed again per token"),
    ]
    if steps is not None:
        hours = [
            steps * seconds * devices / 3600 for seconds in (found.step_s.mean, found.step_s.low, found.step_s.high)
        ]
        rows.append(("device hours", f"{Interval(*hours)} for {steps} steps on {devices} devices"))
    return [f"{name:<16} {text}{note}" for name, text in rows]


def _share(value: Interval) -> str:
    return f"{value.mean:.0%} [{max(0.0, value.low):.0%}, {value.high:.0%}]"


def bound_line(bound: str, found: Sequence[Gain]) -> str:
    """What bounds the run, and the changes that move it."""
    useful = [one for one in found if one.gain >= LEAST_GAIN]
    texts = [f"{one.title} gives {one.gain:+.0%}" for one in useful[:3]]
    return f"{bound}-bound: " + ("; ".join(texts) if texts else "no single change gives 1% more")
