"""Owns how a micro-batch becomes the policy's loss: token losses, their correction, their weights, what is logged."""

from __future__ import annotations

import torch

from areal.algorithm.aggregate import TokenStat, local_denominator, loss_weights, to_metrics
from areal.algorithm.correction import weighted
from areal.algorithm.policy_loss import PolicyTokens, policy_loss
from areal.api.batch import LossFn, LossOutput, MicroBatch, TokenOutputs, TrainBatch
from areal.api.config import PPOActorConfig
from areal.api.metrics import Metrics
from areal.trainer.off_policy import behaviour_weights, old_logprobs


class PolicyUpdate:
    """The policy's `UpdateRule`: what a minibatch is divided by, and the loss of its micro-batches."""

    def __init__(self, config: PPOActorConfig) -> None:
        self._config = config

    def local_denominators(self, mini: TrainBatch) -> torch.Tensor:
        """This rank's part of the denominators of a minibatch, [1] float64."""
        return local_denominator(mini.trained, mini.sequence_index, mini.num_sequences)

    def loss_fn(self, denominators: list[float]) -> LossFn:
        """The loss of the micro-batches of a minibatch with these global denominators."""
        return self._loss

    def names_only(self) -> Metrics:
        """Every metric that an update reports, of no tokens: a rank that has none reports the same names."""
        nothing = TokenOutputs(logprobs=torch.zeros(0), entropy=torch.zeros(0))
        return self._token_loss(nothing, _empty_tokens()).metrics

    def _loss(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Sum of weighted token losses of a micro-batch; the engine divides by the global denominator."""
        if outputs.logprobs is None:
            raise ValueError("the actor's engine gave no log-probabilities: it was built as a critic")
        batch = micro.batch
        if batch.advantages is None:
            raise ValueError("the batch has no advantages: call with_advantages before update")
        tokens = PolicyTokens(
            logprobs=outputs.logprobs,
            old_logprobs=old_logprobs(batch, self._config),
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
            mask=batch.trained,
            sequence_index=batch.sequence_index,
            num_sequences=batch.num_sequences,
        )
        return self._token_loss(outputs, tokens, behaviour_weights(batch, self._config))

    def _token_loss(
        self, outputs: TokenOutputs, tokens: PolicyTokens, factors: torch.Tensor | None = None
    ) -> LossOutput:
        result = weighted(policy_loss(tokens, self._config), factors)
        weights = loss_weights(tokens.mask, tokens.sequence_index, tokens.num_sequences)
        stats = {"loss": TokenStat(result.losses, tokens.mask), **result.stats}
        stats["logprobs"] = TokenStat(tokens.logprobs, tokens.mask)
        if outputs.entropy is not None:
            stats["entropy"] = TokenStat(outputs.entropy, tokens.mask)
        return LossOutput(loss=(weights * result.losses).sum(), metrics=to_metrics(stats))


def _empty_tokens() -> PolicyTokens:
    nothing = torch.zeros(0)
    return PolicyTokens(
        logprobs=nothing,
        old_logprobs=nothing,
        rollout_logprobs=nothing,
        advantages=nothing,
        mask=torch.zeros(0, dtype=torch.bool),
        sequence_index=torch.zeros(0, dtype=torch.int64),
        num_sequences=0,
    )
