"""The metric record: a number with the reduction that merges it over micro-batches, mini-batches and ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

# ----------------------------------------------------------------------------------------------------------------------
# Runs several awaitables at the same time.

T = TypeVar("T")


async def gather_or_cancel(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """All results. When one fails, the others are cancelled before its exception is raised."""
    if len(awaitables) < 2:
        return [await awaitable for awaitable in awaitables]
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def rounded(value: float, digits: int = 4) -> str:
    """A number for people: significant digits, and no exponent for large ones."""
    return f"{float(f'{value:.{digits}g}'):,.12g}"


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
        has_nan = self.total != self.total or other.total != other.total
        total = pick(self.total, other.total) if pick and not has_nan else self.total + other.total
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


def unscored_text(values: Mapping[str, Any], name: str) -> str:
    """How many answers of the evaluation eval/MODE or eval/MODE/SET have no reward; empty = none."""
    missing, answers = values.get(f"{name}/missing"), values.get(f"{name}/answers")
    return f"{missing:.0f} of {answers:.0f} without a reward" if missing and answers else ""


def result_text(values: Mapping[str, Any], name: str) -> str:
    """The result of an evaluation with its standard error and count: "0.180 ±0.034, 41 of 128 without a reward"."""
    reward, scored = values.get(f"{name}/reward"), values.get(f"{name}/reward_scored")
    error = values.get(f"{name}/reward/stderr")
    shown = f"{reward:.3f}" if reward is not None else "no result"
    shown += f" ±{error:.3f}" if error is not None else ""
    if reward is None and scored is not None:
        shown += f" ({scored:.3f} over the others)"
    return ", ".join(filter(None, (shown, unscored_text(values, name))))


def evaluations_of(values: Mapping[str, Any]) -> list[str]:
    """The names of the evaluations whose metrics are in `values`: eval/MODE and eval/MODE/SET."""
    return [name.removesuffix("/answers") for name in values if name.startswith("eval/") and name.endswith("/answers")]
