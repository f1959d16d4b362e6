"""Metrics of a batch before its update: composition, and distance between the policies."""

import torch
from torch import Tensor

from areal.algorithm.aggregate import TokenStat, to_metrics, trained_counts
from areal.algorithm.baselines import mixed_group
from areal.algorithm.importance import log_ratio
from areal.algorithm.kl import kl_estimate
from areal.algorithm.kl_control import sequence_kl
from areal.api.batch import TrainBatch
from areal.api.metrics import Metrics
from areal.data.sessions import by_session
from areal.trainer.minibatch import prefixed


def batch_metrics(batch: TrainBatch) -> Metrics:
    """Rewards, lengths, advantages, and distance between the policies; sessions of several sequences count once."""
    lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).long()
    each = torch.ones_like(lengths, dtype=torch.bool)
    tokens = torch.ones_like(batch.loss_mask)
    stats = {
        "num_sequences": TokenStat(each, each, "sum"),
        "num_tokens": TokenStat(tokens, tokens, "sum"),
        "sequence_length": TokenStat(lengths, each),
        "sequence_length_max": TokenStat(lengths, each, "max"),
    }
    batch = by_session(batch)
    mask = batch.loss_mask
    answer_lengths = trained_counts(mask, batch.sequence_index, batch.num_sequences)
    each = torch.ones(batch.num_sequences, dtype=torch.bool, device=mask.device)
    stats |= {
        "num_trained_tokens": TokenStat(mask, mask, "sum"),
        **_spread("reward", batch.rewards, each),
        **_spread("answer_length", answer_lengths, each),
        "answer_length_rewarded": TokenStat(answer_lengths, batch.rewards > 0),
        "answer_length_unrewarded": TokenStat(answer_lengths, batch.rewards <= 0),
        "unfinished_ratio": TokenStat(~batch.finished, each),
        "uniform_reward_ratio": TokenStat(~mixed_group(batch.rewards, batch.group_ids), each),
    }
    for name, values in (("return", batch.returns), ("value", batch.values)):
        if values is not None:
            stats[name] = TokenStat(values, mask)
    if batch.advantages is not None:
        stats |= _spread("advantage", batch.advantages, mask)
        stats["advantage_abs"] = TokenStat(batch.advantages.abs(), mask)
    return prefixed("batch", to_metrics(stats | _distance_stats(batch)))


def _spread(name: str, values: Tensor, mask: Tensor) -> dict[str, TokenStat]:
    extremes = {f"{name}_max": TokenStat(values, mask, "max"), f"{name}_min": TokenStat(values, mask, "min")}
    return {name: TokenStat(values, mask)} | extremes


def _distance_stats(batch: TrainBatch) -> dict[str, TokenStat]:
    """Distance of the behaviour policy and of the reference from the policy at the start of the update."""
    mask = batch.loss_mask
    stats: dict[str, TokenStat] = {"rollout_logprobs": TokenStat(batch.rollout_logprobs, mask)}
    policy = batch.rollout_logprobs
    if batch.prox_logprobs is not None:
        policy = batch.prox_logprobs
        gap = log_ratio(policy, batch.rollout_logprobs, mask)
        stats["prox_logprobs"] = TokenStat(policy, mask)
        stats["prox_rollout_gap_abs"] = TokenStat(gap.abs(), mask)
        stats["prox_rollout_gap_max"] = TokenStat(gap.abs(), mask, "max")
    if batch.ref_logprobs is not None:
        k1 = kl_estimate(policy, batch.ref_logprobs, mask, "k1")
        of_sequence = sequence_kl(k1, mask, batch.sequence_index, batch.num_sequences, "sequence-sum")
        stats["ref_kl"] = TokenStat(kl_estimate(policy, batch.ref_logprobs, mask, "k3"), mask)
        stats["ref_kl_k1"] = TokenStat(k1, mask)
        has_answer = trained_counts(mask, batch.sequence_index, batch.num_sequences) > 0
        stats["ref_kl_sequence"] = TokenStat(of_sequence, has_answer)
        stats["ref_kl_sequence_max"] = TokenStat(of_sequence, has_answer, "max")
    if batch.ref_full_kl is not None:
        stats["ref_kl_full"] = TokenStat(batch.ref_full_kl, mask)
    return stats
