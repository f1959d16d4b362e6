"""Comparison of a replay with its run, step by step: equality of bits, or a table of differences."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

EXACT = ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm")
"""Metrics that must be equal in a replay without overrides."""
SHOWN = {
    "actor/loss": "loss",
    "actor/grad_norm": "grad norm",
    "actor/clip_ratio": "clip ratio",
    "actor/approx_kl": "approx KL",
    "batch/ref_kl": "ref KL",
    "actor/entropy": "entropy",
    "critic/loss": "value loss",
}
"""Metrics that a comparison with overrides shows, if recorded, and their headings."""
_WIDTH = 11

Row = Mapping[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """One step of a replay and the same step of its run."""

    step: int
    """Steps done."""
    weights: bool | None
    """Whether the checksums are equal; None = the run recorded none."""
    metrics: dict[str, tuple[float | None, float | None]]
    """Metrics in EXACT that both have: live, replayed."""

    @property
    def different(self) -> list[str]:
        """Names of what differs."""
        names = [name for name, (live, own) in self.metrics.items() if live != own]
        return names if self.weights is not False else ["weights", *names]

    def line(self) -> str:
        """One line of the report."""
        weights = {True: "weights equal", False: f"weights DIFFER at step {self.step}", None: "weights not recorded"}
        equal = [name for name, (live, own) in self.metrics.items() if live == own]
        parts = [weights[self.weights]] + [", ".join(equal) + " equal"] * bool(equal)
        for name, (live, own) in self.metrics.items():
            if live != own:
                parts.append(f"{name} DIFFERS (live {live}, replay {own})")
        return f"step {self.step}: " + "; ".join(parts)


def compare_step(step: int, recorded_weights: str, live: Row | None, own: Row) -> StepComparison:
    """Compare one step. `live` None: the run has no metrics of it."""
    weights = own["weights"] == recorded_weights if recorded_weights else None
    metrics = {name: (live[name], own[name]) for name in EXACT if name in live and name in own} if live else {}
    return StepComparison(step=step, weights=weights, metrics=metrics)


class Exactness:
    """Result of a replay with the run's own options."""

    def __init__(self) -> None:
        self._num_steps = self._num_weights = self._num_metrics = 0
        self._first: StepComparison | None = None

    def add(self, step: StepComparison) -> str:
        """Add a step; returns its line."""
        self._num_steps += 1
        self._num_weights += step.weights is not None
        self._num_metrics += bool(step.metrics)
        if self._first is None and step.different:
            self._first = step
        return step.line()

    @property
    def is_equal(self) -> bool:
        return self._first is None

    @property
    def has_compared(self) -> bool:
        """Whether the run recorded anything to compare with."""
        return self._num_weights + self._num_metrics > 0

    def summary(self) -> str:
        compared = f"{self._num_steps} steps, {self._num_weights} with checksums, {self._num_metrics} with metrics"
        if self._first is None:
            return f"equal: {compared}" if self.has_compared else f"nothing to compare with: {compared}"
        return f"DIFFERENT from step {self._first.step} on ({', '.join(self._first.different)}): {compared}"


class Comparison:
    """Table of a replay with overrides and its run: the same data, another update."""

    def __init__(self) -> None:
        self._columns: list[str] = []
        self._values: dict[str, list[tuple[float, float]]] = {}
        self._num_steps = 0
        self._first_other: int | None = None

    def add(self, step: StepComparison, live: Row | None, own: Row) -> list[str]:
        """Add a step; returns its lines of the table."""
        lines: list[str] = []
        if not self._num_steps:
            self._columns = [name for name in SHOWN if name in own or name in (live or {})]
            titles = [f"{SHOWN[name]:^{2 * _WIDTH + 1}}" for name in self._columns]
            below = [f"{'live':>{_WIDTH}} {'replay':>{_WIDTH}}" for _ in self._columns]
            lines = ["      | " + " | ".join(titles), " step | " + " | ".join(below)]
        self._num_steps += 1
        if self._first_other is None and step.weights is False:
            self._first_other = step.step
        cells: list[str] = []
        for name in self._columns:
            pair = (live or {}).get(name), own.get(name)
            cells.append(" ".join(f"{_number(value):>{_WIDTH}}" for value in pair))
            if pair[0] is not None and pair[1] is not None:
                self._values.setdefault(name, []).append((pair[0], pair[1]))
        return [*lines, f"{step.step:5} | " + " | ".join(cells)]

    def summary(self) -> str:
        """Means over the steps that both have, and the first step with different weights."""
        lines = [f"means over {self._num_steps} steps:"]
        for name, pairs in self._values.items():
            live, own = fmean(pair[0] for pair in pairs), fmean(pair[1] for pair in pairs)
            lines.append(f"  {SHOWN[name]}: live {live:.6g}, replay {own:.6g} ({own - live:+.3g})")
        equal = "equal at every step" if self._first_other is None else f"different from step {self._first_other} on"
        return "\n".join([*lines, f"weights: {equal}"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"
