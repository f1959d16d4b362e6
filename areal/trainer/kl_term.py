"""The divergence from the reference policy: as a penalty in the reward and as a term of the loss."""

from dataclasses import replace

import torch
from torch import Tensor

from areal.algorithm.aggregate import TokenStat
from areal.algorithm.kl import distribution_kl, kl_estimate
from areal.api.batch import TokenOutputs, TrainBatch, required
from areal.api.config import PPOActorConfig
from areal.trainer.off_policy import old_logprobs


def uses_reference(config: PPOActorConfig) -> bool:
    """Whether the reward or the loss contains the divergence from the reference."""
    return config.kl_ctl > 0 or config.kl_loss_coef > 0


def num_candidates(config: PPOActorConfig) -> int | None:
    """`OutputSpec.candidates` of policy and reference: the number of tokens, 0 = all, None = none."""
    in_reward = config.kl_ctl > 0 and config.kl_estimator == "full"
    return config.kl_top_k if in_reward or _is_full_loss(config) else None


def with_candidates(batch: TrainBatch, outputs: TokenOutputs, config: PPOActorConfig) -> TrainBatch:
    """Keep the policy's distribution over its most likely tokens before the update. `outputs`: of its `forward`.

    Unchanged without kl estimator `full`. Raises StageError when the engine returned no candidates.
    """
    count = num_candidates(config)
    if count is None:
        return batch
    candidates = required(outputs.candidate_logprobs, "candidate_logprobs")
    ids = outputs.candidate_ids if count else None  # None: the whole vocabulary
    return replace(batch, candidate_ids=ids, prox_candidate_logprobs=candidates)


def with_divergence(batch: TrainBatch, outputs: TokenOutputs, config: PPOActorConfig) -> TrainBatch:
    """Add the divergence of whole distributions before the update. `outputs`: the reference's `forward` of this batch.

    The policy's [T, k] numbers are dropped; the reference's are kept when the loss reads them too.
    """
    if num_candidates(config) is None:
        return batch
    batch = replace(batch, ref_candidate_logprobs=outputs.candidate_logprobs)
    divergence = _full(batch.prox_candidate_logprobs, batch, batch.loss_mask, config)
    kept = batch.ref_candidate_logprobs if _is_full_loss(config) else None
    return replace(batch, ref_full_kl=divergence, prox_candidate_logprobs=None, ref_candidate_logprobs=kept)


def kl_penalty(batch: TrainBatch, config: PPOActorConfig) -> Tensor | None:
    """KL(policy || reference) at each answer token before the update, for the reward. -> [T], None without reference.

    Policy log-probabilities are the proximal ones if the batch has them, else those of the rollout.
    """
    if batch.ref_logprobs is None:
        return None
    if config.kl_estimator == "full":
        return batch.ref_full_kl
    policy = batch.rollout_logprobs if batch.prox_logprobs is None else batch.prox_logprobs
    return kl_estimate(policy, batch.ref_logprobs, batch.loss_mask, config.kl_estimator)


def kl_loss(
    outputs: TokenOutputs, batch: TrainBatch | None, config: PPOActorConfig
) -> tuple[Tensor | float, dict[str, TokenStat]]:
    """kl_loss_coef KL(policy || reference) of each trained token, [T], or 0 without such a term, and its metrics.

    The gradient flows through the policy's log-probabilities in `outputs`. `batch` None: metrics of no tokens. Raises
    StageError without ref_logprobs.
    """
    if config.kl_loss_coef == 0:
        return 0.0, {}
    if batch is None:
        return 0.0, {"kl_loss": TokenStat(torch.zeros(0), torch.zeros(0, dtype=torch.bool))}
    mask = batch.trained
    if _is_full_loss(config):
        estimate = _full(outputs.candidate_logprobs, batch, mask, config)
    else:
        policy, reference = required(outputs.logprobs, "logprobs"), required(batch.ref_logprobs, "ref_logprobs")
        base = _base_of(batch, config, policy)
        estimate = kl_estimate(policy, reference, mask, config.kl_loss_estimator, base_logprobs=base)
    return config.kl_loss_coef * estimate, {"kl_loss": TokenStat(estimate, mask)}


def _base_of(batch: TrainBatch, config: PPOActorConfig, logprobs: Tensor) -> Tensor | None:
    """The policy that sampled the tokens, for the correction of the divergence in the loss; None = no correction."""
    match config.kl_loss_correction:
        case "old":
            return old_logprobs(batch, config, logprobs)
        case "rollout":
            return batch.rollout_logprobs
        case _:
            return None


def _is_full_loss(config: PPOActorConfig) -> bool:
    return config.kl_loss_coef > 0 and config.kl_loss_estimator == "full"


def _full(policy: Tensor | None, batch: TrainBatch, mask: Tensor, config: PPOActorConfig) -> Tensor:
    policy = required(policy, "prox_candidate_logprobs")
    reference = required(batch.ref_candidate_logprobs, "ref_candidate_logprobs")
    return distribution_kl(policy, reference, mask, is_whole=config.kl_top_k == 0)
