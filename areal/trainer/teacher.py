"""The teacher: its log-probabilities of the policy's answers, and distillation into advantages and loss."""

from dataclasses import replace

import torch
from torch import Tensor

from areal.algorithm.advantage import distilled_advantages
from areal.algorithm.aggregate import TokenStat, to_metrics
from areal.algorithm.importance import log_ratio
from areal.algorithm.kl import kl_estimate
from areal.api.batch import TokenOutputs, TrainBatch, required
from areal.api.config import TeacherConfig
from areal.api.engine import TrainEngine
from areal.api.metrics import Metrics
from areal.trainer.minibatch import prefixed


class Teacher:
    """A frozen model that the policy imitates, on all trainer ranks; every rank calls every method."""

    def __init__(self, engine: TrainEngine, config: TeacherConfig) -> None:
        self._engine = engine
        self._config = config

    def with_teacher_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Add the teacher's log-probabilities of the policy's tokens; a collective."""
        outputs = self._engine.forward(replace(batch, candidate_ids=None))
        return replace(batch, teacher_logprobs=required(outputs.logprobs, "logprobs"))

    def with_advantages(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """Combine the advantages with those of distillation; returns metrics of the distance between the models.

        Policy log-probabilities are the proximal ones if the batch has them, else those of the rollout.
        """
        teacher = required(batch.teacher_logprobs, "teacher_logprobs")
        advantages = required(batch.advantages, "advantages")
        policy = batch.rollout_logprobs if batch.prox_logprobs is None else batch.prox_logprobs
        mask, config = batch.loss_mask, self._config
        stats = {
            "logprobs": TokenStat(teacher, mask),
            "kl": TokenStat(kl_estimate(policy, teacher, mask, "k3"), mask),
            "log_ratio": TokenStat(log_ratio(teacher, policy, mask), mask),
        }
        advantages = distilled_advantages(
            advantages, policy, teacher, mask, rl_weight=config.rl_weight, coef=config.advantage_coef
        )
        return replace(batch, advantages=advantages), prefixed("teacher", to_metrics(stats))


def distillation_loss(
    outputs: TokenOutputs, batch: TrainBatch | None, config: TeacherConfig | None
) -> tuple[Tensor | float, dict[str, TokenStat]]:
    """Return loss_coef KL(policy || teacher) of each trained token, [T], or 0 without such a term, and its metrics.

    The gradient flows through the policy's log-probabilities in `outputs`. `batch` None: metrics of no tokens.
    """
    if config is None or config.loss_coef == 0:
        return 0.0, {}
    if batch is None:
        return 0.0, {"teacher_loss": TokenStat(torch.zeros(0), torch.zeros(0, dtype=torch.bool))}
    policy, teacher = required(outputs.logprobs, "logprobs"), required(batch.teacher_logprobs, "teacher_logprobs")
    estimate = kl_estimate(policy, teacher, batch.trained, config.loss_estimator)
    return config.loss_coef * estimate, {"teacher_loss": TokenStat(estimate, batch.trained)}
