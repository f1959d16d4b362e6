"""The values of the sanity alarms, from the metrics of the train steps, and when one is raised. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from areal.api.config import ChosenAlarm
from areal.api.errors import ArealError

Row = Mapping[str, float]
"""The metrics of one train step, as in metrics.jsonl without the values that are not finite."""
Measure = Callable[[Sequence[Row]], float | None]
"""Metrics of the newest steps, the current one last -> the value of a rule; None = it has none in this step."""

WINDOW = 100
"""Steps that a rule can read."""
SOLVED = 0.95
"""Share of the highest reward from which on a low entropy is expected."""
REWARD_MEAN, MIN_BEST_REWARD = 5, 0.05
MEMORY_PART, MEMORY_START, MIN_GROWTH = 10, 5, 0.05
REPLICA_START, SPEED_MEAN = 5, 5
MISSING = "/missing"
"""Ends the name of the metric that counts the answers of an evaluation without a reward."""
MEMORY, REPLICA_SPEED = "memory/", "rollout/replica_tokens_per_s/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One raised alarm: a line of alarms.jsonl."""

    step: int
    """Train steps done."""
    name: str
    code: str
    value: float
    limit: float
    side: str
    """The side of the limit on which the value was: above or below."""
    steps: int
    """Consecutive steps on this side that raise the alarm."""
    action: str
    meaning: str
    causes: str
    look_at: str

    @property
    def comparison(self) -> str:
        """The value and its limit in a few words."""
        return f"{self.name} {self.value:.4g} is {self.side} {self.limit:g}"


class AlarmStop(ArealError, RuntimeError):
    """An alarm with action=stop ended the run. A restart is useless."""


def alarm_stop(chosen: ChosenAlarm, step: int) -> AlarmStop:
    """The error that ends the run after `step` train steps."""
    rule = chosen.rule
    return AlarmStop(
        f"{rule.meaning}: the alarm {rule.name} ended the run after train step {step} "
        f"({rule.side} {chosen.limit:g} in {chosen.steps} steps, action stop; alarms.jsonl contains the value). "
        f"Likely causes: {rule.causes}. Look at: {rule.look_at}",
        code=rule.code,
    )


def alarms_text(alarms: Sequence[Alarm]) -> str:
    """One line for alarms of one step with the same meaning."""
    first = alarms[0]
    values = ", ".join(alarm.comparison for alarm in alarms)
    return (
        f"alarm at step {first.step}: {first.meaning} ({values}). "
        f"Likely causes: {first.causes}. Look at: {first.look_at}"
    )


def by_meaning(alarms: Iterable[Alarm]) -> list[list[Alarm]]:
    """The alarms in groups of one step and meaning, in their order."""
    groups: dict[tuple[int, str], list[Alarm]] = {}
    for alarm in alarms:
        groups.setdefault((alarm.step, alarm.meaning), []).append(alarm)
    return list(groups.values())


class AlarmRules:
    """The rules of a run and their streaks: a function of the steps so far, so that a recovery can compute it again."""

    def __init__(self, chosen: Iterable[ChosenAlarm]) -> None:
        self._chosen = tuple(chosen)
        self._rows: deque[Row] = deque(maxlen=WINDOW)
        self._beyond: dict[str, int] = {}  # Consecutive steps beyond the limit.
        self._within: dict[str, int] = {}
        """Consecutive steps within the limit since the alarm was raised; no entry = it was not raised."""

    def step(self, step: int, row: Row) -> list[Alarm]:
        """The alarms that the metrics after train step `step` raise."""
        self._rows.append(row)
        rows = tuple(self._rows)
        result: list[Alarm] = []
        for chosen in self._chosen:
            value = MEASURES[chosen.rule.name](rows) if chosen.rule.per == "step" else None
            if value is not None and self._raises(chosen, value):
                result.append(alarm_of(step, chosen, value))
        return result

    def _raises(self, chosen: ChosenAlarm, value: float) -> bool:
        name = chosen.rule.name
        if not chosen.rule.is_beyond(value, chosen.limit):
            self._beyond[name] = 0
            if name in self._within:
                self._within[name] += 1
                if self._within[name] >= chosen.steps:
                    del self._within[name]
            return False
        self._beyond[name] = self._beyond.get(name, 0) + 1
        is_raised = name in self._within
        if is_raised:
            self._within[name] = 0
        if self._beyond[name] < chosen.steps:
            return False
        self._within[name] = 0
        # One that stops the run was raised in an earlier launch, which it ended: the cause is still there.
        return not is_raised or chosen.action == "stop"


def alarm_of(step: int, chosen: ChosenAlarm, value: float) -> Alarm:
    rule = chosen.rule
    return Alarm(
        step=step,
        name=rule.name,
        code=rule.code,
        value=value,
        limit=chosen.limit,
        side=rule.side,
        steps=chosen.steps,
        action=chosen.action,
        meaning=rule.meaning,
        causes=rule.causes,
        look_at=rule.look_at,
    )


# The value of each rule.


