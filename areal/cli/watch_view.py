"""The picture of a run that `areal watch` draws with rich: panels of curves, shares, samples and processes."""

import itertools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from areal.cli.compare import Curve, sparkline
from areal.cli.sample_text import safe
from areal.cli.watch_facts import RunView, WatchedProcess
from areal.observe.alarms import alarms_text, by_meaning

_STATES = {"running": "cyan", "completed": "green", "interrupted": "yellow", "failed": "red", "dead": "red"}
_COLORS = ("cyan", "magenta", "yellow", "green", "blue")
_CHART_ROWS, _LABEL = 9, 8
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character by row and column of its dots."""
_BAR = 18
_MIN_SHARE = 0.005
_MAX_TEXT = 160
_WIDE = 100
"""Columns from which on panels are next to each other."""


def view(found: RunView, width: int) -> RenderableType:
    """The whole picture for a terminal of `width` columns."""
    half = width // 2 - 4 if width >= _WIDE else width - 4
    parts: list[RenderableType] = [_head(found)]
    main = {name: found.curves[name] for name in ("reward", "loss") if name in found.curves}
    rest = {name: curve for name, curve in found.curves.items() if name not in main}
    title = "reward and held-out sets" if "reward" in main else "loss"
    left, right = _chart(main | found.held_out, half), _curves(rest | found.held_out, half)
    parts.append(_row([_panel(title, left), _panel("curves", right)], width))
    parts.append(_row([_panel("time of a step", _times(found)), _panel("episodes", _episodes(found))], width))
    if problems := _problems(found):
        parts.append(Panel(problems, title="failures and alarms", title_align="left", border_style="red"))
    if found.samples:
        parts.append(_panel(f"samples of step {found.samples_step}", _samples(found)))
    parts.append(_panel("processes", _processes(found.processes)))
    return Group(*parts)


def _panel(title: str, body: RenderableType) -> Panel:
    return Panel(body, title=title, title_align="left", border_style="bright_black")


def _row(panels: Sequence[Panel], width: int) -> RenderableType:
    if width < _WIDE:
        return Group(*panels)
    grid = Table.grid(expand=True)
    for _ in panels:
        grid.add_column(ratio=1)
    grid.add_row(*panels)
    return grid


def _head(found: RunView) -> Text:
    text = Text(overflow="fold")
    text.append("/".join(Path(found.run).parts[-2:]), style="bold")
    text.append(f"  {found.state}", style=f"bold {_STATES.get(found.state, 'white')}")
    share = min(1.0, found.step / found.total_steps) if found.total_steps else 0.0
    filled = round(share * _BAR)
    text.append(f"  {'━' * filled}", style="cyan").append("━" * (_BAR - filled), style="bright_black")
    text.append(f" step {found.step}/{found.total_steps or '?'}")
    for name, value in (
        ("ETA ", _duration(found.eta_s)),
        ("", None if found.step_s is None else f"{found.step_s:.3g} s/step"),
        ("", None if found.tokens_per_s is None else f"{found.tokens_per_s:,.0f} tokens/s"),
        ("trained for ", _duration(found.elapsed_s)),
    ):
        if value is not None:
            text.append(f"  {name}{value}")
    if found.cause:
        text.append(f"\n{safe(found.cause)}", style="red")
    if found.waiting_for:
        text.append(f"\nwaits for {safe(found.waiting_for)}", style="bright_black")
    return text


def _duration(seconds: float | None) -> str | None:
    return None if seconds is None else str(timedelta(seconds=round(seconds)))


def _chart(curves: Mapping[str, Curve], width: int) -> RenderableType:
    """All curves in one chart of braille dots, with a legend."""
    if not curves:
        return Text("no train step yet", style="bright_black")
    legend = Text()
    for color, (name, curve) in zip(itertools.cycle(_COLORS), curves.items(), strict=False):
        legend.append(f"— {name} {curve.values[-1]:.4g}  ", style=color)
    columns = max(10, width - _LABEL - 1)
    everything = [value for curve in curves.values() for value in curve.values]
    low, high = min(everything), max(everything)
    first, last = min(curve.steps[0] for curve in curves.values()), max(curve.steps[-1] for curve in curves.values())
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    for color, curve in zip(itertools.cycle(_COLORS), curves.values(), strict=False):
        for x, y in _dots(curve, (first, last), (low, high), columns * 2, _CHART_ROWS * 4):
            bits, _ = cells.get((y // 4, x // 2), (0, ""))
            cells[y // 4, x // 2] = (bits | _DOTS[y % 4][x % 2], color)
    text = Text(no_wrap=True)
    for row in range(_CHART_ROWS):
        label = {0: high, _CHART_ROWS - 1: low}.get(row)
        text.append(f"{'' if label is None else format(label, '.4g'):>{_LABEL}} ", style="bright_black")
        for column in range(columns):
            bits, color = cells.get((row, column), (0, ""))
            text.append(chr(0x2800 + bits), style=color)
        text.append("\n")
    text.append(f"{'':>{_LABEL}} step {first} to {last}", style="bright_black")
    return Group(text, legend)


def _dots(
    curve: Curve, steps: tuple[int, int], values: tuple[float, float], width: int, height: int
) -> list[tuple[int, int]]:
    """Places of the dots of a curve, joined by lines. Row 0 is the highest value."""
    across = (width - 1) / max(1, steps[1] - steps[0])
    up = (height - 1) / (values[1] - values[0] if values[1] > values[0] else 1.0)
    places = [
        (round((step - steps[0]) * across), height - 1 - round((value - values[0]) * up))
        for step, value in zip(curve.steps, curve.values, strict=True)
    ]
    dots = places[:1]
    for (x, y), (next_x, next_y) in itertools.pairwise(places):
        count = max(abs(next_x - x), abs(next_y - y), 1)
        dots += [(x + (next_x - x) * i // count, y + (next_y - y) * i // count) for i in range(1, count + 1)]
    return dots


def _curves(curves: Mapping[str, Curve], width: int) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    bars = max(8, width - 36)
    for name, curve in curves.items():
        low, high = min(curve.values), max(curve.values)
        table.add_row(
            name, Text(sparkline(curve.values, low, high, width=bars), style="cyan"), f"{curve.values[-1]:.4g}"
        )
    return table if curves else Text("none yet", style="bright_black")


def _shares(rows: Sequence[tuple[str, float, str]]) -> Table:
    """Name, share from 0 to 1 as a bar, and text."""
    table = Table.grid(padding=(0, 1))
    for name, share, text in rows:
        filled = round(min(1.0, share) * _BAR)
        bar = Text("█" * filled, style="cyan").append("░" * (_BAR - filled), style="bright_black")
        table.add_row(name, bar, text)
    return table


def _times(found: RunView) -> RenderableType:
    total = sum(found.seconds_by_phase.values()) or 1.0
    phases = [
        (name, spent / total, f"{spent:.3g} s")
        for name, spent in found.seconds_by_phase.items()
        if spent >= _MIN_SHARE * total
    ]
    waits = [(name, share, f"{share:.0%}") for name, share in found.waits.items()]
    parts: list[RenderableType] = [_shares(phases)] if phases else [Text("no train step yet", style="bright_black")]
    if waits:
        parts += [Text("\nwho waits for whom", style="bold"), _shares(waits)]
    return Group(*parts)


def _episodes(found: RunView) -> RenderableType:
    names = ("running", "waiting", "consumed", "rejected", "failed")
    counts = ", ".join(f"{found.episodes[name]} {name}" for name in names if name in found.episodes)
    parts: list[RenderableType] = [Text(counts or "no rollouts")]
    reasons: Mapping[str, int] = found.episodes.get("reasons", {})
    for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1])[:4]:
        parts.append(Text(f"  {count} {safe(reason)}", style="yellow", no_wrap=True, overflow="ellipsis"))
    if found.staleness:
        rows = [(name, share, f"{share:.0%} of the tokens") for name, share in found.staleness.items()]
        parts += [Text("\nstaleness in policy versions", style="bold"), _shares(rows)]
    return Group(*parts)


def _problems(found: RunView) -> Text:
    lines = [f"first failure: {safe(found.first_failure)}"] if found.first_failure else []
    lines += [f"{name} was restarted: {safe(cause)}" for name, causes in found.restarts.items() for cause in causes]
    lines += [alarms_text(group) for group in by_meaning(found.alarms)[-3:]]
    return Text("\n".join(lines))


def _samples(found: RunView) -> RenderableType:
    table = Table(box=None, expand=True, padding=(0, 1), header_style="bright_black")
    for name, ratio in (("reward", None), ("prompt", 1), ("answer", 2), ("end", None)):
        table.add_column(name, ratio=ratio, no_wrap=ratio is None)
    for row in found.samples:
        parts = "".join(f"\n{name} {score:g}" for name, score in row["reward_parts"].items())
        end = f"{row['stop_reason']}, {row['num_generated']} tokens"
        table.add_row(f"{row['reward']:g}{parts}", _short(row["prompt"]), _short(row["answer"]), end)
    return table


def _short(text: str) -> Text:
    """The end of a prompt or an answer, which has the question or the result."""
    text = safe(text).strip()
    return Text(text if len(text) <= _MAX_TEXT else f"...{text[-_MAX_TEXT:]}")


def _processes(processes: Sequence[WatchedProcess]) -> Table:
    table = Table(box=None, expand=True, padding=(0, 1), header_style="bright_black")
    for name in ("node", "process", "device", "memory", "heartbeat"):
        table.add_column(name, no_wrap=True)
    table.add_column("does", ratio=1, no_wrap=True, overflow="ellipsis")
    for node, group in itertools.groupby(sorted(processes, key=lambda one: one.node), key=lambda one: one.node):
        for place, one in enumerate(group):
            memory = "" if one.memory_gib is None else f"{one.memory_gib:.2f} GiB"
            silent = "none" if one.silent_s is None else f"{one.silent_s:.0f} s ago"
            table.add_row("" if place else node, one.name, one.device, memory, silent, safe(one.doing))
    return table
