"""One simulated run: the real controller and fleet on a virtual loop, against simulated servers, rewards and trainer.

The gate, the executor, the batches, the router, the weight updates and the rules of staleness are those of a run. What
is simulated is time: of servers, rewards, tools and the trainer, and what episodes generate.
"""

import asyncio
import gc
import math
import random
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from areal.api.allocation import AllocationMode, ParallelDims
from areal.api.columns import packed_ids
from areal.api.config import GenerationHyperparameters, PPOConfig
from areal.api.data import Trajectory, TrajectoryGroup, WeightUpdate
from areal.api.engine import InferenceEngine
from areal.api.errors import LedgerError
from areal.api.metrics import gather_or_cancel
from areal.api.workflow import EPISODE_ID, RolloutWorkflow
from areal.data.prompt_stream import PromptStream
from areal.fleet.fleet import Fleet
from areal.ledger.ledger import EventLog, Ledger
from areal.ledger.state import Event
from areal.planner.cores import Cores
from areal.planner.server import VOCABULARY, SimulatedServers
from areal.planner.service import ServiceTimes, Workload
from areal.planner.virtual_loop import run_virtual
from areal.rollout.controller import Controller
from areal.system.discovery import NameRegistry
from areal.workflow.scoring import new_request, single_turn_rows

SIMULATED_TOKENS = 4_000_000
"""Generated tokens of one simulation from which on one simulated token stands for several."""
_MANY, _LEAST_BATCH, _LEAST_SERVERS, _LEAST_EACH = 4_000, 8, 8, 16
"""Requests of one simulation, episodes of a batch, servers, and episodes of a batch for each of these that are enough:
with fewer the loads of the servers differ more than in the run."""
_CALL_S = 3600.0  # Longest wait of one call of the trainer; it repeats the call.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is simulated."""

    config: PPOConfig
    times: ServiceTimes
    work: Workload
    steps: int
    seed: int = 1
    unit: int = 1
    """Tokens that each token of `times` and of the simulation stands for."""
    copies: float = 1.0
    """Parts like the simulated one that the run consists of: the trainer has the tokens of all."""
    during: Callable[[SimulatedServers], Awaitable[None]] | None = None
    """What happens to the servers meanwhile."""
    work_from: Callable[[int, int], Workload] | None = None
    """(version, episode) -> the work of an episode, when it changes in the run."""
    ess_of: Callable[[float], float] | None = None
    """Mean staleness of a batch -> effective sample size of its importance weights; None = not measured."""

    @property
    def servers(self) -> int:
        inference = self.config.allocation.inference
        assert inference is not None
        return inference.num_replicas

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks of the trainer."""
        return self.config.allocation.train[0].parallel.dp


@dataclass(slots=True, kw_only=True)
class StepFigures:
    """One train step."""

    end_s: float
    """Virtual time of its report."""
    wait_batch_s: float
    wait_servers_s: float
    tokens: float
    """Tokens of the batch, prompts included."""
    staleness: float
    """Mean over the generated tokens."""
    by_staleness: Counter[int]
    """Simulated tokens of the batch by staleness."""
    dropped: float
    generated: float
    """Tokens that the servers have generated since the batch before."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a simulated run did."""

    steps: list[StepFigures] = field(default_factory=list[StepFigures])
    events: list[tuple[float, Event]] = field(default_factory=list[tuple[float, Event]])
    """Virtual time and event of the ledger, where they were asked for."""
    busy: float = 0.0
    """Mean share of the time in which a server computes."""
    running: float = 0.0
    """Mean number of sequences of a server that computes."""
    prefilled: float = 0.0
    prompts: float = 0.0
    """Prompt tokens that the servers computed, and those of all requests: the rest was computed again."""


