"""The stage against stale rollouts: the old policy of the loss, and the weights and rejections of a batch."""

from dataclasses import replace

from torch import Tensor

from areal.algorithm.aggregate import Reduce, TokenStat, to_metrics
from areal.algorithm.correction import (
    Correction,
    Spans,
    approximation_errors,
    correct,
    effective_sample_size,
    loglinear_logprobs,
    mismatch_metrics,
    prox_position,
)
from areal.algorithm.policy_loss import PolicyTokens
from areal.api.batch import TrainBatch, required
from areal.api.columns import ColumnSpec
from areal.api.config import PPOActorConfig, RolloutCorrectionConfig
from areal.api.metrics import Metrics
from areal.data.pack import session_view
from areal.trainer.minibatch import prefixed

BEHAVIOUR_WEIGHTS = ColumnSpec("behaviour_weights", made_by="with_correction")
"""[T] float32, factors of the loss of each token."""


def old_logprobs(batch: TrainBatch, config: PPOActorConfig, logprobs: Tensor) -> Tensor:
    """Log-probabilities of the old policy of the loss, [T]. Raises StageError when they are missing.

    `logprobs` [T] of the policy in training, from which loglinear interpolates the proximal policy.
    """
    if not config.is_around_prox:
        return batch.rollout_logprobs
    if config.prox_logp_method == "loglinear":
        return loglinear_logprobs(logprobs, batch.rollout_logprobs, _prox_position(batch))
    return required(batch.prox_logprobs, "prox_logprobs")


def prox_errors(logprobs: Tensor, batch: TrainBatch | None, config: PPOActorConfig) -> dict[str, TokenStat]:
    """Errors of the approximations of the proximal policy, for prox_logp_method=metrics; empty otherwise.

    `logprobs` [T] of the policy in training. `batch` None: T = 0, for the names.
    """
    if config.prox_logp_method != "metrics" or not config.is_around_prox:
        return {}
    if batch is None:
        return approximation_errors(logprobs, logprobs, logprobs, logprobs, logprobs.bool())
    prox, alpha = required(batch.prox_logprobs, "prox_logprobs"), _prox_position(batch)
    return approximation_errors(logprobs, batch.rollout_logprobs, prox, alpha, batch.trained)


def _prox_position(batch: TrainBatch) -> Tensor:
    return prox_position(batch.output_versions, version=batch.version, progress=batch.update_progress)


def correction_of(config: PPOActorConfig) -> RolloutCorrectionConfig | None:
    """The correction section, also for use_decoupled_loss and behav_imp_weight_cap alone. None = no correction."""
    if config.rollout_correction is not None:
        return config.rollout_correction
    if not config.use_decoupled_loss:
        return None if config.m2_threshold is None else RolloutCorrectionConfig(mode="off")
    if config.behav_imp_weight_cap is None:
        return RolloutCorrectionConfig()
    return RolloutCorrectionConfig(mode="mask", lower=0.0, upper=config.behav_imp_weight_cap)


def with_correction(batch: TrainBatch, config: PPOActorConfig, *, reduce: Reduce) -> tuple[TrainBatch, Metrics]:
    """Add the weights and rejections of the whole batch, and report the distance of the policies; a collective.

    Without a forward pass before the update (ratio to the rollout policy, loglinear, bypass mode) nothing happens
    here: see `late_correction`. With apply_weights=false and no bound the
    batch is only measured. A session that was cut into several sequences counts as one.
    """
    if not config.needs_prox_logprobs:
        return batch, {}
    view = session_view(batch)
    if view is None:
        return _with_correction(batch, config, reduce=reduce)
    corrected, metrics = _with_correction(view.batch, config, reduce=reduce)

    def scattered(column: Tensor | None) -> Tensor | None:
        return None if column is None else view.scattered(column, batch.num_tokens)

    added = replace(
        batch,
        policy_mask=scattered(corrected.policy_mask),
        ratio_mask=scattered(corrected.ratio_mask),
        prox_logprobs=None if corrected.prox_logprobs is None else batch.prox_logprobs,
    )
    if (weights := scattered(corrected.columns.get(BEHAVIOUR_WEIGHTS))) is not None:
        added = added.with_column(BEHAVIOUR_WEIGHTS, weights)
    return added, metrics


def _with_correction(batch: TrainBatch, config: PPOActorConfig, *, reduce: Reduce) -> tuple[TrainBatch, Metrics]:
    old, rollout = required(batch.prox_logprobs, "prox_logprobs"), batch.rollout_logprobs
    spans = Spans(batch.trained, batch.sequence_index, batch.num_sequences)
    metrics = mismatch_metrics(old, rollout, spans, reduce=reduce)
    options = correction_of(config)
    if options is None:
        return batch, prefixed("batch", metrics)
    correction = correct(old, rollout, spans, options, m2_threshold=config.m2_threshold, reduce=reduce)
    metrics |= to_metrics(correction.stats)
    if options.mode != "off":
        weight = correction.stats["correction/weight"]
        metrics["correction/ess"] = effective_sample_size(weight.values, weight.mask, reduce=reduce)
    metrics = prefixed("batch", metrics)
    if not config.is_around_prox:  # only measured: the KL in the reward keeps the servers' log-probabilities
        return replace(batch, prox_logprobs=None), metrics
    batch = batch.with_column(BEHAVIOUR_WEIGHTS, correction.weights)
    if options.renormalize:
        return replace(batch, policy_mask=correction.kept, ratio_mask=None if drops(options) else spans.mask), metrics
    return replace(batch, ratio_mask=correction.kept if drops(options) else None), metrics


def behaviour_weights(batch: TrainBatch, config: PPOActorConfig) -> Tensor | None:
    """The factor of each token's loss, [T], or None. Raises StageError when it is needed and missing."""
    early = config.is_around_prox and config.needs_prox_logprobs
    if early and correction_of(config) is not None:
        return batch.column(BEHAVIOUR_WEIGHTS)
    return batch.columns.get(BEHAVIOUR_WEIGHTS)


def late_correction(tokens: PolicyTokens, config: PPOActorConfig) -> Correction | None:
    """The correction of a micro-batch whose weights depend on the policy in training; None for every other setting.

    prox_logp_method=loglinear: the old policy is known in training only. rollout_correction.numerator=training
    (verl's bypass mode): the policy in training is the numerator, and no gradient flows through the weights.
    Both read each sequence alone: the configuration refuses options that read the whole batch.
    """
    options = correction_of(config)
    in_training = options is not None and options.numerator == "training"
    is_guessed = config.prox_logp_method == "loglinear" and config.is_around_prox
    if options is None or not (in_training or is_guessed):
        return None
    spans = Spans(tokens.mask, tokens.sequence_index, tokens.num_sequences)
    numerator = tokens.logprobs if in_training else tokens.old_logprobs
    return correct(numerator, tokens.rollout_logprobs, spans, options)


def drops_late(config: PPOActorConfig) -> bool:
    """Whether the tokens that `late_correction` rejects leave the ratio of their sequence."""
    options = correction_of(config)
    return options is not None and drops(options)


def drops(options: RolloutCorrectionConfig) -> bool:
    """Whether rejected tokens leave the ratio of their sequence."""
    return options.renormalize if options.drop_from_ratio is None else options.drop_from_ratio
