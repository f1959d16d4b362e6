"""The rewards of evaluations by held-out row, and the interval of the difference of two of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal.api.errors import LedgerError
from areal.ledger.event_files import open_reader

RESAMPLES, LEVEL = 2000, 0.95
MIN_ROWS = 10
"""Draws from fewer rows say little of other rows: the interval is too narrow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRewards:
    """The newest result of one evaluation."""

    step: int
    """Train steps done."""
    rewards: Mapping[int, float]
    """Held-out row -> mean reward of its answers."""


def row_rewards(ledger: Path) -> dict[str, RowRewards]:
    """eval/MODE and eval/MODE/SET -> its newest rewards; empty without a readable ledger that has them."""
    results: dict[str, RowRewards] = {}
    try:
        for event in open_reader(ledger).events():
            if event["event"] == "evaluated":
                for name, rows in event.get("rewards", {}).items():
                    key = f"eval/{event['mode']}/{name}" if name else f"eval/{event['mode']}"
                    results[key] = RowRewards(step=event["step"], rewards=dict(rows))
    except LedgerError:
        return {}
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A difference of two mean rewards with its bootstrap interval (percentiles, 95%)."""

    difference: float
    low: float
    high: float
    num_rows: int
    is_paired: bool
    """The rows of both are the same, and were drawn together."""

    @property
    def verdict(self) -> str:
        if self.num_rows < MIN_ROWS:
            return f"not decided, fewer than {MIN_ROWS} rows"
        if self.low == self.high:
            return "not decided, all draws are equal"
        return "not decided" if self.low <= 0 <= self.high else "higher" if self.low > 0 else "lower"

    @property
    def text(self) -> str:
        rows = f"{self.num_rows} rows{', paired' if self.is_paired else ''}"
        return f"difference {self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}] ({rows}): {self.verdict}"


def difference_interval(run: Mapping[int, float], other: Mapping[int, float], *, is_paired: bool) -> Interval:
    """The mean of `one` minus that of `other`, with the interval of its bootstrap over rows.

    `is_paired`: equal numbers of rows mean the same rows; if both have all of them, they are drawn together, else each
    on its own. The draws have a fixed seed.
    """
    random = np.random.default_rng(0)
    first, second = (np.array([rows[row] for row in sorted(rows)], np.float64) for rows in (run, other))
    if is_paired and run.keys() == other.keys():
        means = _means(first - second, random)
    else:
        is_paired = False
        means = _means(first, random) - _means(second, random)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return Interval(
        difference=float(first.mean() - second.mean()),
        low=low,
        high=high,
        num_rows=min(len(run), len(other)),
        is_paired=is_paired,
    )


def _means(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Means of RESAMPLES draws with replacement, each of as many values as there are."""
    return np.array([values[random.integers(len(values), size=len(values))].mean() for _ in range(RESAMPLES)])