class RecordingLog(EventLog):
    """Holds events in memory, and no payload."""

    def __init__(self, outcome: Outcome, *, keeps: bool) -> None:
        self._outcome, self._keeps = outcome, keeps
        self._size = 0
        self.by_version: dict[int, Sequence[tuple[int, int, int]]] = {}
        """Accepted episodes that no batch has."""

    def start(self, on_failure: Callable[[LedgerError], None]) -> None: ...

    def append(self, event: Event) -> None:
        if event["event"] == "accepted":
            self.by_version[event["id"]] = event["by_version"]
        elif event["event"] == "rejected":
            self.by_version.pop(event["id"], None)
        if self._keeps:
            self._outcome.events.append((asyncio.get_running_loop().time(), event))

    def append_payload(self, data: bytes) -> tuple[int, int, int]:
        self._size += len(data)
        return 1, self._size, len(data)

    def keep(self, episode_id: int, attempt: int, data: bytes) -> None: ...
    async def durable(self) -> None: ...
    async def close(self) -> None: ...


class SimulatedWorkflow(RolloutWorkflow):
    """Generates what the workload says, waits for tools and the reward, and returns the trajectories."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._rng = random.Random(setting.seed)
        self._reward_workers = asyncio.Semaphore(setting.times.reward_workers)
        size = max(1, setting.work.prompt // setting.unit)
        self._prompt = packed_ids([number % VOCABULARY for number in range(size)])
        self._settings = GenerationHyperparameters(max_new_tokens=1, max_tokens=2**30, ignore_eos=True)
        self.num_prompt_tokens = 0
        """Prompt tokens of all requests."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        setting, number = self._setting, EPISODE_ID.get() or 0
        work = setting.work if setting.work_from is None else setting.work_from(engine.version, number)
        tokens, rejected = work.episode(setting.seed, number)
        turns = [[max(1, length // setting.unit) for length in each] for each in tokens]
        rewards = [float(self._rng.randrange(2)) for _ in turns]
        self.num_prompt_tokens += len(self._prompt) * (1 if work.turns == 1 else len(turns))  # conversations share none
        if work.turns == 1:
            requests = [
                new_request(self._prompt, replace(self._settings, max_new_tokens=each[0]), group_id=f"{number}",
                            number=place)
                for place, each in enumerate(turns)
            ]  # fmt: skip
            rows = single_turn_rows(self._prompt, await engine.agenerate_group(requests), rewards)
        else:
            answers = zip(turns, rewards, strict=True)
            calls = [self._converse(engine, f"{number}-{place}", *each) for place, each in enumerate(answers)]
            rows = await gather_or_cancel(calls)
        if any(setting.times.rewards_s):
            await gather_or_cancel([self._score() for _ in rows])
        return TrajectoryGroup(trajectories=[] if rejected else rows, rejected=rejected)

    async def _score(self) -> None:
        async with self._reward_workers:
            await asyncio.sleep(self._rng.choice(self._setting.times.rewards_s))

    async def _converse(self, engine: InferenceEngine, name: str, turns: Sequence[int], reward: float) -> Trajectory:
        """The answers of one agent, whose prompts grow."""
        ids, versions = array("i", self._prompt), array("i", [-1] * len(self._prompt))
        for turn, length in enumerate(turns):
            if turn and (tool_s := self._rng.choice(self._setting.times.tools_s)):
                await asyncio.sleep(tool_s)
            settings = replace(self._settings, max_new_tokens=length)
            response = await engine.agenerate(new_request(packed_ids(ids), settings, group_id=name, number=turn))
            ids.extend(response.output_ids)
            versions.extend(response.output_versions)
        return Trajectory(
            token_ids=packed_ids(ids),
            loss_mask=[int(version >= 0) for version in versions],
            rollout_logprobs=[0.0] * len(ids),
            output_versions=versions.tolist(),
            reward=reward,
            finished=False,
        )


# ----------------------------------------------------------------------------------------------------------------------
# Less of a large run.


def resized(mode: AllocationMode, servers: ParallelDims, trainer: ParallelDims) -> str:
    """The allocation with other sizes of the servers and of the first trainer."""
    sizes = {id(mode.inference): servers, id(mode.train[0]): trainer}
    parts = [replace(part, parallel=sizes.get(id(part), part.parallel)) for part in mode.allocations]
    return str(replace(mode, allocations=tuple(parts)))


def coarse(setting: Setting, most_tokens: int = SIMULATED_TOKENS) -> Setting:
    """Memory and time of a simulation grow with its tokens: with more than `most_tokens` that the servers generate, one
    stands for several."""
    tokens = setting.work.mean_tokens * setting.config.train_dataset.batch_size * setting.steps
    unit = max(1, round(tokens / most_tokens))
    times = replace(setting.times, server=setting.times.server.coarse(1.0, unit))
    return replace(setting, times=times, unit=setting.unit * unit)


def part_of(setting: Setting) -> Setting:
    """A large run is many parts that are alike, with fewer servers and smaller batches: one of them, with the tokens
    of all for the trainer. The longest of its answers is the longest of fewer. It has several servers, which wait for
    the slowest of them; with fewer sequences for each than in the run, each stands for more."""
    config, work, times = setting.config, setting.work, setting.times
    size, num_servers = config.train_dataset.batch_size, setting.servers
    enough = round(_MANY / (work.answers * work.turns * setting.steps))
    several = min(_LEAST_SERVERS, num_servers)
    part = max(_LEAST_BATCH, enough, min(round(size * several / num_servers), several * _LEAST_EACH))
    if part >= size:
        return setting
    copies = size / part
    servers = max(several, round(num_servers / copies))
    in_flight, queue = config.rollout.max_concurrent_rollouts, config.rollout.queue_size
    rollout = replace(
        config.rollout,
        max_concurrent_rollouts=in_flight and max(1, round(in_flight / copies)),
        queue_size=queue and max(part, round(queue / copies)),
    )
    mode, trainer = config.allocation, config.allocation.train[0].parallel
    assert mode.inference is not None
    allocation = resized(mode, replace(mode.inference.parallel, dp=servers), replace(trainer, dp=min(trainer.dp, part)))
    dataset = replace(config.train_dataset, batch_size=part)
    workers = math.ceil(times.reward_workers / copies)
    slower = workers * copies / times.reward_workers  # as many rewards in a second as the part of the workers
    times = replace(
        times,
        server=times.server.coarse(copies * servers / num_servers, 1),
        rewards_s=tuple(size_s * slower for size_s in times.rewards_s),
        reward_workers=workers,
    )
    config = replace(config, rollout=rollout, train_dataset=dataset, allocation_mode=allocation)
    return replace(setting, config=config, times=times, copies=copies)


def checked_for_plan(config: PPOConfig, unit: int, servers: int = 1) -> PPOConfig:
    """The configuration with what is no rule of a plan left out: probes, alarms, and most health checks, which would
    take most of the time of a plan for a thousand servers."""
    rollout = replace(
        config.rollout,
        canary="off",
        should_accept_fn="",
        health_check_interval_s=max(config.rollout.health_check_interval_s, 5.0, servers / 20),
        stream_interval=max(1, config.rollout.stream_interval // unit),
    )
    return replace(config, rollout=rollout, alarms=replace(config.alarms, action="off"), valid_dataset=None)


# ----------------------------------------------------------------------------------------------------------------------
# The simulation.


def simulate(setting: Setting, *, keeps_events: bool = False) -> Outcome:
    """Raises the error that ends the run, as that of a real one. `keeps_events`: of the ledger, in the outcome."""
    was_enabled = gc.isenabled()
    gc.disable()  # the collector would traverse all episodes in flight repeatedly, and there are hardly any cycles
    try:
        return run_virtual(_simulate(setting, keeps_events=keeps_events))
    finally:
        if was_enabled:
            gc.enable()


async def _simulate(setting: Setting, *, keeps_events: bool) -> Outcome:
    config, times = checked_for_plan(setting.config, setting.unit, setting.servers), setting.times
    outcome, cores, clock = Outcome(), Cores(times.cores), asyncio.get_running_loop().time
    servers = SimulatedServers(setting.servers, times.server, cores)
    fleet = Fleet(cast(NameRegistry, servers), setting.servers, config.rollout, servers.connect)
    log, workflow = RecordingLog(outcome, keeps=keeps_events), SimulatedWorkflow(setting)
    batch_size = config.train_dataset.batch_size
    rows = PromptStream[dict[str, Any]]([{}] * batch_size, seed=setting.seed, batch_size=batch_size)
    ledger = Ledger(log, read_payload=lambda where: b"", clock=clock)
    controller = Controller(config, fleet=fleet, workflow=workflow, rows=rows, ledger=ledger, total_steps=setting.steps)
    await controller.start()
    trainer = asyncio.ensure_future(_train(setting, controller, log, cores, outcome))
    ended = asyncio.ensure_future(controller.ended())
    meanwhile = [] if setting.during is None else [asyncio.ensure_future(setting.during(servers))]
    try:
        await asyncio.wait([trainer, ended], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
        trainer.result()
        busy_s, tokens_each = sum(server.busy_s for server in servers.each), setting.unit * setting.copies
        outcome.busy = busy_s / clock() / len(servers.each)
        sequence_s = sum(server.sequence_s for server in servers.each) * times.server.multiplicity
        outcome.running = sequence_s / busy_s if busy_s else 0.0
        outcome.prefilled = sum(server.num_prefilled for server in servers.each) * tokens_each
        outcome.prompts = workflow.num_prompt_tokens * tokens_each
    finally:
        tasks = [trainer, ended, *meanwhile]
        for task in tasks:
            task.cancel()
        controller.finish()
        await controller.close()
        await asyncio.gather(*tasks, return_exceptions=True)
    return outcome


async def _train(setting: Setting, controller: Controller, log: RecordingLog, cores: Cores, outcome: Outcome) -> None:
    """The calls of the trainers, in the order of `areal.trainer.ppo_loop.PPOLoop.run`: they wait for the servers after
    the first gradient, which is the same part of an update for each optimiser step."""
    actor = setting.config.actor
    first = 1 / (actor.ppo_epochs * actor.ppo_n_minibatches)
    times, clock, rng = setting.times.trainer, asyncio.get_running_loop().time, random.Random(setting.seed + 1)
    used, tokens_each = setting.dp_size * times.cores, setting.unit * setting.copies
    update: WeightUpdate | None = None  # what the servers install
    await controller.attach(rank=0, world_size=1, dp_size=setting.dp_size, step=0, version=0)
    for step in range(setting.steps):
        began_s = clock()
        while (record := await controller.next_batch(step, timeout_s=_CALL_S)) is None:
            pass
        got_s, spread, tokens = clock(), rng.choice(times.spread), record.stats["tokens"] * tokens_each
        update_s = spread * (times.update_s + times.update_token_s * tokens)
        await cores.work(spread * (times.before_s + times.before_token_s * tokens) + first * update_s, used)
        computed_s = clock()
        await _installed(controller, update)
        served_s = clock()
        await cores.work((1 - first) * update_s + times.publish_s, used)
        update = WeightUpdate(version=step + 1, kind="disk", path=f"v{step + 1:06d}")
        while not await controller.weights.start(update, timeout_s=_CALL_S):
            pass
        ess = None if setting.ess_of is None else setting.ess_of(record.stats["staleness_mean"])
        await controller.consumed(step, step + 1, ess=ess)
        by_staleness = Counter[int]()
        for episode_id in record.episode_ids:
            for version, _, generated in log.by_version.pop(episode_id):
                if version >= 0:
                    by_staleness[record.version - version] += generated
        figures = StepFigures(
            end_s=clock(),
            wait_batch_s=got_s - began_s,
            wait_servers_s=served_s - computed_s,
            tokens=tokens,
            staleness=record.stats["staleness_mean"],
            by_staleness=by_staleness,
            dropped=record.stats["dropped"] * setting.copies,
            generated=record.stats["produced_tokens"] * tokens_each,
        )
        outcome.steps.append(figures)
        await cores.work(times.after_s, used)
    await _installed(controller, update)


async def _installed(controller: Controller, update: WeightUpdate | None) -> None:
    """Return when the servers have the version."""
    while update is not None and not await controller.weights.publish(update, timeout_s=_CALL_S):
        pass
