"""The spans of a traced run as lanes of the page: in which share of each moment a process did each kind of work."""

import contextlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from areal.cli.web_page import Chart, Series
from areal.observe.trace import Interval, interval_of, joined

_CELLS = 400
_TAIL_BYTES = 2**18  # The newest part of each file is shown: a few train steps of a small run, hours of a large one.
_LEAST_SHARE = 0.002  # A kind of work has a lane from this share of the shown time on.


class SpanLanes:
    """Reads the traces in a folder again when they have grown."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[Path, int] = {}
        self._chart: Chart | None = None

    def chart(self) -> Chart | None:
        """The chart of the newest spans; None without any."""
        sizes = {path: path.stat().st_size for path in sorted(self._folder.glob("*.jsonl"))}
        if sizes != self._sizes:
            self._sizes = sizes
            self._chart = _chart_of(
                [(path.stem, size > _TAIL_BYTES, _newest(path, size)) for path, size in sizes.items()]
            )
        return self._chart


def _newest(path: Path, size: int) -> list[dict[str, Any]]:
    """The newest events that have a length, in the order of the file."""
    found: list[dict[str, Any]] = []
    with path.open("rb") as file:
        file.seek(max(0, size - _TAIL_BYTES))
        for line in file.read(_TAIL_BYTES).split(b"\n"):
            with contextlib.suppress(ValueError):  # the first and the last line may be incomplete
                event = orjson.loads(line)
                if event["ph"] in ("X", "b"):
                    found.append(event)
    return found


def _chart_of(files: list[tuple[str, bool, list[dict[str, Any]]]]) -> Chart | None:
    """`files`: process, whether earlier events are left out, and its events. The time with all events is shown."""
    lanes: dict[str, list[Interval]] = defaultdict(list)
    for process, _, events in files:
        for event in events:
            lanes[f"{process}: {event['name']}"].append(interval_of(event))
    if not lanes:
        return None
    known_from = [min(event["ts"] for event in events) for _, is_cut, events in files if is_cut and events]
    first = max(known_from, default=min(start for spans in lanes.values() for start, _ in spans))
    edges = np.linspace(first, max(end for spans in lanes.values() for _, end in spans), _CELLS + 1)
    columns: dict[str, Any] = {}
    for name, spans in lanes.items():
        starts, ends = np.array(joined(spans)).T
        busy = np.clip(edges[:, None] - starts, 0, ends - starts).sum(axis=1)
        share = np.diff(busy) / np.diff(edges)
        if share.mean() >= _LEAST_SHARE:
            columns[name] = share.round(3).tolist()
    return Chart(
        section="time",
        title="spans of the newest part of the traces",
        unit="share of the time",
        kind="lanes",
        wide=True,
        series=[Series(key=name, label=name) for name in columns],
        data=[((edges[1:] - first) / 1e6).round(3).tolist(), *columns.values()],
    )
