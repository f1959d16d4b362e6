"""Owns the loop of a PPO trainer rank.

Waits for: batch k from the controller (unblocked by finished episodes), and for the fleet to hold each published
version (unblocked by the controller). The trainer is the only finite clock of a run: when it ends, the run ends.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from areal.api.config import PPOConfig
from areal.api.data import BatchShare, StepInfo
from areal.api.metrics import Metric, Metrics, merge_metrics
from areal.data.pack import to_train_batch
from areal.engine.mesh import TrainerMesh
from areal.observe.phase import PhaseClock, phase
from areal.observe.trace import open_tracer
from areal.observe.trackers import build_trackers
from areal.rollout.client import RolloutClient
from areal.system.discovery import registry_of
from areal.system.durable import write_atomic
from areal.system.heartbeat import beating_thread, heartbeat_of
from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths
from areal.trainer.after_step import AfterStep, StepHooks
from areal.trainer.batch_metrics import batch_metrics
from areal.trainer.evaluator import Evaluator
from areal.trainer.progress import Progress, TrainingLength
from areal.trainer.rank import announce_ready, prepare_process
from areal.trainer.recover import RecoverStore
from areal.trainer.roles import PPORoles, build_roles
from areal.trainer.saver import Saver
from areal.trainer.weights import WeightPublisher, build_weight_publisher, checksum_of


class BatchSource(Protocol):
    """Where batches come from, and who hears that they were trained on."""

    def next_batch(self, step: int) -> BatchShare:
        """This rank's share of batch `step`; blocks until it is there."""
        ...

    def consumed(self, step: int, version: int, weights_checksum: str) -> None:
        """Batch `step` was trained on and `version` published; called on rank 0."""
        ...


class PPOLoop:
    """One rank's training: on what it is given, wherever that comes from."""

    def __init__(
        self,
        *,
        roles: PPORoles,
        batches: BatchSource,
        weights: WeightPublisher,
        after_step: Callable[[StepInfo, Metrics, dict[str, float]], bool],
        progress: Progress,
        clock: PhaseClock,
        is_rank0: bool,
    ) -> None:
        """`after_step` gets the metrics of a step and the seconds of its phases; True ends the training."""
        self._roles = roles
        self._batches = batches
        self._weights = weights
        self._after_step = after_step
        self._progress = progress
        self._clock = clock
        self._is_rank0 = is_rank0

    def run(self) -> None:
        """Every remaining step, in order."""
        actor, reference, critic = self._roles.actor, self._roles.reference, self._roles.critic
        judge, teacher = self._roles.judge, self._roles.teacher
        for info in self._progress.remaining_steps():
            began_s = time.monotonic()
            self._clock.begin_step(info.step)
            with phase("rollout"):
                next_batch = partial(self._batches.next_batch, info.step)
                share = self._weights.ask(next_batch, version=info.step)
                batch = to_train_batch(share)
            with phase("scores"):
                batch, scored = judge.with_scores(batch) if judge else (batch, {})
            with phase("prox_logprobs"):
                batch = actor.with_prox_logprobs(batch)
            with phase("ref_logprobs"):
                batch = reference.with_ref_logprobs(batch) if reference else batch
            with phase("teacher_logprobs"):
                batch = teacher.with_teacher_logprobs(batch) if teacher else batch
            with phase("values"):
                batch = critic.with_values(batch) if critic else batch
            with phase("filters"):
                batch, filtered = actor.with_filters(batch)
            with phase("correction"):
                batch, mismatch = actor.with_correction(batch)
            with phase("advantages"):
                batch = actor.with_advantages(batch)
                batch, taught = teacher.with_advantages(batch) if teacher else (batch, {})
            with phase("update"):
                chosen, resampled = actor.with_resampling(batch)
                metrics = resampled | actor.update(chosen, step=info.step)
                metrics |= critic.update(chosen, step=info.step) if critic else {}
                metrics |= reference.after_update(info.step + 1) if reference else {}
            with phase("publish_weights"):
                checksum = self._weights.publish(info.step + 1)
            if self._is_rank0:
                self._batches.consumed(info.step, info.step + 1, checksum)
            found = merge_metrics(scored, filtered, mismatch, taught, batch_metrics(batch))
            metrics = merge_metrics(metrics, found, _share_metrics(share, began_s))
            with phase("after_step"):
                ends = self._after_step(info, metrics, self._clock.end_step())
            if ends:
                self._progress.stop()


