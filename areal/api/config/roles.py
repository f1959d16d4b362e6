"""Owns the options of the frozen models beside policy, critic and reference: a teacher, a reward model."""

from __future__ import annotations

from dataclasses import dataclass, fields

from areal.api.config.advantages import AdvantageOptions
from areal.api.config.fields import Problems, choice, number
from areal.api.config.train import ScoreModelConfig, TrainEngineConfig


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(TrainEngineConfig):
    """A frozen language model with the policy's tokens, which the policy learns from on its own answers."""

    advantage_coef: float = number(1.0, low=0)
    """Weight of log(pi_teacher / pi) of each token in its advantage, pi before the update; 0 = not there."""
    rl_weight: float = number(1.0, low=0)
    """Factor of the advantages from rewards; 0 = learn from the teacher alone."""
    loss_coef: float = number(0.0, low=0)
    """Weight of KL(policy || teacher) as a term of the policy loss; 0 = none."""
    loss_estimator: str = choice("k2", "k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")
    """Which KL approximation that term takes; those of actor.kl_loss_estimator."""

    def problems(self) -> Problems:
        yield from super().problems()
        if self.optimizer is not None:
            yield "optimizer", "is set, but a teacher is never trained: set it to null"
        if self.advantage_coef == 0 and self.loss_coef == 0:
            yield "advantage_coef", "and loss_coef are both 0, so nothing is learned from the teacher: raise one"
        if self.loss_coef == 0 and self.loss_estimator != "k2":
            yield "loss_estimator", "has no effect with loss_coef=0: raise that or remove it"


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(ScoreModelConfig):
    """A frozen model with a one-output head that scores whole answers, prompt included."""

    weight: float = number(1.0, above=0)
    """The score times this is added to the reward of the reward functions."""
    tokenizer_path: str = ""
    """Its own tokenizer: answers are decoded and encoded anew; empty = it reads the policy's tokens as they are."""

    def problems(self) -> Problems:
        yield from super().problems()
        if self.optimizer is not None:
            yield "optimizer", "is set, but a reward model is not trained here: set it to null"


def teacher_problems(teacher: TeacherConfig, actor: AdvantageOptions, *, has_critic: bool, kl_ctl: float) -> Problems:
    """What rl_weight=0, which leaves nothing of the advantages from rewards, leaves without effect; whole paths.

    `kl_ctl`: of the penalty in the reward, 0 without a reference.
    """
    if teacher.rl_weight > 0:
        return
    given, default = vars(actor), vars(AdvantageOptions())
    dead = [f"actor.{entry.name}" for entry in fields(AdvantageOptions) if given[entry.name] != default[entry.name]]
    dead += ["critic"] if has_critic else []
    for path in dead:
        yield path, "has no effect with teacher.rl_weight=0, which drops the advantages of rewards: remove one of them"
    if kl_ctl > 0:
        yield (
            "actor.kl_ctl",
            f"{kl_ctl:g} is a penalty in the reward, which teacher.rl_weight=0 drops: set it to 0 (kl_loss_coef is the "
            "term of the loss), or remove ref",
        )


def reward_model_problems(*, has_functions: bool, accept_fn: str, adv_estimator: str) -> Problems:
    """What a reward model, which scores in the trainer, leaves without sense; whole paths."""
    if accept_fn and not has_functions:
        yield (
            "rollout.should_accept_fn",
            "looks at rewards before the reward model scores, and no reward function is given: remove it",
        )
    if adv_estimator == "remax":
        yield (
            "actor.adv_estimator",
            "remax compares with the greedy answer, which the reward model never sees: use another, or remove "
            "reward_model",
        )
