"""`areal compare`: configuration differences and curves of several runs, as text, JSON, PNG and one HTML file."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from areal.api.config.load import load_experiment
from areal.api.config.redaction import public
from areal.api.errors import ConfigError, InputError
from areal.api.metrics import result_text, unscored_text
from areal.importers.draft import flat
from areal.observe.metric_table import MAIN_METRICS, matching
from areal.observe.step_files import read_step_lines
from areal.replay.recorded import read_metrics
from areal.system.durable import write_atomic
from areal.system.run_paths import RunPaths, existing_run

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Curve:
    steps: list[int]  # Train steps done.
    values: list[float]
    note: str = ""  # How many answers of the newest evaluation have no reward; empty = none.

    def tail_mean(self) -> float:
        last = self.values[-max(1, len(self.values) // 10) :]
        return sum(last) / len(last)


@dataclass(frozen=True, slots=True)
class Comparison:
    runs: list[str]
    config: dict[str, list[Any]]
    """Option -> its value in each run, where they differ; None = it does not have this option."""
    curves: dict[str, list[Curve | None]]  # Metric -> its curve in each run; None = the run has not recorded it.
    changes: dict[str, list[dict[str, Any]]]
    """Run -> the options that later launches changed: `step` (train steps done before) and `changes`."""


# The HTML file of `areal compare`: tables and SVG curves, without scripts and without other files.

_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
_PAGE_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 460, 240, 72, 26, 10
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 24px auto; max-width: 1480px; padding: 0 16px; color: #222; }
table { border-collapse: collapse; } td, th { border: 1px solid #ccc; padding: 3px 9px; text-align: left; }
td { font-family: ui-monospace, monospace; font-size: 13px; word-break: break-all; }
.charts { display: flex; flex-wrap: wrap; gap: 18px; } figure { margin: 0; } figcaption { font-weight: 600; }
.key { display: inline-block; margin-right: 18px; } .key i { display: inline-block; width: 22px; height: 3px;
margin-right: 6px; vertical-align: middle; } svg text { font-size: 11px; fill: #555; }
"""


def html_page(found: Comparison) -> str:
    keys = "".join(
        f'<span class="key"><i style="background:{_color(place)}"></i>{escape(name)}</span>'
        for place, name in enumerate(found.runs)
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in ("option", *found.runs))
    rows = "".join(
        f"<tr><td>{escape(option)}</td>{''.join(f'<td>{escape(_shown(value))}</td>' for value in values)}</tr>"
        for option, values in found.config.items()
    )
    table = f"<table><tr>{head}</tr>{rows}</table>" if found.config else "<p>The options are equal.</p>"
    charts = "".join(_chart(metric, curves) for metric, curves in found.curves.items())
    title = escape(", ".join(found.runs))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>areal compare: {title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>Comparison of runs</h1><p>{keys}</p>"
        f'<h2>Curves by train step</h2><div class="charts">{charts}</div>'
        f"<h2>Options that differ</h2>{table}</body></html>\n"
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=repr)


def _label(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _color(place: int) -> str:
    return _COLORS[place % len(_COLORS)]


def _chart(metric: str, curves: Sequence[Curve | None]) -> str:
    steps, values = _extent(curves)
    first, last, low, high = *steps, *values
    across = (_PAGE_WIDTH - _LEFT - 8) / max(last - first, 1)
    up = (_HEIGHT - _BOTTOM - _TOP) / (high - low if high > low else 1.0)
    floor = _HEIGHT - _BOTTOM

    def place(step: int, value: float) -> str:
        return f"{_LEFT + (step - first) * across:.1f},{floor - (value - low) * up:.1f}"

    lines = "".join(
        f'<polyline fill="none" stroke="{_color(number)}" stroke-width="1.6" '
        f'points="{" ".join(map(place, curve.steps, curve.values))}"/>'
        for number, curve in enumerate(curves)
        if curve
    )
    frame = f'<path d="M{_LEFT},{_TOP}V{floor}H{_PAGE_WIDTH - 8}" fill="none" stroke="#999"/>'
    labels = (
        f'<text x="{_LEFT - 5}" y="{floor}" text-anchor="end">{_label(low)}</text>'
        f'<text x="{_LEFT - 5}" y="{_TOP + 9}" text-anchor="end">{_label(high)}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">{first}</text>'
        f'<text x="{_PAGE_WIDTH - 8}" y="{_HEIGHT - 8}" text-anchor="end">{last}</text>'
    )
    return (
        f"<figure><figcaption>{escape(metric)}</figcaption>"
        f'<svg viewBox="0 0 {_PAGE_WIDTH} {_HEIGHT}" width="{_PAGE_WIDTH}" '
        f'height="{_HEIGHT}">{frame}{labels}{lines}</svg></figure>'
    )


def compare(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="areal compare", description="Compare the options and the curves of runs.")
    parser.add_argument("runs", metavar="RUN", type=existing_run, nargs="+", help="folders, or experiment/trial")
    parser.add_argument("--metric", action="append", default=[], help="name or pattern; several are possible")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one HTML file that needs no network")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture (needs the package matplotlib)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(words)
    if len(given.runs) < 2:
        parser.error("name at least two runs")
    found = read_runs([path.absolute() for path in given.runs], given.metric or MAIN_METRICS)
    if given.html is not None:
        write_atomic(given.html, html_page(found).encode())
    if given.png is not None:
        _write_png(found, given.png)
    written = [path for path in (given.html, given.png) if path is not None]
    if given.json:
        lines = [json.dumps(asdict(found), indent=1)]
    else:
        lines = [f"wrote {path}" for path in written] or _lines(found)
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
    return Comparison(names, _differences([_options(path) for path in folders]), curves, changes)


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
    names = dict.fromkeys(name for one in options for name in one)
    rows = {name: [one.get(name) for one in options] for name in names}
    return {name: values for name, values in rows.items() if any(value != values[0] for value in values)}


def _lines(found: Comparison) -> list[str]:
    lines = [f"options that differ: {len(found.config)}"]
    for name, values in found.config.items():
        lines.append(f"  {name}: " + " | ".join(json.dumps(value, default=repr) for value in values))
    for run, launches in found.changes.items():
        lines += [f"  {run}: changed after step {one['step']}: {'; '.join(one['changes'])}" for one in launches]
    width = max(map(len, found.runs))
    for metric, curves in found.curves.items():
        (first, end), (low, high) = _extent(curves)
        lines += ["", f"{metric} ({low:.4g} to {high:.4g}), steps {first} to {end}"]
        for name, curve in zip(found.runs, curves, strict=True):
            if curve is None:
                lines.append(f"  {name:<{width}}  not recorded")
                continue
            facts = f"last {curve.values[-1]:.4g}, last tenth {curve.tail_mean():.4g}, {len(curve.values)} values"
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


def _write_png(found: Comparison, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        message = "--png needs the package matplotlib: pip install -e '.[plot]'; --html needs no package"
        raise ConfigError(message, code="launch.package_missing") from None
    columns = min(3, len(found.curves))
    rows = -(-len(found.curves) // columns)
    figure = Figure(figsize=(5 * columns, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (metric, curves) in enumerate(found.curves.items(), start=1):
        axes = figure.add_subplot(rows, columns, place)
        axes.set_title(metric)
        axes.set_xlabel("train steps")
        for name, curve in zip(found.runs, curves, strict=True):
            if curve is not None:
                axes.plot(curve.steps, curve.values, label=name)
        axes.legend()
    figure.savefig(path)
