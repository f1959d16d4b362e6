"""Direct preference optimisation: a policy learns from pairs of answers, relative to a frozen reference."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from areal.algorithm.aggregate import sequence_means, sequence_sums
from areal.algorithm.preference import PairPlaces, dpo_losses, ipo_losses, preference_accuracy, preference_log_ratios
from areal.api.batch import TokenOutputs, TrainBatch, required
from areal.api.config import DPOConfig, DPOOptions
from areal.api.engine import TrainEngine
from areal.data.preference_rows import EncodedPair
from areal.observe.phase import phase
from areal.trainer.pairs import PairTask, with_whole_pairs
from areal.trainer.row_loop import EngineBuilder, RowTask, RowTrainer


class DPOTask(PairTask):
    """The chosen answer of a pair gains probability over the rejected one, relative to a reference."""

    def __init__(self, engine: TrainEngine, reference: TrainEngine | None, options: DPOOptions) -> None:
        """`reference` None: its log-probabilities are 0 (dpo.reference_free); `engine`: its base model without
        adapters."""
        super().__init__("actor", engine)
        self._reference = reference
        self._options = options

    def _with_reference(self, batch: TrainBatch) -> TrainBatch:
        if self._reference is None:
            return batch
        with phase("ref_logprobs"):
            is_base, ref = self._reference is self._engine, self._reference
            outputs = ref.forward(batch, with_adapters=False) if is_base else ref.forward(batch)
            return replace(batch, ref_logprobs=required(outputs.logprobs, "logprobs"))

    def _compare(self, outputs: TokenOutputs, batch: TrainBatch, pairs: PairPlaces) -> dict[str, Tensor]:
        """Rewards are implicit: beta (log pi - log ref)."""
        options, logprobs = self._options, required(outputs.logprobs, "logprobs")
        means, _ = sequence_means(logprobs, batch.loss_mask, batch.sequence_index, batch.num_sequences)
        own = self._reduced(logprobs, batch)
        ref = torch.zeros_like(own) if batch.ref_logprobs is None else self._reduced(batch.ref_logprobs, batch)
        chosen, rejected, chosen_mean = own[pairs.chosen], own[pairs.rejected], means[pairs.chosen]
        log_ratios = preference_log_ratios(chosen, rejected, ref[pairs.chosen], ref[pairs.rejected])
        if options.loss_type == "ipo":
            losses = ipo_losses(log_ratios, beta=options.beta)
        else:
            losses = dpo_losses(log_ratios, beta=options.beta, label_smoothing=options.label_smoothing)
        rewards = options.beta * (own - ref)
        good, bad = rewards[pairs.chosen], rewards[pairs.rejected]
        return {
            "loss": losses - options.nll_coef * chosen_mean if options.nll_coef else losses,
            "accuracy": preference_accuracy(good, bad),
            "rewards/chosen": good,
            "rewards/rejected": bad,
            "rewards/margin": good - bad,
            "logps/chosen": chosen,
            "logps/rejected": rejected,
            "nll/chosen": -chosen_mean,
        }

    def _reduced(self, logprobs: Tensor, batch: TrainBatch) -> Tensor:
        """[T] -> [S]"""
        place = (batch.loss_mask, batch.sequence_index, batch.num_sequences)
        if self._options.logp_reduction == "mean":
            return sequence_means(logprobs, *place)[0]
        return sequence_sums(logprobs, *place)


class DPOTrainer(RowTrainer[DPOConfig, EncodedPair]):
    """Trains the policy `config.actor` on pairs, in every trainer rank."""

    def _build_task(self, build: EngineBuilder, *, total_steps: int) -> RowTask[EncodedPair]:
        config = self._config
        engine = build(with_whole_pairs(config.actor), role="actor", total_steps=total_steps)
        reference = None
        if config.ref is not None and not config.dpo.reference_free:
            is_base = config.reference_is_base
            reference = engine if is_base else build(with_whole_pairs(config.ref), role="ref", total_steps=0)
        return DPOTask(engine, reference, config.dpo)
