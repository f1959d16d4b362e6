"""The HTML file of `areal compare`: tables and SVG curves, without scripts and without other files."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 460, 240, 72, 26, 10
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 24px auto; max-width: 1480px; padding: 0 16px; color: #222; }
table { border-collapse: collapse; } td, th { border: 1px solid #ccc; padding: 3px 9px; text-align: left; }
td { font-family: ui-monospace, monospace; font-size: 13px; word-break: break-all; }
.charts { display: flex; flex-wrap: wrap; gap: 18px; } figure { margin: 0; } figcaption { font-weight: 600; }
.key { display: inline-block; margin-right: 18px; } .key i { display: inline-block; width: 22px; height: 3px;
margin-right: 6px; vertical-align: middle; } svg text { font-size: 11px; fill: #555; }
"""


def html_page(
    runs: Sequence[str], config: Mapping[str, Sequence[Any]], curves: Mapping[str, Sequence[list[tuple[int, float]]]]
) -> str:
    """`config`: option -> values by run. `curves`: metric -> (step, value) points by run."""
    keys = "".join(
        f'<span class="key"><i style="background:{_color(place)}"></i>{escape(name)}</span>'
        for place, name in enumerate(runs)
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in ("option", *runs))
    rows = "".join(
        f"<tr><td>{escape(option)}</td>{''.join(f'<td>{escape(_shown(value))}</td>' for value in values)}</tr>"
        for option, values in config.items()
    )
    table = f"<table><tr>{head}</tr>{rows}</table>" if config else "<p>The options are equal.</p>"
    charts = "".join(_chart(metric, points) for metric, points in curves.items())
    title = escape(", ".join(runs))
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


def _chart(metric: str, points: Sequence[list[tuple[int, float]]]) -> str:
    everything = [point for run in points for point in run]
    first, last = min(step for step, _ in everything), max(step for step, _ in everything)
    low, high = min(value for _, value in everything), max(value for _, value in everything)
    across = (_WIDTH - _LEFT - 8) / max(last - first, 1)
    up = (_HEIGHT - _BOTTOM - _TOP) / (high - low if high > low else 1.0)
    floor = _HEIGHT - _BOTTOM

    def place(step: int, value: float) -> str:
        return f"{_LEFT + (step - first) * across:.1f},{floor - (value - low) * up:.1f}"

    lines = "".join(
        f'<polyline fill="none" stroke="{_color(number)}" stroke-width="1.6" '
        f'points="{" ".join(place(*point) for point in run)}"/>'
        for number, run in enumerate(points)
        if run
    )
    frame = f'<path d="M{_LEFT},{_TOP}V{floor}H{_WIDTH - 8}" fill="none" stroke="#999"/>'
    labels = (
        f'<text x="{_LEFT - 5}" y="{floor}" text-anchor="end">{_label(low)}</text>'
        f'<text x="{_LEFT - 5}" y="{_TOP + 9}" text-anchor="end">{_label(high)}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">{first}</text>'
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 8}" text-anchor="end">{last}</text>'
    )
    return (
        f'<figure><figcaption>{escape(metric)}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}">{frame}{labels}{lines}</svg></figure>'
    )
