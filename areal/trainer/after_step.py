"""Owns what follows an update: metrics, exports, recovery checkpoints, evaluation, and the decision to end early.

Every rank calls it. Decisions are taken together (one reduction), so that no rank enters a collective alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from areal.api.config import BaseExperimentConfig
from areal.api.data import StepInfo
from areal.api.engine import TrainEngine
from areal.api.metrics import Metrics, metric_values
from areal.observe.trackers import Tracker
from areal.trainer.cadence import CadenceState
from areal.trainer.recover import ActorState, RecoverPoint, RecoverStore
from areal.trainer.reduce import reduce_metrics
from areal.trainer.saver import Saver


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHooks:
    """What differs between kinds of training."""

    evaluate: Callable[[int], dict[str, float]] | None
    """Steps done -> metrics; called on every rank, and takes as long on each; only rank 0's answer counts."""
    goal_reached: Callable[[dict[str, float]], bool]
    """Evaluation metrics of rank 0 -> end training."""
    committed: Callable[[int, Path], None]
    """A recovery checkpoint after so many steps is complete; called on rank 0."""
    actor_state: Callable[[], ActorState] = ActorState
    """What of the policy's role goes into a recovery checkpoint besides its engine."""


class AfterStep:
    """Called once per train step on every rank; returns True when training should end."""

    def __init__(
        self,
        config: BaseExperimentConfig,
        engines: dict[str, TrainEngine],
        *,
        saver: Saver,
        recover: RecoverStore,
        trackers: list[Tracker],
        hooks: StepHooks,
        is_rank0: bool,
    ) -> None:
        self._config = config
        self._engines = engines
        self._lead = next(iter(engines.values()))
        self._saver = saver
        self._recover = recover
        self._trackers = trackers
        self._hooks = hooks
        self._is_rank0 = is_rank0
        self._cadences = {
            "save": CadenceState(config.saver),
            "recover": CadenceState(config.recover),
            "evaluate": CadenceState(config.evaluator),
        }
        self._began_s = time.monotonic()

    def continue_from(self, point: RecoverPoint) -> None:
        """Go on with the clocks of a recovered run."""
        self._began_s = time.monotonic() - point.elapsed_s
        for name, fired_s in point.cadence_s.items():
            self._cadences[name].last_fired_s = fired_s

    def before_first(self, steps_done: int) -> None:
        """The evaluation before any training."""
        if self._hooks.evaluate is not None:
            self._track(steps_done, self._hooks.evaluate(steps_done))

    def __call__(self, info: StepInfo, metrics: Metrics, seconds: dict[str, float]) -> bool:
        elapsed_s = time.monotonic() - self._began_s
        due = self._what_is_due(info, elapsed_s)
        values = metric_values(reduce_metrics(metrics, self._lead))
        values |= {f"seconds/{name}": spent for name, spent in seconds.items()}
        values |= {"epoch": float(info.epoch), "seconds/elapsed": elapsed_s}
        ends = False
        if "evaluate" in due and self._hooks.evaluate is not None:
            found = self._hooks.evaluate(info.step + 1)
            values |= found
            ends = self._agree(self._is_rank0 and self._hooks.goal_reached(found))
        self._track(info.step + 1, values)
        for name in due:
            self._cadences[name].fired(now_s=elapsed_s)  # before the checkpoint that remembers it
        if "save" in due or info.is_last or ends:
            self._saver.save(info)
        if "recover" in due or (self._config.recover.mode != "disabled" and (info.is_last or ends)):
            self._save_recovery(info, elapsed_s, goal_reached=self._config.evaluator.stop_at if ends else {})
        return ends

    def _what_is_due(self, info: StepInfo, elapsed_s: float) -> set[str]:
        names = list(self._cadences)
        mine = [float(self._cadences[name].due(info, now_s=elapsed_s)) for name in names]
        agreed: list[float] = self._lead.all_reduce(torch.tensor(mine, dtype=torch.float64), "max").tolist()
        due = {name for name, flag in zip(names, agreed, strict=True) if flag}
        if self._config.recover.mode == "disabled":
            due.discard("recover")
        return due | {"evaluate"} if info.is_last else due

    def _save_recovery(self, info: StepInfo, elapsed_s: float, *, goal_reached: dict[str, float]) -> None:
        point = RecoverPoint(
            step=info.step + 1,
            cadence_s={name: state.last_fired_s for name, state in self._cadences.items()},
            elapsed_s=elapsed_s,
            goal_reached=goal_reached,
            actor=self._hooks.actor_state(),
        )
        for tracker in self._trackers:
            tracker.flush()
        path = self._recover.save(point)
        if self._is_rank0:
            self._hooks.committed(point.step, path)

    def _track(self, step: int, values: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)

    def _agree(self, flag: bool) -> bool:
        return bool(self._lead.all_reduce(torch.tensor([float(flag)], dtype=torch.float64), "max").item())

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
