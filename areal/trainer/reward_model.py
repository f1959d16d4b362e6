"""Reward models: their training on pairs (Bradley-Terry), and their scores as rewards in reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import orjson
from torch import Tensor

from areal.algorithm.aggregate import TokenStat, to_metrics
from areal.algorithm.preference import (
    PairPlaces,
    bradley_terry_losses,
    centering_losses,
    last_of_each,
    preference_accuracy,
)
from areal.api.batch import TokenOutputs, TrainBatch, required
from areal.api.config import RewardModelConfig, RWConfig, RWOptions
from areal.api.engine import TrainEngine
from areal.api.metrics import Metrics
from areal.data.pack import rows_to_train_batch
from areal.data.supervised_rows import EncodedPair
from areal.data.tokenizer import Tokenizer
from areal.engine.hf_model import resolve_model_folder
from areal.observe.log import get_logger
from areal.trainer.minibatch import prefixed
from areal.trainer.row_loop import EngineBuilder, RowTask, RowTrainer
from areal.trainer.supervised import PairTask, with_whole_pairs

Recode = Callable[[list[int]], list[int]]
"""The policy's tokens of one sequence -> the reward model's."""


def sequence_scores(engine: TrainEngine, batch: TrainBatch) -> Tensor:
    """The score of every sequence of a packed batch, prompt and answer together: [S] float32 on the CPU; a collective.

    `engine`: built with role "reward". A share without sequences returns shape [0].
    """
    return last_of_each(required(engine.forward(batch).scores, "scores"), batch.cu_seqlens)


class RewardModel:
    """A frozen reward model, on all trainer ranks; every rank calls every method."""

    def __init__(self, engine: TrainEngine, config: RewardModelConfig, *, recode: Recode | None = None) -> None:
        """`engine`: built with role "reward". `recode` None: it has the policy's tokenizer."""
        self._engine = engine
        self._weight = config.weight
        self._recode = recode

    def with_scores(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """Add weight x score to the reward of every sequence; a collective."""
        read = batch if self._recode is None else recoded(batch, self._recode)
        scores = sequence_scores(self._engine, read)
        each = batch.finished | ~batch.finished
        stats = {
            "score": TokenStat(scores, each),
            "score_max": TokenStat(scores, each, "max"),
            "score_min": TokenStat(scores, each, "min"),
            "function_reward": TokenStat(batch.rewards, each),
        }
        rewards = batch.rewards + self._weight * scores.to(batch.rewards.dtype)
        return replace(batch, rewards=rewards), prefixed("reward_model", to_metrics(stats))


def recoded(batch: TrainBatch, recode: Recode) -> TrainBatch:
    """Convert the sequences of a batch to other tokens; only the inputs of a forward pass are kept."""
    bounds: list[int] = batch.cu_seqlens.tolist()
    ids: list[int] = batch.input_ids.tolist()
    rows = [recode(ids[start:end]) for start, end in pairwise(bounds)]
    return rows_to_train_batch(rows, [[0] * len(row) for row in rows])


def recoder(policy: Tokenizer, reward_model: Tokenizer) -> Recode:
    """Decode with the policy's tokenizer, without special tokens, and encode with the reward model's."""
    return lambda token_ids: reward_model.encode(policy.decode(token_ids, skip_special_tokens=True))


class RewardModelTask(PairTask):
    """The chosen answer of a pair learns a higher score than the rejected one."""

    def __init__(self, engine: TrainEngine, options: RWOptions) -> None:
        super().__init__("model", engine)
        self._options = options

    def _compare(self, outputs: TokenOutputs, batch: TrainBatch, pairs: PairPlaces) -> dict[str, Tensor]:
        scores = last_of_each(required(outputs.scores, "scores"), batch.cu_seqlens)
        chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
        losses = bradley_terry_losses(chosen, rejected, batch.rewards[pairs.chosen])
        if self._options.center_coef:
            losses = losses + self._options.center_coef * centering_losses(chosen, rejected)
        return {
            "loss": losses,
            "accuracy": preference_accuracy(chosen, rejected),
            "margin": chosen - rejected,
            "score/chosen": chosen,
            "score/rejected": rejected,
        }


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
