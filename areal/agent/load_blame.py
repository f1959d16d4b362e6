"""Whether zero rewards follow the load of the run and not the policy: a test over the newest sessions. Pure."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

WINDOW = 512
"""Newest sessions that are compared."""
_MIN_SIDE = 8
"""Sessions of one policy version that each side needs at least."""
_SIGNIFICANT = 4.0
"""Standard deviations from which on a difference is no chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLoad:
    """One finished session."""

    is_zero: bool
    """Its reward is 0, or it has none because its time ended."""
    load: float
    """What it suffered: seconds in queues, or the number of open sessions."""
    version: int
    """Policy version at its start."""


class LoadBlame:
    """The newest sessions, under each kind of load."""

    def __init__(self) -> None:
        self._newest: dict[str, deque[SessionLoad]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def add(self, *, is_zero: bool, version: int, loads: dict[str, float]) -> None:
        for name, load in loads.items():
            self._newest[name].append(SessionLoad(is_zero=is_zero, load=load, version=version))

    def gap(self) -> tuple[float, str]:
        """The largest significant difference of zero rates between much and little load, and the kind of load.

        0.0 and an empty name when no difference is significant.
        """
        found = [(zero_gap(sessions), name) for name, sessions in self._newest.items()]
        return max(found, default=(0.0, "")) if any(gap > 0 for gap, _ in found) else (0.0, "")


def zero_gap(sessions: Iterable[SessionLoad]) -> float:
    """Zero rate of sessions above the median load minus that of the others, within policy versions; 0.0 by chance.

    The test is that of Cochran, Mantel and Haenszel: versions are strata, so a policy that becomes worse while the
    load grows raises no alarm.
    """
    strata: dict[int, list[SessionLoad]] = defaultdict(list)
    for one in sessions:
        strata[one.version].append(one)
    observed = expected = variance = weighted = weights = 0.0
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
        weighted += n * (zeros_much / m - (zeros - zeros_much) / len(little))
        weights += n
    if not variance or (observed - expected) / math.sqrt(variance) < _SIGNIFICANT:
        return 0.0
    return weighted / weights
