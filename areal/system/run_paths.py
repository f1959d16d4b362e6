"""Owns where the files of one run lie below cluster.fileroot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from areal.api.config import BaseExperimentConfig


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Folder of one run. Only names paths; who writes below one makes it."""

    root: Path

    @classmethod
    def of(cls, config: BaseExperimentConfig) -> Self:
        """The run folder that a configuration means, absolute."""
        fileroot = Path(config.cluster.fileroot).expanduser().absolute()
        return cls(fileroot / config.experiment_name / config.trial_name)

    @property
    def config(self) -> Path:
        """The resolved configuration that every process of the run reads."""
        return self.root / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def summary(self) -> Path:
        """How the run ended, written once by the launcher."""
        return self.root / "summary.json"

    @property
    def lock(self) -> Path:
        """Held by the one launcher that runs on this folder."""
        return self.root / "launcher.lock"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def names(self) -> Path:
        """Records of the name registry."""
        return self.root / "names"

    @property
    def initial_weights(self) -> Path:
        """Checksums of the models that the run began with."""
        return self.root / "initial_weights.json"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def weights(self) -> Path:
        """Published policy versions, one folder each."""
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        """Hugging Face exports of the saver."""
        return self.root / "checkpoints"

    @property
    def recover(self) -> Path:
        """Recovery checkpoints."""
        return self.root / "recover"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.root / "trace"

    @property
    def alive(self) -> Path:
        """Signs of life, one file for each process of the launcher."""
        return self.root / "alive"

    @property
    def stacks(self) -> Path:
        """What the threads and tasks of each process were doing when somebody asked."""
        return self.root / "stacks"

    @property
    def requests(self) -> Path:
        """What other commands ask of the running launcher, and its answers."""
        return self.root / "requests"

    @property
    def replays(self) -> Path:
        """Results of training again from the recorded batches, one folder each."""
        return self.root / "replays"

    def alive_of(self, process_name: str) -> Path:
        return self.alive / f"{process_name}.json"

    def stacks_of(self, process_name: str) -> Path:
        return self.stacks / f"{process_name}.txt"

    def log_of(self, process_name: str) -> Path:
        """Standard output and error of one process."""
        return self.logs / f"{process_name}.log"

    def weights_of(self, version: int) -> Path:
        """Folder of one published policy version."""
        return self.weights / f"v{version:06d}"
