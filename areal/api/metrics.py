"""The metric record: a number with the reduction that merges it over micro-batches, mini-batches and ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

# ----------------------------------------------------------------------------------------------------------------------
# Runs several awaitables at the same time.

T = TypeVar("T")


async def gather_or_cancel(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """All results. When one fails, the others are cancelled before its exception is raised."""
    if len(awaitables) < 2:
        return [await one for one in awaitables]
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


@dataclass(frozen=True, slots=True)
class Metric:
    """A partial statistic.

    mean: `total / count`; sum: `total`; max and min: `total` is the extreme value (count 0 = no value).
    """

    total: float
    count: float = 1.0
    kind: Literal["mean", "sum", "max", "min"] = "mean"

    @property
    def value(self) -> float:
        if self.kind == "mean":
            return self.total / self.count if self.count else float("nan")
        return self.total

    def merge(self, other: Metric) -> Metric:
        """Merge two parts of one statistic. Raises ValueError if their kinds differ."""
        if self.kind != other.kind:
            raise ValueError(f"cannot merge a {self.kind} metric with a {other.kind} metric")
        if self.count == 0:
            return other
        if other.count == 0:
            return self
        pick = {"max": max, "min": min}.get(self.kind)
        total = pick(self.total, other.total) if pick else self.total + other.total
        return Metric(total, self.count + other.count, self.kind)


Metrics = dict[str, Metric]


def merge_metrics(*parts: Metrics) -> Metrics:
    """Merge metrics by key; a key can be missing in some parts."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def metric_values(metrics: Metrics) -> dict[str, float]:
    """The value of every metric."""
    return {name: metric.value for name, metric in metrics.items()}
