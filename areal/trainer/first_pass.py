"""The proximal log-probabilities of the first mini-batch, which its own forward pass in training gives."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from areal.algorithm.correction import Spans, correct
from areal.api.batch import MicroBatch, TrainBatch
from areal.api.config import PPOActorConfig, PPOConfig
from areal.api.config.algorithm import OWN_FUNCTION
from areal.api.config.policy_losses import loss_facts
from areal.data.pack import token_positions
from areal.trainer.kl_term import num_candidates
from areal.trainer.off_policy import BEHAVIOUR_WEIGHTS, correction_of, drops, is_around_prox


def may_share_first_pass(run: PPOConfig) -> bool:
    """Whether only the loss of a sequence reads its proximal log-probabilities.

    Then the first mini-batch, which computes with the weights before the update, needs no pass before it.
    """
    config = run.actor
    options = correction_of(config)
    if run.teacher is not None or (run.critic is not None and run.critic.warmup_steps > 0):
        return False
    reads_batch = options is not None and (options.batch_normalize or options.renormalize)
    before_update = (
        config.m2_threshold is not None
        or config.has_token_baseline
        or num_candidates(config) is not None
        or loss_facts(config.policy_loss).chooses_tokens
        or config.base_recipe is OWN_FUNCTION
        or config.pf_ppo is not None
        or (config.kl_ctl > 0 and run.ref is not None)
    )
    is_measured = config.prox_logp_method != "recompute" or (options is not None and options.numerator == "training")
    in_training = is_around_prox(config) and not is_measured and config.ppo_epochs == 1
    return in_training and not reads_batch and not before_update


@dataclass(slots=True)
class FirstPass:
    """What the losses of the first mini-batch compute in place of the proximal pass."""

    config: PPOActorConfig
    rows: list[int]
    """The sequences of the batch that are in the mini-batch, in order."""
    cut: list[list[int]]
    """`Passes.rows` of the first epoch."""
    _found: list[tuple[list[int], Tensor]] = field(default_factory=list[tuple[list[int], Tensor]])

    def filled(self, micro: MicroBatch, logprobs: Tensor) -> TrainBatch:
        """The tokens of a micro-batch with what a pass before the update adds, from the log-probabilities [T]."""
        own, batch, options = logprobs.detach(), micro.batch, correction_of(self.config)
        self._found.append(([self.rows[i] for i in micro.source_index], own.cpu()))
        batch = replace(batch, prox_logprobs=own)
        if options is None:
            return batch
        spans = Spans(batch.trained, batch.sequence_index, batch.num_sequences)
        found = correct(own, batch.rollout_logprobs, spans, options)
        batch = batch.with_column(BEHAVIOUR_WEIGHTS, found.weights)
        return replace(batch, ratio_mask=found.kept if drops(options) else None)

    def completed(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the proximal log-probabilities of all sequences that a pass has computed."""
        given = batch.rollout_logprobs if batch.prox_logprobs is None else batch.prox_logprobs
        logprobs = given.clone()
        for rows, values in self._found:
            logprobs = logprobs.to(values.dtype)
            logprobs[token_positions(batch.cu_seqlens, rows)[0]] = values
        return replace(batch, prox_logprobs=logprobs, shares_first_pass=False)


def without_first(logprobs: Tensor, batch: TrainBatch, rows: list[int]) -> Tensor:
    """[T] from those of the sequences `rows` alone; the servers' at the other tokens, so that all are finite."""
    whole = batch.rollout_logprobs.to(logprobs.dtype, copy=True)
    whole[token_positions(batch.cu_seqlens, rows)[0]] = logprobs
    return whole
