"""Owns the loop of a PPO trainer rank.

Waits for: batch k from the controller (unblocked by finished episodes), and for the fleet to hold each published
version (unblocked by the controller). The trainer is the only finite clock of a run: when it ends, the run ends.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import torch

from areal.api.config import PPOConfig
from areal.api.data import BatchShare, StepInfo
from areal.api.engine import TrainEngine, WeightChannel
from areal.api.metrics import Metric, Metrics, merge_metrics
from areal.data.pack import to_train_batch
from areal.engine.build import build_train_engine
from areal.engine.mesh import TrainerMesh
from areal.observe.log import get_logger
from areal.observe.phase import PhaseClock, phase
from areal.observe.trace import open_tracer
from areal.observe.trackers import build_trackers
from areal.rollout.client import RolloutClient, WeightsNeeded
from areal.system.discovery import NameRegistry, registry_of
from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths
from areal.trainer.actor import PPOActor, batch_metrics
from areal.trainer.after_step import AfterStep, StepHooks
from areal.trainer.critic import Critic
from areal.trainer.evaluator import Evaluator
from areal.trainer.progress import Progress, TrainingLength
from areal.trainer.rank import announce_ready, prepare_process
from areal.trainer.recover import RecoverStore
from areal.trainer.reference import Reference
from areal.trainer.saver import Saver
from areal.trainer.weights import build_weight_channel


@dataclass(frozen=True, slots=True, kw_only=True)
class PPORoles:
    """The models of a rank and what they do."""

    actor: PPOActor
    reference: Reference | None
    critic: Critic | None
    trained: dict[str, TrainEngine]
    """Engines that learn, by role, the actor first."""
    frozen: list[TrainEngine]


class PPOLoop:
    """One rank's training."""

    def __init__(
        self,
        *,
        roles: PPORoles,
        client: RolloutClient,
        weights: WeightChannel,
        after_step: AfterStep,
        progress: Progress,
        clock: PhaseClock,
        is_rank0: bool,
    ) -> None:
        self._roles = roles
        self._client = client
        self._weights = weights
        self._after_step = after_step
        self._progress = progress
        self._clock = clock
        self._is_rank0 = is_rank0

    def run(self) -> None:
        """Every remaining step, in order."""
        actor, reference, critic = self._roles.actor, self._roles.reference, self._roles.critic
        for info in self._progress.remaining_steps():
            began_s = time.monotonic()
            with phase("rollout"):
                share = self._next_share(info.step)
                batch = to_train_batch(share)
            with phase("prox_logprobs"):
                batch = actor.with_prox_logprobs(batch)
            with phase("ref_logprobs"):
                batch = reference.with_ref_logprobs(batch) if reference else batch
            with phase("values"):
                batch = critic.with_values(batch) if critic else batch
            with phase("advantages"):
                batch = actor.with_advantages(batch)
            with phase("update"):
                metrics = actor.update(batch) | (critic.update(batch) if critic else {})
            with phase("publish_weights"):
                self._weights.publish(info.step + 1)
            if self._is_rank0:
                self._client.consumed(info.step, info.step + 1)
            metrics = merge_metrics(metrics, batch_metrics(batch), _share_metrics(share, began_s))
            if self._finish_step(info, metrics):
                self._progress.stop()

    def _next_share(self, step: int) -> BatchShare:
        """Batch `step`; servers that died and came back without this policy get it once more, from all ranks together.

        The version before batch `step` is `step`: the number of publications.
        """
        share: BatchShare | None = None
        while True:
            try:
                share = share or self._client.next_batch(step)
            except WeightsNeeded as reason:
                get_logger("trainer").warning("%s: publishing it again", reason)
            has_share = torch.tensor([float(share is not None)], dtype=torch.float64)
            if self._roles.trained["actor"].all_reduce(has_share, "min").item() and share is not None:
                return share
            self._weights.publish(step)

    def _finish_step(self, info: StepInfo, metrics: Metrics) -> bool:
        with phase("after_step"):
            return self._after_step(info, metrics, self._clock.end_step())


