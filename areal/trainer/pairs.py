"""Pairs of answers for reward models and DPO: packed as chosen, rejected, chosen, ..., and their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from areal.algorithm.aggregate import TokenStat, to_metrics
from areal.algorithm.preference import PairPlaces, pair_places
from areal.api.batch import TrainBatch
from areal.api.config import TrainEngineConfig
from areal.api.metrics import Metrics
from areal.data.pack import rows_to_train_batch
from areal.data.preference_rows import EncodedPair

PER_PAIR = 2


def pairs_to_batch(pairs: Sequence[EncodedPair]) -> TrainBatch:
    """Pack alternating chosen and rejected sequences; the reward of a chosen one is the margin of its pair."""
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    batch = rows_to_train_batch([side.token_ids for side in sides], [side.loss_mask for side in sides])
    margins = [margin for pair in pairs for margin in (pair.margin, 0.0)]
    groups = torch.arange(len(pairs)).repeat_interleave(PER_PAIR)
    return replace(batch, rewards=torch.tensor(margins, dtype=torch.float32), group_ids=groups)


def with_whole_pairs(config: TrainEngineConfig) -> TrainEngineConfig:
    """The same model with micro-batches of whole pairs."""
    return replace(config, mb_spec=replace(config.mb_spec, granularity=PER_PAIR))


def places_of(batch: TrainBatch, source_index: Sequence[int] | None = None) -> PairPlaces:
    """The pairs of a micro-batch, or of a whole batch, on the batch's device."""
    found = pair_places(list(range(batch.num_sequences)) if source_index is None else source_index)
    device = batch.input_ids.device
    return PairPlaces(chosen=found.chosen.to(device), rejected=found.rejected.to(device))


def num_pairs(batch: TrainBatch) -> Tensor:
    """Local part of the denominator: [1] float64."""
    return torch.tensor([batch.num_sequences // PER_PAIR], dtype=torch.float64)


def mean_metrics(by_name: Mapping[str, Tensor]) -> Metrics:
    """Means over pairs of values [P]. Without pairs the metrics have count 0."""
    return to_metrics(
        {name: TokenStat(values, torch.ones_like(values, dtype=torch.bool)) for name, values in by_name.items()}
    )
