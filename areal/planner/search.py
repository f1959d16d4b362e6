"""What other settings would give: single changes of a configuration, and what a number of devices can be used for.

A closed form chooses the candidates of a search, and simulations rank them.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, Self

from areal.api.allocation import ParallelDims
from areal.api.config import PPOConfig
from areal.api.config.validate import problems_of
from areal.api.errors import ArealError, ConfigError
from areal.api.metrics import rounded
from areal.launcher.memory_plan import CARD_SHARE, largest_micro_batch, planned_memory
from areal.planner.figures import SEEDS, Figures, simulated
from areal.planner.simulation import Setting, resized

STALENESS = (0, 1, 2, 4)
BEST, SIMULATED = 3, 2
"""Candidates that are named, and those of each staleness that are simulated."""
LEAST_GAIN = 0.01
_SIZES = (1, 2, 4, 8)
"""Sizes of servers, and tensor and pipeline sizes of trainers, that are compared. They fit into a machine."""
_SPLITS = 16
"""Numbers of servers that are compared, between the smallest and the largest, before those around the best."""
_MICRO_TOKENS = (8192, 16384, 32768)

Settings = Callable[[PPOConfig], Setting]
"""How a configuration is simulated."""
Say = Callable[[str], None]
"""Prints what a plan does."""


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
        rollout, micro_tokens = config.rollout, config.actor.mb_spec.max_tokens_per_mb
        limits = rollout.max_head_offpolicyness, rollout.max_concurrent_rollouts
        return cls(str(config.allocation), *limits, micro_tokens, rollout.weight_update)

    def on(self, config: PPOConfig) -> PPOConfig:
        rollout = replace(
            config.rollout,
            max_head_offpolicyness=self.staleness,
            max_concurrent_rollouts=self.episodes,
            weight_update=self.weight_update,
        )
        actor = replace(config.actor, mb_spec=replace(config.actor.mb_spec, max_tokens_per_mb=self.micro_tokens))
        return replace(config, allocation_mode=self.allocation, rollout=rollout, actor=actor)

    def options(self, before: Self | None = None) -> dict[str, str | int | None]:
        """key -> value of what differs from another point, or of everything that is not a default."""
        options = zip(_KEYS, self, before or (None,) * len(_KEYS), strict=True)
        return {key: value for key, value, other in options if value != other}


_KEYS = (
    "allocation_mode",
    "rollout.max_head_offpolicyness",
    "rollout.max_concurrent_rollouts",
    "actor.mb_spec.max_tokens_per_mb",
    "rollout.weight_update",
)


def text_of(options: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items())


def is_allowed(config: PPOConfig, before: PPOConfig) -> bool:
    """Whether a run would take the configuration: it has no problem that the one of before has not."""
    accepted = {problem.path for problem in problems_of(before)}
    is_filled = config.train_dataset.batch_size >= config.allocation.train[0].parallel.dp
    return is_filled and all(problem.path in accepted for problem in problems_of(config))


# ----------------------------------------------------------------------------------------------------------------------
# Single changes.


class Gain(NamedTuple):
    """What one change of a setting gives."""

    options: Mapping[str, str | int | None]
    gain: float
    """Steps per hour more, as a share."""


def gains(config: PPOConfig, settings: Settings, say: Say) -> list[Gain]:
    """Each change alone, the largest gain first. All are simulated with one seed, so that they differ by the change."""
    point, mode, trainer = Point.of(config), config.allocation, config.allocation.train[0].parallel
    assert mode.inference is not None
    servers = mode.inference.parallel
    changes = [
        point._replace(allocation=resized(mode, replace(servers, dp=servers.dp + 1), trainer)),
        point._replace(allocation=resized(mode, servers, replace(trainer, dp=2 * trainer.dp))),
        point._replace(staleness=point.staleness + 1),
        point._replace(episodes=2 * config.max_concurrent_rollouts),
        point._replace(weight_update="keep_cache"),
    ]
    useful: list[Gain] = []
    before = simulated(settings(config), 1).steps_per_hour.mean
    for change in changes:
        changed, options = change.on(config), change.options(point)
        if options and is_allowed(changed, config):
            say(text_of(options))
            with contextlib.suppress(ArealError):  # the changed run would fail
                useful.append(Gain(options, simulated(settings(changed), 1).steps_per_hour.mean / before - 1))
    return sorted(useful, key=lambda gain: -gain.gain)


def bound_line(bound: str, changes: Sequence[Gain]) -> str:
    """What bounds the run, and the options that move it."""
    useful = [f"{text_of(change.options)} gives {change.gain:+.0%}" for change in changes if change.gain >= LEAST_GAIN]
    return f"{bound}-bound: " + ("; ".join(useful[:3]) or "no single change gives 1% more")


# ----------------------------------------------------------------------------------------------------------------------
# The search.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One candidate with its figures."""

    point: Point
    figures: Figures

    @property
    def reason(self) -> str:
        figures = self.figures
        return (
            f"{figures.bound}-bound: trainers wait {figures.waits_batch.mean:.0%} of the time, servers compute "
            f"{figures.servers_busy.mean:.0%}, staleness {figures.staleness_mean.mean:.2f}"
        )


