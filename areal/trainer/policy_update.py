"""The policy's loss of a micro-batch: token losses, off-policy correction, aggregation weights and statistics."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from areal.algorithm.aggregate import (
    LossAggregation,
    TokenStat,
    local_denominator,
    loss_scale,
    loss_weights,
    to_metrics,
)
from areal.algorithm.correction import weighted
from areal.algorithm.losses import policy_loss
from areal.algorithm.policy_loss import (
    PolicyTokens,
    entropy_loss,
    kl_of_samples,
    log_ratio,
    positive_mask,
    positive_nll,
)
from areal.api.batch import LossFn, LossOutput, MicroBatch, OutputSpec, TokenOutputs, TrainBatch, required
from areal.api.config import PPOActorConfig, TeacherConfig
from areal.api.metrics import Metrics
from areal.data.pack import SESSION_TOKENS, with_session_tokens
from areal.trainer.kl_term import kl_loss, num_candidates
from areal.trainer.off_policy import behaviour_weights, drops_late, late_correction, old_logprobs, prox_errors
from areal.trainer.teacher import distillation_loss


def output_spec(config: PPOActorConfig, teacher: TeacherConfig | None = None) -> OutputSpec:
    """The outputs of the policy's engine that the loss needs in addition to log-probabilities."""
    candidates = num_candidates(config)
    if candidates is None and teacher is not None:
        candidates = teacher.top_k or None
    squared_sums = config.has_token_baseline
    if not config.has_entropy_bonus:
        return OutputSpec(squared_sums=squared_sums, candidates=candidates)
    clamp = config.entropy_clamp
    return OutputSpec(entropy_grad=clamp == 0, entropy_clamp=clamp, squared_sums=squared_sums, candidates=candidates)


