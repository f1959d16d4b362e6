"""`areal watch`: the live view of a run in the terminal, and the same facts once as text or JSON."""

import argparse
import dataclasses
import itertools
import json
import re
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import orjson
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from areal.api.config import BaseExperimentConfig
from areal.api.config.load import load_experiment
from areal.api.errors import InputError, LedgerError
from areal.api.metrics import evaluations_of, result_text, rounded, unscored_text
from areal.cli.compare import Curve, sparkline
from areal.cli.predicted import Figure, against_plan, figure_text, read_plan
from areal.cli.show import safe
from areal.launcher.preflight import has_launcher
from areal.launcher.result import episodes_of, recorded_alarms, recorded_restarts
from areal.launcher.status import StatusSource
from areal.ledger.event_files import open_reader
from areal.ledger.show import setpoint_text
from areal.ledger.state import LedgerState
from areal.observe.alarms import Alarm, alarms_text, by_meaning
from areal.observe.causes import causes_text
from areal.serve.audit import FOLDER
from areal.serve.journal import opened_journal, undisturbed
from areal.serve.tenants import Model, Tenants
from areal.system.discovery import registry_of
from areal.system.heartbeat import Beat, read_beats
from areal.system.network import port_number
from areal.system.run_paths import RunPaths, existing_run

# What `areal watch` shows of a run, read from its folder and, while it runs, from its controller.

