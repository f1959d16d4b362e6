"""Direct preference optimisation: a policy learns from pairs of answers, relative to a frozen reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from areal.algorithm.aggregate import sequence_means, sequence_sums
from areal.algorithm.preference import (
    PairPlaces,
    dpo_losses,
    ipo_losses,
    preference_accuracy,
    preference_log_ratios,
)
from areal.api.batch import LossOutput, MicroBatch, TokenOutputs, TrainBatch
from areal.api.config import DPOConfig, DPOOptions
from areal.api.engine import TrainEngine
from areal.api.metrics import Metrics, merge_metrics
from areal.data.preference_rows import EncodedPair
from areal.observe.phase import phase
from areal.trainer.pairs import mean_metrics, num_pairs, pairs_to_batch, places_of, with_whole_pairs
from areal.trainer.row_loop import EngineBuilder, RowTask, RowTrainer, one_step


@dataclass(frozen=True, slots=True)
class _Answers:
    """Log-probabilities of the answers of P pairs, [P] each, reduced as dpo.logp_reduction says."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_mean: Tensor
    """Mean per token under every reduction."""


class DPOTask:
    """Implements `RowTask`: the chosen answer gains probability over the rejected one, relative to a reference."""

    def __init__(self, engine: TrainEngine, reference: TrainEngine | None, options: DPOOptions) -> None:
        """`reference` None: its log-probabilities are 0 (dpo.reference_free)."""
        self._engine = engine
        self._reference = reference
        self._options = options

    @property
    def engines(self) -> dict[str, TrainEngine]:
        return {"actor": self._engine}

    def batch_of(self, rows: Sequence[EncodedPair]) -> TrainBatch:
        return pairs_to_batch(rows)

    def update(self, batch: TrainBatch) -> Metrics:
        """One optimiser step; a collective."""
        batch = self._with_reference(batch)
        with phase("update"):
            found = one_step(self._engine, batch, self._loss, local_denominator=num_pairs(batch))
        nothing = torch.zeros(0)
        return merge_metrics(self._metrics(nothing, _Answers(*[nothing] * 5)), found)

    def measure(self, batch: TrainBatch) -> Metrics:
        """Loss and accuracy on held-out pairs; a collective."""
        batch = self._with_reference(batch)
        answers = self._answers(batch, places_of(batch), self._engine.forward(batch))
        return self._metrics(self._losses(answers), answers)

    def _with_reference(self, batch: TrainBatch) -> TrainBatch:
        if self._reference is None:
            return batch
        with phase("ref_logprobs"):
            return replace(batch, ref_logprobs=_logprobs(self._reference.forward(batch)))

    def _loss(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Sum of pair losses of a micro-batch; the engine divides by the number of pairs on all ranks."""
        answers = self._answers(micro.batch, places_of(micro.batch, micro.source_index), outputs)
        losses = self._losses(answers)
        return LossOutput(loss=losses.sum(), metrics=self._metrics(losses, answers))

    def _answers(self, batch: TrainBatch, pairs: PairPlaces, outputs: TokenOutputs) -> _Answers:
        logprobs = _logprobs(outputs)
        own = self._reduced(logprobs, batch)
        ref = torch.zeros_like(own) if batch.ref_logprobs is None else self._reduced(batch.ref_logprobs, batch)
        means, _ = sequence_means(logprobs, batch.loss_mask, batch.sequence_index, batch.num_sequences)
        return _Answers(
            chosen=own[pairs.chosen],
            rejected=own[pairs.rejected],
            ref_chosen=ref[pairs.chosen],
            ref_rejected=ref[pairs.rejected],
            chosen_mean=means[pairs.chosen],
        )

    def _reduced(self, logprobs: Tensor, batch: TrainBatch) -> Tensor:
        """[T] -> [S]"""
        place = (batch.loss_mask, batch.sequence_index, batch.num_sequences)
        if self._options.logp_reduction == "mean":
            return sequence_means(logprobs, *place)[0]
        return sequence_sums(logprobs, *place)

    def _losses(self, answers: _Answers) -> Tensor:
        options = self._options
        log_ratios = preference_log_ratios(answers.chosen, answers.rejected, answers.ref_chosen, answers.ref_rejected)
        if options.loss_type == "ipo":
            losses = ipo_losses(log_ratios, beta=options.beta)
        else:
            losses = dpo_losses(log_ratios, beta=options.beta, label_smoothing=options.label_smoothing)
        return losses - options.nll_coef * answers.chosen_mean if options.nll_coef else losses

    def _metrics(self, losses: Tensor, answers: _Answers) -> Metrics:
        """Rewards are implicit: beta (log pi - log ref)."""
        chosen = self._options.beta * (answers.chosen - answers.ref_chosen)
        rejected = self._options.beta * (answers.rejected - answers.ref_rejected)
        return mean_metrics(
            {
                "loss": losses,
                "accuracy": preference_accuracy(chosen, rejected),
                "rewards/chosen": chosen,
                "rewards/rejected": rejected,
                "rewards/margin": chosen - rejected,
                "logps/chosen": answers.chosen,
                "logps/rejected": answers.rejected,
                "nll/chosen": -answers.chosen_mean,
            }
        )


class DPOTrainer(RowTrainer[DPOConfig, EncodedPair]):
    """Trains the policy `config.actor` on pairs, in every trainer rank."""

    def _build_task(self, build: EngineBuilder, *, total_steps: int) -> RowTask[EncodedPair]:
        config = self._config
        engine = build(with_whole_pairs(config.actor), role="actor", total_steps=total_steps)
        reference = None
        if config.ref is not None and not config.dpo.reference_free:
            reference = build(with_whole_pairs(config.ref), role="ref", total_steps=0)
        return DPOTask(engine, reference, config.dpo)


def _logprobs(outputs: TokenOutputs) -> Tensor:
    if outputs.logprobs is None:
        raise ValueError("DPO needs language models, and an engine was built with another head")
    return outputs.logprobs