def latest(*keys: str) -> Measure:
    """The first of `keys` that the current step has."""
    return lambda rows: next((rows[-1][key] for key in keys if key in rows[-1]), None)


def fresh_logprob_gap(rows: Sequence[Row]) -> float | None:
    """The gap where every token is of the policy that trains on it, so that nothing but an error explains it."""
    row = rows[-1]
    return row.get("batch/prox_rollout_gap_abs") if row.get("rollout/staleness_max") == 0 else None


def entropy(rows: Sequence[Row]) -> float | None:
    """The entropy, unless the task is almost solved."""
    row = rows[-1]
    highest = max((past["batch/reward_max"] for past in rows if "batch/reward_max" in past), default=0.0)
    if highest > 0 and row.get("batch/reward", 0.0) >= SOLVED * highest:
        return None
    return row.get("actor/entropy")


def unscored_share(rows: Sequence[Row]) -> float | None:
    """The largest share of answers without a reward in the evaluations of the step."""
    row = rows[-1]
    counts = [(row[name], row[f"{name.removesuffix(MISSING)}/answers"]) for name in row if name.endswith(MISSING)]
    return max((missing / answers for missing, answers in counts), default=None)


def memory_growth(rows: Sequence[Row]) -> float | None:
    """The growth in GiB of the process that grew most."""
    names = [name for name in rows[-1] if name.startswith(MEMORY)]
    return max((_growth([row[name] for row in rows if name in row]) for name in names), default=None)


def _growth(values: Sequence[float]) -> float:
    """Difference by which all of the newest values exceed all earlier ones; 0 = less than MIN_GROWTH."""
    if len(values) < MEMORY_START + 3 * MEMORY_PART:
        return 0.0
    # The memory of the first steps grows in every run. The gap of MEMORY_PART steps leaves out one that grows once.
    before = max(values[-3 * MEMORY_PART : -2 * MEMORY_PART])
    growth = min(values[-MEMORY_PART:]) - before
    return growth if growth > MIN_GROWTH * before else 0.0


def reward_share(rows: Sequence[Row]) -> float | None:
    """The mean reward of the newest steps as a share of the highest such mean."""
    newest = [row for row in rows if "batch/reward" in row]
    if len(newest) < REWARD_MEAN or min(row["batch/reward_min"] for row in newest) < 0:
        return None
    rewards = [row["batch/reward"] for row in newest]
    means = [fmean(rewards[end - REWARD_MEAN : end]) for end in range(REWARD_MEAN, len(rewards) + 1)]
    best = max(means)
    return means[-1] / best if best >= MIN_BEST_REWARD else None


def reward_range(rows: Sequence[Row]) -> float | None:
    """The difference between the highest and the lowest reward of the last two steps."""
    newest = [row for row in rows[-2:] if "batch/reward_max" in row]
    if len(newest) < 2:
        return None
    return max(row["batch/reward_max"] for row in newest) - min(row["batch/reward_min"] for row in newest)


def uniform_groups(rows: Sequence[Row]) -> float | None:
    """The share of groups with one reward, unless all rewards are equal, which is another alarm."""
    row = rows[-1]
    is_constant = row.get("batch/reward_max") == row.get("batch/reward_min")
    return None if is_constant else row.get("batch/uniform_reward_ratio")


def slowest_replica(rows: Sequence[Row]) -> float | None:
    """The speed of the slowest replica as a share of the median of the others, without those that just joined."""
    names = [name for name in rows[-1] if name.startswith(REPLICA_SPEED)]
    if len(names) < 2:
        return None
    speeds = [[row[name] for row in rows if name in row] for name in names]
    warm = [values for values in speeds if len(values) >= REPLICA_START + SPEED_MEAN]
    means = sorted(fmean(values[-SPEED_MEAN:]) for values in warm)
    if len(means) < 2 or (others := median(means[1:])) == 0:
        return None
    return means[0] / others


MEASURES: dict[str, Measure] = {
    "effective_sample_size": latest("batch/mismatch/ess_token"),
    "entropy_collapse": entropy,
    "evaluation_missing": unscored_share,
    "failed_deltas": latest("rollout/failed_deltas"),
    "fresh_logprob_gap": fresh_logprob_gap,
    "grad_norm": latest("actor/grad_norm", "grad_norm"),
    "logprob_gap": latest("batch/prox_rollout_gap_abs"),
    "logprob_k3": latest("batch/mismatch/k3"),
    "memory_growth": memory_growth,
    "reward_collapse": reward_share,
    "reward_constant": reward_range,
    "slow_replica": slowest_replica,
    "short_selection": latest("rollout/selection/length_ratio"),
    "stale_tokens": latest("rollout/stale_tokens_frac"),
    "truncated_answers": latest("batch/unfinished_ratio"),
    "uniform_groups": uniform_groups,
    "update_kl": latest("actor/approx_kl"),
    "budget_stops": latest("rollout/ended/budget_stops"),
    "drifts": latest("rollout/ended/drifts"),
    "zeros_by_load": latest("rollout/ended/zeros_by_load"),
}
