"""Whether zero rewards follow the load of the run and not the policy: a test over the newest sessions. Pure."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

WINDOW = 512  # Newest sessions that are compared.
_MIN_SIDE = 8  # Sessions of one policy version that each side needs at least.
_SIGNIFICANT = 4.0  # Standard deviations from which on a difference is no chance.
_LATER = ("retries", "timeouts")
"""Kinds that are compared and never blamed: they also depend on the answers, as longer sessions have more of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLoad:
    is_zero: bool  # Its reward is 0, or it has none because its time ended.
    reward: float | None = None
    load: float  # What it suffered: seconds in queues, open sessions, retries, or time-outs.
    version: int  # Policy version at its start.


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGap:
    """Sessions above the median of a load minus the others, within policy versions; 0 without both sides."""

    zero: float = 0.0  # Of the zero rate.
    reward: float = 0.0  # Of the mean reward.
    is_significant: bool = False  # More zeros under load than by chance.


class LoadBlame:
    """The newest sessions, under each kind of load."""

    def __init__(self) -> None:
        self._newest: dict[str, deque[SessionLoad]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def add(self, *, is_zero: bool, reward: float | None, version: int, loads: Mapping[str, float]) -> None:
        for name, load in loads.items():
            self._newest[name].append(SessionLoad(is_zero=is_zero, reward=reward, load=load, version=version))

    def gaps(self) -> dict[str, LoadGap]:
        return {name: load_gap(sessions) for name, sessions in self._newest.items()}


def blamed(gaps: Mapping[str, LoadGap]) -> tuple[float, str]:
    """The largest significant difference of zero rates, and its kind of load; 0.0 and an empty name without one."""
    found = [(gap.zero, name) for name, gap in gaps.items() if gap.is_significant and name not in _LATER]
    return max(found, default=(0.0, ""))


def load_gap(sessions: Iterable[SessionLoad]) -> LoadGap:
    """Compare the sessions above the median load with the others.

    The test is that of Cochran, Mantel and Haenszel: versions are strata, so a policy that becomes worse while the
    load grows raises no alarm.
    """
    strata: dict[int, list[SessionLoad]] = defaultdict(list)
    for one in sessions:
        strata[one.version].append(one)
    observed = expected = variance = 0.0
    zeros_by_size, rewards_by_size = list[tuple[float, int]](), list[tuple[float, int]]()
    for stratum in strata.values():
        middle = median(one.load for one in stratum)
        much = [one for one in stratum if one.load > middle]
        little = [one for one in stratum if one.load <= middle]
        n, m = len(stratum), len(much)
        if min(m, n - m) < _MIN_SIDE:
            continue
        zeros = sum(one.is_zero for one in stratum)
        zeros_much = sum(one.is_zero for one in much)
        observed += zeros_much
        expected += zeros * m / n
        variance += zeros * (n - zeros) * m * (n - m) / (n * n * (n - 1))
        zeros_by_size.append((zeros_much / m - (zeros - zeros_much) / len(little), n))
        high, low = ([one.reward for one in side if one.reward is not None] for side in (much, little))
        if high and low:
            rewards_by_size.append((fmean(high) - fmean(low), n))
    is_significant = variance > 0 and (observed - expected) / math.sqrt(variance) >= _SIGNIFICANT
    return LoadGap(zero=_weighted(zeros_by_size), reward=_weighted(rewards_by_size), is_significant=is_significant)


def _weighted(values: list[tuple[float, int]]) -> float:
    return sum(value * size for value, size in values) / sum(size for _, size in values) if values else 0.0
