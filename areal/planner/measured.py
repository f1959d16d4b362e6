"""Service times of a recorded run, from its ledger, its metrics and, where it has them, its traces."""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
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
from areal.observe.trace import Interval, joined, read_spans
from areal.planner.cores import WorkClock
from areal.planner.service import ServerTimes, ServiceTimes, TrainerTimes, Workload, most_running
from areal.reward.pool import pool_size
from areal.system.run_paths import RunPaths

WARMUP_STEPS = 2
"""The first steps of a run compile, allocate and fill caches."""
_MAX_EPISODES = 4000  # The newest episodes that are read.
_MIN_ANSWERS = 10
_FITS = 3  # Fits of decode steps: each weighs the loads by the speed that the fit before it found.
_ROUNDS = 30  # Iterations of the cores in use: they depend on the slowdown, which depends on them.


def nonnegative_fit(columns: np.typing.ArrayLike, wanted: np.typing.ArrayLike) -> list[float]:
    """The coefficients, none negative, of the least squares fit of `wanted` by `columns`; at most four columns."""
    matrix, target = np.array(columns, float).T, np.array(wanted, float)
    best, least = np.zeros(len(matrix.T)), float(target @ target)
    for chosen in (each for size in range(len(best)) for each in combinations(range(len(best)), size + 1)):
        solution, *_ = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)
        rest = target - matrix[:, chosen] @ solution
        if (solution >= 0).all() and rest @ rest < least * (1 - 1e-9):
            best, least = np.zeros(len(best)), float(rest @ rest)
            best[list(chosen)] = solution
    return best.tolist()


# ----------------------------------------------------------------------------------------------------------------------
# The trainer, from metrics.jsonl.