WINDOW = 20  # Steps over which rates, phases and staleness are averaged.
NUM_SAMPLES = 3
_EVALUATION = re.compile(r"eval/([^/]+(?:/[^/]+)?)/reward|eval/(loss)")
_NOT_EVALUATION = "/episode"
CURVES = {
    "reward": ("rollout/reward",), "loss": ("loss",), "entropy": ("actor/entropy",),
    "KL from the reference": ("batch/ref_kl",), "KL of the update": ("actor/approx_kl",),
    "answer length": ("batch/answer_length",), "gradient norm": ("actor/grad_norm", "grad_norm"),
}  # fmt: skip
"""Name -> the metrics of which the first recorded one is its curve."""
_SPEED = "rollout/generated_tokens_per_s"
_STALENESS = "rollout/staleness_frac/"
_SETPOINT = "rollout/setpoint/"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedProcess:
    name: str
    node: str
    device: str
    doing: str  # What its newest heartbeat says, with the seconds since it began that; empty without one.
    memory_gib: float | None  # Resident memory, of an ended process in its last step.
    silent_s: float | None  # Seconds from the newest heartbeat to the newest sign of the run; None without one.


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedModel:
    """An adapter of a service with its requests."""

    user: str
    model: str
    rank: int
    steps: int | None  # Optimiser steps in its weights; None = not known.
    answered: int
    failed: int
    waiting: int
    missing: int | None  # The request that others wait for, and that has not come.


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedService:
    sessions: int  # That have not ended.
    samplers: int
    saved_weights: int
    models: Sequence[WatchedModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    name: str  # eval/MODE or eval/MODE/SET
    step: int  # Train steps done.
    text: str  # Reward, standard error, and how many answers have no reward.
    unscored: str  # Empty = all answers have one.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    run: str
    state: str  # running, completed, failed, interrupted, or dead: it ended without a summary.
    cause: str  # Why it failed.
    step: int  # Train steps done.
    total_steps: int | None
    elapsed_s: float | None  # Seconds of training.
    step_s: float | None  # Median of the newest steps, evaluation included.
    eta_s: float | None  # Seconds of training that remain of a running run, at the speed of the newest steps.
    curves: dict[str, Curve]
    held_out: dict[str, Curve]  # Evaluation -> its curve.
    evaluations: Sequence[EvaluationResult]  # The newest result of each.
    unscored: Sequence[str]  # The newest results of evaluations with answers without a reward.
    staleness: Mapping[str, float]  # Staleness in versions -> share of the generated tokens of the newest steps.
    planned: Sequence[Figure]  # Figures of a plan beside those of the newest steps.
    causes: str  # What makes policy and servers differ, in a sentence; empty when it was not measured.
    setpoint: Mapping[str, float]  # Target, value, error and lead, mean of the newest steps; empty = no set-point.
    seconds_by_phase: Mapping[str, float]  # Mean of the newest steps, the longest first.
    waits: Mapping[str, float]  # Who waits for whom -> share of the time of the newest steps.
    waiting_for: str  # What a running run waits for now.
    tokens_per_s: float | None  # Generated.
    episodes: Mapping[str, Any]  # Numbers by state, and by reason; empty without a controller.
    first_failure: str
    alarms: Sequence[Alarm]
    restarts: Mapping[str, Sequence[str]]
    """Server, or all trainer ranks -> the causes of its restarts."""
    samples: Sequence[Mapping[str, Any]]
    """Rows of the newest table of samples: the highest reward, one between, the lowest."""
    samples_step: int | None
    servers: Sequence[Mapping[str, Any]]
    """State, version and load of each server of a running run, from its controller."""
    processes: Sequence[WatchedProcess]
    service: WatchedService | None
    """The tenants of `areal serve`."""


@dataclass(slots=True)
class GrowingRows:
    """Reads a metrics file to which a run adds lines."""

    path: Path
    _read_bytes: int = 0
    _file: int = -1

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The rows of the complete lines since the last call, and whether they replace all earlier ones: a recovery
        replaces the file, which is then read again."""
        try:
            with open(self.path, "rb") as file:
                number, is_new = self.path.stat().st_ino, False
                if number != self._file or self.path.stat().st_size < self._read_bytes:
                    self._file, self._read_bytes, is_new = number, 0, True
                file.seek(self._read_bytes)
                *lines, rest = file.read().split(b"\n")
                self._read_bytes = file.tell() - len(rest)
        except FileNotFoundError:
            return [], False
        return [row for line in lines if (row := _read_row(line))], is_new


def _read_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
        return row if isinstance(row["step"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


@dataclass(slots=True)
class _Metrics:
    """The rows of a growing metrics file. Only what is shown is kept."""

    rows: GrowingRows
    newest: deque[dict[str, Any]] = field(default_factory=lambda: deque[dict[str, Any]](maxlen=WINDOW + 1))
    points: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    results: dict[str, EvaluationResult] = field(default_factory=dict[str, EvaluationResult])
    """Evaluation -> its newest result."""

    def read(self) -> None:
        rows, is_new = self.rows.read()
        if is_new:
            self.newest.clear()
            self.points.clear()
        for row in rows:
            self._take(row["step"], row)

    def _take(self, step: int, row: dict[str, Any]) -> None:
        if step:  # line 0 is the evaluation before training
            self.newest.append(row)
        for name in evaluations_of(row):
            self.results[name] = EvaluationResult(
                name=name, step=step, text=result_text(row, name), unscored=unscored_text(row, name)
            )
        shown = {key for keys in CURVES.values() for key in keys} & row.keys()
        shown |= {key for key in row if _EVALUATION.fullmatch(key) and _NOT_EVALUATION not in key}
        for key in shown:
            if isinstance(row[key], int | float):
                self.points.setdefault(key, {})[step] = float(row[key])

    def curve(self, key: str) -> Curve | None:
        points = self.points.get(key)
        return Curve(list(points), list(points.values())) if points else None


class Watched:
    """A run that is looked at once or again and again."""

    def __init__(self, folder: Path) -> None:
        """InputError when `folder` is no run folder."""
        self._paths = RunPaths(folder.absolute())
        if not self._paths.config.is_file():
            raise InputError(f"{folder} is no run folder: it has no config.yaml", code="launch.no_run_folder")
        self.config: BaseExperimentConfig = load_experiment(
            ["--config", str(self._paths.config)], allow_unknown_top_level=True
        )
        self._metrics = _Metrics(GrowingRows(self._paths.metrics))
        self._plan = read_plan(self._paths.predicted)
        self._source: StatusSource | None = None
        self._token = ""
        self._last_status: dict[str, Any] | None = None
        self._last_episodes: dict[str, Any] | None = None
        self._clock = RunClock()

    def look(self) -> RunView:
        """Read what is new, and ask the controller of a running run."""
        paths, plan = self._paths, _json(self._paths.plan)
        self._metrics.read()
        is_running = has_launcher(paths)
        if is_running:
            self._last_episodes = None
        summary = {} if is_running else _newer(paths.summary, paths.plan)
        status = self._status(plan) if is_running else None
        rows = list(self._metrics.newest)
        last: dict[str, Any] = rows[-1] if rows else {}
        total = (status or {}).get("total_steps") or plan.get("numbers", {}).get("total_steps")
        step, step_s = int(last.get("step", 0)), _step_s(rows)
        samples_step, samples = _samples(paths)
        now_s = self._clock.now_s(newest_s(paths), time.monotonic())
        beats, since_beats_s = read_beats(paths.alive), max(0.0, now_s - written_s(paths.alive))
        return RunView(
            run=str(paths.root),
            state="running" if is_running else summary.get("status", "dead"),
            cause=summary.get("cause", ""),
            step=step,
            total_steps=total,
            elapsed_s=last.get("seconds/elapsed"),
            step_s=step_s,
            eta_s=(total - step) * step_s if is_running and total and step_s is not None else None,
            curves=self._curves(),
            held_out=self._held_out(),
            evaluations=list(self._metrics.results.values()),
            unscored=[
                f"{result.name}/reward: {result.text}" for result in self._metrics.results.values() if result.unscored
            ],
            staleness=_staleness(rows),
            causes=causes_text(rows),
            planned=against_plan(self._plan, rows[-WINDOW:]),
            setpoint=_setpoint(rows),
            seconds_by_phase=phases_of(rows),
            waits=waits_of(rows),
            waiting_for=(status or {}).get("waiting_for", ""),
            tokens_per_s=status["tokens_per_s"] if status else _tokens_per_s(rows),
            episodes=episodes_of(paths, status or self._last_status) or ({} if is_running else self._of_ledger()),
            first_failure=(status or {}).get("first_failure", ""),
            alarms=recorded_alarms(paths.alarms),
            samples=samples,
            samples_step=samples_step,
            restarts=recorded_restarts(paths),
            servers=((status or {}).get("replicas") or {}).get("replicas") or [],
            processes=[
                _process(process, beats.get(process["name"]), last, since_beats_s)
                for process in plan.get("processes", ())
            ],
            service=_service(paths.root / FOLDER / "journal"),
        )

    def _of_ledger(self) -> dict[str, Any]:
        """The episodes of a run whose controller was killed, from its ledger, which is read once."""
        if self._last_episodes is None:
            try:
                self._last_episodes = LedgerState.replay(open_reader(self._paths.ledger).events()).episodes()
            except LedgerError:  # a run without one
                self._last_episodes = {}
        return self._last_episodes

    def _status(self, plan: Mapping[str, Any]) -> dict[str, Any] | None:
        try:
            token = self._paths.token.read_text(encoding="utf-8").strip()
        except OSError:  # of another user, or the run has just ended
            return None
        if self._source is None or token != self._token:
            has_controller = any(process["role"] == "controller" for process in plan.get("processes", ()))
            self._token, self._source = (
                token,
                StatusSource(
                    registry_of(self.config),
                    self._paths.metrics,
                    has_controller=has_controller,
                    total_steps=None,
                    token=token,
                ),
            )
        self._last_status = status = self._source.status()
        return status

    def _curves(self) -> dict[str, Curve]:
        curves_of = {name: [self._metrics.curve(key) for key in keys] for name, keys in CURVES.items()}
        return {name: curves[0] for name, known in curves_of.items() if (curves := [curve for curve in known if curve])}

    def _held_out(self) -> dict[str, Curve]:
        held_out: dict[str, Curve] = {}
        for key in self._metrics.points:
            match, curve = _EVALUATION.fullmatch(key), self._metrics.curve(key)
            if match and curve:
                held_out[match[1] or match[2]] = curve
        return held_out


def _service(journal: Path) -> WatchedService | None:
    """The tenants by the journal of a service. None = the run is no service, or its journal is damaged."""
    if not journal.is_dir():
        return None
    try:
        tenants = undisturbed(journal, lambda: _read(journal))
    except LedgerError:
        return None
    return WatchedService(
        sessions=len(tenants.sessions) - len(tenants.ended),
        samplers=len(tenants.samplers),
        saved_weights=len(tenants.saved),
        models=[_model(model, tenants.key_of(model.session)) for model in tenants.models.values()],
    )


def _read(journal: Path) -> Tenants:
    tenants = Tenants()
    for event in opened_journal(journal)[1]:
        tenants.apply(event)
    return tenants


def _model(model: Model, user: str) -> WatchedModel:
    counts = model.counts()
    return WatchedModel(
        user=user,
        model=model.id,
        rank=model.settings["rank"],
        steps=model.num_steps,
        answered=counts["computed"] + counts["failed"],
        failed=counts["failed"],
        waiting=counts["waiting"],
        missing=model.num_done if counts["waiting"] and model.num_done not in model.operations else None,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _newer(summary: Path, plan: Path) -> dict[str, Any]:
    """The summary, unless a later launch has written its plan and died."""
    try:
        return _json(summary) if summary.stat().st_mtime_ns >= plan.stat().st_mtime_ns else {}
    except OSError:
        return _json(summary)


def _step_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    times = [row["time"] for row in rows]
    return median(after - before for before, after in pairwise(times)) if len(times) > 1 else None


def _tokens_per_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean of the newest steps. In the last ones less is generated, because no batch needs more."""
    speeds = [row[_SPEED] for row in rows if _SPEED in row]
    return fmean(speeds) if speeds else None


def _staleness(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    newest = [row for row in rows[-WINDOW:] if "rollout/staleness_mean" in row]
    names = sorted({name for row in newest for name in row if name.startswith(_STALENESS)}, key=_number)
    return {name.removeprefix(_STALENESS): fmean(row.get(name, 0.0) for row in newest) for name in names}


def _setpoint(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = {name for row in rows[-WINDOW:] for name in row if name.startswith(_SETPOINT)}
    means = {name: fmean(row[name] for row in rows[-WINDOW:] if name in row) for name in names}
    return {name.removeprefix("rollout/"): value for name, value in means.items()}


def _number(name: str) -> int:
    digits = re.sub(r"\D", "", name)
    return int(digits) if digits else 0


def phases_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean seconds of each phase in the newest of these steps, the longest first."""
    newest = rows[-WINDOW:]
    names = {name for row in newest for name in row if name.startswith("seconds/")}
    names -= {"seconds/step", "seconds/elapsed"}
    mean = {name.removeprefix("seconds/"): fmean(row.get(name, 0.0) for row in newest) for name in names}
    return dict(sorted(mean.items(), key=lambda item: -item[1]))


def waits_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of the newest steps, from the phases of trainer rank 0 and from the state when each batch was made."""
    newest = rows[-WINDOW:]
    if not newest or "rollout/running" not in newest[-1]:
        return {}
    seconds = sum(row["seconds/step"] for row in newest) or 1.0

    def share(phase: str) -> float:
        return sum(row.get(f"seconds/{phase}", 0.0) for row in newest) / seconds

    return {
        "the trainer waits for answers": share("rollout"),
        "the trainer sends weights, or waits until the servers have them": share("publish_weights"),
        "the servers wait for the trainer": fmean(row["rollout/running"] == 0 for row in newest),
    }


def _samples(paths: RunPaths) -> tuple[int | None, list[dict[str, Any]]]:
    """The step and rows of the newest table of samples, which is sorted by reward."""
    newest = max(paths.samples.glob("step-*.jsonl"), default=None)
    if newest is None:
        return None, []
    try:
        rows: list[dict[str, Any]] = [orjson.loads(line) for line in newest.read_bytes().splitlines()]
    except (OSError, ValueError):
        return None, []
    places = sorted({round(part * (len(rows) - 1) / (NUM_SAMPLES - 1)) for part in range(NUM_SAMPLES)} if rows else ())
    return int(newest.stem.removeprefix("step-")), [rows[place] for place in places]


def newest_s(paths: RunPaths) -> float:
    """When the newest file that running processes write was written, by the clock of the file system; 0 without one."""
    return max(map(written_s, (paths.metrics, paths.ledger, paths.alive, *paths.logs.glob("*.log"))))


def written_s(path: Path) -> float:
    """When a file was written, by the clock of its file system; 0 when it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class RunClock:
    """The time of a run by the clock of its files, because the clock of this machine may be another one."""

    def __init__(self) -> None:
        self._newest_s = self._seen_s = 0.0

    def now_s(self, newest_s: float, local_s: float) -> float:
        """The time of the newest file, and the local seconds since it was first seen.

        Of a run whose processes all hang, only the time since the first look counts.
        """
        if newest_s > self._newest_s:
            self._newest_s, self._seen_s = newest_s, local_s
        return self._newest_s + local_s - self._seen_s


def _process(
    planned: Mapping[str, Any], beat: Beat | None, last: Mapping[str, Any], since_beats_s: float
) -> WatchedProcess:
    """`beat`: None of a process that has ended. `since_beats_s`: seconds since the launcher wrote the heartbeats."""
    in_metrics: float | None = last.get(f"memory/{planned['name']}")
    return WatchedProcess(
        name=planned["name"],
        node=beat.node if beat and beat.node else planned["host"]["node"],
        device=f"GPU {','.join(planned['gpus'])}" if planned["gpus"] else planned["device"],
        doing=f"{beat.doing} ({beat.for_s:.0f} s)" if beat else "",
        memory_gib=beat.resident_bytes / 2**30 if beat and beat.resident_bytes else in_metrics,
        silent_s=beat.silent_s + since_beats_s if beat else None,
    )


# The picture of a run that `areal watch` draws with rich: panels of curves, shares, samples and processes.

_STATES = {"running": "cyan", "completed": "green", "interrupted": "yellow", "failed": "red", "dead": "red"}
_COLORS = ("cyan", "magenta", "yellow", "green", "blue")
_CHART_ROWS, _LABEL = 9, 8
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character by row and column of its dots."""
_BAR = 18
_MIN_SHARE = 0.005
_MAX_TEXT = 160
_WIDE = 100  # Columns from which on panels are next to each other.


def view(seen: RunView, width: int) -> RenderableType:
    parts: list[RenderableType] = [_head(seen)]
    parts += _training(seen, width) if seen.service is None else [_panel("tenants", _tenants(seen.service))]
    if problems := problems_of(seen):
        text = Text("\n".join(problems))
        parts.append(Panel(text, title="failures and alarms", title_align="left", border_style="red"))
    if seen.samples:
        parts.append(_panel(f"samples of step {seen.samples_step}", _sample_texts(seen)))
    parts.append(_panel("processes", _processes(seen.processes)))
    return Group(*parts)


def _training(seen: RunView, width: int) -> Sequence[RenderableType]:
    half = width // 2 - 4 if width >= _WIDE else width - 4
    main = {name: seen.curves[name] for name in ("reward", "loss") if name in seen.curves}
    rest = {name: curve for name, curve in seen.curves.items() if name not in main}
    title = "reward and held-out sets" if "reward" in main else "loss"
    left, right = _chart(main | seen.held_out, half), _curves(rest | seen.held_out, half)
    times = _panel(f"time of a step, mean of the last {WINDOW} steps", _times(seen))
    curves = [_panel(title, left), _panel("curves", right)]
    return _row(curves, width), _row([times, _panel("episodes", _episodes(seen))], width)


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


def _head(seen: RunView) -> Text:
    text = Text(overflow="fold")
    text.append("/".join(Path(seen.run).parts[-2:]), style="bold")
    text.append(f"  {seen.state}", style=f"bold {_STATES.get(seen.state, 'white')}")
    share = min(1.0, seen.step / seen.total_steps) if seen.total_steps else 0.0
    filled = round(share * _BAR)
    if seen.service is None:
        text.append(f"  {'━' * filled}", style="cyan").append("━" * (_BAR - filled), style="bright_black")
        text.append(f" step {seen.step}/{seen.total_steps or '?'}")
    for name, value in (
        ("ETA ", _duration(seen.eta_s)),
        ("", None if seen.step_s is None else f"{seen.step_s:.3g} s/step"),
        ("", None if seen.tokens_per_s is None else f"{seen.tokens_per_s:,.0f} tokens/s"),
        ("trained for ", _duration(seen.elapsed_s)),
    ):
        if value is not None:
            text.append(f"  {name}{value}")
    if seen.cause:
        text.append(f"\n{safe(seen.cause)}", style="red")
    if seen.waiting_for:
        text.append(f"\nwaits for {safe(seen.waiting_for)}", style="bright_black")
    return text


def _duration(seconds: float | None) -> str | None:
    return None if seconds is None else str(timedelta(seconds=round(seconds)))


def _chart(curves: Mapping[str, Curve], width: int) -> RenderableType:
    if not curves:
        return Text("no train step yet", style="bright_black")
    legend = Text()
    for color, (name, curve) in zip(itertools.cycle(_COLORS), curves.items(), strict=False):
        legend.append(f"— {name} {rounded(curve.values[-1])}  ", style=color)
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
            name, Text(sparkline(curve.values, low, high, width=bars), style="cyan"), rounded(curve.values[-1])
        )
    return table if curves else Text("none yet", style="bright_black")


def _shares(rows: Sequence[tuple[str, float, str]]) -> Table:
    table = Table.grid(padding=(0, 1))
    for name, share, text in rows:
        filled = round(min(1.0, share) * _BAR)
        bar = Text("█" * filled, style="cyan").append("░" * (_BAR - filled), style="bright_black")
        table.add_row(name, bar, text)
    return table


def _times(seen: RunView) -> RenderableType:
    total = sum(seen.seconds_by_phase.values()) or 1.0
    phases = [
        (name, spent / total, f"{spent:.3g} s")
        for name, spent in seen.seconds_by_phase.items()
        if spent >= _MIN_SHARE * total
    ]
    waits = [(name, share, f"{share:.0%}") for name, share in seen.waits.items()]
    parts: list[RenderableType] = [_shares(phases)] if phases else [Text("no train step yet", style="bright_black")]
    if waits:
        parts += [Text(f"\nwho waits for whom, last {WINDOW} steps", style="bold"), _shares(waits)]
    if seen.planned:
        parts.append(Text(f"\nthe plan, and the last {WINDOW} steps", style="bold"))
        parts += [Text(figure_text(figure)) for figure in seen.planned]
    return Group(*parts)


def _episodes(seen: RunView) -> RenderableType:
    names = ("running", "waiting", "consumed", "rejected", "failed")
    counts = ", ".join(f"{seen.episodes[name]} {name}" for name in names if name in seen.episodes)
    parts: list[RenderableType] = [Text(counts or "no rollouts")]
    reasons: Mapping[str, int] = seen.episodes.get("reasons", {})
    for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1])[:4]:
        parts.append(Text(f"  {count} {safe(reason)}", style="yellow", no_wrap=True, overflow="ellipsis"))
    if seen.staleness:
        rows = [(name, share, f"{share:.0%} of the tokens") for name, share in seen.staleness.items()]
        parts += [Text(f"\nstaleness in policy versions, last {WINDOW} steps", style="bold"), _shares(rows)]
    if seen.causes:
        parts.append(Text(seen.causes))
    if seen.setpoint:
        parts.append(Text(setpoint_text(seen.setpoint)))
    return Group(*parts)


