"""The models of a PPO trainer rank: which ones a configuration names, and how each is built."""

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from areal.algorithm.advantage import RETURNS, VALUES
from areal.algorithm.aggregate import (
    LossAggregation,
    TokenStat,
    local_denominator,
    loss_scale,
    loss_weights,
    to_metrics,
)
from areal.algorithm.policy_loss import value_loss
from areal.api.batch import LossFn, LossOutput, MicroBatch, OutputSpec, TokenOutputs, TrainBatch, required
from areal.api.config import PPOActorConfig, PPOConfig, PPOCriticConfig
from areal.api.engine import TrainEngine
from areal.api.errors import ConfigError
from areal.api.metrics import Metric, Metrics
from areal.data.image_files import ImageFiles
from areal.data.pack import SESSION_TOKENS, with_session_tokens
from areal.data.tokenizer import load_tokenizer, tokenizer_of
from areal.engine.build import TRAIN_ENGINES
from areal.engine.fsdp import FSDPEngine
from areal.engine.mesh import TrainerMesh
from areal.observe.log import get_logger
from areal.system.run_paths import RunPaths
from areal.trainer.actor import PPOActor
from areal.trainer.first_pass import may_share_first_pass
from areal.trainer.kl_term import PROX_CANDIDATES, num_candidates, uses_reference, with_divergence
from areal.trainer.minibatch import Passes, prefixed, train_on_minibatches
from areal.trainer.policy_update import output_spec
from areal.trainer.progress import TrainingLength, updating
from areal.trainer.reward_model import RewardModel, recoder
from areal.trainer.teacher import Teacher

# ----------------------------------------------------------------------------------------------------------------------
# The value model in training: values before the update, value updates and their metrics.


class Critic:
    """The value model on all trainer ranks; every method is called by every rank."""

    def __init__(self, engine: TrainEngine, config: PPOCriticConfig, *, seed: int = 0) -> None:
        """`seed`: of the run; it determines the order of sequences in later epochs of a batch."""
        self._engine = engine
        self._config = config
        self._seed = seed
        self._aggregation: LossAggregation = cast("LossAggregation", config.loss_aggregation)

    def with_values(self, batch: TrainBatch) -> TrainBatch:
        """Add the values at the start of the update; a collective."""
        return batch.with_column(VALUES, required(self._engine.forward(batch).values, "values"))

    def update(self, batch: TrainBatch, *, step: int = 0) -> Metrics:
        """`ppo_epochs` times `ppo_n_minibatches` optimiser steps towards RETURNS in train step `step`.

        A collective. Metrics of this rank's tokens.
        """
        config = self._config
        passes = Passes(
            num_minibatches=config.ppo_n_minibatches,
            num_epochs=config.ppo_epochs,
            seed=self._seed,
            step=step,
            keeps_groups=config.shared_prefixes == "tree",
        )
        with updating("critic", step):
            return prefixed("critic", train_on_minibatches(self._engine, batch, passes, self))

    def with_weights(self, mini: TrainBatch) -> TrainBatch:
        """The mini-batch with the numbers of trained tokens of whole sessions."""
        return with_session_tokens(mini, mini.loss_mask)

    def local_denominators(self, mini: TrainBatch) -> Tensor:
        """This rank's part of the denominator of a mini-batch, [1] float64."""
        return local_denominator(
            mini.loss_mask,
            mini.sequence_index,
            mini.num_sequences,
            self._aggregation,
            self._config.loss_scale_tokens,
            mini.columns.get(SESSION_TOKENS),
        )

    def loss_fn(self, denominators: list[float]) -> LossFn:
        """The loss of the micro-batches of a mini-batch with this global denominator."""
        scale = loss_scale(self._aggregation, denominators[0], self._config.loss_scale_tokens)
        return partial(self._loss, scale=scale)

    def names_only(self) -> Metrics:
        """Every metric that an update reports, of no tokens."""
        nothing, no_mask = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
        return self._metrics(nothing, nothing, nothing, no_mask, no_mask)

    def _loss(self, outputs: TokenOutputs, micro: MicroBatch, *, scale: float) -> LossOutput:
        """Sum of weighted token losses of a micro-batch; the engine divides by the global denominator."""
        batch, values, config = micro.batch, required(outputs.values, "values"), self._config
        old, returns, mask = batch.column(VALUES), batch.column(RETURNS), batch.loss_mask
        result = value_loss(values, old, returns, mask, eps_clip=config.eps_clip, huber_delta=config.huber_delta)
        weights = scale * loss_weights(
            mask, batch.sequence_index, batch.num_sequences, self._aggregation, batch.columns.get(SESSION_TOKENS)
        )
        metrics = self._metrics(result.losses, values, returns, result.clipped, mask)
        return LossOutput(loss=(weights * result.losses).sum(), metrics=metrics)

    @staticmethod
    def _metrics(losses: Tensor, values: Tensor, returns: Tensor, clipped: Tensor, mask: Tensor) -> Metrics:
        errors = (values.detach() - returns).square()
        stats = {"loss": losses, "value": values, "squared_error": errors, "clip_ratio": clipped}
        return to_metrics({name: TokenStat(values, mask) for name, values in stats.items()})