def computing_span(row: Mapping[str, Any]) -> Interval:
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
    elapsed = np.diff([row["seconds/elapsed"] for row in rows[WARMUP_STEPS - 1 :]])
    after_s = float(elapsed.mean()) - fmean(row["seconds/step"] for row in rows[WARMUP_STEPS:])
    rows = [row for row in rows[WARMUP_STEPS:] if computing_span(row)[0] >= first_s] or rows[WARMUP_STEPS:]

    speeds = [clock.speed(*computing_span(row)) for row in rows]

    def of(name: str, *without: str) -> Any:
        """Seconds of each step on `clock`."""
        spent = [row[f"seconds/{name}"] - sum(row.get(f"seconds/{part}", 0.0) for part in without) for row in rows]
        return np.multiply(spent, speeds)

    columns = [[1.0] * len(rows), tokens := [row["rollout/tokens"] for row in rows]]
    before, update = of("step", "wait_batch", "update", "publish_weights"), of("update")
    before_s, before_token_s = nonnegative_fit(columns, before)
    update_s, update_token_s = nonnegative_fit(columns, update)
    fitted = before_s + update_s + (before_token_s + update_token_s) * np.array(tokens)
    spread = (before + update)[fitted > 0] / fitted[fitted > 0]
    return TrainerTimes(
        before_s=before_s,
        before_token_s=before_token_s,
        update_s=update_s,
        update_token_s=update_token_s,
        publish_s=float(np.maximum(0.0, of("publish_weights", "wait_servers")).mean()),
        after_s=max(0.0, after_s),
        cores=cores,
        spread=tuple((spread / spread.mean()).tolist()) if len(spread) else (1.0,),
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

    @property
    def rewarded_s(self) -> float:
        return self.generated_s + self.reward_s


def traced_times(path: Path) -> tuple[dict[int, Episode], list[float]]:
    """Times of the episodes, and the seconds of the weight updates; empty without a trace."""
    spans: defaultdict[int, defaultdict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    updates: list[float] = []
    for event in read_spans(path):
        if event["cat"] == "weight update":
            updates.append(event["args"]["us"] / 1e6)
        elif event["cat"] == "episode":
            kind = event["name"].partition(" ")[0]
            spans[int(event["id"])][kind].append((event["ts"] / 1e6, event["args"]["us"] / 1e6))
    episodes = {
        number: Episode(
            start_s=named["episode"][-1][0],
            generated_s=max((start_s + size_s for start_s, size_s in named["generate"]), default=0.0),
            reward_s=max((size_s for _, size_s in named["reward"]), default=0.0),  # they run at the same time
            tools_s=tuple(size_s for _, size_s in named["tool"]),
        )
        for number, named in spans.items()
        if named["episode"]
    }
    return episodes, updates


def read_episodes(paths: RunPaths) -> tuple[list[Episode], dict[str, float], float]:
    """The newest episodes that ended after the first train steps, the share of each reason of rejection among all such
    episodes, and the seconds of a weight update, 0 = not recorded.

    Without a trace, an episode ends when its ledger group was written, and its reward counts as generation.
    """
    traced, updates = traced_times(paths.trace / "controller.jsonl")
    lost: Counter[str] = Counter()
    admitted: dict[int, float] = {}
    ended: list[tuple[Mapping[str, Any], Episode]] = []
    num_batches = 0
    for mark, *events in open_reader(paths.ledger).groups():
        for event in events:
            kind, end_s = event["event"], mark["at"]
            num_batches += kind == "batched"
            if kind == "admitted":
                admitted[event["id"]] = end_s
            elif kind in ("accepted", "rejected", "failed"):
                start_s = admitted.pop(event["id"], end_s)
                if kind == "accepted":
                    start_s = end_s - event["seconds"]
                if num_batches >= WARMUP_STEPS:
                    episode, servers = traced.get(event["id"]) or Episode(start_s=start_s), event.get("replicas", ())
                    breaks, last_s = event.get("interruptions", 0), episode.generated_s or end_s
                    server = servers[0] if len(servers) == 1 else ""
                    ended.append((event, replace(episode, generated_s=last_s, server=server, interruptions=breaks)))
                    if kind != "accepted":
                        lost[event["reason"].partition(":")[0] if kind == "rejected" else "failed"] += 1
    with PayloadReader(paths.ledger) as payloads:
        episodes = [_with_lengths(episode, payloads, event) for event, episode in ended[-_MAX_EPISODES:]]
    return episodes, {reason: times / len(ended) for reason, times in lost.items()}, median(updates or [0.0])


def _with_lengths(episode: Episode, payloads: PayloadReader, event: Mapping[str, Any]) -> Episode:
    """The episode with the tokens of its trajectories, unless it was not accepted or the payload is gone."""
    if event["event"] != "accepted":
        return episode
    try:
        table = read_table(payloads, dict(event))
    except LedgerError:
        return episode
    made = [part >= 0 for part in np.split(table.output_versions, np.cumsum(table.lengths)[:-1])]
    begins = [np.flatnonzero(part & ~np.concatenate([[False], part[:-1]])) for part in made]
    return replace(
        episode,
        prompt=round(fmean(first[0] if len(first) else len(part) for first, part in zip(begins, made, strict=True))),
        lengths=tuple(int(part.sum()) for part in made),
        turns=round(fmean(max(1, len(first)) for first in begins)),
    )


def reward_times(episodes: Sequence[Episode], workers: int) -> tuple[float, ...]:
    """Seconds of the reward of one answer. With fewer workers than answers, most of the time of a reward is a wait for
    others, which a plan simulates: then one answer takes no longer than if all workers were busy meanwhile."""
    answers = fmean(len(episode.lengths) for episode in episodes)
    each = sorted(episode.reward_s for episode in episodes)
    if workers >= answers:
        return _thinned(each)
    busy_s = sum(
        end_s - start_s for start_s, end_s in joined((episode.generated_s, episode.rewarded_s) for episode in episodes)
    )
    at_most = busy_s * workers / sum(len(episode.lengths) for episode in episodes)
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
    queued_s: float = 0.0
    """Seconds in which the request waited before; 0 = not recorded."""
    is_exact: bool = True
    """Both times are recorded."""

    @property
    def arrival_s(self) -> float:
        return self.start_s - self.queued_s


def traced_answers(folder: Path) -> list[Served]:
    """The answers in the traces of native servers of a run; empty without traces. Requests that score a prompt
    and canary probes are no answers: their time is that of a prompt."""
    answers: list[Served] = []
    for path in sorted(folder.glob("server-*.jsonl")):
        started: dict[str, float] = {}
        for event in read_spans(path):
            if event["cat"] != "request":
                continue
            args, number = event["args"], event["id"]
            if event["name"] == "run":
                started[number] = event["ts"] / 1e6
            elif "tokens" in args and (start_s := started.pop(number, None)) is not None:
                if args.get("scored") or number.startswith(PROBE_PREFIX):
                    continue
                times = {"start_s": start_s, "end_s": (event["ts"] + args["us"]) / 1e6}
                times["queued_s"] = start_s - event["ts"] / 1e6
                answers.append(Served(server=path.stem, prompt=args["prompt"], tokens=args["tokens"], **times))
    return answers


def answers_of(episodes: Sequence[Episode]) -> list[Served]:
    """What episodes tell: answers advance at an equal pace, so that only the end of the longest one is exact. The time
    in which an agent waits for its tools counts as a slower pace."""
    known = [episode.lengths for episode in episodes if episode.lengths]
    if not known:
        return []
    typical = [round(fmean(length for lengths in known for length in lengths))] * round(fmean(map(len, known)))
    answers: list[Served] = []
    for episode in episodes:
        lengths = episode.lengths or typical
        for length in lengths:
            is_exact = bool(episode.lengths) and length == max(lengths) and not episode.interruptions
            end_s = episode.start_s + episode.generating_s * length / max(lengths)
            answer = {"server": episode.server, "start_s": episode.start_s, "end_s": end_s, "is_exact": is_exact}
            answers.append(Served(**answer, prompt=episode.prompt, tokens=length))
    return answers


def queued_s(answers: Sequence[Served], max_running: float) -> float:
    """Median seconds of the wait of a request whose server could run it and all requests before it: a plan simulates
    the wait for others. 0 without such a request."""
    waits: list[float] = []
    for name in {served.server for served in answers}:
        of_server = [served for served in answers if served.server == name]
        arrivals = sorted(served.arrival_s for served in of_server)
        ends = sorted(served.end_s for served in of_server)
        waits += [
            served.queued_s
            for served in of_server
            if bisect_right(arrivals, served.arrival_s) - bisect_right(ends, served.arrival_s) <= max_running
        ]
    return median(waits or [0.0])


def decode_times(answers: Sequence[Served]) -> list[float]:
    """Seconds of a decode step, of each sequence in it, and of each token of their contexts."""
    servers = sorted({served.server for served in answers if served.server}) or [""]
    unknown = [served for served in answers if served.server not in servers]
    groups = [[served for served in answers if served.server == name] for name in servers]

    def times(group: Sequence[Served]) -> np.ndarray:
        """Start, end and tokens of the answers that are fitted."""
        exact = [served for served in group if served.is_exact and served.tokens and served.end_s > served.start_s]
        return np.array([(served.start_s, served.end_s, served.tokens) for served in exact]).reshape(-1, 3).T

    spans = [times(group) for group in groups]
    start_s, end_s, tokens = np.concatenate(spans, axis=1)
    if len(tokens) < _MIN_ANSWERS:
        text = f"the run has {len(tokens)} answers with their times: a plan needs {_MIN_ANSWERS} at least"
        raise InputError(text, code="plan.too_few_steps")
    loads = [Load(group, unknown, len(servers)) for group in groups]
    weights, cost = np.sqrt(tokens), [1.0, 0.0, 0.0]
    for _ in range(_FITS):
        means = [load.mean(span[0], span[1], cost) for load, span in zip(loads, spans, strict=True)]
        cost = nonnegative_fit(weights * np.concatenate(means, axis=1), weights * (end_s - start_s) / tokens)
    return cost


class Load:
    """Sequences of a server, and tokens of their contexts, over time. `unknown`: of any of `num_servers`."""

    def __init__(self, answers: Sequence[Served], unknown: Sequence[Served], num_servers: int) -> None:
        changes: list[tuple[float, float, float, float]] = []
        """The changes: time, and by how much the sequences, the growth of the contexts and the contexts change."""
        shares = [1.0] * len(answers) + [1 / num_servers] * len(unknown)
        for share, served in zip(shares, [*answers, *unknown], strict=True):
            growth = share * served.tokens / max(1e-9, served.end_s - served.start_s)
            changes.append((served.start_s, share, growth, share * served.prompt))
            changes.append((served.end_s, -share, -growth, -share * (served.prompt + served.tokens)))
        self._times, *each = np.array(sorted(changes)).T
        sequences, growth, jumps = np.cumsum(each, axis=1)[:, :-1]
        self._passed_s = np.diff(self._times)
        grown = growth * self._passed_s
        self._loads = np.array([np.ones_like(grown), sequences, jumps + np.cumsum(grown) - grown / 2])
        """For each interval between two changes: one, and sequences and contexts in its middle."""

    def mean(self, start_s: float | np.ndarray, end_s: float | np.ndarray, cost: Sequence[float]) -> np.ndarray:
        """One, mean sequences and mean tokens of their contexts over the decode steps between two times, or between
        those of arrays. A step takes `cost` seconds for each of the three; with (1, 0, 0) the means are over time."""
        steps = self._passed_s / np.maximum(np.array(cost) @ self._loads, 1e-9)
        until = np.cumsum(np.pad(steps * self._loads, ((0, 0), (1, 0))), axis=1)
        sums = [np.interp(end_s, self._times, each) - np.interp(start_s, self._times, each) for each in until]
        return np.array(sums) / sums[0]


# ----------------------------------------------------------------------------------------------------------------------
# Processes that shared the cores of a machine.


def shared_cores(
    rows: Sequence[Mapping[str, Any]], answers: Sequence[Served], cores: float, ranks: int
) -> tuple[WorkClock, float, float]:
    """The clock of a run on `cores`, and the cores that a server and a trainer rank use while they compute: their CPU
    seconds by the seconds of their work, and 1 at least: with less, something else used the cores. Both are those of
    the steps that ended while there were answers, because `answers` may have the newest only."""
    names = {served.server for served in answers if served.server} or {""}
    servers = [joined((served.start_s, served.end_s) for served in answers if served.server == name) for name in names]
    trainers = [computing_span(row) for row in rows]
    first_s = min((served.start_s for served in answers), default=math.inf)
    last_s = max((served.end_s for served in answers), default=-math.inf)
    seen = [row for row in rows[WARMUP_STEPS:] if "cpu/controller" in row and first_s <= row["time"] <= last_s]
    of_server = of_rank = 1.0
    for _ in range(_ROUNDS):
        clock = WorkClock([(ranks * of_rank, trainers), *((of_server, each) for each in servers)], cores)
        if len(seen) > WARMUP_STEPS and cores < math.inf:
            of_rank = max(1.0, _cpu_s(seen, "trainer-") / (ranks * _work_s(trainers, seen, clock) or math.inf))
            handled_s = _cpu_s(seen, "server-") + _cpu_s(seen, "controller")
            of_server = max(1.0, handled_s / (sum(_work_s(each, seen, clock) for each in servers) or math.inf))
    return clock, of_server, of_rank


def _cpu_s(rows: Sequence[Mapping[str, Any]], kind: str) -> float:
    """CPU seconds of the processes whose names begin so, between two steps. One that is started again counts from 0."""
    used_s = 0.0
    for name in {name for row in rows for name in row if name.startswith(f"cpu/{kind}")}:
        values = np.array([row[name] for row in rows if name in row])
        used_s += np.where(np.diff(values) < 0, values[1:], np.diff(values)).sum()
    return used_s


def _work_s(spans: Sequence[Interval], rows: Sequence[Mapping[str, Any]], clock: WorkClock) -> float:
    """Seconds of work in spans, between the first and the last step."""
    return np.diff(clock.at(np.clip(spans, rows[0]["time"], rows[-1]["time"]))).sum()


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
    episodes, rejected, update_s = read_episodes(paths)
    after_s = min((episode.start_s for episode in episodes), default=0.0)
    answers = [served for served in traced_answers(paths.trace) if served.start_s >= after_s] or answers_of(episodes)
    shared = cores if config.cluster.n_gpus_per_node == 0 else math.inf
    trained = [row for row in rows if "rollout/staleness_mean" in row]
    clock, server_cores, rank_cores = shared_cores(trained, answers, shared, config.allocation.train[0].parallel.dp)
    trainer = trainer_times(rows, clock, cores=rank_cores, first_s=after_s if shared < math.inf else -math.inf)
    worked = [replace(served, start_s=clock.at(served.start_s), end_s=clock.at(served.end_s)) for served in answers]
    step_s, sequence_s, context_s = decode_times(worked)
    known = [episode for episode in episodes if episode.lengths]
    server = ServerTimes(
        step_s=max(step_s, 1e-9),
        sequence_s=sequence_s,
        context_s=context_s,
        prefill_s=sequence_s,
        queued_s=queued_s(answers, most_running(config)),
        prepare_s=max(0.0, update_s - trainer.publish_s),
        has_second_copy=config.server_backend == "native",
        max_running=most_running(config),
        cores=server_cores,
    )
    workers = pool_size(config.reward)
    times = ServiceTimes(
        server=server,
        trainer=trainer,
        rewards_s=reward_times(known, workers),
        reward_workers=workers,
        tools_s=_thinned(sorted(size for episode in known for size in episode.tools_s)),
        cores=shared,
        source=f"measured in {folder.name}",
    )
    work = Workload(
        prompt=max(1, round(fmean(episode.prompt for episode in known))),
        answers=config.gconfig.n_samples,
        recorded=tuple(episode.lengths for episode in known),
        turns=max(1, round(fmean(episode.turns for episode in known))),
        rejected=tuple(sorted(rejected.items())),
    )
    first, *_, last = trained[WARMUP_STEPS:]
    step_s = (last["seconds/elapsed"] - first["seconds/elapsed"]) / (len(trained) - WARMUP_STEPS - 1)
    staleness = fmean(row["rollout/staleness_mean"] for row in trained[WARMUP_STEPS:])
    return MeasuredRun(config=config, times=times, work=work, step_s=step_s, staleness=staleness)


def _thinned(values: Sequence[float], most: int = 200) -> tuple[float, ...]:
    """At most `most` of the values, at equal distances in their order; (0.0,) if there are none."""
    places = np.linspace(0, len(values) - 1, min(len(values), most)).round().astype(int).tolist()
    return tuple(values[place] for place in places) or (0.0,)