def problems_of(seen: RunView) -> list[str]:
    """A line for each failure, restart, evaluation with answers without a reward, and group of the newest alarms."""
    lines = [f"first failure: {safe(seen.first_failure)}"] if seen.first_failure else []
    lines += [f"{name} was restarted: {safe(cause)}" for name, causes in seen.restarts.items() for cause in causes]
    lines += seen.unscored
    return lines + [alarms_text(group) for group in by_meaning(seen.alarms)[-3:]]


def _sample_texts(seen: RunView) -> RenderableType:
    table = Table(box=None, expand=True, padding=(0, 1), header_style="bright_black")
    for name, ratio in (("reward", None), ("prompt", 1), ("answer", 2), ("end", None)):
        table.add_column(name, ratio=ratio, no_wrap=ratio is None)
    for row in seen.samples:
        parts = "".join(f"\n{name} {score:g}" for name, score in row["reward_parts"].items())
        end = f"{row['stop_reason']}, {row['num_generated']} tokens"
        table.add_row(f"{row['reward']:g}{parts}", _short(row["prompt"]), _short(row["answer"]), end)
    return table


def _short(text: str) -> Text:
    """The end of a prompt or an answer, which has the question or the result."""
    text = safe(text).strip()
    return Text(text if len(text) <= _MAX_TEXT else f"...{text[-_MAX_TEXT:]}")


