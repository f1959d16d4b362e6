"""Owns the stage against stale rollouts: which policy the loss is around, and what a batch must hold for it."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from areal.algorithm.aggregate import Reduce, TokenStat, to_metrics
from areal.algorithm.correction import Correction, correct
from areal.algorithm.mismatch import effective_sample_size, mismatch_metrics
from areal.algorithm.policy_loss import PolicyTokens
from areal.algorithm.proximal import approximation_errors, loglinear_logprobs, prox_position
from areal.api.batch import TrainBatch
from areal.api.config import PPOActorConfig, RolloutCorrectionConfig
from areal.api.metrics import Metrics
from areal.trainer.minibatch import prefixed


def is_around_prox(config: PPOActorConfig) -> bool:
    """Whether the loss is around the trainer's policy at the start of the update, not the servers'."""
    return config.use_decoupled_loss or config.recompute_logprob


def needs_prox_logprobs(config: PPOActorConfig) -> bool:
    """Whether that policy's log-probabilities come from a forward pass before the update, be it only to measure."""
    if is_around_prox(config):
        return config.prox_logp_method != "loglinear"
    return config.rollout_correction is not None  # one that only logs, or the configuration is refused


def old_logprobs(batch: TrainBatch, config: PPOActorConfig, logprobs: Tensor) -> Tensor:
    """The policy that the ratio of the loss is taken against, [T]. ValueError when it was not computed yet.

    `logprobs` [T] are those of the policy in training, which a guess of the proximal policy goes by.
    """
    if not is_around_prox(config):
        return batch.rollout_logprobs
    if config.prox_logp_method == "loglinear":
        return loglinear_logprobs(logprobs, batch.rollout_logprobs, _prox_position(batch))
    return _recomputed(batch)


def prox_errors(logprobs: Tensor, batch: TrainBatch | None, config: PPOActorConfig) -> dict[str, TokenStat]:
    """How far the guesses of the proximal policy are off, for prox_logp_method=metrics; nothing otherwise.

    `logprobs` [T] of the policy in training. `batch` None: of no tokens, for the names.
    """
    if config.prox_logp_method != "metrics":
        return {}
    if batch is None:
        return approximation_errors(logprobs, logprobs, logprobs, logprobs, logprobs.bool())
    prox, alpha = _recomputed(batch), _prox_position(batch)
    return approximation_errors(logprobs, batch.rollout_logprobs, prox, alpha, batch.trained)


def _prox_position(batch: TrainBatch) -> Tensor:
    return prox_position(batch.output_versions, version=batch.version, progress=batch.update_progress)


def _recomputed(batch: TrainBatch) -> Tensor:
    if batch.prox_logprobs is None:
        raise ValueError("the batch has no prox_logprobs: call with_prox_logprobs before update")
    return batch.prox_logprobs


def correction_of(config: PPOActorConfig) -> RolloutCorrectionConfig | None:
    """What is corrected, the short forms written out: use_decoupled_loss, behav_imp_weight_cap. None = nothing."""
    if config.rollout_correction is not None:
        return config.rollout_correction
    if not config.use_decoupled_loss:
        return None if config.m2_threshold is None else RolloutCorrectionConfig(mode="off")
    if config.behav_imp_weight_cap is None:
        return RolloutCorrectionConfig()
    return RolloutCorrectionConfig(mode="mask", lower=0.0, upper=config.behav_imp_weight_cap)


def with_correction(batch: TrainBatch, config: PPOActorConfig, *, reduce: Reduce) -> tuple[TrainBatch, Metrics]:
    """Decide once for the whole batch which tokens the policy loss leaves out, and what weighs the others.

    Also how far apart the policies are, of all ranks' tokens. A collective. Where the loss is around the rollout policy
    every ratio is 1: nothing is done, at most measured. Where the old policy is guessed, see `late_correction`.
    """
    if not needs_prox_logprobs(config):
        return batch, {}
    old, rollout, mask = _recomputed(batch), batch.rollout_logprobs, batch.trained
    spans = (mask, batch.sequence_index, batch.num_sequences)
    metrics = mismatch_metrics(old, rollout, *spans, reduce=reduce)
    options = correction_of(config)
    if options is None:
        return batch, prefixed("batch", metrics)
    found = correct(old, rollout, *spans, options, m2_threshold=config.m2_threshold, reduce=reduce)
    metrics |= to_metrics(found.stats)
    if options.mode != "off":
        weight = found.stats["correction/weight"]
        metrics["correction/ess"] = effective_sample_size(weight.values, weight.mask, reduce=reduce)
    if not is_around_prox(config):  # only measured: the KL in the reward goes on with the servers' log-probabilities
        return replace(batch, prox_logprobs=None), prefixed("batch", metrics)
    corrected = replace(batch, behaviour_weights=found.weights)
    if options.renormalize:
        corrected = replace(corrected, policy_mask=found.kept)
    return corrected, prefixed("batch", metrics)


def behaviour_weights(batch: TrainBatch, config: PPOActorConfig) -> Tensor | None:
    """The factor of each token's loss, [T], or None when there is none. ValueError when it was not computed yet."""
    early = is_around_prox(config) and needs_prox_logprobs(config)
    needed = early and correction_of(config) is not None
    if needed and batch.behaviour_weights is None:
        raise ValueError("the batch has no behaviour_weights: call with_correction before update")
    return batch.behaviour_weights


def late_correction(tokens: PolicyTokens, config: PPOActorConfig) -> Correction | None:
    """The correction of a micro-batch where the old policy is known in training only (loglinear); None otherwise.

    It is a function of each sequence alone: what would need the whole batch is refused by the configuration.
    """
    options = correction_of(config)
    if options is None or config.prox_logp_method != "loglinear":
        return None
    spans = (tokens.mask, tokens.sequence_index, tokens.num_sequences)
    return correct(tokens.old_logprobs, tokens.rollout_logprobs, *spans, options)
