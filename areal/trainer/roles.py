"""Owns the models of a PPO trainer rank: which ones a configuration names, and how each is built."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.batch import OutputSpec
from areal.api.config import PPOConfig
from areal.api.engine import TrainEngine
from areal.data.tokenizer import load_tokenizer
from areal.engine.build import build_train_engine
from areal.engine.mesh import TrainerMesh
from areal.observe.log import get_logger
from areal.trainer.actor import PPOActor
from areal.trainer.critic import Critic
from areal.trainer.kl_term import num_candidates, uses_reference
from areal.trainer.policy_update import output_spec
from areal.trainer.progress import TrainingLength
from areal.trainer.reference import Reference, ReferenceResets
from areal.trainer.reward_model_role import Judge, recoder
from areal.trainer.teacher import Teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class PPORoles:
    """The models of a rank and what they do."""

    actor: PPOActor
    reference: Reference | None
    critic: Critic | None
    judge: Judge | None
    teacher: Teacher | None
    trained: dict[str, TrainEngine]
    """Engines that learn, by role, the actor first."""
    frozen: dict[str, TrainEngine]

    @property
    def recovered(self) -> dict[str, TrainEngine]:
        """Engines whose weights change, so that a recovery checkpoint must hold them."""
        keeps = self.reference is None or self.reference.is_frozen
        return self.trained if keeps else self.trained | {"ref": self.frozen["ref"]}

    @property
    def engines(self) -> dict[str, TrainEngine]:
        return self.trained | self.frozen


def build_roles(config: PPOConfig, mesh: TrainerMesh, length: TrainingLength) -> PPORoles:
    """Load the models this configuration names."""
    frozen_steps = 0 if config.critic is None else config.critic.warmup_steps
    if frozen_steps >= length.total_steps:
        get_logger("trainer").warning(
            "critic.warmup_steps=%d leaves the policy none of this run's %d train steps: only the critic learns",
            frozen_steps,
            length.total_steps,
        )
    per_step = config.actor.ppo_n_minibatches * config.actor.ppo_epochs
    optimizer_steps = max(length.total_steps - frozen_steps, 1) * per_step
    actor = build_train_engine(
        config.actor,
        role="actor",
        total_steps=optimizer_steps,
        mesh=mesh,
        seed=config.seed,
        outputs=output_spec(config.actor),
    )
    trained: dict[str, TrainEngine] = {"actor": actor}
    frozen: dict[str, TrainEngine] = {}
    critic = None
    if config.critic is not None:
        steps = length.total_steps * config.critic.ppo_n_minibatches * config.critic.ppo_epochs
        trained["critic"] = build_train_engine(
            config.critic, role="critic", total_steps=steps, mesh=mesh, seed=config.seed
        )
        critic = Critic(trained["critic"], config.critic, seed=config.seed)
    policy = PPOActor(
        actor,
        config.actor,
        max_new_tokens=config.gconfig.max_new_tokens,
        seed=config.seed,
        frozen_steps=frozen_steps,
        critic_lambda=None if config.critic is None else config.critic.gae_lambda,
        teacher=config.teacher,
    )
    return PPORoles(
        actor=policy,
        reference=_build_reference(config, actor, frozen, mesh),
        critic=critic,
        judge=_build_judge(config, frozen, mesh),
        teacher=_build_teacher(config, frozen, mesh),
        trained=trained,
        frozen=frozen,
    )


def _build_reference(
    config: PPOConfig, policy: TrainEngine, frozen: dict[str, TrainEngine], mesh: TrainerMesh
) -> Reference | None:
    """The reference, its engine among the `frozen`; None when none is given or nothing needs it."""
    if config.ref is None:
        return None
    if not uses_reference(config.actor):
        get_logger("trainer").info("ref is not loaded: actor.kl_ctl and actor.kl_loss_coef are 0, nothing needs it")
        return None
    outputs = OutputSpec(candidates=num_candidates(config.actor))
    engine = build_train_engine(config.ref, role="ref", total_steps=0, mesh=mesh, seed=config.seed, outputs=outputs)
    frozen["ref"] = engine
    resets = None
    if config.ref_reset_steps is not None:
        resets = ReferenceResets(
            policy=policy, every_steps=config.ref_reset_steps, with_optimizer=config.ref_reset_optimizer
        )
    return Reference(engine, config.actor, resets=resets)


def _build_teacher(config: PPOConfig, frozen: dict[str, TrainEngine], mesh: TrainerMesh) -> Teacher | None:
    if config.teacher is None:
        return None
    frozen["teacher"] = build_train_engine(config.teacher, role="ref", total_steps=0, mesh=mesh, seed=config.seed)
    return Teacher(frozen["teacher"], config.teacher)


def _build_judge(config: PPOConfig, frozen: dict[str, TrainEngine], mesh: TrainerMesh) -> Judge | None:
    model = config.reward_model
    if model is None:
        return None
    frozen["reward_model"] = build_train_engine(model, role="reward", total_steps=0, mesh=mesh, seed=config.seed)
    recode = None
    if model.tokenizer_path:
        policy = load_tokenizer(config.tokenizer_path or config.actor.path)
        recode = recoder(policy, load_tokenizer(model.tokenizer_path))
    return Judge(frozen["reward_model"], model, recode=recode)