def _tenants(service: WatchedService) -> RenderableType:
    table = Table(box=None, expand=True, padding=(0, 1), header_style="bright_black")
    for name in ("user", "model", "rank", "steps", "answered", "failed", "waiting"):
        table.add_column(name, overflow="ellipsis" if name == "model" else "fold")
    for model in service.models:
        waiting = f"{model.waiting}" if model.missing is None else f"{model.waiting} for request {model.missing}"
        numbers = (model.rank, model.steps, model.answered, model.failed)
        table.add_row(safe(model.user), safe(model.model), *("?" if n is None else str(n) for n in numbers), waiting)
    counts = f"{service.sessions} sessions, {service.samplers} samplers, {service.saved_weights} saved weights"
    return Group(Text(counts), table)


def _processes(processes: Sequence[WatchedProcess]) -> Table:
    table = Table(box=None, expand=True, padding=(0, 1), header_style="bright_black")
    for name in ("node", "process", "device", "memory", "heartbeat"):
        table.add_column(name, no_wrap=True)
    table.add_column("does", ratio=1, no_wrap=True, overflow="ellipsis")
    for node, group in itertools.groupby(
        sorted(processes, key=lambda process: process.node), key=lambda process: process.node
    ):
        for place, process in enumerate(group):
            memory = "" if process.memory_gib is None else f"{process.memory_gib:.2f} GiB"
            silent = "none" if process.silent_s is None else f"{process.silent_s:.0f} s ago"
            table.add_row("" if place else node, process.name, process.device, memory, silent, safe(process.doing))
    return table


