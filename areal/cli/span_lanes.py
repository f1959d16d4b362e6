"""The spans of a traced run as lanes of the page: in which share of each moment a process did each kind of work."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from areal.cli.web_page import Chart, Series
from areal.observe.trace import Interval, interval_of, joined, read_spans

_CELLS = 400
_TAIL_BYTES = 2**18  # The newest part of each file is shown: a few train steps of a small run, hours of a large one.
_LEAST_SHARE, _MOST_LANES = 0.005, 24
"""A kind of work has a lane from this share of the shown time on. Of many servers and ranks the first are shown."""


class SpanLanes:
    """Reads the traces in a folder again when they have grown."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._sizes = folder, dict[Path, int]()
        self._chart: Chart | None = None

    def chart(self) -> Chart | None:
        """The chart of the newest spans; None without any."""
        sizes = {path: path.stat().st_size for path in sorted(self._folder.glob("*.jsonl"), key=_place)}
        if sizes != self._sizes:
            self._sizes, self._chart = sizes, _chart_of(sizes)
        return self._chart


def _place(path: Path) -> tuple[int, str]:
    """The controller, the first server and trainer, the second ones, ..."""
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1, path.stem


def _chart_of(sizes: Mapping[Path, int]) -> Chart | None:
    """The chart of the newest part of each file, over the time of which all events are read."""
    lanes: dict[str, list[Interval]] = defaultdict(list)
    known_from: list[float] = []
    for path, size in sizes.items():
        events = list(read_spans(path, newest_bytes=_TAIL_BYTES))
        for event in events:
            lanes[f"{path.stem}: {event['name']}"].append(interval_of(event))
        if events and size > _TAIL_BYTES:
            known_from.append(min(event["ts"] for event in events))
    if not lanes:
        return None
    first = max(known_from, default=min(start for spans in lanes.values() for start, _ in spans))
    edges = np.linspace(first, max(end for spans in lanes.values() for _, end in spans), _CELLS + 1)
    columns: dict[str, Any] = {}
    for name, spans in lanes.items():
        starts, ends = np.array(joined(spans)).T
        busy = np.clip(edges[:, None] - starts, 0, ends - starts).sum(axis=1)
        share = np.diff(busy) / np.diff(edges)
        if share.mean() >= _LEAST_SHARE and len(columns) < _MOST_LANES:
            columns[name] = share.round(3).tolist()
    return Chart(
        section="time",
        title="spans of the newest part of the traces",
        unit="share of the time",
        kind="lanes",
        series=[Series(key=name, label=name) for name in columns],
        data=[((edges[1:] - first) / 1e6).round(3).tolist(), *columns.values()],
    )
