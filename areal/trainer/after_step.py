"""What follows a train step: metrics, alarms, exports, recovery checkpoints, evaluation, the decision to end early.

Every rank calls it. Decisions are agreed by one reduction over all ranks, so that no rank enters a collective alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

import torch

from areal.api.config import BaseExperimentConfig, Cadence, ChosenAlarm
from areal.api.data import StepInfo
from areal.api.engine import Ranks, TrainEngine
from areal.api.metrics import Metrics, metric_values
from areal.observe.chosen_trackers import build_trackers
from areal.observe.step_files import SampleRow
from areal.observe.trackers import Tracker
from areal.system.heartbeat import read_beats
from areal.system.run_paths import RunPaths
from areal.trainer.recover import ActorState, RecoverPoint, RecoverStore
from areal.trainer.reduce import reduce_metrics
from areal.trainer.run_alarms import RunAlarms, alarm_stop, chosen_alarms
from areal.trainer.saver import Saver


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHooks:
    """What differs between kinds of training."""

    evaluate: Callable[[int], dict[str, float]] | None
    """Steps done -> metrics. Called on every rank and takes equally long on each; rank 0's result is used."""
    goal_reached: Callable[[dict[str, float]], bool] = lambda values: False
    """Evaluation metrics of rank 0 -> whether training ends."""
    committed: Callable[[int, Path], None] = lambda step, path: None
    """Called on rank 0 when the recovery checkpoint after this number of steps is complete."""
    actor_state: Callable[[], ActorState] = ActorState
    """State of the actor role for a recovery checkpoint, besides its engine."""


@dataclass(slots=True)
class CadenceState:
    """Decides after each step whether a periodic action is due. Pure; the clock is an argument."""

    cadence: Cadence
    last_fired_s: float = 0.0
    """Seconds of training when the action last ran."""

    def due(self, info: StepInfo, *, now_s: float) -> bool:
        """Whether to act after step `info`. `now_s`: seconds of training so far."""
        cadence = self.cadence
        by_epoch = cadence.freq_epochs is not None and info.is_epoch_end and (info.epoch + 1) % cadence.freq_epochs == 0
        by_step = cadence.freq_steps is not None and (info.step + 1) % cadence.freq_steps == 0
        by_time = cadence.freq_secs is not None and now_s - self.last_fired_s >= cadence.freq_secs
        return by_epoch or by_step or by_time


