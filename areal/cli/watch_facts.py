"""What `areal watch` shows of a run, read from its folder and, while it runs, from its controller."""

import json
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import orjson

from areal.api.config import BaseExperimentConfig
from areal.api.config.load import load_experiment
from areal.api.errors import InputError
from areal.cli.compare import Curve
from areal.launcher.preflight import has_launcher
from areal.launcher.result import episodes_of, recorded_alarms
from areal.launcher.status import StatusSource
from areal.observe.alarms import Alarm
from areal.system.discovery import registry_of
from areal.system.heartbeat import Beat, read_beats
from areal.system.run_paths import RunPaths

WINDOW = 20
"""Steps over which rates, phases and staleness are averaged."""
NUM_SAMPLES = 3
_EVALUATION = re.compile(r"eval/([^/]+(?:/[^/]+)?)/reward|eval/(loss)")
_NOT_EVALUATION = "/episode"
_CURVES = {
    "reward": ("rollout/reward",),
    "loss": ("loss",),
    "entropy": ("actor/entropy",),
    "KL from the reference": ("batch/ref_kl",),
    "KL of the update": ("actor/approx_kl",),
    "answer length": ("batch/answer_length",),
    "gradient norm": ("actor/grad_norm", "grad_norm"),
}
"""Name -> the metrics of which the first recorded one is its curve."""
_SPEED = "rollout/generated_tokens_per_s"
_STALENESS = "rollout/staleness_frac/"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedProcess:
    """One process of the plan."""

    name: str
    node: str
    device: str
    doing: str
    """From its newest heartbeat, with the seconds since it began that; empty without one."""
    memory_gib: float | None
    """Resident memory, of an ended process in its last step."""
    silent_s: float | None
    """Seconds from the newest heartbeat to the newest sign of the run; None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Everything that one look at a run shows."""

    run: str
    state: str
    """running, completed, failed, interrupted, or dead: it ended without a summary."""
    cause: str
    """Why it failed."""
    step: int
    """Train steps done."""
    total_steps: int | None
    elapsed_s: float | None
    """Of training."""
    step_s: float | None
    """Median of the newest steps, evaluation included."""
    eta_s: float | None
    """Seconds of training that remain of a running run, at the speed of the newest steps."""
    curves: dict[str, Curve]
    held_out: dict[str, Curve]
    """Evaluation -> its curve."""
    staleness: Mapping[str, float]
    """Staleness in versions -> share of the generated tokens of the newest steps."""
    seconds_by_phase: Mapping[str, float]
    """Mean of the newest steps, the longest first."""
    waits: Mapping[str, float]
    """Who waits for whom -> share of the time of the newest steps."""
    waiting_for: str
    """What a running run waits for now."""
    tokens_per_s: float | None
    """Generated."""
    episodes: Mapping[str, Any]
    """Numbers by state, and by reason; empty without a controller."""
    first_failure: str
    alarms: Sequence[Alarm]
    restarts: Mapping[str, Sequence[str]]
    """Of an ended run: server, or all trainer ranks -> the causes of its restarts."""
    samples: Sequence[Mapping[str, Any]]
    """Rows of the newest table of samples: the highest reward, one between, the lowest."""
    samples_step: int | None
    processes: Sequence[WatchedProcess]


@dataclass(slots=True)
class _Metrics:
    """The rows of a growing metrics file. Only what is shown is kept."""

    path: Path
    newest: deque[dict[str, Any]] = field(default_factory=lambda: deque[dict[str, Any]](maxlen=WINDOW + 1))
    points: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    _read_bytes: int = 0
    _file: int = -1

    def read(self) -> None:
        """Read the complete lines since the last call. A recovery replaces the file, which is then read again."""
        try:
            with open(self.path, "rb") as file:
                number = self.path.stat().st_ino
                if number != self._file or self.path.stat().st_size < self._read_bytes:
                    self.newest.clear()
                    self.points.clear()
                    self._file, self._read_bytes = number, 0
                file.seek(self._read_bytes)
                *lines, rest = file.read().split(b"\n")
                self._read_bytes = file.tell() - len(rest)
        except FileNotFoundError:
            return
        for line in lines:
            try:
                row = orjson.loads(line)
                self._take(row["step"], row)
            except (ValueError, KeyError, TypeError):
                continue

    def _take(self, step: int, row: dict[str, Any]) -> None:
        if step:  # line 0 is the evaluation before training
            self.newest.append(row)
        shown = {key for keys in _CURVES.values() for key in keys} & row.keys()
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
        self._config: BaseExperimentConfig = load_experiment(
            ["--config", str(self._paths.config)], allow_unknown_top_level=True
        )
        self._metrics = _Metrics(self._paths.metrics)
        self._source: StatusSource | None = None
        self._token = ""
        self._last_status: dict[str, Any] | None = None
        self._clock = RunClock()

    def look(self) -> RunView:
        """Read what is new, and ask the controller of a running run."""
        paths, plan = self._paths, _json(self._paths.plan)
        self._metrics.read()
        is_running = has_launcher(paths)
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
            staleness=_staleness(rows),
            seconds_by_phase=_phases(rows),
            waits=_waits(rows),
            waiting_for=(status or {}).get("waiting_for", ""),
            tokens_per_s=status["tokens_per_s"] if status else _tokens_per_s(rows),
            episodes=episodes_of(paths, status or self._last_status) or {},
            first_failure=(status or {}).get("first_failure", ""),
            alarms=recorded_alarms(paths.alarms),
            samples=samples,
            samples_step=samples_step,
            restarts=summary.get("restarts", {}),
            processes=[
                _process(process, beats.get(process["name"]), last, since_beats_s)
                for process in plan.get("processes", ())
            ],
        )

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
                    registry_of(self._config),
                    self._paths.metrics,
                    has_controller=has_controller,
                    total_steps=None,
                    token=token,
                ),
            )
        self._last_status = status = self._source.status()
        return status

    def _curves(self) -> dict[str, Curve]:
        found = {name: [self._metrics.curve(key) for key in keys] for name, keys in _CURVES.items()}
        return {name: curves[0] for name, known in found.items() if (curves := [curve for curve in known if curve])}

    def _held_out(self) -> dict[str, Curve]:
        found: dict[str, Curve] = {}
        for key in self._metrics.points:
            match, curve = _EVALUATION.fullmatch(key), self._metrics.curve(key)
            if match and curve:
                found[match[1] or match[2]] = curve
        return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
    found = [row[_SPEED] for row in rows if _SPEED in row]
    return fmean(found) if found else None


def _staleness(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    newest = [row for row in rows[-WINDOW:] if "rollout/staleness_mean" in row]
    names = sorted({name for row in newest for name in row if name.startswith(_STALENESS)}, key=_number)
    return {name.removeprefix(_STALENESS): fmean(row.get(name, 0.0) for row in newest) for name in names}


def _number(name: str) -> int:
    digits = re.sub(r"\D", "", name)
    return int(digits) if digits else 0


def _phases(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    newest = rows[-WINDOW:]
    names = {name for row in newest for name in row if name.startswith("seconds/")}
    names -= {"seconds/step", "seconds/elapsed"}
    mean = {name.removeprefix("seconds/"): fmean(row.get(name, 0.0) for row in newest) for name in names}
    return dict(sorted(mean.items(), key=lambda item: -item[1]))


def _waits(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
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
