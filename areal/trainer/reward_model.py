"""Training of reward models on pairs (Bradley-Terry), and scores of whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson
import torch
from torch import Tensor

from areal.algorithm.preference import bradley_terry_losses, centering_losses, last_of_each, preference_accuracy
from areal.api.batch import LossOutput, MicroBatch, TokenOutputs, TrainBatch
from areal.api.config import RWConfig, RWOptions
from areal.api.engine import TrainEngine
from areal.api.metrics import Metrics, merge_metrics
from areal.data.preference_rows import EncodedPair
from areal.engine.hf_model import resolve_model_folder
from areal.observe.log import get_logger
from areal.observe.phase import phase
from areal.trainer.pairs import mean_metrics, num_pairs, pairs_to_batch, places_of, with_whole_pairs
from areal.trainer.row_loop import EngineBuilder, RowTask, RowTrainer, one_step


def sequence_scores(engine: TrainEngine, batch: TrainBatch) -> Tensor:
    """The score of every sequence of a packed batch, prompt and answer together: [S] float32 on the CPU; a collective.

    `engine`: built with role "reward". A share without sequences returns shape [0].
    """
    return last_of_each(_scores(engine.forward(batch)), batch.cu_seqlens)


class RewardModelTask:
    """Implements `RowTask`: the chosen answer of a pair learns a higher score than the rejected one."""

    def __init__(self, engine: TrainEngine, options: RWOptions) -> None:
        self._engine = engine
        self._options = options

    @property
    def engines(self) -> dict[str, TrainEngine]:
        return {"model": self._engine}

    def batch_of(self, rows: Sequence[EncodedPair]) -> TrainBatch:
        return pairs_to_batch(rows)

    def update(self, batch: TrainBatch) -> Metrics:
        """One optimiser step; a collective."""
        with phase("update"):
            found = one_step(self._engine, batch, self._loss, local_denominator=num_pairs(batch))
        return merge_metrics(self._metrics(*[torch.zeros(0)] * 3), found)

    def measure(self, batch: TrainBatch) -> Metrics:
        """Loss and accuracy on held-out pairs; a collective."""
        pairs = places_of(batch)
        scores = sequence_scores(self._engine, batch)
        chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
        return self._metrics(self._losses(chosen, rejected, batch.rewards[pairs.chosen]), chosen, rejected)

    def _loss(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Sum of pair losses of a micro-batch; the engine divides by the number of pairs on all ranks."""
        pairs = places_of(micro.batch, micro.source_index)
        scores = last_of_each(_scores(outputs), micro.batch.cu_seqlens)
        chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
        losses = self._losses(chosen, rejected, micro.batch.rewards[pairs.chosen])
        return LossOutput(loss=losses.sum(), metrics=self._metrics(losses, chosen, rejected))

    def _losses(self, chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
        losses = bradley_terry_losses(chosen, rejected, margins)
        if self._options.center_coef:
            losses = losses + self._options.center_coef * centering_losses(chosen, rejected)
        return losses

    @staticmethod
    def _metrics(losses: Tensor, chosen: Tensor, rejected: Tensor) -> Metrics:
        return mean_metrics(
            {
                "loss": losses,
                "accuracy": preference_accuracy(chosen, rejected),
                "margin": chosen - rejected,
                "score/chosen": chosen,
                "score/rejected": rejected,
            }
        )


class RewardModelTrainer(RowTrainer[RWConfig, EncodedPair]):
    """Trains the reward model `config.model` on pairs, in every trainer rank."""

    def _build_task(self, build: EngineBuilder, *, total_steps: int) -> RowTask[EncodedPair]:
        config = self._config
        if self._context.index == 0:
            warning = padding_trap(resolve_model_folder(config.model.path), self._train_rows)
            if warning:
                get_logger("trainer").warning(warning)
        engine = build(with_whole_pairs(config.model), role="reward", total_steps=total_steps)
        return RewardModelTask(engine, config.rw)


def padding_trap(folder: Path, pairs: Sequence[EncodedPair]) -> str:
    """A warning when transformers would take the exported model's score at another token; "" otherwise."""
    padding = orjson.loads((folder / "config.json").read_bytes()).get("pad_token_id")
    if padding is None or all(side.token_ids[-1] != padding for pair in pairs for side in (pair.chosen, pair.rejected)):
        return ""
    return (
        f"texts end with token {padding}, which is pad_token_id in config.json of {folder}: the score is learned "
        "there, but transformers takes that of the token before it; set another pad_token_id"
    )


def _scores(outputs: TokenOutputs) -> Tensor:
    if outputs.scores is None:
        raise ValueError("a score needs a reward model, and the engine was built with another head")
    return outputs.scores
