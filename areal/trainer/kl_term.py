"""The divergence from the reference policy: as a penalty in the reward and as a term of the loss."""

import torch
from torch import Tensor

from areal.algorithm.aggregate import TokenStat
from areal.algorithm.kl import distribution_kl, kl_estimate
from areal.api.batch import CANDIDATE_IDS, TokenOutputs, TrainBatch, required
from areal.api.columns import ColumnSpec
from areal.api.config import PPOActorConfig
from areal.trainer.off_policy import old_logprobs

PROX_CANDIDATES = ColumnSpec("prox_candidate_logprobs", show="", made_by="with_prox_logprobs")
"""[T, k] float32, those of the policy before the update."""
REF_CANDIDATES = ColumnSpec("ref_candidate_logprobs", show="", made_by="with_ref_logprobs")
"""[T, k] float32, those of the reference."""
REF_KL = ColumnSpec("ref_full_kl", made_by="with_ref_logprobs")
"""[T] float32, KL of whole distributions before the update."""


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
    batch = batch.with_column(PROX_CANDIDATES, candidates)
    if count and outputs.candidate_ids is not None:  # otherwise the whole vocabulary
        batch = batch.with_column(CANDIDATE_IDS, outputs.candidate_ids)
    return batch


def with_divergence(batch: TrainBatch, outputs: TokenOutputs, config: PPOActorConfig) -> TrainBatch:
    """Add the divergence of whole distributions before the update. `outputs`: the reference's `forward` of this batch.

    The policy's [T, k] numbers are dropped; the reference's are kept when the loss reads them too.
    """
    if num_candidates(config) is None:
        return batch
    batch = batch.with_column(REF_CANDIDATES, required(outputs.candidate_logprobs, "candidate_logprobs"))
    batch = batch.with_column(REF_KL, _full(batch.column(PROX_CANDIDATES), batch, batch.loss_mask, config))
    return batch.without(PROX_CANDIDATES, *(() if _is_full_loss(config) else (REF_CANDIDATES,)))


def kl_penalty(batch: TrainBatch, config: PPOActorConfig) -> Tensor | None:
    """KL(policy || reference) at each answer token before the update, for the reward. -> [T], None without reference.

    Policy log-probabilities are the proximal ones if the batch has them, else those of the rollout.
    """
    if batch.ref_logprobs is None:
        return None
    if config.kl_estimator == "full":
        return batch.column(REF_KL)
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
        estimate = _full(required(outputs.candidate_logprobs, "candidate_logprobs"), batch, mask, config)
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


def _full(policy: Tensor, batch: TrainBatch, mask: Tensor, config: PPOActorConfig) -> Tensor:
    return distribution_kl(policy, batch.column(REF_CANDIDATES), mask, is_whole=config.kl_top_k == 0)
