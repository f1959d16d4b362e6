"""Service times of a recorded run, from its ledger, its metrics and, where it has them, its traces."""

import contextlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from areal.api.config import PPOConfig
from areal.api.config.load import load_experiment
from areal.api.errors import InputError, LedgerError
from areal.fleet.weight_updater import PROBE_PREFIX
from areal.ledger.event_files import PayloadReader, open_reader
from areal.ledger.payload import read_table
from areal.observe.step_files import read_step_lines
from areal.planner.cores import Span, WorkClock, joined
from areal.planner.service import ServerTimes, ServiceTimes, TrainerTimes, Workload, most_running
from areal.reward.pool import pool_size
from areal.system.run_paths import RunPaths

WARMUP_STEPS = 2
"""The first steps of a run compile, allocate and fill caches."""
_MAX_EPISODES = 4000  # The newest accepted episodes whose payloads are read.
_MIN_ANSWERS = 10
_FITS = 3  # Fits of decode steps: each weighs the loads by the speed that the fit before it found.
_ROUNDS = 30  # Iterations of the cores in use: they depend on the slowdown, which depends on them.
_BEFORE = (
    "scores",
    "filters",
    "prox_logprobs",
    "ref_logprobs",
    "teacher_logprobs",
    "values",
    "correction",
    "advantages",
)


