"""Owns the options of the frozen models beside policy, critic and reference: a teacher, a reward model."""

from __future__ import annotations

from dataclasses import dataclass

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
