"""Trackers of metrics: metrics.jsonl always, dashboards (TensorBoard, Weights & Biases, SwanLab) when configured."""

import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from areal.api.config import BaseExperimentConfig, SwanlabConfig, WandBConfig
from areal.api.config.redaction import public, public_text
from areal.api.errors import ConfigError
from areal.system.durable import append_whole, write_atomic
from areal.system.run_paths import RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One trajectory in a table of samples."""

    group: int
    """Equal for the trajectories of one prompt."""
    reward: float
    reward_parts: dict[str, float]
    prompt: str
    answer: str
    """Everything after the prompt, special tokens included."""
    num_generated: int
    """Generated tokens."""
    versions: list[int]
    """Lowest and highest policy version of the generated tokens; empty = none was generated."""
    stop_reason: str

    def cells(self) -> list[str]:
        """The row as text, in the order of SAMPLE_COLUMNS."""
        parts = ", ".join(f"{name} {score:g}" for name, score in self.reward_parts.items())
        versions = " to ".join(map(str, dict.fromkeys(self.versions)))
        return [
            f"{self.reward:g}",
            parts,
            self.prompt,
            self.answer,
            str(self.num_generated),
            versions,
            self.stop_reason,
            str(self.group),
        ]


SAMPLE_COLUMNS = ("reward", "parts", "prompt", "answer", "generated tokens", "versions", "stop reason", "group")


class Tracker(Protocol):
    """Receives the metrics of every train step, and a table of samples at some."""

    def log(self, step: int, values: dict[str, float]) -> None: ...
    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None: ...
    def flush(self) -> None:
        """Return when everything logged survives this process. A recovery continues after it."""
        ...

    def close(self) -> None: ...


class StepLines:
    """A file of JSON objects, one per line, each with the train step and the time (Unix seconds) of its writing."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        """Open for append. Removes lines from `first_step` on, which an attempt that died has written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if _is_before(line, first_step)]
        if kept != lines:
            write_atomic(path, b"".join(kept))
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def append(self, step: int, facts: Mapping[str, Any]) -> None:
        line = json.dumps({"step": step, "time": round(time.time(), 3), **facts}, allow_nan=False)
        append_whole(self._file, line.encode() + b"\n")

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.flush()
            self._file.close()


def read_step_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a StepLines file; none where there is no file. Damaged lines are left out."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if _step_of(line) is not None]


class JsonlTracker(StepLines):
    """metrics.jsonl: the values of every step; null for a value that is not finite.

    The samples of a step are a file `samples/step-000100.jsonl` next to it, one line per row.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        """Also removes the samples from `first_step` on."""
        super().__init__(path, first_step=first_step)
        self._samples = path.parent / "samples"
        for old in self._samples.glob("step-*.jsonl"):
            if first_step <= 1 or old.name >= _samples_name(first_step):
                old.unlink()

    def log(self, step: int, values: dict[str, float]) -> None:
        self.append(step, {name: value if math.isfinite(value) else None for name, value in values.items()})

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._samples.mkdir(exist_ok=True)
        lines = [orjson.dumps({"step": step} | dataclasses.asdict(row)) + b"\n" for row in rows]
        write_atomic(self._samples / _samples_name(step), b"".join(lines))


def _samples_name(step: int) -> str:
    return f"step-{step:06d}.jsonl"


def _is_before(line: bytes, first_step: int) -> bool:
    """Whether a line is complete and of a step before `first_step`. A start from step 1 keeps nothing."""
    step = _step_of(line)
    return step is not None and first_step > 1 and step < first_step


def _step_of(line: bytes) -> int | None:
    """The step of a complete line; None of a damaged one."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