# ----------------------------------------------------------------------------------------------------------------------
# The reference policy: log-probabilities for the KL divergence, and resets to the current policy.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResets:
    """The reference is reset to the current policy every `every_steps` train steps."""

    policy: TrainEngine
    every_steps: int
    with_optimizer: bool
    """Reset the policy's optimiser too; its schedule continues."""


class Reference:
    """A policy that is not trained, on all trainer ranks; every rank calls every method."""

    def __init__(
        self,
        engine: TrainEngine,
        config: PPOActorConfig | None = None,
        *,
        resets: ReferenceResets | None = None,
        is_base: bool = False,
    ) -> None:
        """`config`: that of the policy; None = no divergence of whole distributions. `resets` None: constant weights.
        `is_base`: the engine is that of the policy, and the reference is its base model without adapters.
        Raises ConfigError when the weights of the policy do not fit the reference."""
        if resets is not None:
            _require_same_model(engine, resets.policy)
        self._engine = engine
        self._config = config
        self._resets = resets
        self._is_base = is_base

    @property
    def is_frozen(self) -> bool:
        """Whether the weights never change, so that recovery checkpoints do not contain them."""
        return self._resets is None

    def with_ref_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Add the reference's log-probabilities, and the divergence of whole distributions; a collective."""
        forward = partial(self._engine.forward, with_adapters=False) if self._is_base else self._engine.forward
        outputs = forward(batch.without(PROX_CANDIDATES))
        batch = replace(batch, ref_logprobs=required(outputs.logprobs, "logprobs"))
        return batch if self._config is None else with_divergence(batch, outputs, self._config)

    def after_update(self, steps_done: int) -> Metrics:
        """Reset the weights if that is due after `steps_done` train steps; a collective."""
        resets = self._resets
        if resets is None:
            return {}
        is_due = steps_done % resets.every_steps == 0
        if is_due:
            self._engine.load_weights(resets.policy.named_weights(stored=True))
            if resets.with_optimizer:
                resets.policy.reset_optimizer()
        return {"ref/reset": Metric(float(is_due), 1.0, "max")}


def _require_same_model(engine: TrainEngine, policy: TrainEngine) -> None:
    shapes = [{spec.name: spec.shape for spec in trained.weight_specs()} for trained in (engine, policy)]
    if shapes[0] != shapes[1]:
        message = "ref_reset_steps copies the policy into the reference, but ref.path names a model of another shape"
        raise ConfigError(message, code="model.weights_do_not_fit")


@dataclass(frozen=True, slots=True, kw_only=True)
class PPORoles:
    """The models of a rank by role."""

    actor: PPOActor
    reference: Reference | None
    critic: Critic | None
    reward_model: RewardModel | None
    teacher: Teacher | None
    trained: dict[str, TrainEngine]
    """Engines that learn, by role, the actor first."""
    frozen: dict[str, TrainEngine]
    """Engines without an optimiser."""

    @property
    def recovered(self) -> dict[str, TrainEngine]:
        """Engines whose weights change, so that a recovery checkpoint must contain them."""
        moves = {"ref": self.reference is not None and not self.reference.is_frozen}
        moves["teacher"] = self.teacher is not None and self.teacher.is_average
        return self.trained | {name: engine for name, engine in self.frozen.items() if moves.get(name)}

    @property
    def engines(self) -> dict[str, TrainEngine]:
        return self.trained | self.frozen


