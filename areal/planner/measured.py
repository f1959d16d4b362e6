"""Service times of a recorded run, from its ledger, its metrics and, where it has them, its traces."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from areal.api.config import PPOConfig
from areal.api.config.load import load_experiment
from areal.api.errors import InputError, LedgerError
from areal.ledger.event_files import PayloadReader, open_reader
from areal.ledger.payload import read_table
from areal.observe.step_files import read_step_lines
from areal.planner.service import ServerTimes, ServiceTimes, TrainerTimes, Workload
from areal.reward.pool import pool_size
from areal.system.run_paths import RunPaths

WARMUP_STEPS = 2
"""The first steps of a run compile, allocate and fill caches."""
_MAX_EPISODES = 4000
"""The newest accepted episodes whose payloads are read."""
_VARIES = 0.2
"""Standard deviation of the lengths, as a share of their mean, from which on they tell the time of a step."""
_EXPLAINS = 0.7
"""Share of the squared errors that may be left for a time of each request, besides its steps, to be believed."""
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


def trainer_times(rows: Sequence[Mapping[str, Any]]) -> TrainerTimes:
    """`rows`: lines of metrics.jsonl, in order. InputError when the run has too few steps."""
    rows = [row for row in rows if "seconds/update" in row and "rollout/tokens" in row]
    if len(rows) < WARMUP_STEPS + 3:
        text = f"the run has {len(rows)} train steps: a plan needs {WARMUP_STEPS + 3} at least"
        raise InputError(text, code="plan.too_few_steps")
    after = [
        row["seconds/elapsed"] - before["seconds/elapsed"] - row["seconds/step"]
        for before, row in zip(rows[WARMUP_STEPS - 1 :], rows[WARMUP_STEPS:], strict=False)
    ]
    rows = rows[WARMUP_STEPS:]

    def of(row: Mapping[str, Any], *names: str) -> float:
        return sum(row.get(f"seconds/{name}", 0.0) for name in names)

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
        spread=tuple(value / mean for value in spread) or (1.0,),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Episodes, from the ledger and the trace of the controller.


@dataclass(slots=True, kw_only=True)
class Episode:
    """One episode that has ended."""

    start_s: float
    generated_s: float
    """When its last answer ended."""
    reward_s: float
    tools_s: list[float]
    server: str
    """Empty = unknown, or several."""
    prompt: int
    lengths: list[int]
    """Generated tokens of its answers; empty = not recorded."""
    turns: int
    interruptions: int

    @property
    def generating_s(self) -> float:
        """Seconds of its requests: the tools of one answer are waited for one after another."""
        return self.generated_s - self.start_s - sum(self.tools_s) / max(1, len(self.lengths))


@dataclass(slots=True)
class _Spans:
    """Of one episode in a trace, in seconds."""

    start_s: float = 0.0
    generated_s: float = 0.0
    """End of the last generation."""
    reward_s: float = 0.0
    tools_s: tuple[float, ...] = ()


def traced_spans(path: Path) -> tuple[dict[int, _Spans], list[float]]:
    """Spans by episode, and the seconds of the weight updates; empty without a trace."""
    spans: defaultdict[int, _Spans] = defaultdict(_Spans)
    updates: list[float] = []
    if not path.exists():
        return spans, updates
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
                if event["ph"] != "b" or event["cat"] not in ("episode", "weight update"):
                    continue
                start_s, size_s = event["ts"] / 1e6, event["args"]["us"] / 1e6
                if event["cat"] == "weight update":
                    updates.append(size_s)
                    continue
                found = spans[int(event["id"])]
            except (ValueError, KeyError, TypeError):
                continue  # an incomplete line of a process that was killed
            match event["name"]:
                case "episode":
                    found.start_s = start_s
                case "generate":
                    found.generated_s = max(found.generated_s, start_s + size_s)
                case "reward":
                    found.reward_s = max(found.reward_s, size_s)  # those of several answers run at the same time
                case name if name.startswith("tool "):
                    found.tools_s += (size_s,)
                case _:
                    pass
    return {number: found for number, found in spans.items() if found.start_s}, updates


def read_episodes(paths: RunPaths) -> tuple[list[Episode], dict[str, float], list[float]]:
    """The episodes that ended after the first train steps, the share of each reason of rejection among them, and the
    seconds of the weight updates.

    Without a trace, an episode ends when its ledger group was written, and its reward counts as generation.
    """
    traced, updates = traced_spans(paths.trace / "controller.jsonl")
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
                    admitted_s = admitted.pop(event["id"], None)
                    if admitted_s is not None:
                        episodes.append(_episode(event, mark["at"], traced.get(event["id"]), admitted_s, [], 0, 1))
                elif kind == "accepted":
                    num_ended, num_accepted = num_ended + 1, num_accepted + 1
                    admitted.pop(event["id"], None)
                    if total - num_accepted < _MAX_EPISODES:
                        prompt, lengths, turns = _lengths(payloads, event)
                        admitted_s = mark["at"] - event["seconds"]
                        spans = traced.get(event["id"])
                        episodes.append(_episode(event, mark["at"], spans, admitted_s, lengths, prompt, turns))
    return episodes, {reason: times / num_ended for reason, times in lost.items()}, updates


def _episode(
    event: Mapping[str, Any],
    ended_s: float,
    spans: _Spans | None,
    admitted_s: float,
    lengths: list[int],
    prompt: int,
    turns: int,
) -> Episode:
    servers = event.get("replicas", ())
    return Episode(
        start_s=spans.start_s if spans else admitted_s,
        generated_s=spans.generated_s if spans and spans.generated_s else ended_s,
        reward_s=spans.reward_s if spans else 0.0,
        tools_s=list(spans.tools_s) if spans else [],
        server=servers[0] if len(servers) == 1 else "",
        prompt=prompt,
        lengths=lengths,
        turns=turns,
        interruptions=event.get("interruptions", 0),
    )


def _lengths(payloads: PayloadReader, event: Mapping[str, Any]) -> tuple[int, list[int], int]:
    """Tokens of the prompt, generated tokens of each trajectory, and its turns; none where the payload is gone."""
    try:
        table = read_table(payloads, dict(event))
    except LedgerError:
        return 0, [], 1
    prompts: list[int] = []
    lengths: list[int] = []
    turns: list[int] = []
    start = 0
    for size in table.lengths.tolist():
        made = table.output_versions[start : start + size] >= 0
        begins = np.flatnonzero(made & ~np.concatenate([[False], made[:-1]]))
        lengths.append(int(made.sum()))
        prompts.append(int(begins[0]) if len(begins) else size)
        turns.append(max(1, len(begins)))
        start += size
    return round(fmean(prompts)), lengths, round(fmean(turns))


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
# The servers: seconds of an episode by its longest answer and by how many sequences its server computed meanwhile.


def decode_times(episodes: Sequence[Episode]) -> tuple[float, float, float]:
    """Seconds of a request besides its steps, of a decode step, and of each sequence in it."""
    known = [one for one in episodes if one.lengths and one.generating_s > 0]
    if len(known) < 10:
        text = f"the ledger has {len(known)} accepted episodes with answers: a plan needs 10 at least"
        raise InputError(text, code="plan.too_few_steps")
    answers = fmean(len(one.lengths) for one in known)
    active = fmean(sum(one.lengths) / max(one.lengths) for one in known)
    changes: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in episodes:
        changes[one.server] += _changes(one, answers, active)
    unknown = changes.pop("", [])
    if not changes:
        changes[""] = []
    share = 1 / len(changes)
    curves = {
        server: _Curve([*found, *((at_s, change * share) for at_s, change in unknown)])
        for server, found in changes.items()
    }
    steady = [one for one in known if one.interruptions == 0 and one.server in curves] or known
    seconds = [one.generating_s for one in steady]
    longest = [float(max(one.lengths)) for one in steady]
    curve = next(iter(curves.values()))
    loads = [curves.get(one.server, curve).mean(one.start_s, one.generated_s) for one in steady]
    each = [spent / length for spent, length in zip(seconds, longest, strict=True)]  # the error grows with the length
    ones, inverse = [1.0] * len(steady), [1 / length for length in longest]
    step_s, sequence_s = nonnegative_fit([ones, loads], each)
    request_s, *other = nonnegative_fit([inverse, ones, loads], each)
    alone = sum((one - step_s - sequence_s * load) ** 2 for one, load in zip(each, loads, strict=True))
    rest = sum(
        (one - request_s * part - other[0] - other[1] * load) ** 2
        for one, part, load in zip(each, inverse, loads, strict=True)
    )
    # A busy machine slows some requests down, whatever their length: that is no time of each request.
    varies = float(np.std(longest)) > _VARIES * fmean(longest)
    if varies and rest < _EXPLAINS * alone:
        step_s, sequence_s = other
    else:
        request_s = 0.0
    request_s /= fmean(one.turns for one in steady)
    if step_s == sequence_s == 0:
        step_s = fmean(seconds) / fmean(longest)
    return request_s, step_s, sequence_s


def _changes(one: Episode, answers: float, active: float) -> list[tuple[float, float]]:
    """When the number of its running sequences changes, and by how much. Answers advance at an equal pace."""
    if not one.lengths:
        return [(one.start_s, active), (one.generated_s, -active)]
    size_s, longest = one.generated_s - one.start_s, max(one.lengths)
    share = one.generating_s / size_s if size_s > 0 else 1.0  # the rest is spent in tools
    ends = [(one.start_s + size_s * length / longest, -share) for length in one.lengths]
    return [(one.start_s, share * len(one.lengths)), *ends]


class _Curve:
    """A number of sequences over time."""

    def __init__(self, changes: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(changes)
        self._times = np.array([at_s for at_s, _ in ordered] or [0.0])
        self._values = np.cumsum([change for _, change in ordered] or [0.0])
        areas = np.diff(self._times) * self._values[:-1]
        self._areas = np.concatenate([[0.0], np.cumsum(areas)])

    def _area(self, at_s: float) -> float:
        place = int(np.searchsorted(self._times, at_s, side="right")) - 1
        if place < 0:
            return 0.0
        return float(self._areas[place] + (at_s - self._times[place]) * self._values[place])

    def mean(self, start_s: float, end_s: float) -> float:
        return max(1.0, (self._area(end_s) - self._area(start_s)) / (end_s - start_s))


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
    steps: int


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
    trainer = trainer_times(rows)
    episodes, lost, updates = read_episodes(paths)
    request_s, step_s, sequence_s = decode_times(episodes)
    known = [one for one in episodes if one.lengths]
    update_s = median(updates) if updates else 0.0
    server = ServerTimes(
        step_s=max(step_s, 1e-9),
        sequence_s=sequence_s,
        prefill_s=sequence_s,
        request_s=request_s,
        prepare_s=max(0.0, update_s - trainer.publish_s),
        has_second_copy=config.server_backend == "native",
    )
    prompt = round(fmean(one.prompt for one in known))
    workers = pool_size(config.reward)
    tools = [size for one in known for size in one.tools_s]
    trained = [row for row in rows if "rollout/staleness_mean" in row][WARMUP_STEPS:]
    return MeasuredRun(
        config=config,
        times=ServiceTimes(
            server=server,
            trainer=trainer,
            rewards_s=reward_times(known, workers),
            reward_workers=workers,
            tools_s=tuple(_thinned(sorted(tools))) or (0.0,),
            cores=cores if config.cluster.n_gpus_per_node == 0 else math.inf,
            source=f"measured in {folder.name}",
        ),
        work=Workload(
            prompt=max(1, prompt),
            answers=config.gconfig.n_samples,
            recorded=tuple(tuple(one.lengths) for one in known),
            turns=max(1, round(fmean(one.turns for one in known))),
            rejected=tuple(sorted(lost.items())),
        ),
        step_s=(trained[-1]["seconds/elapsed"] - trained[0]["seconds/elapsed"]) / (len(trained) - 1),
        staleness=fmean(row["rollout/staleness_mean"] for row in trained),
        steps=len(trained),
    )


def _thinned(values: Sequence[float], count: int = 200) -> list[float]:
    """At most `count` of them, evenly over their order."""
    if len(values) <= count:
        return list(values)
    return [values[round(place * (len(values) - 1) / (count - 1))] for place in range(count)]