def _share_metrics(share: BatchShare, began_s: float) -> Metrics:
    """Statistics of the whole batch as the controller saw it, and this rank's share of the step's throughput."""
    seconds = max(time.monotonic() - began_s, 1e-9)
    metrics = {f"rollout/{name}": Metric(value) for name, value in share.stats.items()}
    metrics["trained_tokens_per_s"] = Metric(len(share.token_ids) / seconds, 1.0, "sum")
    metrics["seconds/step"] = Metric(seconds)
    return metrics


def train_policy(config: PPOConfig, context: ProcessContext, length: TrainingLength, *, has_valid: bool) -> None:
    """What a trainer rank does from its start to its end."""
    prepare_process(context, config.seed)
    registry = registry_of(config)
    tracer = open_tracer(config.perf_tracer, RunPaths.of(config), context.name)
    with contextlib.ExitStack() as stack:
        stack.callback(tracer.flush if tracer else lambda: None)
        heartbeat = stack.enter_context(beating_thread(heartbeat_of(context)))
        clock = PhaseClock(tracer, heartbeat)
        stack.enter_context(clock.active())
        heartbeat.doing("meets the other ranks")
        mesh = TrainerMesh.open(context, registry)
        stack.callback(mesh.close)
        heartbeat.doing("loads the models")
        roles = build_roles(config, mesh, length)
        for engine in roles.engines.values():
            stack.callback(engine.close)
        client = RolloutClient.from_registry(registry, config.rollout)
        heartbeat.doing("joins the run")
        loop = _connect(config, context, length, roles, client, clock, stack, has_valid=has_valid)
        loop.run()
        if context.index == 0:
            client.finish()


def _connect(
    config: PPOConfig,
    context: ProcessContext,
    length: TrainingLength,
    roles: PPORoles,
    client: RolloutClient,
    clock: PhaseClock,
    stack: contextlib.ExitStack,
    *,
    has_valid: bool,
) -> PPOLoop:
    """Recover or start anew, and meet the controller."""
    is_rank0, paths = context.index == 0, RunPaths.of(config)
    recover = RecoverStore(paths.recover, config.recover, roles.recovered)
    source = recover.start_from(after_failure=context.recover)
    point = recover.load(source) if source else None
    start_step = point.step if point else 0

    weights = build_weight_publisher(config, roles.trained["actor"], client, paths, context.host, is_rank0=is_rank0)
    stack.callback(weights.close)
    evaluator = Evaluator(config.evaluator, client, weights)
    after_step = AfterStep(
        config,
        roles.trained,
        saver=Saver(paths.checkpoints, roles.trained, keep_last=config.saver.keep_last, is_rank0=is_rank0),
        recover=recover,
        trackers=build_trackers(config, paths, first_step=start_step + 1) if is_rank0 else [],
        hooks=StepHooks(
            evaluate=evaluator.evaluate if has_valid else None,
            goal_reached=evaluator.goal_reached,
            committed=client.committed,
            actor_state=roles.actor.state,
        ),
        is_rank0=is_rank0,
    )
    stack.callback(after_step.close)
    if point is None:
        _record_initial_weights(paths, roles, is_rank0=is_rank0)
    else:
        after_step.continue_from(point)
        roles.actor.load_state(point.actor)
    progress = Progress(length, start_step=start_step, ended=point is not None and point.ends(config))
    if not progress.is_complete:
        if point is not None or context.run_id > 0 or config.actor.init_from_scratch:
            # Before attaching: no episode starts on what the servers happened to load, or hold of a later version.
            weights.publish(start_step)
        _attach(client, context, start_step, dp_size=roles.trained["actor"].dp_size)
    announce_ready(registry_of(config), context)
    if config.evaluator.eval_before_train and point is None:
        after_step.before_first(0)
    return PPOLoop(
        roles=roles,
        batches=client,
        weights=weights,
        after_step=after_step,
        progress=progress,
        clock=clock,
        is_rank0=is_rank0,
    )


def _attach(client: RolloutClient, context: ProcessContext, step: int, *, dp_size: int) -> None:
    """The policy version at a step is the step: the number of publications."""
    client.attach(rank=context.index, world_size=context.world_size, dp_size=dp_size, step=step, version=step)


def _record_initial_weights(paths: RunPaths, roles: PPORoles, *, is_rank0: bool) -> None:
    """What a replay must begin with; a collective."""
    found = {role: checksum_of(engine, is_rank0=is_rank0) for role, engine in roles.engines.items()}
    if is_rank0:
        write_atomic(paths.initial_weights, json.dumps(found).encode())
