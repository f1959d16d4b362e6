"""What the page of `areal watch --web` shows: the facts of a run as columns and charts. Pure."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from areal.api.config import BaseExperimentConfig, PPOConfig
from areal.api.config.schema import find_field
from areal.cli.watch import CURVES, WINDOW, RunView, phases_of, problems_of, waits_of
from areal.cli.web_page import Chart, GoverningOption, Series
from areal.observe.metric_table import entry_of, matching
from areal.observe.trace import WAIT

LANE = "lane/"
"""Begins the names of columns with shares of the time of a step."""
_MIN_LANE = 0.01  # Least mean share of a phase that has a lane.
_COUNTED = ("rollout", "publish_weights", "after_step")
"""Phases without a lane: the lanes of the waits show the first two, and the last one is not part of its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """The values of new train steps. All columns have the length of `steps`; None = not recorded in this step."""

    replaces: bool  # These are all steps: those sent before no longer count.
    steps: Sequence[int]
    elapsed_s: Sequence[float]  # Seconds of training.
    columns: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFacts:
    """What the page shows besides the values of train steps."""

    view: RunView  # It has no curves, which the columns contain.
    charts: Sequence[Chart]
    problems: Sequence[str]


class _Spec(NamedTuple):
    section: str
    title: str
    patterns: str  # Of its columns, separated by spaces.
    options: str = ""  # That govern it, separated by spaces.
    only_above_zero: bool = False


_LANES, _STALENESS = "who waits for whom, and what the trainer does", "staleness of a batch"
_STEP = "seconds/step seconds/after_step seconds/rollout seconds/update seconds/publish_weights"
_IN_FLIGHT = "rollout.max_concurrent_rollouts train_dataset.batch_size"
_SPECS = (
    _Spec("rewards", "reward of train batches and evaluations", "rollout/reward eval/*/reward"),
    _Spec("rewards", "answers of evaluations without a reward", "eval/*/missing", only_above_zero=True),
    _Spec("rewards", "loss", "loss eval/loss"),
    _Spec("time", _LANES, f"{LANE}*"),
    _Spec("time", "time of a step", _STEP),
    _Spec("time", "speed", "rollout/generated_tokens_per_s trained_tokens_per_s"),
    _Spec("rollout", "episodes when a batch was made", "rollout/running rollout/queue_length", _IN_FLIGHT),
    _Spec("rollout", _STALENESS, "rollout/staleness_mean rollout/staleness_max", "rollout.max_head_offpolicyness"),
    _Spec("rollout", "set-point of staleness", "rollout/setpoint/target rollout/setpoint/value"),
    _Spec("rollout", "speed of one answer by server", "rollout/replica_tokens_per_s/*"),
    *(_Spec("policy", name, " ".join(keys)) for name, keys in CURVES.items() if name not in ("reward", "loss")),
)
_HISTOGRAM = f"tokens by staleness in versions, last {WINDOW} steps"
_PATTERNS = tuple(pattern for spec in _SPECS for pattern in spec.patterns.split())


class StepTable:
    """Makes the columns of a run from its metrics, row by row, and knows which charts they fill."""

    def __init__(self) -> None:
        self._sums = Counter[str]()
        self._num_steps, self._elapsed_s = 0, 0.0

    def take(self, rows: Sequence[Mapping[str, Any]], *, replaces: bool) -> StepColumns:
        rows = [{**row, **lanes_of(row)} for row in rows]
        keys = dict.fromkeys(key for row in rows for key, value in row.items() if _is_shown(key) and value is not None)
        columns = {key: [row.get(key) for row in rows] for key in keys}
        self._sums.update({key: sum(filter(None, column)) for key, column in columns.items()})
        self._num_steps += len(rows)
        elapsed_s = list[float]()
        for row in rows:
            self._elapsed_s = row.get("seconds/elapsed") or self._elapsed_s
            elapsed_s.append(self._elapsed_s)
        steps = [row["step"] for row in rows]
        return StepColumns(replaces=replaces, steps=steps, elapsed_s=elapsed_s, columns=columns)

    def charts(self, view: RunView, options: Mapping[str, GoverningOption]) -> list[Chart]:
        """The charts for which there are values, in the order of the page."""
        charts: list[Chart] = []
        for spec in _SPECS:
            keys, is_lanes = matching(self._sums, spec.patterns.split()), spec.title == _LANES
            if is_lanes:
                keys = self._lanes(keys)
            if not keys or (spec.only_above_zero and not any(self._sums[key] for key in keys)):
                continue
            entry = entry_of(keys[0])
            chart = Chart(
                section=spec.section,
                title=spec.title,
                unit="share of the time of a step" if is_lanes else entry.unit if entry else "",
                kind="lanes" if is_lanes else "line",
                series=[Series(key=key, label=_label(key, keys), sparse=key.startswith("eval/")) for key in keys],
                options=[options[name] for name in spec.options.split() if name in options],
            )
            charts.append(chart)
            if spec.title == _STALENESS and view.staleness:
                data = [[float(value) for value in view.staleness], list(view.staleness.values())]
                shares = [Series(key="share", label="share")]
                charts.append(replace(chart, title=_HISTOGRAM, kind="bars", unit="of tokens", series=shares, data=data))
        return charts

    def _lanes(self, keys: Sequence[str]) -> list[str]:
        """Who waits for whom, then the phases in which the trainer works, the longest first."""
        waits = [key for key in keys if " " in key]
        work = [key for key in keys if " " not in key and self._sums[key] >= _MIN_LANE * self._num_steps]
        return waits + sorted(work, key=lambda key: -self._sums[key])


@cache
def _is_shown(key: str) -> bool:
    return bool(matching([key], _PATTERNS))


def lanes_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Shares of the time of one step: who waits for whom, and what the trainer does."""
    step_s = row.get("seconds/step")
    if not step_s:
        return {}
    phases = phases_of([row])
    work = {name: spent / step_s for name, spent in phases.items() if name not in _COUNTED and WAIT not in name}
    return {f"{LANE}{name}": share for name, share in {**waits_of([row]), **work}.items()}


def _label(key: str, keys: Sequence[str]) -> str:
    """The part of a key in which it differs from the others of its chart."""
    if len(keys) == 1:
        return key if key.startswith("eval/") else key.rpartition("/")[2]
    return key.removeprefix(os.path.commonpath(keys)).removeprefix("/")


def page_facts(view: RunView, table: StepTable, config: BaseExperimentConfig, spans: Chart | None = None) -> PageFacts:
    charts = table.charts(view, governing_options(config)) + ([spans] if spans else [])
    return PageFacts(view=replace(view, curves={}, held_out={}), charts=charts, problems=problems_of(view))


def governing_options(config: BaseExperimentConfig) -> dict[str, GoverningOption]:
    """The options that charts name, with their values in this run."""
    if not isinstance(config, PPOConfig):
        return {}
    values = {
        "rollout.max_head_offpolicyness": config.rollout.max_head_offpolicyness,
        "rollout.max_concurrent_rollouts": config.max_concurrent_rollouts,
        "train_dataset.batch_size": config.train_dataset.batch_size,
    }
    return {
        name: GoverningOption(name=name, value=value, meaning=spec.sentence)
        for name, value in values.items()
        if (spec := find_field(type(config), name))
    }