def memory_problem(setting: Setting, card_bytes: float | None) -> str:
    """Why the memory of the devices does not suffice; empty = it does, or is not known."""
    config, room = setting.config, setting.times.server.max_context
    longest = setting.work.prompt + min(config.gconfig.max_new_tokens, setting.work.max_tokens)
    if room < longest:
        return f"a server has room for {room:,.0f} tokens, an answer may have {longest:,}"
    memory = planned_memory(config, largest_micro_batch(config), on_gpu=True)
    if card_bytes is not None and memory is not None and memory.peak > card_bytes * CARD_SHARE:
        return f"a trainer rank needs {memory.peak / 1e9:,.0f} GB, a card has {card_bytes / 1e9:,.0f} GB"
    return ""


def estimate_s(setting: Setting) -> float:
    """Seconds of a train step in closed form: the slower of servers with all requests in flight and of the trainer;
    both, one after the other, without staleness. It ignores how they wait for each other."""
    config, work, server, trainer = setting.config, setting.work, setting.times.server, setting.times.trainer
    longest = max(sum(turns) for number in range(64) for turns in work.episode(1, number)[0])
    mean, answers = work.mean_tokens / work.answers, config.train_dataset.batch_size * work.answers
    tokens = answers * (work.prompt + mean)
    train_s = trainer.before_s + trainer.update_s + trainer.publish_s + trainer.after_s
    train_s += (trainer.before_token_s + trainer.update_token_s) * tokens
    context = work.prompt + mean / 2
    running = config.max_concurrent_rollouts * work.answers / setting.servers
    running = min(running, server.max_running, server.max_context / context)
    decode_s = server.decode_s(1, math.ceil(running), running * context)
    prompts_s = config.train_dataset.batch_size * work.prompt * server.prefill_s
    generate_s = (answers * mean * decode_s / running + prompts_s) / setting.servers
    bound, last_s = config.rollout.max_head_offpolicyness, longest * decode_s
    if bound == 0:
        return train_s + max(generate_s, last_s)
    return max(train_s, generate_s, last_s / (bound + 1))