class TensorBoardTracker:
    def __init__(self, folder: Path, *, first_step: int) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise _missing("stats_logger.tensorboard.path", "tensorboardX", "tensorboard") from None
        purge_step = first_step if first_step > 1 else None
        self._writer = SummaryWriter(logdir=str(folder), purge_step=purge_step)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in _finite(values).items():
            self._writer.add_scalar(name, value, global_step=step)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """As a Markdown table, which TensorBoard shows under Text."""
        lines = [SAMPLE_COLUMNS, ["---"] * len(SAMPLE_COLUMNS), *(map(_markdown_cell, row.cells()) for row in rows)]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(line)} |" for line in lines), global_step=step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandBTracker:
    """A Weights & Biases run. The x axis is a metric, `train_step`, so that steps can repeat after a recovery."""

    def __init__(self, settings: WandBConfig, config: BaseExperimentConfig, folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("stats_logger.wandb.mode", "wandb", "wandb") from None
        folder.mkdir(parents=True, exist_ok=True)
        given = {"base_url": settings.wandb_base_url, "api_key": settings.wandb_api_key}
        connection: dict[str, Any] = {name: value for name, value in given.items() if value}
        names = [config.experiment_name, config.trial_name]
        try:
            self._run = wandb.init(
                mode=settings.mode,  # pyright: ignore[reportArgumentType] - the choices are checked with the config
                dir=str(folder),
                id="_".join([*names, *filter(None, [settings.id_suffix])]),
                resume="allow",
                entity=settings.entity,
                project=settings.project or config.experiment_name,
                name=settings.name or config.trial_name,
                job_type=settings.job_type,
                group=settings.group or "_".join(names),
                notes=settings.notes,
                tags=settings.tags,
                config=public(dataclasses.asdict(config)),
                settings=wandb.Settings(console="off", silent=True, **connection),
            )
        except (wandb.Error, ValueError) as error:
            # A ValueError quotes the setting that it refuses, which may contain a password.
            reason = public_text(str(error)) if isinstance(error, wandb.Error) else "check wandb_base_url and its key"
            message = f"stats_logger.wandb.mode={settings.mode}: wandb did not start: {reason}"
            raise ConfigError(message, code="launch.tracker_failed") from None
        self._table = wandb.Table
        self._run.define_metric("train_step", hidden=True)
        self._run.define_metric("*", step_metric="train_step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(_finite(values) | {"train_step": step})

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        table = self._table(columns=list(SAMPLE_COLUMNS), data=[row.cells() for row in rows])
        self._run.log({"samples": table, "train_step": step})

    def flush(self) -> None:
        """wandb sends and keeps everything in a separate process."""

    def close(self) -> None:
        self._run.finish()


class SwanLabTracker:
    def __init__(self, settings: SwanlabConfig, config: BaseExperimentConfig, folder: Path) -> None:
        try:
            import swanlab
        except ImportError:
            raise _missing("stats_logger.swanlab.mode", "swanlab", "swanlab") from None
        folder.mkdir(parents=True, exist_ok=True)
        if settings.api_key:
            swanlab.login(api_key=settings.api_key)
        quiet = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})  # pyright: ignore[reportArgumentType] - pydantic takes the mapping
        self._run = swanlab.init(
            mode="online" if settings.mode == "cloud" else settings.mode,  # pyright: ignore[reportArgumentType]
            log_dir=str(folder),
            project=settings.project or config.experiment_name,
            name=settings.name or f"{config.trial_name}_train",
            config=public(dataclasses.asdict(config)),
            settings=quiet,
        )
        self._text = swanlab.Text

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(_finite(values), step=step)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """One text per row: SwanLab shows texts at each step."""
        texts = [self._text(f"{row.prompt}\n-- answer\n{row.answer}", caption=f"reward {row.reward:g}") for row in rows]
        self._run.log({"samples": texts}, step=step)

    def flush(self) -> None:
        """SwanLab writes everything at once."""

    def close(self) -> None:
        self._run.finish()


def build_trackers(config: BaseExperimentConfig, paths: RunPaths, *, first_step: int = 0) -> list[Tracker]:
    """All configured trackers, for rank 0. `first_step` is the first step that will be logged."""
    trackers: list[Tracker] = [JsonlTracker(paths.metrics, first_step=first_step)]
    chosen = config.stats_logger
    if chosen.tensorboard.path is not None:
        trackers.append(TensorBoardTracker(Path(chosen.tensorboard.path), first_step=first_step))
    if chosen.wandb.mode != "disabled":
        trackers.append(WandBTracker(chosen.wandb, config, paths.root))
    if chosen.swanlab.mode != "disabled":
        trackers.append(SwanLabTracker(chosen.swanlab, config, paths.root / "swanlog"))
    return trackers


def _missing(key: str, package: str, extra: str) -> ConfigError:
    message = f"{key} needs the package {package}: pip install 'areal[{extra}]'"
    return ConfigError(message, code="launch.package_missing")


def _markdown_cell(text: str) -> str:
    """Text of a model inside a Markdown table: no markup, no new rows."""
    return re.sub(r"([\\`*_<>|#\[\]])", r"\\\1", text).replace("\n", "<br>")


def _finite(values: dict[str, float]) -> dict[str, float]:
    """Dashboards show finite numbers only; the others are in metrics.jsonl."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