class PolicyUpdate:
    """Implements `UpdateRule` for the policy.

    loss = sum over tokens of w (behaviour weight x policy loss - entropy_coef H + kl_loss_coef KL
                                 + teacher.loss_coef KL to the teacher) / D
           + positive_nll_coef sum over tokens of good answers of -log pi / their number,
    with the weights w and the denominator D of `loss_aggregation`; both counts are of the mini-batch on all ranks.
    """

    def __init__(
        self,
        config: PPOActorConfig,
        *,
        entropy_coef: float = 0.0,
        teacher: TeacherConfig | None = None,
        completed: Callable[[MicroBatch, Tensor], TrainBatch] | None = None,
    ) -> None:
        """`entropy_coef`: of this train step. `teacher` None: there is none. `completed` adds columns to a micro-batch
        from the log-probabilities [T] of the policy in training; None = the batch has all."""
        self._completed = completed
        self._config = config
        self._teacher = teacher
        self._entropy_coef = entropy_coef
        self._aggregation: LossAggregation = cast("LossAggregation", config.loss_aggregation)

    def with_weights(self, mini: TrainBatch) -> TrainBatch:
        return with_session_tokens(mini, mini.trained) if self._config.loss_unit == "session" else mini

    def local_denominators(self, mini: TrainBatch) -> Tensor:
        """Denominators of the whole loss and of the good answers. -> [2] float64"""
        policy = local_denominator(
            mini.trained,
            mini.sequence_index,
            mini.num_sequences,
            self._aggregation,
            self._config.loss_scale_tokens,
            mini.columns.get(SESSION_TOKENS),
        )
        good = positive_mask(mini.rewards, mini.trained, mini.sequence_index).sum()
        return torch.cat([policy, good.to(device="cpu", dtype=torch.float64).reshape(1)])

    def loss_fn(self, denominators: list[float]) -> LossFn:
        return partial(self._loss, denominators=denominators)

    def names_only(self) -> Metrics:
        nothing = torch.zeros(0)
        tokens = PolicyTokens(
            **dict.fromkeys(("logprobs", "old_logprobs", "rollout_logprobs", "advantages"), nothing),
            mask=nothing.bool(),
            sequence_index=nothing.long(),
            num_sequences=0,
        )
        outputs = TokenOutputs(logprobs=nothing, entropy=nothing, clamped_entropy=nothing)
        stats = self._policy_loss(tokens, None)[1] | self._entropy_loss(outputs, tokens.mask)[1]
        stats |= prox_errors(nothing, None, self._config)
        stats |= kl_loss(outputs, None, self._config)[1] | distillation_loss(outputs, None, self._teacher)[1]
        return to_metrics(stats | self._likelihood_loss(tokens, nothing)[1])

    def _loss(self, outputs: TokenOutputs, micro: MicroBatch, *, denominators: list[float]) -> LossOutput:
        """Sum of weighted token losses of a micro-batch; the engine divides by the first denominator."""
        batch, logprobs = micro.batch, required(outputs.logprobs, "logprobs")
        if self._completed is not None:
            batch = self._completed(micro, logprobs)
        trained = batch.trained
        tokens = PolicyTokens(
            logprobs=logprobs,
            old_logprobs=old_logprobs(batch, self._config, logprobs),
            rollout_logprobs=batch.rollout_logprobs,
            advantages=required(batch.advantages, "advantages"),
            mask=batch.in_ratio,
            sequence_index=batch.sequence_index,
            num_sequences=batch.num_sequences,
            columns=batch.columns,
        )
        losses, stats = self._policy_loss(tokens, behaviour_weights(batch, self._config))
        stats |= prox_errors(logprobs, batch, self._config)
        bonus, entropy_stats = self._entropy_loss(outputs, trained)
        scale = loss_scale(self._aggregation, denominators[0], self._config.loss_scale_tokens)
        weights = scale * loss_weights(
            trained, tokens.sequence_index, tokens.num_sequences, self._aggregation, batch.columns.get(SESSION_TOKENS)
        )
        divergence, kl_stats = kl_loss(outputs, batch, self._config)
        taught, teacher_stats = distillation_loss(outputs, batch, self._teacher)
        total = (weights * (losses + bonus + divergence + taught)).sum()
        stats |= entropy_stats | teacher_stats
        likelihood, likelihood_stats = self._likelihood_loss(replace(tokens, mask=trained), batch.rewards)
        if denominators[1] > 0:  # the engine divides everything by the first denominator, this term has its own
            total = total + likelihood.sum() * (denominators[0] / denominators[1])
        return LossOutput(loss=total, metrics=to_metrics(stats | kl_stats | likelihood_stats))

    def _policy_loss(self, tokens: PolicyTokens, factors: Tensor | None) -> tuple[Tensor, dict[str, TokenStat]]:
        """The policy-gradient loss of each token, [T], and its metrics."""
        late = late_correction(tokens, self._config)
        if late is not None and drops_late(self._config):
            tokens = replace(tokens, mask=late.kept)
        result = weighted(policy_loss(tokens, self._config), factors if late is None else late.weights)
        moved = log_ratio(tokens.logprobs, tokens.old_logprobs, tokens.mask).detach()
        stats = {
            "loss": TokenStat(result.losses, tokens.mask),
            "approx_kl": TokenStat(kl_of_samples(moved, "k3"), tokens.mask),  # target_kl needs it of every loss
            **result.stats,
            "logprobs": TokenStat(tokens.logprobs, tokens.mask),
            **({} if late is None else late.stats),
        }
        return result.losses, stats

    def _entropy_loss(self, outputs: TokenOutputs, mask: Tensor) -> tuple[Tensor | float, dict[str, TokenStat]]:
        """-entropy_coef H of each token, [T], or 0 without a bonus, and its metrics."""
        stats: dict[str, TokenStat] = {}
        if outputs.entropy is not None:
            stats["entropy"] = TokenStat(outputs.entropy, mask)
        if not self._config.has_entropy_bonus:
            return 0.0, stats
        entropy = required(outputs.clamped_entropy if self._config.entropy_clamp else outputs.entropy, "entropy")
        stats["bonus_entropy"] = TokenStat(entropy, mask)
        return self._entropy_coef * entropy_loss(entropy, mask), stats

    def _likelihood_loss(self, tokens: PolicyTokens, rewards: Tensor) -> tuple[Tensor, dict[str, TokenStat]]:
        """positive_nll_coef x -log pi of the tokens of good answers, [T], and its metrics."""
        coef = self._config.positive_nll_coef
        if coef == 0:
            return tokens.logprobs.new_zeros(()), {}
        good = positive_mask(rewards, tokens.mask, tokens.sequence_index)
        losses = positive_nll(tokens.logprobs, good)
        return coef * losses, {"positive_nll": TokenStat(losses, good)}
