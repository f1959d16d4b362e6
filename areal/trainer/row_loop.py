"""Owns training on rows: the loop of a trainer rank that waits for no rollouts, and its evaluation on held-out rows.

What a kind of training is, it says in a `RowTask`: how rows become a batch, one optimiser step, the metrics of a batch.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from areal.api.batch import LossFn, TrainBatch
from areal.api.config import RowsExperimentConfig
from areal.api.engine import TrainEngine
from areal.api.metrics import Metric, Metrics, merge_metrics, metric_values
from areal.data.balance import balanced_parts
from areal.data.prompt_stream import PromptStream
from areal.engine.mesh import TrainerMesh
from areal.observe.phase import PhaseClock, phase
from areal.observe.trace import open_tracer
from areal.observe.trackers import build_trackers
from areal.system.discovery import registry_of
from areal.system.heartbeat import beating_thread, heartbeat_of
from areal.system.run_paths import RunPaths
from areal.trainer.after_step import AfterStep, StepHooks
from areal.trainer.launched import join_run
from areal.trainer.progress import Progress, TrainingLength
from areal.trainer.rank import announce_ready, prepare_process
from areal.trainer.recover import RecoverStore
from areal.trainer.reduce import reduce_metrics
from areal.trainer.saver import Saver

RowT = TypeVar("RowT")
TaskRowT = TypeVar("TaskRowT", contravariant=True)


class RowTask(Protocol[TaskRowT]):
    """A kind of training on rows, on one trainer rank. What is a collective is called by every rank."""

    @property
    def engines(self) -> dict[str, TrainEngine]:
        """The models that are trained, by role: those are exported and recovered. The first connects the ranks."""
        ...

    @property
    def frozen(self) -> Sequence[TrainEngine]:
        """Further models, which only ever look."""
        ...

    def num_tokens(self, row: TaskRowT) -> int:
        """What balances the ranks: a row goes to one rank as a whole."""
        ...

    def batch_of(self, rows: Sequence[TaskRowT]) -> TrainBatch:
        """Pack this rank's rows, perhaps none."""
        ...

    def update(self, batch: TrainBatch) -> Metrics:
        """One optimiser step on the batch of all ranks; a collective. The same names on every rank."""
        ...

    def measure(self, batch: TrainBatch) -> Metrics:
        """The metrics of held-out rows, nothing is learned; a collective. The same names on every rank."""
        ...


