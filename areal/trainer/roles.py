"""The models of a PPO trainer rank: which ones a configuration names, and how each is built."""

from dataclasses import dataclass
from functools import partial

from areal.api.batch import OutputSpec
from areal.api.config import PPOConfig
from areal.api.engine import TrainEngine
from areal.data.tokenizer import load_tokenizer, tokenizer_of
from areal.engine.build import TRAIN_ENGINES
from areal.engine.fsdp import FSDPEngine
from areal.engine.mesh import TrainerMesh
from areal.observe.log import get_logger
from areal.system.image_files import ImageFiles
from areal.system.run_paths import RunPaths
from areal.trainer.actor import PPOActor
from areal.trainer.critic import Critic
from areal.trainer.first_pass import may_share_first_pass
from areal.trainer.kl_term import num_candidates, uses_reference
from areal.trainer.policy_update import output_spec
from areal.trainer.progress import TrainingLength
from areal.trainer.reference import Reference, ReferenceResets
from areal.trainer.reward_model import RewardModel, recoder
from areal.trainer.teacher import Teacher


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

    @property
    def recovered(self) -> dict[str, TrainEngine]:
        """Engines whose weights change, so that a recovery checkpoint must contain them."""
        keeps = self.reference is None or self.reference.is_frozen
        return self.trained if keeps else self.trained | {"ref": self.frozen["ref"]}

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
            config.actor, role="actor", total_steps=_actor_steps(config, length), outputs=output_spec(config.actor)
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
    if config.teacher is not None:
        frozen["teacher"] = build_frozen(config.teacher, role="ref")
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
    return PPORoles(
        actor=PPOActor(
            trained["actor"],
            config.actor,
            max_new_tokens=config.gconfig.max_new_tokens,
            seed=config.seed,
            frozen_steps=0 if critic is None else critic.warmup_steps,
            critic_lambda=None if critic is None else critic.gae_lambda,
            teacher=config.teacher,
            shares_first_pass=_shares_first_pass(config, trained["actor"]),
        ),
        reference=reference,
        critic=None if critic is None else Critic(trained["critic"], critic, seed=config.seed),
        reward_model=_reward_model(config, frozen["reward_model"]) if "reward_model" in frozen else None,
        teacher=None if config.teacher is None else Teacher(frozen["teacher"], config.teacher),
        trained=trained,
        frozen=frozen,
    )


def _shares_first_pass(config: PPOConfig, engine: TrainEngine) -> bool:
    is_equal = isinstance(engine, FSDPEngine) and engine.repeats_passes
    return is_equal and may_share_first_pass(config)


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
