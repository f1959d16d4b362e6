"""Splits a train batch into shares, one per data-parallel rank, and computes its statistics. Pure.

A batch depends only on its ledger record and the payloads of its episodes, so it can be rebuilt byte for byte.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from areal.api.batch_share import BatchShare
from areal.data.balance import balanced_parts
from areal.ledger.payload import join_columns, payload_sizes, reward_names, reward_parts
from areal.ledger.session_columns import SessionColumns, join_sessions
from areal.ledger.state import AcceptedEpisode

MAX_STALENESS_BIN = 8
"""Staleness from this value on shares one bin of the histogram."""


def build_shares(
    payloads: Sequence[bytes], *, step: int, version: int, mask_before: int, dp_size: int
) -> list[BatchShare]:
    """One share per rank, balanced by tokens, with whole groups. `stats` of the shares is empty."""
    parts = balanced_parts([payload_sizes(payload)[1] for payload in payloads], dp_size)
    names, sessions = reward_names(payloads), join_sessions(payloads)
    shares: list[BatchShare] = []
    for part in parts:
        mine = [payloads[index] for index in part]
        share = _build_share(mine, part, names, step=step, version=version, mask_before=mask_before)
        shares.append(share if sessions is None else _with_sessions(share, [sessions[index] for index in part]))
    return shares


def _with_sessions(share: BatchShare, episodes: Sequence[SessionColumns]) -> BatchShare:
    """A share with the sessions of its episodes, numbered from 0."""
    numbers: dict[tuple[int, int, int], int] = {}
    ids: list[int] = []
    for episode, columns in enumerate(episodes):
        for row, session in enumerate(columns.sessions.tolist()):
            key = (episode, session, -1 if session >= 0 else row)
            ids.append(numbers.setdefault(key, len(numbers)))
    turns = [columns.turns for columns in episodes] or [np.zeros(0, np.int32)]
    rewards = [columns.turn_rewards for columns in episodes] or [np.zeros(0, np.float32)]
    return replace(
        share,
        sessions=np.array(ids, np.int32),
        turns=np.concatenate(turns, dtype=np.int32),
        turn_rewards=np.concatenate(rewards, dtype=np.float32),
    )


def _build_share(
    payloads: Sequence[bytes], group_ids: Sequence[int], names: list[str], *, step: int, version: int, mask_before: int
) -> BatchShare:
    columns = join_columns(payloads)
    versions = np.frombuffer(columns["output_versions"], dtype="<i4")
    loss_mask = np.frombuffer(columns["loss_mask"], dtype=np.uint8)
    if mask_before > 0:
        loss_mask = loss_mask * (versions >= mask_before)
    return BatchShare(
        step=step,
        version=version,
        token_ids=np.frombuffer(columns["token_ids"], dtype="<i4"),
        lengths=np.frombuffer(columns["lengths"], dtype="<i4"),
        loss_mask=loss_mask,
        rollout_logprobs=np.frombuffer(columns["rollout_logprobs"], dtype="<f4"),
        output_versions=versions,
        rewards=np.frombuffer(columns["rewards"], dtype="<f4"),
        group_index=np.repeat(np.array(group_ids, dtype="<i4"), [payload_sizes(payload)[0] for payload in payloads]),
        finished=np.frombuffer(columns["finished"], dtype=np.uint8),
        baselines=np.frombuffer(columns["baselines"], dtype="<f4"),
        reward_parts=reward_parts(payloads, names),
        reward_names=names,
    )


def token_stats(shares: Sequence[BatchShare], *, max_staleness: int) -> dict[str, float]:
    """Sizes and mean reward of the whole batch, and the staleness of its generated tokens, including masked ones."""
    versions = np.concatenate([share.output_versions for share in shares])
    lengths = np.concatenate([share.lengths for share in shares])
    staleness = shares[0].version - versions[versions >= 0]
    rewards = np.concatenate([_first_rows(share, share.rewards) for share in shares])
    finished = np.concatenate([_first_rows(share, share.finished) for share in shares])
    stats = {
        "num_trajectories": float(len(lengths)),
        "num_sessions": float(len(rewards)),
        "tokens": float(len(versions)),
        "generated_tokens": float(len(staleness)),
        "trained_tokens": float(sum(int(share.loss_mask.sum()) for share in shares)),
        "length_mean": len(versions) / len(lengths),
        "length_max": float(lengths.max()),
        "finished_frac": int(finished.sum()) / len(rewards),
        "reward": float(rewards.sum(dtype=np.float64)) / len(rewards),
    }
    if len(staleness) == 0:
        return stats | {"staleness_mean": 0.0, "staleness_max": 0.0, "stale_tokens_frac": 0.0}
    histogram = np.bincount(np.clip(staleness, 0, MAX_STALENESS_BIN))
    stats |= {
        "staleness_mean": int(staleness.sum()) / len(staleness),
        "staleness_max": float(staleness.max()),
        "stale_tokens_frac": int((staleness > max_staleness).sum()) / len(staleness),
    }
    return stats | {f"staleness_frac/{value}": int(count) / len(staleness) for value, count in enumerate(histogram)}


def _first_rows(share: BatchShare, values: np.ndarray) -> np.ndarray:
    """The values of the first row of each session."""
    return values[np.unique(share.sessions, return_index=True)[1]] if share.sessions.size else values


def episode_stats(episodes: Sequence[AcceptedEpisode]) -> dict[str, float]:
    """Mean of each statistic of the workflow, over the episodes that have it."""
    found: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.stats.items():
            found.setdefault(name, []).append(value)
    return {f"episode/{name}": sum(values) / len(values) for name, values in found.items()}