class RowTrainer(ABC, Generic[RowT]):
    """Trains on rows to the end of the run; runs in every trainer rank."""

    def __init__(
        self,
        config: RowsExperimentConfig,
        *,
        train_dataset: Sequence[RowT],
        valid_dataset: Sequence[RowT] | None = None,
    ) -> None:
        self._context = join_run()
        self._rows_config = config
        self._train_rows = train_dataset
        self._valid_rows = valid_dataset
        self._length = TrainingLength.of(config, num_rows=len(train_dataset), samples_per_row=config.sequences_per_row)

    @abstractmethod
    def _build_task(self, mesh: TrainerMesh, *, total_steps: int) -> RowTask[RowT]:
        """Load the models; a collective. Every train step is one optimiser step."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def train(self) -> None:
        """Train to the end of the run."""

        config, context = self._rows_config, self._context
        prepare_process(context, config.seed)
        paths, registry = RunPaths.of(config), registry_of(config)
        tracer = open_tracer(config.perf_tracer, paths, context.name)
        with contextlib.ExitStack() as stack:
            stack.callback(tracer.flush if tracer else lambda: None)
            heartbeat = stack.enter_context(beating_thread(heartbeat_of(context)))
            clock = PhaseClock(tracer, heartbeat)
            stack.enter_context(clock.active())
            heartbeat.doing("meets the other ranks")
            mesh = TrainerMesh.open(context, registry)
            stack.callback(mesh.close)
            heartbeat.doing("loads the models")
            task = self._build_task(mesh, total_steps=self._length.total_steps)
            for engine in [*task.engines.values(), *task.frozen]:
                stack.callback(engine.close)
            announce_ready(registry, context)
            self._run(task, clock, paths, stack)

    def _run(self, task: RowTask[RowT], clock: PhaseClock, paths: RunPaths, stack: contextlib.ExitStack) -> None:

        config, is_rank0 = self._rows_config, self._context.index == 0
        engines = task.engines
        recover = RecoverStore(paths.recover, config.recover, engines)
        source = recover.start_from(after_failure=self._context.recover)
        point = recover.load(source) if source else None
        start_step = point.step if point else 0
        valid, batch_size = self._valid_rows, config.train_dataset.batch_size
        after_step = AfterStep(
            config,
            engines,
            saver=Saver(paths.checkpoints, engines, keep_last=config.saver.keep_last, is_rank0=is_rank0),
            recover=recover,
            trackers=build_trackers(config, paths, first_step=start_step + 1) if is_rank0 else [],
            hooks=StepHooks(
                evaluate=(lambda done: evaluate(task, valid, rows_at_once=batch_size)) if valid else None,
                goal_reached=lambda values: False,
                committed=lambda step, path: None,
            ),
            is_rank0=is_rank0,
        )
        stack.callback(after_step.close)
        if point is not None:
            after_step.continue_from(point)
        elif config.evaluator.eval_before_train:
            after_step.before_first(0)
        order = PromptStream.of(range(len(self._train_rows)), config)
        for info in Progress(self._length, start_step=start_step).remaining_steps():
            began_s = time.monotonic()
            clock.begin_step(info.step)
            with phase("data"):
                first = info.step * batch_size
                rows = [self._train_rows[order.index(k)] for k in range(first, first + batch_size)]
                batch = task.batch_of(share_of(task, rows))
            metrics = task.update(batch)
            seconds = time.monotonic() - began_s
            metrics["trained_tokens_per_s"] = Metric(batch.num_tokens / seconds, 1.0, "sum")
            with phase("after_step"):
                after_step(info, metrics, clock.end_step())


def lead_of(task: RowTask[RowT]) -> TrainEngine:
    """The engine that connects the ranks."""
    return next(iter(task.engines.values()))


def share_of(task: RowTask[RowT], rows: Sequence[RowT]) -> list[RowT]:
    """This rank's part of a batch of rows, balanced by tokens."""
    lead = lead_of(task)
    parts = balanced_parts([task.num_tokens(row) for row in rows], lead.dp_size)
    return [rows[i] for i in parts[lead.dp_rank]]


def evaluate(task: RowTask[RowT], rows: Sequence[RowT], *, rows_at_once: int) -> dict[str, float]:
    """The metrics over held-out rows as eval/NAME, the same numbers on every rank; a collective.

    `rows_at_once` over all ranks: without a token limit a batch is one forward pass, and the held-out set may be large.
    """
    lead = lead_of(task)
    found: Metrics = {}
    for first in range(0, len(rows), rows_at_once):
        mine = rows[first : first + rows_at_once][lead.dp_rank :: lead.dp_size]
        found = merge_metrics(found, task.measure(task.batch_of(mine)))
    return {f"eval/{name}": value for name, value in metric_values(reduce_metrics(found, lead)).items()}


def one_step(engine: TrainEngine, batch: TrainBatch, loss_fn: LossFn, *, local_denominator: Tensor) -> Metrics:
    """One optimiser step on the batches of all ranks; a collective. Returns the metrics of this rank, merged.

    `local_denominator` [1] float64: this rank's part of what divides the sum of losses, so that no cut matters.
    """
    denominator = float(engine.all_reduce(local_denominator).item())
    metrics = engine.forward_backward(batch, loss_fn, denominator=max(denominator, 1.0))
    return merge_metrics(metrics, engine.optimizer_step())


def count_of(number: int) -> Tensor:
    """A denominator: [1] float64."""
    return torch.tensor([float(number)], dtype=torch.float64)
