"""What the terminal, summary.json and the last line of a run state about its episodes and alarms."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.api.config import EvaluatorConfig
from areal.api.metrics import evaluations_of, result_text, rounded, unscored_text
from areal.observe.alarms import Alarm, alarms_text, by_meaning
from areal.observe.metric_table import MAIN_METRICS, matching
from areal.observe.step_files import StepLines, read_step_lines
from areal.system.run_paths import RunPaths

# ----------------------------------------------------------------------------------------------------------------------
# The help of a launcher.

_FURTHER_HELP = """
`areal run --help` lists the flags of all launchers, `areal config SECTION`
explains the options of the configuration.
"""


def help_if_asked(words: Sequence[str], usage: str) -> None:
    """Print the help of a launcher and exit, if a word asks for it."""
    if {"--help", "-h"} & {*words}:
        sys.stdout.write(usage + _FURTHER_HELP)
        raise SystemExit(0)


EPISODES = (
    *("admitted", "running", "waiting", "batched", "consumed", "rejected", "failed", "reasons", "first_failure"),
    "selection",
)
"""What is known about the episodes of a run: numbers by state, and by reason; the first failure; what was lost."""
_FIELDS = {field.name for field in dataclasses.fields(Alarm)}


class RunAlarmLines:
    """The alarms that the trainer writes to alarms.jsonl while the run lasts."""

    def __init__(self, paths: RunPaths, *, steps_done: int) -> None:
        """`steps_done`: of the checkpoint from which the trainers start; alarms of later steps are removed."""
        self._path = paths.alarms
        if self._path.exists():
            StepLines(self._path, first_step=steps_done + 1).close()
        self._size = -1
        self._shown = {(alarm.step, alarm.name) for alarm in self.all()}

    def all(self) -> list[Alarm]:
        return recorded_alarms(self._path)

    def new(self) -> Iterator[str]:
        """The lines to show for alarms that were not shown yet. A step that is trained again shows its alarms once."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size == self._size:
            return
        self._size = size
        alarms = [alarm for alarm in self.all() if (alarm.step, alarm.name) not in self._shown]
        self._shown |= {(alarm.step, alarm.name) for alarm in alarms}
        yield from map(alarms_text, by_meaning(alarms))


_HELD_OUT = re.compile(r"eval/(?:loss|accuracy)")


class HeldOutLines:
    """The results on held-out rows among the lines that the trainer adds to its metrics."""

    def __init__(self, metrics: Path) -> None:
        self._path = metrics
        self._offset = metrics.stat().st_size if metrics.exists() else 0
        self._step = 0

    def new(self) -> Iterator[str]:
        """The lines to show. A step that is trained again shows its results once."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size == self._offset:
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset if size > self._offset else 0)  # a recovery removes lines
            lines = file.read().splitlines(keepends=True)
        self._offset = size - (len(lines[-1]) if lines and not lines[-1].endswith(b"\n") else 0)
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # the beginning of one
                continue
            results = [f"{name.removeprefix('eval/')} {result_text(row, name)}" for name in evaluations_of(row)]
            results += [f"{name.removeprefix('eval/')} {row[name]:.4g}" for name in row if _HELD_OUT.fullmatch(name)]
            if results and row["step"] > self._step:
                self._step = row["step"]
                yield f"held-out rows after step {self._step}: {'; '.join(results)}"


def recorded_alarms(path: Path) -> list[Alarm]:
    """The alarms of a file. Damaged lines are left out."""
    lines = read_step_lines(path)
    return [Alarm(**{name: line[name] for name in _FIELDS}) for line in lines if line.keys() >= _FIELDS]


def recorded_restarts(paths: RunPaths) -> dict[str, list[str]]:
    """Server, or all trainer ranks -> the causes of its restarts in all launches. Damaged lines are left out."""
    causes: dict[str, list[str]] = {}
    for line in read_step_lines(paths.restarts):
        if line.keys() >= {"unit", "cause"}:
            causes.setdefault(line["unit"], []).append(line["cause"])
    return causes


def episodes_of(paths: RunPaths, last_status: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The episodes of a run: what the controller wrote at its end, else its last status; None without a ledger."""
    try:
        episodes = json.loads(paths.episodes.read_bytes())
    except (OSError, ValueError):  # it was killed
        episodes = last_status
    if episodes is None or "admitted" not in episodes:  # an evaluation without training admits none
        return None
    return {name: episodes[name] for name in EPISODES if name in episodes}


def goal_text(record: Mapping[str, Any], config: EvaluatorConfig, total_steps: int | None) -> str:
    """Which goals in evaluator.stop_at ended a run before its last step; empty when none did.

    `record`: the last line of the metrics, {} without one.
    """
    rewards = {mode: record.get(f"eval/{mode}/reward", -math.inf) for mode in config.stop_at}
    if record.get("step") == total_steps or not config.goals_reached(rewards):
        return ""
    reached = ", ".join(f"{mode} {rewards[mode]:.3f} >= {goal:g}" for mode, goal in config.stop_at.items())
    return f"stopped at step {record['step']}: {reached}"


def main_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Means of the first and of the last tenth of the values of each main metric; `rows`: the lines of the metrics."""
    metrics: dict[str, dict[str, float]] = {}
    for key in matching(dict.fromkeys(key for row in rows for key in row), MAIN_METRICS):
        values = [row[key] for row in rows if isinstance(row.get(key), int | float)]
        tenth = max(1, len(values) // 10)
        if values:
            metrics[key] = {"first": sum(values[:tenth]) / tenth, "last": sum(values[-tenth:]) / tenth}
    return metrics


def unscored_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each evaluation whose newest result lacks rewards; `rows`: the lines of the metrics."""
    newest = {name: row for row in rows for name in evaluations_of(row)}
    return [f"{name}/reward: {result_text(row, name)}" for name, row in newest.items() if unscored_text(row, name)]


def metrics_text(metrics: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A table of `main_metrics`, one line each; none without metrics."""
    if not metrics:
        return []
    width = max(map(len, metrics))
    head = f"{'mean of the':<{width}}  {'first tenth':>12}  {'last tenth':>12}"
    rows = ((key, rounded(ends["first"]), rounded(ends["last"])) for key, ends in metrics.items())
    return [head, *(f"{key:<{width}}  {first:>12}  {last:>12}" for key, first, last in rows)]


def facts_text(episodes: Mapping[str, Any] | None, alarms: list[Alarm]) -> str:
    """Episodes by outcome, failures and rejections by reason, and alarms, for the last line of a run."""
    parts: list[str] = []
    if episodes is not None:
        reasons: dict[str, int] = episodes.get("reasons", {})
        parts.append(f"{episodes['consumed']} of {episodes['admitted']} episodes trained")
        for outcome in ("failed", "rejected"):
            prefix = f"{outcome}: "
            counts = {name.removeprefix(prefix): count for name, count in reasons.items() if name.startswith(prefix)}
            named = ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1]))
            parts.append(f"{episodes[outcome]} {outcome}" + (f" ({named})" if named else ""))
        if episodes.get("selection"):
            parts.append(episodes["selection"])
    first: dict[str, int] = {}
    for alarm in alarms:
        first.setdefault(alarm.name, alarm.step)
    names = ", ".join(f"{name} at step {step}" for name, step in first.items())
    parts.append(f"alarms: {names}" if names else "no alarms")
    return "; ".join(parts)
