"""Training on rows (SFT, reward models, DPO): the loop of a trainer rank, and evaluation on held-out rows.

A `RowTask` defines a kind of training: how rows become a batch, one optimiser step, the metrics of a batch.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor

from areal.api.batch import LossFn, TrainBatch
from areal.api.config import RowsExperimentConfig
from areal.api.engine import TrainEngine
from areal.api.metrics import Metric, Metrics, merge_metrics, metric_values
from areal.data.balance import balanced_parts
from areal.data.image_files import MemoryImages
from areal.data.prompt_stream import PromptStream
from areal.data.supervised_rows import EncodedPair, EncodedRow
from areal.engine.build import TRAIN_ENGINES
from areal.observe.phase import phase
from areal.system.discovery import registry_of
from areal.trainer.after_step import AfterStep, StepHooks
from areal.trainer.minibatch import reduce_metrics
from areal.trainer.process_setup import TrainingRank, announce_ready, join_run, training_rank
from areal.trainer.progress import Progress, TrainingLength, updating

ConfigT = TypeVar("ConfigT", bound=RowsExperimentConfig)
RowT = TypeVar("RowT", EncodedRow, EncodedPair)
TaskRowT = TypeVar("TaskRowT", contravariant=True)
EngineBuilder = Callable[..., TrainEngine]
"""A factory of `TRAIN_ENGINES` with mesh and seed bound."""


class RowTask(Protocol[TaskRowT]):
    """A kind of training on rows, on one trainer rank. Every rank calls every collective."""

    @property
    def engines(self) -> dict[str, TrainEngine]:
        """The trained models by role, which are exported and recovered."""
        ...

    def batch_of(self, rows: Sequence[TaskRowT]) -> TrainBatch:
        """Pack this rank's rows; there may be none."""
        ...

    def update(self, batch: TrainBatch) -> Metrics:
        """One optimiser step on the batches of all ranks; a collective. Metric names are the same on every rank."""
        ...

    def measure(self, batch: TrainBatch) -> Metrics:
        """Metrics of held-out rows, without training; a collective. Metric names are the same on every rank."""
        ...


class RowTrainer(ABC, Generic[ConfigT, RowT]):
    """Trains on rows to the end of the run, in every trainer rank."""

    def __init__(
        self, config: ConfigT, *, train_dataset: Sequence[RowT], valid_dataset: Sequence[RowT] | None = None
    ) -> None:
        self._context = join_run()
        self._config = config
        self._train_rows = train_dataset
        self._valid_rows = valid_dataset
        self._images = MemoryImages()  # The images of the rows of one batch.
        self._length = TrainingLength.of(config, num_rows=len(train_dataset), samples_per_row=config.sequences_per_row)

    @abstractmethod
    def _build_task(self, build: EngineBuilder, *, total_steps: int) -> RowTask[RowT]:
        """Load the models; a collective. Every train step is one optimiser step."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to release: `train` does it."""

    def train(self) -> None:
        """Train to the end of the run."""
        config = self._config
        with contextlib.ExitStack() as stack:
            rank = stack.enter_context(training_rank(config, self._context))
            factory = TRAIN_ENGINES[config.train_backend]
            build = partial(factory, mesh=rank.mesh, seed=config.seed, images=self._images)
            task = self._build_task(build, total_steps=self._length.total_steps)
            announce_ready(registry_of(config), self._context)
            self._run(task, rank, stack)

    def _run(self, task: RowTask[RowT], rank: TrainingRank, stack: contextlib.ExitStack) -> None:
        config, valid = self._config, self._valid_rows
        batch_size = config.train_dataset.batch_size
        at_once = (config.valid_dataset.batch_size if config.valid_dataset else None) or batch_size
        hooks = StepHooks(evaluate=(lambda done: evaluate(task, valid, rows_at_once=at_once)) if valid else None)
        engines, is_restart = task.engines, self._context.recover
        after_step, point = AfterStep.of_run(
            config, engines, rank.mesh, hooks=hooks, recovered=engines, after_failure=is_restart
        )
        stack.callback(after_step.close)
        start_step = point.step if point else 0
        if point is None and config.evaluator.eval_before_train:
            after_step.before_first()
        order = PromptStream.of(range(len(self._train_rows)), config)
        for info in Progress(self._length, start_step=start_step).remaining_steps():
            began_s = time.monotonic()
            rank.clock.begin_step(info.step)
            with phase("data"):
                first = info.step * batch_size
                rows = [self._train_rows[order.index(k)] for k in range(first, first + batch_size)]
                batch = task.batch_of(share_of(task, rows))
            with updating(next(iter(engines)), info.step):
                metrics = task.update(batch)
            seconds = time.monotonic() - began_s
            metrics["trained_tokens_per_s"] = Metric(batch.num_tokens / seconds, 1.0, "sum")
            with phase("after_step"):
                after_step(info, metrics, rank.clock.end_step())


def lead_of(task: RowTask[RowT]) -> TrainEngine:
    """The engine whose data-parallel ranks share the rows."""
    return next(iter(task.engines.values()))


def share_of(task: RowTask[RowT], rows: Sequence[RowT]) -> list[RowT]:
    """This data-parallel rank's part of a batch of rows, balanced by tokens."""
    lead = lead_of(task)
    parts = balanced_parts([row.num_tokens for row in rows], lead.dp_size)
    return [rows[i] for i in parts[lead.dp_rank]]


def evaluate(task: RowTask[RowT], rows: Sequence[RowT], *, rows_at_once: int) -> dict[str, float]:
    """The metrics over held-out rows as eval/NAME, equal on every rank; a collective.

    `rows_at_once`: rows per batch over all ranks, which bounds the memory of a forward pass.
    """
    lead = lead_of(task)
    metrics: Metrics = {}
    for first in range(0, len(rows), rows_at_once):
        mine = rows[first : first + rows_at_once][lead.dp_rank :: lead.dp_size]
        metrics = merge_metrics(metrics, task.measure(task.batch_of(mine)))
    return {f"eval/{name}": value for name, value in metric_values(reduce_metrics(metrics, lead)).items()}


def one_step(engine: TrainEngine, batch: TrainBatch, loss_fn: LossFn, *, local_denominator: Tensor) -> Metrics:
    """One optimiser step on the batches of all ranks; a collective. Returns the metrics of this rank.

    `local_denominator` [1] float64: this rank's part of the global denominator of the sum of losses.
    """
    denominator = float(engine.all_reduce(local_denominator).item())
    metrics = engine.forward_backward(batch, loss_fn, denominator=max(denominator, 1.0))
    return merge_metrics(metrics, engine.optimizer_step())
