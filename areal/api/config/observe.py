"""Owns the options of saving, evaluating, recovering, tracking and tracing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from areal.api.config.fields import Problems, choice, number


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """When something happens: any of the three fires; all null = never."""

    freq_epochs: int | None = number(None, low=1)
    """Every so many epochs; null = not by epochs."""
    freq_steps: int | None = number(None, low=1)
    """Every so many train steps; null = not by steps."""
    freq_secs: int | None = number(None, low=1)
    """Every so many seconds; null = not by time."""

    @property
    def is_set(self) -> bool:
        """Whether it ever happens by cadence."""
        return any(freq is not None for freq in (self.freq_epochs, self.freq_steps, self.freq_secs))


@dataclass(frozen=True, kw_only=True)
class SaverConfig(Cadence):
    """Hugging Face exports below checkpoints/. The last step of a run is always exported."""

    keep_last: int | None = number(None, low=1)
    """Exports kept, oldest removed first; null = all."""


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig(Cadence):
    """Evaluation on valid_dataset with the training workflow. The last step of a run is always evaluated."""

    eval_before_train: bool = False
    """Evaluate once before the first step."""
    modes: list[str] = field(default_factory=lambda: ["sampled"])
    """Which evaluations: sampled = with eval_gconfig, greedy = the same with greedy choice."""
    stop_at: dict[str, float] = field(default_factory=dict[str, float])
    """Training ends early once the mean reward of every mode named here reaches its number, e.g. {greedy: 0.95}."""

    def problems(self) -> Problems:
        for mode in self.modes:
            if mode not in ("sampled", "greedy"):
                yield "modes", f"{mode!r} is not an evaluation mode: use sampled or greedy"
        if not self.modes or len(set(self.modes)) < len(self.modes):
            yield "modes", f"{self.modes} must hold sampled, greedy or both, each once"
        for mode, goal in self.stop_at.items():
            if mode not in self.modes:
                yield "stop_at", f"{mode!r} is not among modes={self.modes}: add it there"
            if not math.isfinite(goal):
                yield "stop_at", f"{goal} for {mode!r} is never reached: use a finite number"


@dataclass(frozen=True, kw_only=True)
class RecoverConfig(Cadence):
    """Recovery checkpoints: everything a restarted run needs to go on. The end of a run is one too."""

    mode: str = choice("disabled", "disabled", "auto", "fault", "resume")
    """disabled = never; auto = whenever possible; fault = only trainers that died in this launch; resume = must."""
    retries: int = number(3, low=0)
    """Restarts of one process, all trainer ranks counting as one, until the run gets a train step further."""

    def problems(self) -> Problems:
        if self.mode in ("auto", "fault") and not self.is_set:
            yield "mode", f"{self.mode} needs recovery checkpoints, but none is ever written: set freq_steps"


@dataclass(frozen=True, kw_only=True)
class WandBConfig:
    """Weights & Biases."""

    mode: str = choice("disabled", "disabled", "online", "offline", "shared")
    """disabled = off; offline writes to the run folder."""
    wandb_base_url: str = ""
    """Own server; empty = the public one."""
    wandb_api_key: str = ""
    """Key; empty = what the environment holds."""
    entity: str | None = None
    """Team or user; null = the key's default."""
    project: str | None = None
    """Project; null = experiment_name."""
    name: str | None = None
    """Run name; null = trial_name."""
    job_type: str | None = None
    """Job type tag; null = none."""
    group: str | None = None
    """Group; null = experiment_name_trial_name."""
    notes: str | None = None
    """Notes; null = none."""
    tags: list[str] | None = None
    """Tags; null = none."""
    id_suffix: str | None = "train"
    """Ending of the run id; null = none."""


@dataclass(frozen=True, kw_only=True)
class SwanlabConfig:
    """SwanLab."""

    project: str | None = None
    """Project; null = experiment_name."""
    name: str | None = None
    """Run name; null = trial_name with _train."""
    mode: str = choice("disabled", "disabled", "cloud", "local", "offline")
    """disabled = off; offline and local write to the run folder."""
    api_key: str | None = None
    """Key; null = what the environment holds."""


@dataclass(frozen=True, kw_only=True)
class TensorBoardConfig:
    """TensorBoard."""

    path: str | None = None
    """Folder of the event files; null = off."""


@dataclass(frozen=True, kw_only=True)
class StatsLoggerConfig:
    """Where metrics go. metrics.jsonl in the run folder is always written."""

    wandb: WandBConfig = field(default_factory=WandBConfig)
    """Weights & Biases."""
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig)
    """SwanLab."""
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    """TensorBoard."""


@dataclass(frozen=True, kw_only=True)
class PerfTracerConfig:
    """Chrome-trace spans of the phases of every trainer rank."""

    enabled: bool = False
    """Write trace/{process}.jsonl in the run folder."""
    save_interval: int = number(1, low=1)
    """Write to disk every so many train steps."""
