"""Options of the frozen models other than the reference: a teacher and a reward model."""

from dataclasses import dataclass

from areal.api.config.algorithm import PPOActorConfig
from areal.api.config.fields import Problems, choice, number
from areal.api.config.relevance import above
from areal.api.config.rollout import InferenceEngineConfig
from areal.api.config.train import ScoreModelConfig, TrainEngineConfig


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(TrainEngineConfig):
    """A frozen language model with the policy's vocabulary; the policy learns from it on its own answers."""

    advantage_coef: float = number(1.0, low=0)
    """Coefficient of log(pi_teacher / pi) in the advantage of each token, pi before the update; 0 = none."""
    rl_weight: float = number(1.0, low=0)
    """Factor of the advantages from rewards; 0 = learn from the teacher only."""
    loss_coef: float = number(0.0, low=0)
    """Coefficient of KL(policy || teacher) as a term of the policy loss; 0 = none."""
    loss_estimator: str = choice(
        "k2", "k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", relevant=above("loss_coef", 0)
    )
    """KL estimator of the loss term, as in actor.kl_loss_estimator."""

    def problems(self) -> Problems:
        yield from super().problems()
        if self.optimizer is not None:
            yield "optimizer", "is set, but a teacher is never trained: set it to null"
        if self.advantage_coef == 0 and self.loss_coef == 0:
            yield "advantage_coef", "and loss_coef are both 0, so the teacher is not used: raise one"


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(ScoreModelConfig):
    """A frozen model with a one-output head that scores whole answers, prompt included."""

    weight: float = number(1.0, above=0)
    """Factor of the score, which is added to the reward of the reward functions."""
    tokenizer_path: str = ""
    """Tokenizer of the reward model: answers are decoded and encoded again; empty = the policy's tokens are used."""

    def problems(self) -> Problems:
        yield from super().problems()
        if self.optimizer is not None:
            yield "optimizer", "is set, but this reward model is never trained: set it to null"


def reward_model_problems(actor: PPOActorConfig, rollout: InferenceEngineConfig, *, has_functions: bool) -> Problems:
    """Options that cannot work with a reward model, which scores in the trainer."""
    if rollout.should_accept_fn and not has_functions:
        text = "filters before the reward model scores, and there is no reward function: remove it"
        yield "rollout.should_accept_fn", text
    if actor.adv_estimator == "remax":
        text = "remax needs the reward of the greedy answer, which the reward model does not score: use another"
        yield "actor.adv_estimator", text
    if actor.adv_estimator == "gdpo":
        yield "actor.adv_estimator", "gdpo reads the reward functions without the reward model: use another"