def _share_metrics(share: BatchShare, began_s: float) -> Metrics:
    """Statistics of the whole batch as the controller saw it, and this rank's share of the step's throughput."""
    seconds = max(time.monotonic() - began_s, 1e-9)
    metrics = {f"rollout/{name}": Metric(value) for name, value in share.stats.items()}
    metrics["trained_tokens_per_s"] = Metric(len(share.token_ids) / seconds, 1.0, "sum")
    metrics["seconds/step"] = Metric(seconds)
    return metrics


def build_roles(config: PPOConfig, mesh: TrainerMesh, length: TrainingLength) -> PPORoles:
    """Load the models this configuration names."""
    optimizer_steps = length.total_steps * config.actor.ppo_n_minibatches
    actor = build_train_engine(config.actor, role="actor", total_steps=optimizer_steps, mesh=mesh, seed=config.seed)
    trained: dict[str, TrainEngine] = {"actor": actor}
    frozen: list[TrainEngine] = []
    reference = critic = None
    if config.ref is not None and config.actor.kl_ctl > 0:
        frozen.append(build_train_engine(config.ref, role="ref", total_steps=0, mesh=mesh, seed=config.seed))
        reference = Reference(frozen[0])
    if config.critic is not None:
        steps = length.total_steps * config.critic.ppo_n_minibatches
        trained["critic"] = build_train_engine(
            config.critic, role="critic", total_steps=steps, mesh=mesh, seed=config.seed
        )
        critic = Critic(trained["critic"], config.critic)
    return PPORoles(
        actor=PPOActor(actor, config.actor), reference=reference, critic=critic, trained=trained, frozen=frozen
    )


def train_policy(config: PPOConfig, context: ProcessContext, length: TrainingLength, *, has_valid: bool) -> None:
    """What a trainer rank does from its start to its end."""
    prepare_process(context, config.seed)
    registry = registry_of(config)
    tracer = open_tracer(config.perf_tracer, RunPaths.of(config), context.name)
    clock = PhaseClock(tracer)
    with contextlib.ExitStack() as stack:
        stack.callback(tracer.close if tracer else lambda: None)
        stack.enter_context(clock.active())
        mesh = TrainerMesh.open(context, registry)
        stack.callback(mesh.close)
        roles = build_roles(config, mesh, length)
        for engine in [*roles.trained.values(), *roles.frozen]:
            stack.callback(engine.close)
        client = RolloutClient.from_registry(registry, config.rollout)
        loop = _connect(config, context, length, roles, client, registry, clock, stack, has_valid=has_valid)
        loop.run()
        if context.index == 0:
            client.finish()


def _connect(
    config: PPOConfig,
    context: ProcessContext,
    length: TrainingLength,
    roles: PPORoles,
    client: RolloutClient,
    registry: NameRegistry,
    clock: PhaseClock,
    stack: contextlib.ExitStack,
    *,
    has_valid: bool,
) -> PPOLoop:
    """Recover or start anew, meet the controller, publish what it does not yet hold."""
    is_rank0, paths = context.index == 0, RunPaths.of(config)
    lead = roles.trained["actor"]
    recover = RecoverStore(paths.recover, config.recover, num_ranks=context.world_size, is_rank0=is_rank0)
    source = recover.start_from(after_failure=context.recover)
    point = recover.load(source, roles.trained) if source else None
    start_step = point.step if point else 0

    weights = build_weight_channel(config, lead, client, paths, is_rank0=is_rank0)
    stack.callback(weights.close)
    evaluator = Evaluator(config.evaluator, client)
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
        ),
        is_rank0=is_rank0,
    )
    stack.callback(after_step.close)
    if point is not None:
        after_step.continue_from(point)
    if point is not None or config.actor.init_from_scratch:
        weights.publish(start_step)  # before attaching: no episode starts on weights the servers happened to load
    client.attach(
        rank=context.index,
        world_size=context.world_size,
        dp_size=lead.dp_size,
        step=start_step,
        version=start_step,
    )
    announce_ready(registry, context)
    if config.evaluator.eval_before_train and point is None:
        after_step.before_first(0)
    return PPOLoop(
        roles=roles,
        client=client,
        weights=weights,
        after_step=after_step,
        progress=Progress(length, start_step=start_step),
        clock=clock,
        is_rank0=is_rank0,
    )
