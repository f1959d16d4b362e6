"""The teacher in training: its log-probabilities of the policy's answers, and distillation into advantages and loss."""

from dataclasses import replace

import torch
from torch import Tensor

from areal.algorithm.advantage import distilled_advantages
from areal.algorithm.aggregate import TokenStat, to_metrics
from areal.algorithm.kl import distribution_kl, kl_estimate
from areal.algorithm.policy_loss import log_ratio
from areal.api.batch import CANDIDATE_IDS, TokenOutputs, TrainBatch, required
from areal.api.config import TeacherConfig
from areal.api.engine import TrainEngine
from areal.api.metrics import Metrics
from areal.trainer.minibatch import prefixed
from areal.trainer.teacher_servers import TEACHER_IDS, TEACHER_LOGPROBS, TEACHER_TOP


class Teacher:
    """A model that the policy imitates, on all trainer ranks; every rank calls every method."""

    def __init__(self, engine: TrainEngine | None, config: TeacherConfig, *, policy: TrainEngine) -> None:
        """`engine` None: the teacher is on servers, which scored the answers. `policy` enters its average, if it is
        one."""
        self._engine = engine
        self._config = config
        self._policy = policy

    @property
    def is_average(self) -> bool:
        """Whether its weights change, so that a recovery checkpoint must contain them."""
        return self._config.average_decay is not None

    def with_teacher_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Add the teacher's log-probabilities of the policy's tokens; a collective."""
        if self._engine is not None:
            outputs = self._engine.forward(batch.without(CANDIDATE_IDS))
            return batch.with_column(TEACHER_LOGPROBS, required(outputs.logprobs, "logprobs"))
        if self._config.top_k:
            return batch.with_column(CANDIDATE_IDS, batch.column(TEACHER_IDS).long())
        return batch

    def after_update(self) -> None:
        """Move an average of the policy towards the policy after a train step; a collective."""
        decay, engine = self._config.average_decay, self._engine
        if decay is None or engine is None:
            return
        pairs = zip(engine.named_weights(stored=True), self._policy.named_weights(stored=True), strict=True)
        engine.load_weights((name, new.to(old.dtype).lerp(old, decay)) for (name, old), (_, new) in pairs)

    def with_advantages(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """Combine the advantages with those of distillation; returns metrics of the distance between the models.

        Policy log-probabilities are the proximal ones if the batch has them, else those of the rollout.
        """
        teacher = batch.column(TEACHER_LOGPROBS)
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
    if config.top_k:
        policy, teacher = required(outputs.candidate_logprobs, "candidate_logprobs"), batch.column(TEACHER_TOP)
        estimate = distribution_kl(policy, teacher.to(policy.device), batch.trained, is_whole=False)
    else:
        policy, teacher = required(outputs.logprobs, "logprobs"), batch.column(TEACHER_LOGPROBS)
        estimate = kl_estimate(policy, teacher, batch.trained, config.loss_estimator)
    return config.loss_coef * estimate, {"teacher_loss": TokenStat(estimate, batch.trained)}