def watch(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="areal watch",
        description="Show reward, held-out results, waits, phases, failures, samples and processes of a run. A running "
        "run is shown until it ends or Ctrl-C, which does not affect it; another one, or without a terminal, once.",
    )
    parser.add_argument("run", metavar="RUN", type=existing_run, help="folder of the run, or experiment/trial")
    parser.add_argument("--once", action="store_true", help="print the view once")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between updates (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print the facts once as JSON")
    parser.add_argument("--web", action="store_true", help="serve a page for a browser on this machine")
    parser.add_argument("--port", type=port_number, metavar="N", help="of the page (default: any free one)")
    args = parser.parse_args(words)
    if args.port is not None and not args.web:
        parser.error("--port is that of the page: add --web")
    if args.web and (args.json or args.once):
        parser.error("--web serves a page until Ctrl-C: not with --json or --once")
    watched = Watched(args.run)
    if args.web:
        from areal.cli.page_server import serve_page

        return serve_page(args.run.absolute(), port=args.port or 0, interval_s=args.interval)
    seen = watched.look()
    if args.json:
        sys.stdout.write(orjson.dumps(dataclasses.asdict(seen)).decode() + "\n")
        return 0
    console = Console()
    if args.once or not console.is_terminal or seen.state != "running":
        console.print(view(seen, console.width))
        return 0
    try:
        with Live(view(seen, console.width), console=console, auto_refresh=False, screen=True) as live:
            while seen.state == "running":
                time.sleep(args.interval)
                seen = watched.look()
                live.update(view(seen, console.width), refresh=True)
    except KeyboardInterrupt:
        pass
    console.print(view(seen, console.width))
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.1 to 3600")
    return seconds