class Search:
    """`settings` gives the times of a configuration; `card_bytes`: memory of a device, None = unknown; `varies`: sizes
    of servers, model-parallel sizes and micro-batches too, which only a specification says something about."""

    def __init__(
        self, config: PPOConfig, settings: Settings, *, devices: int, card_bytes: float | None, varies: bool, say: Say
    ) -> None:
        self._config, self._settings, self._devices, self._say = config, settings, devices, say
        self._card_bytes, self._varies = card_bytes, varies
        self._seconds: dict[Point, float] = {}
        self._why = ""

    def best(self, staleness: Sequence[int]) -> list[Ranked]:
        """What was simulated, the most steps per hour first; of equal ones the lowest staleness. All are simulated with
        one seed, and the best ones with all seeds."""
        ranked = ordered(self._simulated([point for bound in staleness for point in self._chosen(bound)], 1))
        if not ranked:
            mode = self._config.allocation_mode
            text = f"--devices {self._devices}: no allocation like {mode} works on them; {self._why}"
            raise ConfigError(text.rstrip("; "), code="plan.too_few_devices")
        if len(staleness) > 1:
            first, point = ranked[0].figures.steps_per_hour.mean, ranked[0].point
            episodes = point.on(self._config).max_concurrent_rollouts
            more = [point._replace(episodes=count) for count in (max(1, episodes // 2), episodes * 2)]
            more = self._simulated([point for point in more if self._seconds_of(point) < math.inf], 1)
            ranked += [other for other in more if other.figures.steps_per_hour.mean > first * (1 + LEAST_GAIN)]
            ranked = ordered(ranked)
        return ordered(self._simulated([entry.point for entry in ranked[:BEST]], SEEDS)) + ranked[BEST:]

    def _simulated(self, points: Sequence[Point], seeds: int) -> list[Ranked]:
        """The candidates whose run would not fail."""
        ranked: list[Ranked] = []
        for point in points:
            try:
                entry = Ranked(point=point, figures=simulated(self._settings(point.on(self._config)), seeds))
            except ArealError as error:
                self._why = str(error)
                continue
            ranked.append(entry)
            self._say(f"{text_of(point.options())}: {rounded(entry.figures.steps_per_hour.mean, 3)} steps per hour")
        return ranked

    def _chosen(self, bound: int) -> list[Point]:
        """The candidates with this staleness that the closed form ranks first."""
        base, points_of_bound = Point.of(self._config)._replace(staleness=bound), list[Point]()
        for server, trainer in self._shapes():
            points = [base._replace(allocation=each) for each in self._splits(server, trainer)]
            step = max(1, len(points) // _SPLITS)
            coarse = [place for place in range(0, len(points), step) if self._seconds_of(points[place]) < math.inf]
            if coarse:
                middle = min(coarse, key=lambda place, points=points: self._seconds_of(points[place]))
                points_of_bound += [self._filled(point) for point in points[max(0, middle - step) : middle + step + 1]]
        points_of_bound.sort(key=self._seconds_of)
        return [point for point in points_of_bound[:SIMULATED] if self._seconds_of(point) < math.inf]

    def _shapes(self) -> Iterator[tuple[ParallelDims, ParallelDims]]:
        """Sizes of a server and of the model-parallel trainer: those of the configuration and, if they vary, others."""
        config, mode = self._config, self._config.allocation
        assert mode.inference is not None
        server, trainer = mode.inference.parallel, mode.train[0].parallel
        sizes = _SIZES if self._varies and config.server_backend != "native" else (server.tp,)
        tensor = _SIZES if self._varies else (trainer.tp,)
        stages = _SIZES if self._varies and config.train_backend == "megatron" else (trainer.pp,)
        for size, tp, pp in product(sizes, tensor, stages):
            yield replace(server, tp=size), replace(trainer, tp=tp, pp=pp)

    def _splits(self, server: ParallelDims, trainer: ParallelDims) -> Iterator[str]:
        """Allocations of servers and trainers of these sizes, whose data-parallel sizes fill the devices."""
        of_server, of_rank = server.world_size // server.dp, trainer.world_size // trainer.dp
        for servers in range(1, (self._devices - of_rank) // of_server + 1):
            ranks = min((self._devices - servers * of_server) // of_rank, self._config.train_dataset.batch_size)
            yield resized(self._config.allocation, replace(server, dp=servers), replace(trainer, dp=ranks))

    def _filled(self, point: Point) -> Point:
        """The point with the best micro-batches. Its episodes in flight fit into the caches of the servers when each
        answer has half of its length."""
        if self._seconds_of(point) == math.inf:
            return point
        setting = self._settings(point.on(self._config))
        context = setting.work.prompt + setting.work.mean_tokens / setting.work.answers / 2
        room = setting.servers * setting.times.server.max_context / context / setting.work.answers
        if room < setting.config.max_concurrent_rollouts:
            point = point._replace(episodes=max(1, int(room)))
        sizes = (*_MICRO_TOKENS, point.micro_tokens) if self._varies else (point.micro_tokens,)
        return min((point._replace(micro_tokens=each) for each in sizes), key=self._seconds_of)

    def _seconds_of(self, point: Point) -> float:
        """Estimated seconds of a step; infinite where a run would be refused."""
        if point not in self._seconds:
            self._seconds[point], config = math.inf, point.on(self._config)
            if is_allowed(config, self._config):
                setting = self._settings(config)
                problem = memory_problem(setting, self._card_bytes)
                self._why = problem or self._why
                self._seconds[point] = math.inf if problem else estimate_s(setting)
        return self._seconds[point]


def ordered(entries: Sequence[Ranked]) -> list[Ranked]:
    """The most steps per hour first; of those that differ by less than `LEAST_GAIN` the lowest staleness."""
    left = sorted(entries, key=lambda entry: -entry.figures.steps_per_hour.mean)
    result: list[Ranked] = []
    while left:
        least = left[0].figures.steps_per_hour.mean / (1 + LEAST_GAIN)
        equal = [entry for entry in left if entry.figures.steps_per_hour.mean >= least]
        result += sorted(equal, key=lambda entry: entry.figures.staleness_mean.mean)
        left = left[len(equal) :]
    return result
