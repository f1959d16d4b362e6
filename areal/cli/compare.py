"""`areal compare`: configuration differences and curves of several runs, as text, JSON, PNG and one HTML file."""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from areal.api.config.load import load_experiment
from areal.api.config.redaction import public
from areal.api.errors import ConfigError, InputError
from areal.api.metrics import result_text, rounded, unscored_text
from areal.cli.web_page import Chart, Series, page
from areal.importers.draft import flat
from areal.ledger.audit import ledger_folder
from areal.ledger.evaluations import Interval, RowRewards, difference_interval, row_rewards
from areal.observe.metric_table import MAIN_METRICS, entry_of, matching
from areal.observe.step_files import read_step_lines
from areal.replay.recorded import read_metrics
from areal.system.durable import write_atomic
from areal.system.run_paths import RunPaths, existing_run

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class EndValues:
    last: float
    last_tenth: float  # Mean.
    num_values: int


@dataclass(frozen=True, slots=True)
class Curve:
    steps: list[int]  # Train steps done.
    values: list[float]
    note: str = ""  # How many answers of the newest evaluation have no reward; empty = none.

    def ends(self) -> EndValues:
        tenth = self.values[-max(1, len(self.values) // 10) :]
        return EndValues(last=self.values[-1], last_tenth=sum(tenth) / len(tenth), num_values=len(self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The newest result of an evaluation in a run, minus that in the first run."""

    evaluation: str
    run: str
    base: str  # The first run.
    steps: tuple[int, int]  # Train steps done by the run and by the first one.
    interval: Interval
    text: str


@dataclass(frozen=True, slots=True)
class Comparison:
    runs: list[str]
    config: dict[str, list[Any]]
    """Option -> its value in each run, where they differ; None = it does not have this option."""
    curves: dict[str, list[Curve | None]]  # Metric -> its curve in each run; None = the run has not recorded it.
    changes: dict[str, list[dict[str, Any]]]
    """Run -> the options that later launches changed: `step` (train steps done before) and `changes`."""
    ends: dict[str, list[EndValues | None]]  # Metric -> its newest values in each run.
    elapsed_s: list[Curve]  # Seconds of training by step, for each run.
    differences: list[Difference]


def html_page(comparison: Comparison) -> str:
    charts = [
        Chart(
            section="curves",
            title=metric,
            unit=entry.unit if (entry := entry_of(metric)) else "",
            kind="line",
            series=[Series(key=run, label=run, sparse=metric.startswith("eval/")) for run in comparison.runs],
        )
        for metric in comparison.curves
    ]
    data = orjson.dumps({"found": comparison, "charts": charts}, default=repr, option=orjson.OPT_NON_STR_KEYS)
    return page("compare", title=f"areal compare: {', '.join(comparison.runs)}", data=data).html


def compare(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="areal compare", description="Compare the options and the curves of runs.")
    parser.add_argument("runs", metavar="RUN", type=existing_run, nargs="+", help="folders, or experiment/trial")
    parser.add_argument("--metric", action="append", default=[], help="name or pattern; several are possible")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one HTML file that needs no network")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture (needs the package matplotlib)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(words)
    if len(args.runs) < 2:
        parser.error("name at least two runs")
    comparison = read_runs([path.absolute() for path in args.runs], args.metric or MAIN_METRICS)
    if args.html is not None:
        write_atomic(args.html, html_page(comparison).encode())
    if args.png is not None:
        _write_png(comparison, args.png)
    written = [path for path in (args.html, args.png) if path is not None]
    if args.json:
        lines = [json.dumps(asdict(comparison), indent=1)]
    else:
        lines = [f"wrote {path}" for path in written] or _lines(comparison)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def read_runs(folders: Sequence[Path], patterns: Sequence[str]) -> Comparison:
    """What the run folders hold. Raises ConfigError or InputError when one has no configuration or metrics."""
    names = [path.name for path in folders]
    if len(set(names)) < len(names):
        names = ["/".join(path.parts[-2:]) for path in folders]
    if len(set(names)) < len(names):
        names = [str(path) for path in folders]
    metrics = [read_metrics(RunPaths(path).metrics) for path in folders]
    for path, rows in zip(folders, metrics, strict=True):
        if not rows:
            raise InputError(f"{path} has no metrics: name the folder of a run that trained", code="replay.no_run")
    known = dict.fromkeys(key for rows in metrics for row in rows.values() for key in row)
    curves = {key: [_curve(rows, key) for rows in metrics] for key in matching(known, patterns)}
    if not curves:
        raise ConfigError(f"no metric matches {', '.join(patterns)}", code="command.no_metric")
    recorded = [read_step_lines(RunPaths(path).option_changes) for path in folders]
    changes = {name: lines for name, lines in zip(names, recorded, strict=True) if lines}
    options = _differences([_options(path) for path in folders])
    is_paired = not any(name.startswith("valid_dataset.") for name in options)
    return Comparison(
        names,
        options,
        curves,
        changes,
        {key: [curve and curve.ends() for curve in of_runs] for key, of_runs in curves.items()},
        [_elapsed(rows) for rows in metrics],
        differences(names, [row_rewards(ledger_folder(path)) for path in folders], is_paired=is_paired),
    )


def differences(
    names: Sequence[str], results: Sequence[Mapping[str, RowRewards]], *, is_paired: bool
) -> list[Difference]:
    """The differences from the first run. `is_paired`: row N is the same held-out row in all runs."""
    rows: list[Difference] = []
    base, *others = zip(names, results, strict=True)
    for run, by_name in others:
        for name in (name for name in by_name if name in base[1]):
            result, first = by_name[name], base[1][name]
            interval = difference_interval(result.rewards, first.rewards, is_paired=is_paired)
            steps = (result.step, first.step)
            rows.append(
                Difference(evaluation=name, run=run, base=base[0], steps=steps, interval=interval, text=interval.text)
            )
    return rows


def _elapsed(rows: dict[int, dict[str, Any]]) -> Curve:
    now_s, times = 0.0, list[float]()
    for _, row in sorted(rows.items()):
        now_s = row.get("seconds/elapsed") or now_s
        times.append(now_s)
    return Curve(sorted(rows), times)


def _curve(rows: dict[int, dict[str, Any]], key: str) -> Curve | None:
    points = [(step, row[key]) for step, row in sorted(rows.items()) if isinstance(row.get(key), int | float)]
    if not points:
        return None
    name, note = key.removesuffix("/reward"), ""
    evaluated = [row for _, row in sorted(rows.items()) if f"{name}/answers" in row]
    if evaluated and unscored_text(evaluated[-1], name):
        note = result_text(evaluated[-1], name)
    return Curve([step for step, _ in points], [float(value) for _, value in points], note)


def _options(folder: Path) -> dict[str, Any]:
    config = load_experiment(["--config", str(RunPaths(folder).config)], allow_unknown_top_level=True)
    return {name: value for name, value in flat(public(asdict(config))).items() if value != {}}


def _differences(options: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for option in options for name in option)
    rows = {name: [option.get(name) for option in options] for name in names}
    return {name: values for name, values in rows.items() if any(value != values[0] for value in values)}


def _lines(comparison: Comparison) -> list[str]:
    lines = [f"options that differ: {len(comparison.config)}"]
    for name, values in comparison.config.items():
        lines.append(f"  {name}: " + " | ".join(json.dumps(value, default=repr) for value in values))
    for run, launches in comparison.changes.items():
        lines += [
            f"  {run}: changed after step {launch['step']}: {'; '.join(launch['changes'])}" for launch in launches
        ]
    for diff in comparison.differences:
        step, base_step = diff.steps
        where = f"{diff.evaluation}/reward of {diff.run} after step {step}, against {diff.base} after step {base_step}"
        lines.append(f"{where}: {diff.text}")
    width = max(map(len, comparison.runs))
    for metric, curves in comparison.curves.items():
        (first, end), (low, high) = _extent(curves)
        lines += ["", f"{metric} ({rounded(low)} to {rounded(high)}), steps {first} to {end}"]
        for name, curve in zip(comparison.runs, curves, strict=True):
            if curve is None:
                lines.append(f"  {name:<{width}}  not recorded")
                continue
            ends = curve.ends()
            facts = f"last {rounded(ends.last)}, last tenth {rounded(ends.last_tenth)}, {ends.num_values} values"
            facts += f"; newest evaluation: {curve.note}" if curve.note else ""
            lines.append(f"  {name:<{width}}  {bars_by_step(curve, (first, end), low, high)}  {facts}")
    return lines


def _extent(curves: Sequence[Curve | None]) -> tuple[tuple[int, int], tuple[float, float]]:
    """The first and last step, and the lowest and highest value."""
    known = [curve for curve in curves if curve is not None]
    steps = [step for curve in known for step in curve.steps]
    values = [value for curve in known for value in curve.values]
    return (min(steps), max(steps)), (min(values), max(values))


def sparkline(values: Sequence[float], low: float, high: float, *, width: int = _WIDTH) -> str:
    """At most `width` bars between `low` and `high`, each the mean of an equal number of values."""
    curve = Curve(list(range(len(values))), list(values))
    return bars_by_step(curve, (0, len(values) - 1), low, high, width=width)


def bars_by_step(curve: Curve, steps: tuple[int, int], low: float, high: float, *, width: int = _WIDTH) -> str:
    """At most `width` bars for the steps from the first to the last one, each the mean of its values.

    Between two steps of the curve its last bar is repeated; where it has not started or has ended there are spaces.
    """
    first, end = steps
    count, num_steps = min(width, end - first + 1), end - first + 1
    columns: list[list[float]] = [[] for _ in range(count)]
    for step, value in zip(curve.steps, curve.values, strict=True):
        columns[(step - first) * count // num_steps].append(value)
    bars, last = "", max(place for place, values in enumerate(columns) if values)
    for values in columns[: last + 1]:
        bars += _bar(math.fsum(values) / len(values), low, high) if values else bars[-1:] or " "
    return bars.ljust(count)


def _bar(value: float, low: float, high: float) -> str:
    return _BARS[round((value - low) * (len(_BARS) - 1) / (high - low))] if high > low else _BARS[0]


def _write_png(comparison: Comparison, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        message = "--png needs the package matplotlib: pip install -e '.[plot]'; --html needs no package"
        raise ConfigError(message, code="launch.package_missing") from None
    columns = min(3, len(comparison.curves))
    rows = -(-len(comparison.curves) // columns)
    figure = Figure(figsize=(5 * columns, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (metric, curves) in enumerate(comparison.curves.items(), start=1):
        axes = figure.add_subplot(rows, columns, place)
        axes.set_title(metric)
        axes.set_xlabel("train steps")
        for name, curve in zip(comparison.runs, curves, strict=True):
            if curve is not None:
                axes.plot(curve.steps, curve.values, label=name)
        axes.legend()
    figure.savefig(path)
