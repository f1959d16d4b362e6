"""What a replay reads from a run folder: configuration, ranks, batches, checksums, metrics. It writes nothing there.

Everything is read once: a replay of a running run uses the state on disk at its start.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from areal.api.config import PPOConfig
from areal.api.config.load import load_experiment
from areal.api.errors import InputError
from areal.data.prompt_stream import PromptStream, row_stream
from areal.launcher.status import StatusLine
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
            contexts = [(ProcessContext.from_env(entry["env"]), entry["env"]) for entry in processes]
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"{self.paths.plan} does not list the ranks of the run ({error})"
            raise InputError(message, code="replay.damaged_run") from error
        ranks = [(context, env) for context, env in contexts if context is not None and context.role == "trainer"]
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


# ----------------------------------------------------------------------------------------------------------------------
# The output of a replay: each step next to that of its run, equal in every bit or in a table, and the result.

EXACT = ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm")
"""Metrics that must be equal in a replay without overrides."""
SHOWN = {
    "actor/loss": "loss", "actor/grad_norm": "grad norm", "actor/clip_ratio": "clip ratio",
    "actor/approx_kl": "approx KL", "batch/ref_kl": "ref KL", "actor/entropy": "entropy", "critic/loss": "value loss",
}  # fmt: skip
"""Metrics that a comparison with overrides shows, if recorded, and their headings."""
_WIDTH = 11

Row = Mapping[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """One step of a replay and the same step of its run."""

    step: int  # Steps done.
    weights: bool | None  # Whether the checksums are equal; None = the run recorded none.
    live: Row  # The run's metrics; empty = it has none of this step.
    replayed: Row

    @classmethod
    def of(cls, step: int, recorded_weights: str, live: Row | None, replayed: Row) -> "StepComparison":
        weights = replayed["weights"] == recorded_weights if recorded_weights else None
        return cls(step=step, weights=weights, live=live or {}, replayed=replayed)

    @property
    def exact(self) -> dict[str, tuple[Any, Any]]:
        """The metrics in EXACT that both have: live, replayed."""
        return {
            name: (self.live[name], self.replayed[name])
            for name in EXACT
            if name in self.live and name in self.replayed
        }

    @property
    def different(self) -> list[str]:
        return ["weights"] * (self.weights is False) + [name for name, (a, b) in self.exact.items() if a != b]

    def line(self) -> str:
        """What is equal and what differs."""
        weights = {True: "weights equal", False: f"weights DIFFER at step {self.step}", None: "weights not recorded"}
        equal = [name for name, (a, b) in self.exact.items() if a == b]
        parts = [weights[self.weights]] + [", ".join(equal) + " equal"] * bool(equal)
        parts += [f"{name} DIFFERS (live {a}, replay {b})" for name, (a, b) in self.exact.items() if a != b]
        return f"step {self.step}: " + "; ".join(parts)

    def facts(self) -> dict[str, Any]:
        """What the run and the replay measured, for --json."""
        names = [name for name in SHOWN if name in self.replayed or name in self.live]
        values = {name: {"run": self.live.get(name), "replay": self.replayed.get(name)} for name in names}
        return {"step": self.step, "weights_equal": self.weights, "different": self.different, "metrics": values}


class Comparison:
    """All steps of a replay. With the options of the run it must be equal; with others it is a table of both."""

    def __init__(self, *, is_exact: bool) -> None:
        self._is_exact = is_exact
        self.steps: list[StepComparison] = []
        self._columns: list[str] = []

    def add(self, step: StepComparison) -> list[str]:
        """Add a step; returns its lines."""
        self.steps.append(step)
        if self._is_exact:
            return [step.line()]
        lines: list[str] = []
        if len(self.steps) == 1:
            self._columns = [name for name in SHOWN if name in step.replayed or name in step.live]
            titles = [f"{SHOWN[name]:^{2 * _WIDTH + 1}}" for name in self._columns]
            below = [f"{'live':>{_WIDTH}} {'replay':>{_WIDTH}}" for _ in self._columns]
            lines = ["      | " + " | ".join(titles), " step | " + " | ".join(below)]
        pairs = [(step.live.get(name), step.replayed.get(name)) for name in self._columns]
        cells = [
            " ".join(f"{'-' if value is None else format(value, '.5g'):>{_WIDTH}}" for value in pair) for pair in pairs
        ]
        return [*lines, f"{step.step:5} | " + " | ".join(cells)]

    @property
    def is_equal(self) -> bool | None:
        """Whether an exact replay equals its run; None when the run recorded nothing to compare with."""
        if not any(step.weights is not None or step.exact for step in self.steps):
            return None
        return not any(step.different for step in self.steps)

    def summary(self) -> str:
        first = next((step for step in self.steps if step.different), None)
        if self._is_exact:
            num_weights = sum(step.weights is not None for step in self.steps)
            num_metrics = sum(bool(step.exact) for step in self.steps)
            text = f"{len(self.steps)} steps, {num_weights} with checksums, {num_metrics} with metrics"
            if first is not None:
                return f"DIFFERENT from step {first.step} on ({', '.join(first.different)}): {text}"
            return f"nothing to compare with: {text}" if self.is_equal is None else f"equal: {text}"
        lines = [f"means over {len(self.steps)} steps:"]
        for name in self._columns:
            pairs = [(step.live.get(name), step.replayed.get(name)) for step in self.steps]
            if both := [(a, b) for a, b in pairs if a is not None and b is not None]:
                live, replay = fmean(a for a, _ in both), fmean(b for _, b in both)
                lines.append(f"  {SHOWN[name]}: live {live:.6g}, replay {replay:.6g} ({replay - live:+.3g})")
        other = next((step.step for step in self.steps if step.weights is False), None)
        return "\n".join([*lines, f"weights: {f'different from step {other} on' if other else 'equal at every step'}"])


class Report:
    """Compares each step when its line appears in the metrics of the replay."""

    def __init__(self, run: RecordedRun, folder: Path, order: ReplayOrder, *, is_exact: bool, as_json: bool) -> None:
        """`as_json`: one JSON object at the end in place of lines."""
        self._run = run
        self._live = read_metrics(run.paths.metrics)
        self._own = metrics_of(folder)
        self._order = order
        self._line = StatusLine()
        self._offset = 0
        self._is_exact, self._as_json = is_exact, as_json
        self._compared = Comparison(is_exact=is_exact)

    def look(self) -> None:
        """Report the steps done since the last call."""
        for row in self._new_rows():
            weights = self._run.weights.get(row["step"] - 1, "")
            lines = self._compared.add(StepComparison.of(row["step"], weights, self._live.get(row["step"]), row))
            if not self._as_json:
                sys.stdout.write("".join(line + "\n" for line in lines))
                sys.stdout.flush()
        self._line.show(f"replay: step {self._done}/{self._order.end_step}, {self._pace()}")

    @property
    def _done(self) -> int:
        return self._compared.steps[-1].step if self._compared.steps else self._order.start_step

    def end(self) -> int:
        """Report the result; returns the exit status of the command."""
        self._line.end(f"replay: {self._done - self._order.start_step} steps done, results in {self._own.parent}")
        is_equal = self._compared.is_equal if self._is_exact else None
        text = self._compared.summary()
        if self._as_json:
            steps = [step.facts() for step in self._compared.steps]
            text = json.dumps({"folder": str(self._own.parent), "is_equal": is_equal, "steps": steps})
        sys.stdout.write(text + "\n")
        return 0 if not self._is_exact or is_equal else 2 if is_equal is None else 1

    def _pace(self) -> str:
        seconds = [step.replayed["seconds/step"] for step in self._compared.steps]
        if not seconds:
            return "the models are loading"
        live = [row["seconds/step"] for step, row in self._live.items() if step > self._order.start_step]
        return f"{fmean(seconds):.2f} s a step" + (f" (live {fmean(live):.2f})" if live else "")

    def _new_rows(self) -> Iterator[Row]:
        if not self._own.exists():
            return
        with open(self._own, "rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        yield from map(json.loads, whole.splitlines())
