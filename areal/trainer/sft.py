"""Owns supervised fine-tuning: SFTTrainer, its loss and its loop. Waits for nothing but its own ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from types import TracebackType

import torch

from areal.api.batch import LossOutput, MicroBatch, TokenOutputs, TrainBatch
from areal.api.config import SFTConfig
from areal.api.engine import TrainEngine
from areal.api.metrics import Metric, Metrics, merge_metrics
from areal.data.pack import rows_to_train_batch
from areal.data.sft import EncodedRow
from areal.data.split import balanced_parts
from areal.engine.build import build_train_engine
from areal.engine.mesh import TrainerMesh
from areal.observe.phase import PhaseClock, phase
from areal.observe.trace import open_tracer
from areal.observe.trackers import build_trackers
from areal.rollout.prompts import PromptStream
from areal.system.discovery import registry_of
from areal.system.heartbeat import beating_thread, heartbeat_of
from areal.system.run_paths import RunPaths
from areal.trainer.after_step import AfterStep, StepHooks
from areal.trainer.launched import join_run
from areal.trainer.progress import Progress, TrainingLength
from areal.trainer.rank import announce_ready, prepare_process
from areal.trainer.recover import RecoverStore
from areal.trainer.saver import Saver


def sft_loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> LossOutput:
    """Sum of -log p over the trained tokens of a micro-batch."""

    assert outputs.logprobs is not None, "supervised fine-tuning needs a language model, not a critic"
    mask = micro_batch.batch.loss_mask
    loss = -(outputs.logprobs * mask).sum()
    metrics = {"loss": Metric(float(loss.detach()), float(mask.sum()))}
    return LossOutput(loss=loss, metrics=metrics)


class SFTTrainer:
    """Fine-tunes `config.model` on encoded rows; runs in every trainer rank."""

    def __init__(
        self,
        config: SFTConfig,
        *,
        train_dataset: Sequence[EncodedRow],
        valid_dataset: Sequence[EncodedRow] | None = None,
    ) -> None:
        context = join_run()
        self._config = config
        self._context = context
        self._train_rows = train_dataset
        self._valid_rows = valid_dataset
        self._length = TrainingLength.of(config, num_rows=len(train_dataset))

    def __enter__(self) -> SFTTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def train(self) -> None:
        """Train to the end of the run."""

        config, context = self._config, self._context
        prepare_process(context, config.seed)
        paths, registry = RunPaths.of(config), registry_of(config)
        tracer = open_tracer(config.perf_tracer, paths, context.name)
        with contextlib.ExitStack() as stack:
            stack.callback(tracer.close if tracer else lambda: None)
            heartbeat = stack.enter_context(beating_thread(heartbeat_of(context)))
            clock = PhaseClock(tracer, heartbeat)
            stack.enter_context(clock.active())
            heartbeat.doing("meets the other ranks")
            mesh = TrainerMesh.open(context, registry)
            stack.callback(mesh.close)
            heartbeat.doing("loads the model")
            engine = build_train_engine(
                config.model, role="actor", total_steps=self._length.total_steps, mesh=mesh, seed=config.seed
            )
            stack.callback(engine.close)
            announce_ready(registry, context)
            self._run(engine, clock, paths, stack)

    def _run(self, engine: TrainEngine, clock: PhaseClock, paths: RunPaths, stack: contextlib.ExitStack) -> None:

        config, is_rank0 = self._config, self._context.index == 0
        engines = {"model": engine}
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
                evaluate=(lambda done: evaluation_loss(engine, valid, rows_at_once=batch_size)) if valid else None,
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
        progress = Progress(self._length, start_step=start_step)
        order = self._row_order()
        for info in progress.remaining_steps():
            began_s = time.monotonic()
            clock.begin_step(info.step)
            with phase("data"):
                batch = self._batch(engine, order, info.step)
            with phase("update"):
                metrics = train_one_batch(engine, batch)
            seconds = time.monotonic() - began_s
            metrics["trained_tokens_per_s"] = Metric(batch.num_tokens / seconds, 1.0, "sum")
            with phase("after_step"):
                after_step(info, metrics, clock.end_step())

    def _row_order(self) -> PromptStream:

        return PromptStream.of(range(len(self._train_rows)), self._config)

    def _batch(self, engine: TrainEngine, order: PromptStream, step: int) -> TrainBatch:
        """This rank's part of the rows of train step `step`, balanced by tokens."""

        size = self._config.train_dataset.batch_size
        rows = [self._train_rows[order.index(k)] for k in range(step * size, (step + 1) * size)]
        mine = balanced_parts([len(row.token_ids) for row in rows], engine.dp_size)[engine.dp_rank]
        return rows_to_train_batch([rows[i].token_ids for i in mine], [rows[i].loss_mask for i in mine])


def evaluation_loss(engine: TrainEngine, rows: Sequence[EncodedRow], *, rows_at_once: int) -> dict[str, float]:
    """Mean loss per token over the held-out rows, the same number on every rank; a collective.

    `rows_at_once` over all ranks: without a token limit a batch is one forward pass, and the held-out set may be large.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for first in range(0, len(rows), rows_at_once):
        mine = rows[first : first + rows_at_once][engine.dp_rank :: engine.dp_size]
        batch = rows_to_train_batch([row.token_ids for row in mine], [row.loss_mask for row in mine])
        outputs = engine.forward(batch)
        assert outputs.logprobs is not None
        sums += torch.stack([-(outputs.logprobs * batch.loss_mask).sum(), batch.loss_mask.sum()]).double()
    loss, count = engine.all_reduce(sums).tolist()
    return {"eval/loss": loss / max(count, 1.0)}


def train_one_batch(engine: TrainEngine, batch: TrainBatch) -> Metrics:
    """One optimiser step on one batch: the mean over the trained tokens of all ranks."""

    count = engine.all_reduce(torch.tensor([float(batch.loss_mask.sum())], dtype=torch.float64))
    nothing = {"loss": Metric(0.0, 0.0)}  # a rank without rows reports the same names
    metrics = engine.forward_backward(batch, sft_loss, denominator=max(float(count), 1.0))
    return merge_metrics(nothing, metrics, engine.optimizer_step())