class AfterStep:
    """Called once per train step on every rank; returns True when training should end."""

    def __init__(
        self,
        config: BaseExperimentConfig,
        engines: dict[str, TrainEngine],
        ranks: Ranks,
        *,
        paths: RunPaths,
        recover: RecoverStore,
        trackers: list[Tracker],
        hooks: StepHooks,
        first_step: int = 1,
    ) -> None:
        """`engines`: the trained models by role. `first_step`: the first train step that follows, counted from 1.

        While the file `paths.checkpoint_request` exists, each step is followed by a recovery checkpoint.
        """
        self._config = config
        self._lead = next(iter(engines.values()))
        self._ranks = ranks
        self._saver = Saver(paths.checkpoints, engines, ranks, config.saver)
        self._paths = paths
        self._recover = recover
        self._trackers = trackers
        self._hooks = hooks
        self._chosen_alarms = chosen_alarms(config)
        self._alarms = RunAlarms(self._chosen_alarms, paths, first_step=first_step) if ranks.rank == 0 else None
        self._cadences = {
            "save": CadenceState(config.saver),
            "recover": CadenceState(config.recover),
            "evaluate": CadenceState(config.evaluator),
        }
        self._began_s = time.monotonic()
        self._saved_step = first_step - 1
        """Train steps done at the newest recovery checkpoint of this process."""

    @classmethod
    def of_run(
        cls,
        config: BaseExperimentConfig,
        engines: dict[str, TrainEngine],
        ranks: Ranks,
        *,
        hooks: StepHooks,
        recovered: dict[str, TrainEngine],
        after_failure: bool,
        newest_step: Callable[[], int | None] = lambda: None,
    ) -> tuple[Self, RecoverPoint | None]:
        """Return what follows the steps of a run, and the checkpoint that it continues from; a collective.

        `recovered`: the engines in a recovery checkpoint, which is already loaded. `after_failure`: this is a restart.
        `newest_step`: as in RecoverStore.start_from.
        """
        paths = RunPaths.of(config)
        recover = RecoverStore(paths.recover, config.recover, recovered, ranks, committed=hooks.committed)
        source = recover.start_from(after_failure=after_failure, newest_step=newest_step)
        point = recover.load(source) if source else None
        first_step = point.step + 1 if point else 1
        trackers: list[Tracker] = []
        if ranks.rank == 0:
            trackers = build_trackers(config, paths, first_step=first_step, after_failure=after_failure)
        found = cls(
            config,
            engines,
            ranks,
            paths=paths,
            recover=recover,
            trackers=trackers,
            hooks=hooks,
            first_step=first_step,
        )
        if point is not None:
            found.continue_from(point)
        return found, point

    def continue_from(self, point: RecoverPoint) -> None:
        """Continue the clocks of a recovered run."""
        self._began_s = time.monotonic() - point.elapsed_s
        for name, fired_s in point.cadence_s.items():
            self._cadences[name].last_fired_s = fired_s

    def before_first(self) -> None:
        """Evaluate before any training."""
        if self._hooks.evaluate is not None:
            self._track(0, self._hooks.evaluate(0))

    def __call__(self, info: StepInfo, metrics: Metrics, seconds: dict[str, float]) -> bool:
        """Raises AlarmStop on every rank when an alarm ends the run."""
        elapsed_s = time.monotonic() - self._began_s
        due = self._actions_due(info, elapsed_s)
        values = metric_values(reduce_metrics(metrics, self._lead))
        values |= {f"seconds/{name}": spent for name, spent in seconds.items()}
        values |= {"epoch": float(info.epoch), "seconds/elapsed": elapsed_s}
        if self._ranks.rank == 0:
            sizes = {name: beat.resident_bytes for name, beat in read_beats(self._paths.alive).items()}
            values |= {f"memory/{name}": size / 2**30 for name, size in sizes.items() if size is not None}
            values |= (
                {"failed_uploads": float(self._saver.failed_uploads)} if self._config.saver.hub_upload.repo_id else {}
            )
        ends = False
        if "evaluate" in due and self._hooks.evaluate is not None:
            found = self._hooks.evaluate(info.step + 1)
            values |= found
            (ends,) = self._any([self._ranks.rank == 0 and self._hooks.goal_reached(found)])
        self._track(info.step + 1, values)
        stopped_by = self._stopped_by(info.step + 1, values)
        for name in due & self._cadences.keys():
            self._cadences[name].last_fired_s = elapsed_s  # before the checkpoint that contains it
        if "save" in due or info.is_last or ends:
            self._saver.save(info.step + 1, values, is_last=info.is_last or ends)
        is_end = info.is_last or ends or stopped_by is not None
        if "recover" in due or (self._config.recover.mode != "disabled" and is_end):
            goal = self._config.evaluator.stop_at if ends else {}
            self.save_recovery(info.step + 1, goal_reached=goal, waits=is_end or "requested" in due)
        if stopped_by is not None:
            raise alarm_stop(stopped_by, info.step + 1)
        return ends

    def _stopped_by(self, step: int, values: dict[str, float]) -> ChosenAlarm | None:
        """Look for alarms on rank 0; the one that ends the run, on every rank."""
        raised = self._alarms.look(step, values) if self._alarms is not None else []
        stopping = {alarm.name for alarm in raised if alarm.action == "stop"}
        may_stop = [chosen for chosen in self._chosen_alarms if chosen.action == "stop"]
        if not may_stop:
            return None
        flags = self._any([chosen.rule.name in stopping for chosen in may_stop])
        return next((chosen for chosen, flag in zip(may_stop, flags, strict=True) if flag), None)

    def close(self) -> None:
        self._recover.close()
        self._saver.close()
        if self._alarms is not None:
            self._alarms.close()
        for tracker in self._trackers:
            tracker.close()

    def _actions_due(self, info: StepInfo, elapsed_s: float) -> set[str]:
        """The periodic actions, "requested" when a checkpoint is; finishes a checkpoint that all ranks have written."""
        due_here = {name for name, state in self._cadences.items() if state.due(info, now_s=elapsed_s)}
        due_here |= {"requested"} if self._paths.checkpoint_request.exists() else set()
        due_here |= {"writing"} if self._recover.is_writing else set()
        names = [*self._cadences, "requested", "writing"]
        flags = self._any([name in due_here for name in names])
        due = {name for name, flag in zip(names, flags, strict=True) if flag}
        if "writing" not in due:
            self._recover.finish()
        due |= {"recover"} if "requested" in due else set()
        if self._config.recover.mode == "disabled":
            due -= {"recover", "requested"}
        return due | {"evaluate"} if info.is_last else due

    def save_recovery(
        self, steps_done: int, *, goal_reached: Mapping[str, float] = MappingProxyType({}), waits: bool = True
    ) -> None:
        """Save the recovery checkpoint after `steps_done` train steps, unless it was saved; a collective.

        `waits`: until it is complete, also with recover.async_save.
        """
        if steps_done != self._saved_step:
            self._saved_step = steps_done
            point = RecoverPoint(
                step=steps_done,
                cadence_s={name: state.last_fired_s for name, state in self._cadences.items()},
                elapsed_s=time.monotonic() - self._began_s,
                goal_reached=dict(goal_reached),
                actor=self._hooks.actor_state(),
            )
            for tracker in self._trackers:
                tracker.flush()
            if self._alarms is not None:
                self._alarms.flush()
            self._recover.save(point, waits=waits or not self._config.recover.async_save)
        elif waits:
            self._recover.finish()

    def log_samples(self, steps_done: int, rows: Sequence[SampleRow]) -> None:
        """Give a table of samples to the trackers."""
        for tracker in self._trackers:
            tracker.log_samples(steps_done, rows)

    def _track(self, step: int, values: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)

    def _any(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank."""
        found: list[float] = self._ranks.all_reduce(torch.tensor(flags, dtype=torch.float64), "max").tolist()
        return [bool(value) for value in found]
