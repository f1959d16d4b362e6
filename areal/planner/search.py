"""Ranks what a number of devices can be used for: a closed form chooses candidates, simulations rank these."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from areal.api.allocation import ParallelDims
from areal.api.config import PPOConfig
from areal.api.errors import ArealError, ConfigError
from areal.launcher.memory_plan import CARD_SHARE, largest_micro_batch, planned_memory
from areal.planner.report import LEAST_GAIN, Figures, Point, Settings, is_allowed, resized, simulated
from areal.planner.service import mean_tokens
from areal.planner.simulation import Setting

STALENESS = (0, 1, 2, 4)
BEST, SIMULATED = 3, 2
"""Candidates that are named, and those of each staleness that are simulated."""
_SIZES = (1, 2, 4, 8)
"""Sizes of servers, and tensor and pipeline sizes of trainers, that are compared. They fit into a machine."""
_SPLITS = 16
"""Numbers of servers that are compared, between the smallest and the largest, before those around the best."""
_MICRO_TOKENS = (8192, 16384, 32768)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One candidate with its figures."""

    point: Point
    figures: Figures

    @property
    def title(self) -> str:
        episodes = "" if self.point.episodes is None else f", {self.point.episodes} episodes in flight"
        tokens = "" if self.point.micro_tokens is None else f", micro-batches of {self.point.micro_tokens} tokens"
        return f"{self.point.allocation}, staleness {self.point.staleness}{episodes}{tokens}"

    @property
    def reason(self) -> str:
        found = self.figures
        return (
            f"{found.bound}-bound: trainers wait {found.waits_batch.mean:.0%} of the time, servers compute "
            f"{found.servers_busy.mean:.0%}, staleness {found.staleness_mean.mean:.2f}"
        )


def memory_problem(setting: Setting, card_bytes: float | None) -> str:
    """Why the memory of the devices does not suffice; empty = it does, or is not known."""
    config = setting.config
    longest = setting.work.prompt + min(config.gconfig.max_new_tokens, setting.work.max_tokens)
    if setting.times.server.max_context < longest:
        return f"a server has room for {setting.times.server.max_context:,.0f} tokens, an answer may have {longest:,}"
    memory = planned_memory(config, largest_micro_batch(config), on_gpu=True)
    if card_bytes is not None and memory is not None and memory.peak > card_bytes * CARD_SHARE:
        return f"a trainer rank needs {memory.peak / 1e9:,.0f} GB, a card has {card_bytes / 1e9:,.0f} GB"
    return ""


def estimate_s(setting: Setting) -> float:
    """Seconds of a train step in closed form: the slower of servers with all requests in flight and of the trainer;
    both, one after the other, without staleness. It ignores how they wait for each other."""
    config, work, server, trainer = setting.config, setting.work, setting.times.server, setting.times.trainer
    longest = max(sum(turns) for number in range(64) for turns in work.episode(1, number).turns)
    mean, answers = mean_tokens(work) / work.answers, config.train_dataset.batch_size * work.answers
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