def nonnegative_fit(columns: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The coefficients, none negative, of the least squares fit of `wanted` by `columns`; at most four columns."""
    matrix, target = np.array(columns, float).T, np.array(wanted, float)
    best, least = [0.0] * len(columns), float(target @ target)
    for size in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), size):
            found, *_ = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)
            rest = target - matrix[:, chosen] @ found
            if (found >= 0).all() and rest @ rest < least * (1 - 1e-9):
                least, best = float(rest @ rest), [0.0] * len(columns)
                for place, value in zip(chosen, found.tolist(), strict=True):
                    best[place] = value
    return best


# ----------------------------------------------------------------------------------------------------------------------
# The trainer, from metrics.jsonl.


def computing_span(row: Mapping[str, Any]) -> tuple[float, float]:
    """When the trainers computed a step: from the arrival of its batch to its report."""
    return row["time"] - row["seconds/step"] + row.get("seconds/wait_batch", 0.0), row["time"]


def trainer_times(
    rows: Sequence[Mapping[str, Any]], clock: WorkClock, *, cores: float, first_s: float = -math.inf
) -> TrainerTimes:
    """`rows`: lines of metrics.jsonl, in order. `first_s`: from when on `clock` knows what the servers computed.
    InputError when the run has too few steps."""
    rows = [row for row in rows if "seconds/update" in row and "rollout/tokens" in row]
    if len(rows) < WARMUP_STEPS + 3:
        text = f"the run has {len(rows)} train steps: a plan needs {WARMUP_STEPS + 3} at least"
        raise InputError(text, code="plan.too_few_steps")
    after = [
        row["seconds/elapsed"] - before["seconds/elapsed"] - row["seconds/step"]
        for before, row in zip(rows[WARMUP_STEPS - 1 :], rows[WARMUP_STEPS:], strict=False)
    ]
    rows = [row for row in rows[WARMUP_STEPS:] if computing_span(row)[0] >= first_s] or rows[WARMUP_STEPS:]

    def of(row: Mapping[str, Any], *names: str) -> float:
        return clock.speed(*computing_span(row)) * sum(row.get(f"seconds/{name}", 0.0) for name in names)

    tokens = [row["rollout/tokens"] for row in rows]
    before = [of(row, *_BEFORE, "rollout") - of(row, "wait_batch") for row in rows]
    update = [of(row, "update") for row in rows]
    ones = [1.0] * len(rows)
    before_s, before_token_s = nonnegative_fit([ones, tokens], before)
    update_s, update_token_s = nonnegative_fit([ones, tokens], update)
    fitted = [before_s + update_s + (before_token_s + update_token_s) * count for count in tokens]
    spread = [(one + other) / fit for one, other, fit in zip(before, update, fitted, strict=True) if fit > 0]
    mean = fmean(spread) if spread else 1.0
    return TrainerTimes(
        before_s=before_s,
        before_token_s=before_token_s,
        update_s=update_s,
        update_token_s=update_token_s,
        publish_s=fmean(max(0.0, of(row, "publish_weights") - of(row, "wait_servers")) for row in rows),
        after_s=max(0.0, fmean(after)),
        cores=cores,
        spread=tuple(value / mean for value in spread) or (1.0,),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Episodes, from the ledger and the trace of the controller.


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode that has ended."""

    start_s: float = 0.0
    generated_s: float = 0.0
    """When its last answer ended."""
    reward_s: float = 0.0
    tools_s: tuple[float, ...] = ()
    server: str = ""
    """Empty = unknown, or several."""
    prompt: int = 0
    lengths: tuple[int, ...] = ()
    """Generated tokens of its answers; empty = not recorded."""
    turns: int = 1
    interruptions: int = 0

    @property
    def generating_s(self) -> float:
        """Seconds of its requests: the tools of one answer are waited for one after another."""
        return self.generated_s - self.start_s - sum(self.tools_s) / max(1, len(self.lengths))


def _events(path: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """The events of a trace that have a beginning and a size; none without a trace."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):  # an incomplete line of a process that was killed
                event = json.loads(line)
                if event.get("ph") == "b" and event["cat"] in kinds:
                    yield event


def traced_times(path: Path) -> tuple[dict[int, Episode], list[float]]:
    """Times of the episodes, and the seconds of the weight updates; empty without a trace."""
    found: defaultdict[int, Episode] = defaultdict(Episode)
    updates: list[float] = []
    for event in _events(path, "episode", "weight update"):
        start_s, size_s = event["ts"] / 1e6, event["args"]["us"] / 1e6
        if event["cat"] == "weight update":
            updates.append(size_s)
            continue
        number = int(event["id"])
        one = found[number]
        match event["name"]:
            case "episode":
                found[number] = replace(one, start_s=start_s)
            case "generate":
                found[number] = replace(one, generated_s=max(one.generated_s, start_s + size_s))
            case "reward":  # those of several answers run at the same time
                found[number] = replace(one, reward_s=max(one.reward_s, size_s))
            case name if name.startswith("tool "):
                found[number] = replace(one, tools_s=(*one.tools_s, size_s))
            case _:
                pass
    return {number: one for number, one in found.items() if one.start_s}, updates


def read_episodes(paths: RunPaths) -> tuple[list[Episode], dict[str, float], list[float]]:
    """The episodes that ended after the first train steps, the share of each reason of rejection among them, and the
    seconds of the weight updates.

    Without a trace, an episode ends when its ledger group was written, and its reward counts as generation.
    """
    traced, updates = traced_times(paths.trace / "controller.jsonl")
    episodes: list[Episode] = []
    lost: Counter[str] = Counter()
    reader, num_accepted, num_ended = open_reader(paths.ledger), 0, 0
    groups = list(reader.groups())
    total = sum(event["event"] == "accepted" for _, *events in groups for event in events)
    admitted: dict[int, float] = {}
    num_batches = 0
    with PayloadReader(paths.ledger) as payloads:
        for mark, *events in groups:
            for event in events:
                kind = event["event"]
                num_batches += kind == "batched"
                if num_batches < WARMUP_STEPS and kind != "admitted":
                    num_accepted += kind == "accepted"
                elif kind == "admitted":
                    admitted[event["id"]] = mark["at"]
                elif kind in ("rejected", "failed"):
                    num_ended += 1
                    lost[event["reason"].partition(":")[0] if kind == "rejected" else "failed"] += 1
                    if (start_s := admitted.pop(event["id"], None)) is not None:
                        episodes.append(_ended(event, traced, start_s, mark["at"]))
                elif kind == "accepted":
                    num_ended, num_accepted = num_ended + 1, num_accepted + 1
                    admitted.pop(event["id"], None)
                    if total - num_accepted < _MAX_EPISODES:
                        one = _ended(event, traced, mark["at"] - event["seconds"], mark["at"])
                        episodes.append(_with_lengths(one, payloads, event))
    return episodes, {reason: times / num_ended for reason, times in lost.items()}, updates


def _ended(event: Mapping[str, Any], traced: Mapping[int, Episode], start_s: float, end_s: float) -> Episode:
    one = traced.get(event["id"]) or Episode(start_s=start_s)
    servers = event.get("replicas", ())
    return replace(
        one,
        generated_s=one.generated_s or end_s,
        server=servers[0] if len(servers) == 1 else "",
        interruptions=event.get("interruptions", 0),
    )


def _with_lengths(one: Episode, payloads: PayloadReader, event: Mapping[str, Any]) -> Episode:
    """With the tokens of its trajectories, unless the payload is gone."""
    try:
        table = read_table(payloads, dict(event))
    except LedgerError:
        return one
    ends = np.cumsum(table.lengths)
    made = [part >= 0 for part in np.split(table.output_versions, ends[:-1])]
    begins = [np.flatnonzero(part & ~np.concatenate([[False], part[:-1]])) for part in made]
    return replace(
        one,
        prompt=round(fmean(first[0] if len(first) else len(part) for first, part in zip(begins, made, strict=True))),
        lengths=tuple(int(part.sum()) for part in made),
        turns=round(fmean(max(1, len(first)) for first in begins)),
    )


def reward_times(episodes: Sequence[Episode], workers: int) -> tuple[float, ...]:
    """Seconds of the reward of one answer. With fewer workers than answers, most of the time of a reward is a wait for
    others, which a plan simulates: then one answer takes no longer than if all workers were busy meanwhile."""
    answers = fmean(len(one.lengths) for one in episodes)
    each = sorted(one.reward_s for one in episodes)
    if workers >= answers:
        return tuple(_thinned(each)) or (0.0,)
    busy_s, reached = 0.0, -math.inf
    for start_s, size_s in sorted((one.generated_s, one.reward_s) for one in episodes):
        busy_s += max(0.0, start_s + size_s - max(start_s, reached))
        reached = max(reached, start_s + size_s)
    at_most = busy_s * workers / sum(len(one.lengths) for one in episodes)
    return (min(at_most, each[len(each) // 4] * workers / answers),)


# ----------------------------------------------------------------------------------------------------------------------
# The servers: seconds of a token of each answer, by what its server computed meanwhile.


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An answer, or a part of one, that a server generated."""

    server: str
    """Empty = unknown, or several."""
    start_s: float
    end_s: float
    prompt: int
    """Tokens of the context before it."""
    tokens: int
    is_exact: bool = True
    """Both times are recorded."""


def traced_answers(folder: Path) -> list[Served]:
    """The answers in the traces of native servers of a run; empty without traces. Requests that score a prompt
    and canary probes are no answers: their time is that of a prompt."""
    found: list[Served] = []
    for path in sorted(folder.glob("server-*.jsonl")):
        started: dict[str, float] = {}
        for event in _events(path, "request"):
            if event["name"] == "run":
                started[event["id"]] = event["ts"] / 1e6
            elif "tokens" in event["args"] and (start_s := started.pop(event["id"], None)) is not None:
                args, end_s = event["args"], (event["ts"] + event["args"]["us"]) / 1e6
                if args.get("scored") or event["id"].startswith(PROBE_PREFIX):
                    continue
                times = {"server": path.stem, "start_s": start_s, "end_s": end_s}
                found.append(Served(**times, prompt=args["prompt"], tokens=args["tokens"]))
    return found


def answers_of(episodes: Sequence[Episode]) -> list[Served]:
    """What episodes tell: answers advance at an equal pace, so that only the end of the longest one is exact. The time
    in which an agent waits for its tools counts as a slower pace."""
    known = [one for one in episodes if one.lengths]
    if not known:
        return []
    typical = [round(fmean(length for one in known for length in one.lengths))]
    typical *= round(fmean(len(one.lengths) for one in known))
    found: list[Served] = []
    for one in episodes:
        lengths = one.lengths or typical
        size_s, longest = one.generating_s, max(lengths)
        for length in lengths:
            is_exact = bool(one.lengths) and length == longest and not one.interruptions
            end_s = one.start_s + size_s * length / longest
            answer = {"server": one.server, "start_s": one.start_s, "end_s": end_s, "is_exact": is_exact}
            found.append(Served(**answer, prompt=one.prompt, tokens=length))
    return found


def decode_times(answers: Sequence[Served]) -> tuple[float, float, float]:
    """Seconds of a decode step, of each sequence in it, and of each token of their contexts."""
    servers = {one.server for one in answers if one.server} or {""}
    fitted = [one for one in answers if one.is_exact and one.tokens and one.end_s > one.start_s]
    fitted = [one for one in fitted if one.server in servers]
    if len(fitted) < _MIN_ANSWERS:
        text = f"the run has {len(fitted)} answers with their times: a plan needs {_MIN_ANSWERS} at least"
        raise InputError(text, code="plan.too_few_steps")
    unknown = [one for one in answers if one.server not in servers]
    loads = {name: _Load([one for one in answers if one.server == name], unknown, len(servers)) for name in servers}
    weights = np.sqrt([one.tokens for one in fitted])
    each = weights * [(one.end_s - one.start_s) / one.tokens for one in fitted]
    for _ in range(_FITS):
        means = np.array([[1.0, *loads[one.server].mean(one.start_s, one.end_s)] for one in fitted]).T
        step_s, sequence_s, context_s = nonnegative_fit((weights * means).tolist(), each.tolist())
        for load in loads.values():
            load.weigh((step_s, sequence_s, context_s))
    return step_s, sequence_s, context_s


class _Load:
    """Sequences of a server, and tokens of their contexts, over time. `unknown`: of any of `num_servers`."""

    def __init__(self, own: Sequence[Served], unknown: Sequence[Served], num_servers: int) -> None:
        changes: list[tuple[float, float, float, float]] = []
        """The changes: time, and by how much the sequences, the growth of the contexts and the contexts change."""
        for share, answers in ((1.0, own), (1 / num_servers, unknown)):
            for one in answers:
                growth = share * one.tokens / max(1e-9, one.end_s - one.start_s)
                changes.append((one.start_s, share, growth, share * one.prompt))
                changes.append((one.end_s, -share, -growth, -share * (one.prompt + one.tokens)))
        self._times, sequences, growth, jumps = np.array(sorted(changes)).T
        self._sequences, self._growth = np.cumsum(sequences), np.cumsum(growth)
        passed = np.diff(self._times, append=self._times[-1])
        grown = self._growth * passed
        self._contexts = np.cumsum(jumps) + np.cumsum(grown) - grown
        self._middle, self._passed = self._contexts + grown / 2, passed
        self.weigh((1.0, 0.0, 0.0))

    def weigh(self, cost: Sequence[float]) -> None:
        """Means are over decode steps, of which each takes this time. (1, 0, 0): over time."""
        step_s, sequence_s, context_s = cost
        seconds = step_s + sequence_s * self._sequences + context_s * self._middle
        self._rates = 1 / np.maximum(seconds, 1e-9)
        areas = self._rates * self._passed * [np.ones_like(seconds), self._sequences, self._middle]
        self._areas = np.cumsum(areas, axis=1) - areas

    def _until(self, at_s: float) -> Any:
        place = int(np.searchsorted(self._times, at_s, side="right")) - 1
        more_s = at_s - self._times[place]
        contexts = self._contexts[place] + self._growth[place] * more_s / 2
        steps = self._rates[place] * more_s
        return self._areas[:, place] + steps * np.array([1.0, self._sequences[place], contexts])

    def mean(self, start_s: float, end_s: float) -> list[float]:
        """Mean sequences and tokens of their contexts; `start_s` is not before the first answer."""
        steps, sequences, contexts = self._until(end_s) - self._until(start_s)
        return [float(sequences / steps), float(contexts / steps)]


# ----------------------------------------------------------------------------------------------------------------------
# Processes that shared the cores of a machine.


def shared_cores(
    rows: Sequence[Mapping[str, Any]], answers: Sequence[Served], cores: float, ranks: int
) -> tuple[WorkClock, float, float]:
    """The clock of a run on `cores`, and the cores that a server and a trainer rank use while they compute: their CPU
    seconds by the seconds of their work, and 1 at least: with less, something else used the cores. Both are those of
    the steps that ended while there were answers, because `answers` may have the newest only."""
    names = {one.server for one in answers if one.server} or {""}
    servers = [joined((one.start_s, one.end_s) for one in answers if one.server == name) for name in names]
    trainers = [computing_span(row) for row in rows]
    first_s = min((one.start_s for one in answers), default=math.inf)
    last_s = max((one.end_s for one in answers), default=-math.inf)
    seen = [row for row in rows[WARMUP_STEPS:] if "cpu/controller" in row and first_s <= row["time"] <= last_s]
    of_server = of_rank = 1.0
    for _ in range(_ROUNDS):
        clock = WorkClock([(ranks * of_rank, trainers), *((of_server, each) for each in servers)], cores)
        if len(seen) > WARMUP_STEPS and cores < math.inf:
            window = seen[0]["time"], seen[-1]["time"]
            of_rank = _cores_of(_cpu_share(seen, "trainer-"), ranks * _work_share(trainers, window, clock))
            handled = _cpu_share(seen, "server-") + _cpu_share(seen, "controller")
            of_server = _cores_of(handled, sum(_work_share(each, window, clock) for each in servers))
    return clock, of_server, of_rank


def _cores_of(cpu_share: float, work_share: float) -> float:
    return max(1.0, cpu_share / work_share) if work_share else 1.0


def _cpu_share(rows: Sequence[Mapping[str, Any]], kind: str) -> float:
    """CPU seconds of the processes whose names begin so, in a second. One that is started again counts from 0."""
    used, last = [0.0], dict(rows[0])
    for row in rows[1:]:
        counts = {name: value for name, value in row.items() if name.startswith(f"cpu/{kind}")}
        more = [value - last[name] if value >= last[name] else value for name, value in counts.items() if name in last]
        used.append(used[-1] + sum(more))
        last |= counts
    return float(np.polyfit([row["time"] - rows[0]["time"] for row in rows], used, 1)[0])


def _work_share(spans: Sequence[Span], window: Span, clock: WorkClock) -> float:
    inside = [(max(start_s, window[0]), min(end_s, window[1])) for start_s, end_s in spans]
    worked_s = sum(clock.at(end_s) - clock.at(start_s) for start_s, end_s in inside if start_s < end_s)
    return worked_s / (window[1] - window[0])


# ----------------------------------------------------------------------------------------------------------------------
# All of it.


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """What a plan takes from a run."""

    config: PPOConfig
    times: ServiceTimes
    work: Workload
    step_s: float
    """Seconds of its train steps, in the mean."""
    staleness: float


def measured_run(folder: Path, *, cores: float) -> MeasuredRun:
    """`cores`: of the machine that the run shared with nothing else, if it had no GPU."""
    paths = RunPaths(folder)
    if not paths.config.exists() or not paths.ledger.is_dir():
        text = f"{folder} has no ledger: name the folder of a run with rollouts"
        raise InputError(text, code="plan.no_run")
    config = load_experiment(["--config", str(paths.config)], allow_unknown_top_level=True, is_quiet=True)
    if not isinstance(config, PPOConfig):
        raise InputError(f"{folder} is a run without rollouts: there is nothing to plan", code="plan.no_run")
    rows = read_step_lines(paths.metrics)
    episodes, lost, updates = read_episodes(paths)
    after_s = min((one.start_s for one in episodes), default=0.0)
    traced = [one for one in traced_answers(paths.trace) if one.start_s >= after_s]
    answers = traced or answers_of(episodes)
    shared = cores if config.cluster.n_gpus_per_node == 0 else math.inf
    trained = [row for row in rows if "rollout/staleness_mean" in row]
    clock, server_cores, rank_cores = shared_cores(trained, answers, shared, config.allocation.train[0].parallel.dp)
    trainer = trainer_times(rows, clock, cores=rank_cores, first_s=after_s if shared < math.inf else -math.inf)
    worked = [replace(one, start_s=clock.at(one.start_s), end_s=clock.at(one.end_s)) for one in answers]
    step_s, sequence_s, context_s = decode_times(worked)
    known = [one for one in episodes if one.lengths]
    update_s = median(updates) if updates else 0.0
    server = ServerTimes(
        step_s=max(step_s, 1e-9),
        sequence_s=sequence_s,
        context_s=context_s,
        prefill_s=sequence_s,
        prepare_s=max(0.0, update_s - trainer.publish_s),
        has_second_copy=config.server_backend == "native",
        max_running=most_running(config),
        cores=server_cores,
    )
    prompt = round(fmean(one.prompt for one in known))
    workers = pool_size(config.reward)
    tools = [size for one in known for size in one.tools_s]
    trained = trained[WARMUP_STEPS:]
    return MeasuredRun(
        config=config,
        times=ServiceTimes(
            server=server,
            trainer=trainer,
            rewards_s=reward_times(known, workers),
            reward_workers=workers,
            tools_s=tuple(_thinned(sorted(tools))) or (0.0,),
            cores=shared,
            source=f"measured in {folder.name}",
        ),
        work=Workload(
            prompt=max(1, prompt),
            answers=config.gconfig.n_samples,
            recorded=tuple(one.lengths for one in known),
            turns=max(1, round(fmean(one.turns for one in known))),
            rejected=tuple(sorted(lost.items())),
        ),
        step_s=(trained[-1]["seconds/elapsed"] - trained[0]["seconds/elapsed"]) / (len(trained) - 1),
        staleness=fmean(row["rollout/staleness_mean"] for row in trained),
    )


def _thinned(values: Sequence[float], count: int = 200) -> list[float]:
    """At most `count` of them, evenly over their order."""
    if len(values) <= count:
        return list(values)
    return [values[round(place * (len(values) - 1) / (count - 1))] for place in range(count)]
