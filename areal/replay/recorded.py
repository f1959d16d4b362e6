"""What a replay reads from a run folder: configuration, ranks, batches, checksums, metrics. It writes nothing there.

Everything is read once: a replay of a running run uses the state on disk at its start.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from areal.api.config import PPOConfig
from areal.api.config.load import load_experiment
from areal.api.errors import InputError
from areal.data.prompt_stream import PromptStream, row_stream
from areal.ledger.event_files import LedgerReader
from areal.ledger.state import BatchRecord, LedgerState
from areal.system.durable import write_atomic
from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths
from areal.trainer.progress import TrainingLength

# The order of a replay, which its ranks read from the folder of the replay.

_ORDER = "replay.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOrder:
    run: str  # Folder of the recorded run.
    start_step: int  # Steps done before the replay: 0, or the step of its recovery checkpoint.
    end_step: int  # Steps done after the replay.
    export: bool  # Export the final weights as Hugging Face checkpoints.

    def write(self, folder: Path) -> None:
        write_atomic(folder / _ORDER, json.dumps(dataclasses.asdict(self), indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        return cls(**json.loads((folder / _ORDER).read_bytes()))


def config_of(folder: Path) -> Path:
    return folder / "config.yaml"


def metrics_of(folder: Path) -> Path:
    """One line per step: metrics as in the run's file, and "weights", the checksum after the step."""
    return folder / "metrics.jsonl"


def checkpoint_of(run: RunPaths, steps_done: int) -> Path:
    return run.recover / f"step-{steps_done:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The training of a run according to its ledger. Steps count from 0; step k produces policy version k + 1."""

    paths: RunPaths
    batches: dict[int, BatchRecord]
    weights: dict[int, str]
    """Step -> checksum of the actor's weights after it; the last one if the step was trained again."""
    first_step: int  # The first step with a recorded batch.
    first_kept_step: int  # All recorded batches from this step on have their payloads.
    end_step: int  # The number of trained steps.
    num_rows: int
    rows: PromptStream[int] | None  # Episode id -> index of its row; None when the ledger does not determine it.
    total_steps: tuple[int, ...]
    """The configured lengths of the run, in order: several if it was continued with another length."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises InputError when `folder` has nothing to replay, LedgerError when its ledger is damaged."""
        paths = RunPaths(folder)
        if not paths.ledger.is_dir():
            raise InputError(f"{folder} has no ledger: name the folder of a run with rollouts", code="replay.no_run")
        state, weights, lengths = LedgerState(), dict[int, str](), dict[int, None]()
        for event in LedgerReader(paths.ledger).events():
            state.apply(event)
            if event["event"] == "started":
                lengths[event["total_steps"]] = None
            elif event["event"] in ("consumed", "trained_again") and event.get("weights"):
                weights[event["step"]] = event["weights"]
        if not state.consumed_steps or state.identity is None:
            raise InputError(f"{folder}: the run has not trained any step yet", code="replay.no_run")
        return cls(
            paths=paths,
            batches=state.batches,
            weights=weights,
            first_step=state.skipped_steps,
            first_kept_step=_first_kept_step(state),
            end_step=max(state.consumed_steps) + 1,
            num_rows=state.identity["num_rows"],
            rows=row_stream(state.identity),
            total_steps=tuple(lengths),
        )

    def config(self, overrides: Sequence[str] = ()) -> PPOConfig:
        return read_config(self.paths.config, overrides)

    def length(self, config: PPOConfig) -> TrainingLength:
        by_config = TrainingLength.of(config, num_rows=self.num_rows, samples_per_row=config.gconfig.n_samples)
        return TrainingLength(steps_per_epoch=by_config.steps_per_epoch, total_steps=self.total_steps[-1])

    def ranks(self) -> list[tuple[ProcessContext, dict[str, str]]]:
        try:
            processes: list[dict[str, Any]] = json.loads(self.paths.plan.read_bytes())["processes"]
            found = [(ProcessContext.from_env(entry["env"]), entry["env"]) for entry in processes]
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"{self.paths.plan} does not list the ranks of the run ({error})"
            raise InputError(message, code="replay.damaged_run") from error
        ranks = [(context, env) for context, env in found if context is not None and context.role == "trainer"]
        if not ranks or len(ranks) != ranks[0][0].world_size:
            raise InputError(f"{self.paths.plan} does not list all trainer ranks of the run", code="replay.damaged_run")
        return ranks

    def initial_weights(self) -> dict[str, str]:
        """Role -> checksum of the initial model; empty when none was recorded."""
        try:
            return json.loads(self.paths.initial_weights.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            message = f"{self.paths.initial_weights} cannot be read: {error}"
            raise InputError(message, code="replay.damaged_run") from error


def _first_kept_step(state: LedgerState) -> int:
    pruned = state.pruned_segments
    lost = (step for step, batch in state.batches.items() if any(where[0] in pruned for where in batch.payloads))
    return max(lost, default=state.skipped_steps - 1) + 1


def read_config(path: Path, overrides: Sequence[str] = ()) -> PPOConfig:
    """The resolved configuration in `path`. Keys that only the run's script defines are ignored."""
    config = load_experiment(["--config", str(path), *overrides], allow_unknown_top_level=True)
    if not isinstance(config, PPOConfig):
        raise InputError(f"{path} belongs to a run without rollouts, which has no batches", code="replay.no_run")
    return config


def read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """The lines of a metrics file by their step (steps done); an incomplete last line is ignored."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
        return {row["step"]: row for row in map(json.loads, lines)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}", code="replay.damaged_run") from error
