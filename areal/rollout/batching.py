"""Splits a train batch into shares, one per data-parallel rank, and computes its statistics. Pure.

A batch depends only on its ledger record and the payloads of its episodes, so it can be rebuilt byte for byte.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import mul

import numpy as np

from areal.api.batch_share import BatchShare
from areal.data.balance import balanced_parts
from areal.ledger.payload import PayloadHead, join_columns, payload_sizes, reward_parts
from areal.ledger.session_columns import SessionColumns, join_experts, join_images, join_sessions, temperatures
from areal.ledger.state import AcceptedEpisode
from areal.ledger.token_counts import TokenCounts

MAX_STALENESS_BIN = 8
"""Staleness from this value on shares one bin of the histogram."""


@dataclass(frozen=True, slots=True)
class SharePart:
    """Which episodes of a batch are the share of one rank."""

    indices: list[int]
    """Positions in the batch, ascending."""
    reward_names: list[str]
    """Reward functions that scored any episode of the whole batch."""
    has_sessions: bool = False
    """Whether any episode of the whole batch has sessions of several trajectories."""


def share_parts(heads: Sequence[PayloadHead], dp_size: int) -> list[SharePart]:
    """The share of each rank: balanced by tokens, with whole groups."""
    return as_shares(heads, balanced_parts([head.num_tokens for head in heads], dp_size))


def as_shares(heads: Sequence[PayloadHead], parts: Sequence[list[int]]) -> list[SharePart]:
    """The parts of a batch as shares."""
    names = sorted({name for head in heads for name in head.reward_names})
    has_sessions = any(head.has_sessions for head in heads)
    return [SharePart(part, names, has_sessions) for part in parts]


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


def build_share(
    payloads: Sequence[bytes],
    part: SharePart,
    *,
    step: int,
    version: int,
    mask_before: int,
    stats: dict[str, float] | None = None,
) -> BatchShare:
    """The share of one rank, of the payloads of its episodes."""
    columns = join_columns(payloads)
    versions = np.frombuffer(columns["output_versions"], dtype="<i4")
    loss_mask = np.frombuffer(columns["loss_mask"], dtype=np.uint8)
    if mask_before > 0:
        loss_mask = loss_mask * (versions >= mask_before)
    sizes = [payload_sizes(payload)[0] for payload in payloads]
    share = BatchShare(
        step=step,
        version=version,
        token_ids=np.frombuffer(columns["token_ids"], dtype="<i4"),
        lengths=np.frombuffer(columns["lengths"], dtype="<i4"),
        loss_mask=loss_mask,
        rollout_logprobs=np.frombuffer(columns["rollout_logprobs"], dtype="<f4"),
        output_versions=versions,
        rewards=np.frombuffer(columns["rewards"], dtype="<f4"),
        group_index=np.repeat(np.array(part.indices, dtype="<i4"), sizes),
        finished=np.frombuffer(columns["finished"], dtype=np.uint8),
        baselines=np.frombuffer(columns["baselines"], dtype="<f4"),
        reward_parts=reward_parts(payloads, part.reward_names),
        reward_names=part.reward_names,
        temperatures=temperatures(payloads),
        routed_experts=join_experts(payloads),
        images=join_images(payloads),
        stats=stats or {},
    )
    return _with_sessions(share, join_sessions(payloads)) if part.has_sessions else share


def token_stats(
    episodes: Sequence[TokenCounts], *, version: int, mask_before: int, max_staleness: int
) -> dict[str, float]:
    """Sizes and mean reward of a batch, and the staleness of its generated tokens, including masked ones.

    `version` trains on it; tokens of versions below `mask_before` are excluded from the loss.
    """
    num_trajectories, num_sessions, num_finished, longest, reward, by_version = _joined(episodes)
    by_staleness = Counter[int]()
    num_tokens = num_trained = 0
    for made_by, tokens, trained in by_version:
        num_tokens += tokens
        num_trained += trained if made_by >= mask_before or not mask_before else 0
        if made_by >= 0:
            by_staleness[version - made_by] += tokens
    num_generated = by_staleness.total()
    stats = {
        "num_trajectories": float(num_trajectories),
        "num_sessions": float(num_sessions),
        "tokens": float(num_tokens),
        "generated_tokens": float(num_generated),
        "trained_tokens": float(num_trained),
        "length_mean": num_tokens / num_trajectories,
        "length_max": float(longest),
        "finished_frac": num_finished / num_sessions,
        "reward": reward,
    }
    if num_generated == 0:
        return stats | {"staleness_mean": 0.0, "staleness_max": 0.0, "stale_tokens_frac": 0.0}
    num_stale = sum(tokens for staleness, tokens in by_staleness.items() if staleness > max_staleness)
    stats |= {
        "staleness_mean": sum(staleness * tokens for staleness, tokens in by_staleness.items()) / num_generated,
        "staleness_max": float(max(by_staleness)),
        "stale_tokens_frac": num_stale / num_generated,
    }
    bins = [0] * (min(max(*by_staleness, 0), MAX_STALENESS_BIN) + 1)
    for staleness, tokens in by_staleness.items():
        bins[min(max(staleness, 0), MAX_STALENESS_BIN)] += tokens
    return stats | {f"staleness_frac/{value}": tokens / num_generated for value, tokens in enumerate(bins)}


def _joined(episodes: Sequence[TokenCounts]) -> TokenCounts:
    """The counts of several episodes as those of one."""
    trajectories, sessions, finished, longest, rewards, by_version = zip(*episodes, strict=True)
    num_sessions = sum(sessions)
    tokens, trained = Counter[int](), Counter[int]()
    for (version, made, used), times in Counter(chain.from_iterable(by_version)).items():
        tokens[version] += made * times
        trained[version] += used * times
    return TokenCounts(
        sum(trajectories),
        num_sessions,
        sum(finished),
        max(longest),
        sum(map(mul, rewards, sessions)) / num_sessions,
        tuple((version, tokens[version], trained[version]) for version in sorted(tokens)),
    )


class BatchSums:
    """The statistics of a batch, added block by block."""

    def __init__(self) -> None:
        self.episodes: list[AcceptedEpisode] = []
        self._blocks: list[TokenCounts] = []
        self._values: dict[str, list[float]] = {}

    def add(self, episodes: Sequence[AcceptedEpisode], counts: Sequence[TokenCounts]) -> None:
        self.episodes += episodes
        self._blocks.append(_joined(counts))
        for episode in episodes:
            for name, value in episode.stats.items():
                self._values.setdefault(name, []).append(value)

    def stats(self, *, version: int, mask_before: int, max_staleness: int) -> dict[str, float]:
        """`token_stats` of all, and the mean of each statistic of the workflow over the episodes that have it."""
        found = token_stats(self._blocks, version=version, mask_before=mask_before, max_staleness=max_staleness)
        means = {f"episode/{name}": sum(values) / len(values) for name, values in self._values.items()}
        return found | means