def _splits(config: PPOConfig, devices: int, server: ParallelDims, trainer: ParallelDims) -> Iterator[str]:
    """Allocations of servers and trainers of these sizes, whose data-parallel sizes fill the devices."""
    of_server, of_rank = server.world_size // server.dp, trainer.world_size // trainer.dp
    most = (devices - of_rank) // of_server
    for servers in range(1, most + 1):
        ranks = min((devices - servers * of_server) // of_rank, config.train_dataset.batch_size)
        yield str(resized(config.allocation, replace(server, dp=servers), replace(trainer, dp=ranks)))


def shapes(config: PPOConfig, *, varies: bool) -> Iterator[tuple[ParallelDims, ParallelDims]]:
    """Sizes of a server and of the model-parallel trainer: those of the configuration and, if it `varies`, others."""
    mode = config.allocation
    assert mode.inference is not None
    server, trainer = mode.inference.parallel, mode.train[0].parallel
    varies_server = varies and config.server_backend != "native"
    sizes = _SIZES if varies_server else (server.tp,)
    tensor = _SIZES if varies else (trainer.tp,)
    stages = _SIZES if varies and config.train_backend == "megatron" else (trainer.pp,)
    for size, tp, pp in product(sizes, tensor, stages):
        yield replace(server, tp=size), replace(trainer, tp=tp, pp=pp)


class Search:
    """`settings` gives the times of a configuration; `card_bytes`: memory of a device, None = unknown; `varies`: sizes
    of servers, model-parallel sizes and micro-batches too, which only a specification says something about."""

    def __init__(
        self,
        config: PPOConfig,
        settings: Settings,
        *,
        devices: int,
        card_bytes: float | None,
        varies: bool,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._settings, self._devices, self._say = config, settings, devices, say
        self._card_bytes, self._varies = card_bytes, varies
        self._seconds: dict[Point, float] = {}
        self._why = ""

    def best(self, staleness: Sequence[int], seeds: int) -> list[Ranked]:
        """What was simulated, the most steps per hour first; of equal ones the lowest staleness. All are simulated with
        one seed, and the best ones with all seeds."""
        found = self._simulated([point for bound in staleness for point in self._chosen(bound)], 1)
        if not found:
            mode = self._config.allocation_mode
            text = f"--devices {self._devices}: no allocation like {mode} works on them; {self._why}"
            raise ConfigError(text.rstrip("; "), code="plan.too_few_devices")
        found = _ordered(found)
        if len(staleness) > 1:
            first, point = found[0].figures.steps_per_hour.mean, found[0].point
            episodes = point.on(self._config).max_concurrent_rollouts
            more = [point._replace(episodes=count) for count in (max(1, episodes // 2), episodes * 2)]
            more = self._simulated([one for one in more if self._seconds_of(one) < math.inf], 1)
            found += [one for one in more if one.figures.steps_per_hour.mean > first * (1 + LEAST_GAIN)]
            found = _ordered(found)
        best = self._simulated([one.point for one in found[:BEST]], seeds)
        return [*_ordered(best), *found[BEST:]]

    def _simulated(self, points: Sequence[Point], seeds: int) -> list[Ranked]:
        """The candidates whose run would not fail."""
        found: list[Ranked] = []
        for point in points:
            try:
                one = Ranked(point=point, figures=simulated(self._settings(point.on(self._config)), seeds))
            except ArealError as error:
                self._why = str(error)
                continue
            found.append(one)
            self._say(f"{one.title}: {one.figures.steps_per_hour.mean:.3g} steps per hour")
        return found

    def _chosen(self, bound: int) -> list[Point]:
        """The candidates with this staleness that the closed form ranks first."""
        base, found = Point.of(self._config)._replace(staleness=bound), list[Point]()
        for server, trainer in shapes(self._config, varies=self._varies):
            allocations = _splits(self._config, self._devices, server, trainer)
            points = [base._replace(allocation=each) for each in allocations]
            step = max(1, len(points) // _SPLITS)
            coarse = [place for place in range(0, len(points), step) if self._seconds_of(points[place]) < math.inf]
            if not coarse:
                continue
            middle = min(coarse, key=lambda place, points=points: self._seconds_of(points[place]))
            found += [self._filled(point) for point in points[max(0, middle - step) : middle + step + 1]]
        found.sort(key=self._seconds_of)
        return [one for one in found[:SIMULATED] if self._seconds_of(one) < math.inf]

    def _filled(self, point: Point) -> Point:
        """The point with the best micro-batches. Its episodes in flight fit into the caches of the servers when each
        answer has half of its length."""
        if self._seconds_of(point) == math.inf:
            return point
        setting = self._settings(point.on(self._config))
        context = setting.work.prompt + mean_tokens(setting.work) / setting.work.answers / 2
        room = setting.servers * setting.times.server.max_context / context / setting.work.answers
        if room < setting.config.max_concurrent_rollouts:
            point = point._replace(episodes=max(1, int(room)))
        if not self._varies:
            return point
        return min(
            (point._replace(micro_tokens=each) for each in (*_MICRO_TOKENS, point.micro_tokens)), key=self._seconds_of
        )

    def _seconds_of(self, point: Point) -> float:
        """Estimated seconds of a step; infinite where a run would be refused."""
        if point not in self._seconds:
            config = point.on(self._config)
            is_valid = is_allowed(config, self._config)
            setting = self._settings(config) if is_valid else None
            problem = memory_problem(setting, self._card_bytes) if setting is not None else ""
            self._why = problem or self._why
            self._seconds[point] = math.inf if setting is None or problem else estimate_s(setting)
        return self._seconds[point]


def _ordered(found: Sequence[Ranked]) -> list[Ranked]:
    """The most steps per hour first; of those that differ by less than `LEAST_GAIN` the lowest staleness."""
    left = sorted(found, key=lambda one: -one.figures.steps_per_hour.mean)
    ordered: list[Ranked] = []
    while left:
        least = left[0].figures.steps_per_hour.mean / (1 + LEAST_GAIN)
        equal = [one for one in left if one.figures.steps_per_hour.mean >= least]
        ordered += sorted(equal, key=lambda one: one.figures.staleness_mean.mean)
        left = left[len(equal) :]
    return ordered