def build_roles(
    config: PPOConfig, mesh: TrainerMesh, length: TrainingLength, *, images: ImageFiles | None = None
) -> PPORoles:
    """Load the models that the configuration names; a collective. `images`: of the batches, None = those of the run."""
    images = images or ImageFiles(RunPaths.of(config).images)
    build = partial(TRAIN_ENGINES[config.train_backend], mesh=mesh, seed=config.seed, images=images)
    build_frozen = partial(build, total_steps=0)
    trained: dict[str, TrainEngine] = {
        "actor": build(
            config.actor,
            role="actor",
            total_steps=_actor_steps(config, length),
            outputs=output_spec(config.actor, config.teacher),
        )
    }
    if config.critic is not None:
        steps = length.total_steps * config.critic.ppo_n_minibatches * config.critic.ppo_epochs
        trained["critic"] = build(config.critic, role="critic", total_steps=steps)
    frozen: dict[str, TrainEngine] = {}
    if config.ref is not None and uses_reference(config.actor) and config.reference_is_base:
        get_logger("trainer").info("ref is the actor without its adapters, and has no copy of the weights")
    elif config.ref is not None and uses_reference(config.actor):
        ref_outputs = OutputSpec(candidates=num_candidates(config.actor))
        frozen["ref"] = build_frozen(config.ref, role="ref", outputs=ref_outputs)
    elif config.ref is not None:
        get_logger("trainer").info("ref is not loaded: actor.kl_ctl and actor.kl_loss_coef are 0")
    if config.reward_model is not None:
        frozen["reward_model"] = build_frozen(config.reward_model, role="reward")
    if "teacher" in config.models:
        frozen["teacher"] = build_frozen(config.models["teacher"], role="ref")
    return _roles_of(config, trained, frozen)


def _roles_of(config: PPOConfig, trained: dict[str, TrainEngine], frozen: dict[str, TrainEngine]) -> PPORoles:
    critic, resets = config.critic, None
    if config.ref_reset_steps is not None:
        resets = ReferenceResets(
            policy=trained["actor"], every_steps=config.ref_reset_steps, with_optimizer=config.ref_reset_optimizer
        )
    reference = None
    if config.ref is not None and uses_reference(config.actor):
        is_base = config.reference_is_base
        engine = trained["actor"] if is_base else frozen["ref"]
        reference = Reference(engine, config.actor, resets=resets, is_base=is_base)
    policy = trained["actor"]
    repeats = isinstance(policy, FSDPEngine) and policy.repeats_passes
    return PPORoles(
        actor=PPOActor(
            policy,
            config.actor,
            max_new_tokens=config.gconfig.max_new_tokens,
            seed=config.seed,
            frozen_steps=0 if critic is None else critic.warmup_steps,
            critic_lambda=None if critic is None else critic.gae_lambda,
            teacher=config.teacher,
            shares_first_pass=repeats and may_share_first_pass(config),
        ),
        reference=reference,
        critic=None if critic is None else Critic(trained["critic"], critic, seed=config.seed),
        reward_model=_reward_model(config, frozen["reward_model"]) if "reward_model" in frozen else None,
        teacher=None if config.teacher is None else Teacher(frozen.get("teacher"), config.teacher, policy=policy),
        trained=trained,
        frozen=frozen,
    )


def _actor_steps(config: PPOConfig, length: TrainingLength) -> int:
    """Optimiser steps of the policy's schedule: none while only the critic learns."""
    warmup = 0 if config.critic is None else config.critic.warmup_steps
    if warmup >= length.total_steps:
        get_logger("trainer").warning(
            "critic.warmup_steps=%d of %d train steps: only the critic learns", warmup, length.total_steps
        )
    return max(length.total_steps - warmup, 1) * config.actor.ppo_n_minibatches * config.actor.ppo_epochs


def _reward_model(config: PPOConfig, engine: TrainEngine) -> RewardModel:
    assert config.reward_model is not None
    recode = None
    if config.reward_model.tokenizer_path:
        policy = tokenizer_of(config, config.actor.path)
        recode = recoder(policy, load_tokenizer(config.reward_model.tokenizer_path))
    return RewardModel(engine, config.reward_model, recode=recode)
