"""`log_metric`: numbers that code inside an episode or a reward function reports by name."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from areal.api.errors import InputError

_LOGGED: ContextVar[dict[str, list[float]] | None] = ContextVar("areal_episode_metrics", default=None)


class LoggedMetrics:
    """What one episode, or one call of a reward function, has logged."""

    def __init__(self, values: dict[str, list[float]]) -> None:
        self._values = values

    def means(self) -> dict[str, float]:
        """The mean of the values of each name."""
        return {name: sum(values) / len(values) for name, values in self._values.items()}


@contextmanager
def logged_metrics() -> Iterator[LoggedMetrics]:
    """Collect what `log_metric` gets while the block runs, also in tasks and threads that the block starts."""
    values: dict[str, list[float]] = {}
    token = _LOGGED.set(values)
    try:
        yield LoggedMetrics(values)
    finally:
        _LOGGED.reset(token)


def log_metric(name: str, value: float) -> None:
    """Report a number of the running episode, for example `log_metric("tool_calls", 2)`.

    Several values of one name are averaged within the episode, then over the episodes of the batch: the trackers and
    metrics.jsonl get the mean as rollout/episode/NAME, evaluations as eval/MODE/episode/NAME. In a reward function the
    name becomes reward/FUNCTION/NAME. Outside of an episode, for example in a test, it only checks its arguments.
    Raises InputError unless `value` is a finite number.
    """
    if not isinstance(name, str) or not hasattr(value, "__float__") or not math.isfinite(float(value)):
        message = f"log_metric({name!r}, {value!r}): the first must be text and the second a finite number"
        raise InputError(message, code="workflow.not_finite")
    if (logged := _LOGGED.get()) is not None:
        logged.setdefault(name, []).append(float(value))
