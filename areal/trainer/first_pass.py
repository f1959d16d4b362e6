"""The proximal log-probabilities of the first mini-batch, which its own forward pass in training gives."""

from dataclasses import replace

from torch import Tensor

from areal.algorithm.correction import Spans, correct
from areal.api.batch import MicroBatch, TrainBatch, required
from areal.api.config import PPOActorConfig, PPOConfig
from areal.api.config.algorithm import OWN_FUNCTION
from areal.api.config.policy_losses import loss_facts
from areal.api.engine import TrainEngine
from areal.data.pack import take, token_positions
from areal.trainer.kl_term import num_candidates
from areal.trainer.minibatch import FILTERED, Passes, sequences_in_loss, without_filtered
from areal.trainer.off_policy import BEHAVIOUR_WEIGHTS, correction_of, drops


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
    in_training = config.is_around_prox and not is_measured and config.ppo_epochs == 1
    return in_training and not reads_batch and not before_update


class FirstPass:
    """What the losses of the first mini-batch compute in place of the proximal pass of a batch.

    Until `completed`, the part of the first mini-batch in `prox_logprobs` is rollout_logprobs; the column is absent if
    there is one mini-batch only.
    """

    def __init__(self, config: PPOActorConfig, batch: TrainBatch) -> None:
        self._config = config
        passes = Passes(num_minibatches=config.ppo_n_minibatches, keeps_groups=config.shared_prefixes == "tree")
        self.cut = passes.rows(without_filtered(batch), epoch=0)
        """`Passes.rows` of the first epoch."""
        in_loss = sequences_in_loss(batch)
        self._rows = [in_loss[row] for row in self.cut[0]]
        """The sequences of the batch that are in the mini-batch, in order."""
        self._made: list[tuple[list[int], Tensor]] = []

    def with_other_logprobs(self, batch: TrainBatch, engine: TrainEngine) -> TrainBatch:
        """Add the proximal log-probabilities of all sequences but those of the first mini-batch; a collective."""
        others = sorted(set(range(batch.num_sequences)).difference(self._rows))
        if self._config.ppo_n_minibatches == 1 and FILTERED not in batch.columns:  # equal on all ranks
            return batch
        logprobs = required(engine.forward(take(batch, others)).logprobs, "logprobs")
        whole = batch.rollout_logprobs.to(logprobs.dtype, copy=True)  # so that all numbers are finite
        whole[token_positions(batch.cu_seqlens, others)[0]] = logprobs
        return replace(batch, prox_logprobs=whole)

    def in_training(self, micro: MicroBatch, logprobs: Tensor) -> TrainBatch:
        """The tokens of a micro-batch with what a pass before the update adds, from the log-probabilities [T]."""
        batch, options = micro.batch, correction_of(self._config)
        if batch.update_progress > 0:
            return batch
        logprobs = logprobs.detach()
        self._made.append(([self._rows[i] for i in micro.source_index], logprobs.cpu()))
        batch = replace(batch, prox_logprobs=logprobs)
        if options is None:
            return batch
        spans = Spans(batch.trained, batch.sequence_index, batch.num_sequences)
        correction = correct(logprobs, batch.rollout_logprobs, spans, options)
        batch = batch.with_column(BEHAVIOUR_WEIGHTS, correction.weights)
        return replace(batch, ratio_mask=correction.kept if drops(options) else None)

    def completed(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the proximal log-probabilities of all sequences that a pass has computed."""
        known = batch.rollout_logprobs if batch.prox_logprobs is None else batch.prox_logprobs
        logprobs = known.clone()
        for rows, values in self._made:
            logprobs = logprobs.to(values.dtype)
            logprobs[token_positions(batch.cu_seqlens, rows)[0]] = values
        return replace(batch, prox_logprobs=logprobs)
