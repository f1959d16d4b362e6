"""Owns what a replay reads of a run folder: configuration, ranks, batches, checksums, metrics. Changes nothing there.

Everything is read once: of a run that still goes on, a replay sees what was on disk when it started.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from areal.api.config import PPOConfig
from areal.api.config.load import load_experiment
from areal.api.errors import InputError
from areal.ledger.event_files import LedgerReader
from areal.ledger.state import BatchRecord, LedgerState
from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths
from areal.trainer.progress import TrainingLength


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run's training as its ledger tells it. Steps count from 0; step k makes policy version k + 1."""

    paths: RunPaths
    batches: dict[int, BatchRecord]
    weights: dict[int, str]
    """By step, the checksum of the actor's weights after it; of a step that was trained again the last one."""
    first_step: int
    """The first step with a recorded batch."""
    end_step: int
    """One past the last step that was trained."""
    num_rows: int
    total_steps: tuple[int, ...]
    """The lengths that the run was given, in order: more than one when it was continued with another."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """InputError when `folder` holds nothing to train again from, LedgerError when its ledger is damaged."""
        paths = RunPaths(folder)
        if not paths.ledger.is_dir():
            raise InputError(f"{folder} holds no ledger: name the folder of a run that trained on rollouts")
        state, weights, lengths = LedgerState(), dict[int, str](), dict[int, None]()
        for event in LedgerReader(paths.ledger).events():
            state.apply(event)
            if event["event"] == "started":
                lengths[event["total_steps"]] = None
            elif event["event"] in ("consumed", "trained_again") and event.get("weights"):
                weights[event["step"]] = event["weights"]
        if not state.consumed_steps or state.identity is None:
            raise InputError(f"{folder}: no step was trained yet, so there is nothing to train again")
        return cls(
            paths=paths,
            batches=state.batches,
            weights=weights,
            first_step=state.skipped_steps,
            end_step=max(state.consumed_steps) + 1,
            num_rows=state.identity["num_rows"],
            total_steps=tuple(lengths),
        )

    def config(self, overrides: Sequence[str] = ()) -> PPOConfig:
        """The run's configuration, changed by `overrides`."""
        return read_config(self.paths.config, overrides)

    def length(self, config: PPOConfig) -> TrainingLength:
        """How long the run was to be: the learning rate depends on it."""
        by_config = TrainingLength.of(config, num_rows=self.num_rows, samples_per_row=config.gconfig.n_samples)
        return TrainingLength(steps_per_epoch=by_config.steps_per_epoch, total_steps=self.total_steps[-1])

    def ranks(self) -> list[tuple[ProcessContext, dict[str, str]]]:
        """The trainer ranks as the launcher planned them, with their environments."""
        try:
            processes: list[dict[str, Any]] = json.loads(self.paths.plan.read_bytes())["processes"]
            found = [(ProcessContext.from_env(entry["env"]), entry["env"]) for entry in processes]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.paths.plan} does not tell the ranks of the run ({error})") from error
        ranks = [(context, env) for context, env in found if context is not None and context.role == "trainer"]
        if not ranks or len(ranks) != ranks[0][0].world_size:
            raise InputError(f"{self.paths.plan} does not name all trainer ranks of the run")
        return ranks

    def initial_weights(self) -> dict[str, str]:
        """By role, the checksum of the model that the run began with; empty when it did not record any."""
        try:
            return json.loads(self.paths.initial_weights.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise InputError(f"{self.paths.initial_weights} cannot be read: {error}") from error


def read_config(path: Path, overrides: Sequence[str] = ()) -> PPOConfig:
    """The resolved configuration in `path`. Keys that only the run's script knew are left out."""
    config = load_experiment(["--config", str(path), *overrides], allow_unknown_top_level=True)
    if not isinstance(config, PPOConfig):
        raise InputError(f"{path} is of a run without rollouts: there are no batches to train again from")
    return config


def read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """The lines of a metrics file by their step (steps done); a half-written last line is left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
        return {row["step"]: row for row in map(json.loads, lines)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
