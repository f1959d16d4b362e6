"""Owns how a train batch is cut into shares, one per data-parallel rank, and what its statistics are. Pure.

A batch is a function of its ledger record and the payloads of its episodes, so it can be made again byte for byte.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from areal.api.data import BatchShare
from areal.rollout.ledger_state import AcceptedEpisode, BatchRecord
from areal.rollout.payload import join_columns, num_tokens, num_trajectories

MAX_AGE_BIN = 8
"""Ages from here on share one bin of the histogram."""


def split_balanced(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices per part: largest first, each to the part with the least so far; no part stays empty if avoidable.

    Ties go to the lower index, so the answer depends on the sizes alone. Indices within a part are ascending.
    """
    loads = [(0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, part = loads[0]
        parts[part].append(index)
        heapq.heapreplace(loads, (load + sizes[index], part))
    return [sorted(part) for part in parts]


def build_shares(record: BatchRecord, payloads: Sequence[bytes], dp_size: int) -> list[BatchShare]:
    """One share per rank, groups kept whole, balanced by tokens."""
    parts = split_balanced([num_tokens(payload) for payload in payloads], dp_size)
    return [_build_share(record, payloads, part) for part in parts]


def _build_share(record: BatchRecord, payloads: Sequence[bytes], part: Sequence[int]) -> BatchShare:
    mine = [payloads[index] for index in part]
    columns = join_columns(mine)
    versions = np.frombuffer(columns["output_versions"], dtype="<i4")
    loss_mask = np.frombuffer(columns["loss_mask"], dtype=np.uint8)
    if record.mask_before > 0:
        loss_mask = np.where(versions < record.mask_before, 0, loss_mask).astype(np.uint8)
    return BatchShare(
        step=record.step,
        version=record.version,
        token_ids=np.frombuffer(columns["token_ids"], dtype="<i4"),
        lengths=np.frombuffer(columns["lengths"], dtype="<i4"),
        loss_mask=loss_mask,
        rollout_logprobs=np.frombuffer(columns["rollout_logprobs"], dtype="<f4"),
        output_versions=versions,
        rewards=np.frombuffer(columns["rewards"], dtype="<f4"),
        group_index=np.repeat(np.array(part, dtype="<i4"), [num_trajectories(payload) for payload in mine]),
        finished=np.frombuffer(columns["finished"], dtype=np.uint8),
        stats=record.stats,
    )


def token_stats(payloads: Sequence[bytes], *, version: int, mask_before: int, max_staleness: int) -> dict[str, float]:
    """Ages of the generated tokens of a batch: mean, max, histogram, and what the mask takes out."""
    columns = join_columns(payloads)
    learned = np.frombuffer(columns["loss_mask"], dtype=np.uint8) == 1
    ages = version - np.frombuffer(columns["output_versions"], dtype="<i4")[learned]
    lengths = np.frombuffer(columns["lengths"], dtype="<i4")
    finished = np.frombuffer(columns["finished"], dtype=np.uint8)
    stats = {
        "num_trajectories": float(len(lengths)),
        "tokens": float(lengths.sum()),
        "generated_tokens": float(len(ages)),
        "length_mean": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "finished_frac": float(finished.mean()),
        "reward": float(np.frombuffer(columns["rewards"], dtype="<f4").astype(np.float64).mean()),
    }
    if len(ages) == 0:
        return stats | {"staleness_mean": 0.0, "staleness_max": 0.0, "stale_tokens_frac": 0.0}
    bins = np.bincount(np.clip(ages, 0, MAX_AGE_BIN), minlength=1) / len(ages)
    stats |= {
        "staleness_mean": float(ages.mean()),
        "staleness_max": float(ages.max()),
        "stale_tokens_frac": float((ages > max_staleness).mean()),
    }
    if mask_before > 0:
        stats["masked_tokens_frac"] = float((ages > version - mask_before).mean())
    return stats | {f"age_frac/{age}": float(share) for age, share in enumerate(bins)}


def episode_stats(episodes: Sequence[AcceptedEpisode]) -> dict[str, float]:
    """Means of what the workflow reported, over the episodes that reported it."""
    found: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.stats.items():
            found.setdefault(name, []).append(value)
    return {f"episode/{name}": sum(values) / len(values) for name, values in found.items()}
