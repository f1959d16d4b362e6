"""Filters of a train batch: answers and tokens that are removed from the policy loss.

A filter removes tokens from `TrainBatch.policy_mask` only. Rewards, baselines, advantages, their norms and the critic
use `loss_mask`, which still contains them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from areal.algorithm.aggregate import trained_counts
from areal.algorithm.baselines import mixed_group
from areal.algorithm.shared_prefix import contested_prefixes
from areal.api.batch import TrainBatch
from areal.api.config import PPOActorConfig
from areal.api.metrics import Metric, Metrics


def with_filters(batch: TrainBatch, config: PPOActorConfig) -> tuple[TrainBatch, Metrics]:
    """Remove tokens by the configured filters, in order; the metrics count those that each filter removed first.

    Groups are whole on a rank, so the ranks exchange nothing.
    """
    index = batch.sequence_index
    taken: dict[str, Tensor] = {}
    if config.mask_truncated:
        taken["truncated"] = ~batch.finished[index]
    if config.dynamic_sampling:
        taken["uniform_group"] = ~mixed_group(batch.rewards, batch.group_ids)[index]
    if config.shared_prefix_min_tokens is not None:
        taken["shared_prefix"] = contested_prefixes(
            batch.input_ids,
            batch.loss_mask,
            index,
            batch.cu_seqlens,
            batch.group_ids,
            batch.rewards,
            min_tokens=config.shared_prefix_min_tokens,
        )
    if not taken:
        return batch, {}
    kept, metrics = batch.trained, Metrics()
    for name, tokens in taken.items():
        removed = kept & tokens
        metrics[f"filter/{name}_tokens"] = Metric(float(removed.sum()), 1.0, "sum")
        metrics[f"filter/{name}_sequences"] = Metric(float(torch.unique(index[removed]).numel()), 1.0, "sum")
        kept = kept & ~tokens
    metrics["filter/kept_tokens"] = Metric(float(kept.sum()), 1.0, "sum")
    filtered = trained_counts(kept, index, batch.num_sequences) == 0
    return replace(batch, policy_mask=kept, filtered=filtered), metrics
