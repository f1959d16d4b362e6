"""The reward model in reinforcement learning: a score of every answer, added to its reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from areal.algorithm.aggregate import TokenStat, to_metrics
from areal.api.batch import TrainBatch
from areal.api.config import RewardModelConfig
from areal.api.engine import TrainEngine
from areal.api.metrics import Metrics
from areal.data.pack import rows_to_train_batch
from areal.data.tokenizer import Tokenizer
from areal.trainer.minibatch import prefixed
from areal.trainer.reward_model import sequence_scores

Recode = Callable[[list[int]], list[int]]
"""The policy's tokens of one sequence -> the reward model's."""


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

    def recode(token_ids: list[int]) -> list[int]:
        return reward_model.encode(policy.decode(token_ids, skip_special_tokens=True))

    return recode
