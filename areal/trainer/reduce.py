"""Reduction of metrics over the data-parallel ranks."""

import zlib

import torch

from areal.api.engine import TrainEngine
from areal.api.metrics import Metric, Metrics


def reduce_metrics(metrics: Metrics, engine: TrainEngine) -> Metrics:
    """Merge the metrics of all data-parallel ranks; a collective. Metrics with a total count of 0 are left out.

    Raises RuntimeError on every rank when the names differ between ranks.
    """
    names = sorted(metrics)
    fingerprint = float(zlib.crc32("\n".join(names).encode()))
    extremes = [fingerprint, -fingerprint]
    for name in names:
        metric = metrics[name]
        if metric.kind in ("max", "min"):
            sign = 1.0 if metric.kind == "max" else -1.0
            extremes.append(sign * metric.total if metric.count else float("-inf"))
    highest: list[float] = engine.all_reduce(torch.tensor(extremes, dtype=torch.float64), "max").tolist()
    if highest[0] != -highest[1]:
        raise RuntimeError("the trainer ranks report different metrics; names on this rank: " + ", ".join(names))
    flat = [number for name in names for number in (metrics[name].total, metrics[name].count)]
    summed: list[float] = engine.all_reduce(torch.tensor(flat or [0.0], dtype=torch.float64), "sum").tolist()
    merged: Metrics = {}
    extreme = iter(highest[2:])
    for index, name in enumerate(names):
        kind = metrics[name].kind
        total, count = summed[2 * index], summed[2 * index + 1]
        if kind in ("max", "min"):
            total = next(extreme) * (1.0 if kind == "max" else -1.0)
        if count:
            merged[name] = Metric(total, count, kind)
    return merged
