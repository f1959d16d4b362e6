"""The stage that chooses the tokens of Clip-Cov and KL-Cov, once for a whole batch."""

from __future__ import annotations

from dataclasses import replace

from areal.algorithm.aggregate import Reduce
from areal.algorithm.covariance import drawn_between, highest_covariances, token_covariances, token_draws
from areal.api.batch import TrainBatch
from areal.api.config import PPOActorConfig


def with_chosen_tokens(batch: TrainBatch, config: PPOActorConfig, *, reduce: Reduce) -> TrainBatch:
    """Clip-Cov's and KL-Cov's tokens of high covariance; other losses leave the batch unchanged. A collective.

    The policy of the covariance is the one before the update: the trainer's when it was recomputed, else the
    servers'. Raises ValueError when the batch has no advantages.
    """
    if config.policy_loss not in ("clip_cov", "kl_cov"):
        return batch
    if batch.advantages is None:
        raise ValueError("the batch has no advantages: call with_advantages before with_chosen_tokens")
    logprobs = batch.rollout_logprobs if batch.prox_logprobs is None else batch.prox_logprobs
    covariances = token_covariances(batch.advantages, logprobs, batch.trained, reduce=reduce)
    draws = token_draws(batch.input_ids, batch.rollout_logprobs, batch.cu_seqlens, batch.sequence_index)
    if config.policy_loss == "kl_cov":
        chosen = highest_covariances(covariances, draws, batch.trained, ratio=config.kl_cov.ratio, reduce=reduce)
    else:
        box = config.clip_cov
        chosen = drawn_between(
            covariances, draws, batch.trained, low=box.low, high=box.high, ratio=box.ratio, reduce=reduce
        )
    return replace(batch, chosen_tokens=chosen)
