"""Owns the binary form of one episode's trajectories: written once when accepted, served from ever after.

Little-endian: a header, then the arrays in the types of BatchShare, so that a batch is a plain concatenation:
lengths i4[n], rewards f4[n], token_ids i4[T], output_versions i4[T], rollout_logprobs f4[T], loss_mask u1[T],
finished u1[n].
"""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from areal.api.data import Trajectory, TrajectoryGroup
from areal.api.errors import LedgerError

_HEADER = struct.Struct("<4sIQII")  # magic, CRC-32 of the rest, episode id, n, T
_BODY_START = 8  # the checksum covers everything after itself
_MAGIC = b"ARP1"

FIELDS = ("lengths", "rewards", "token_ids", "output_versions", "rollout_logprobs", "loss_mask", "finished")


class TrajectoryError(ValueError):
    """A workflow returned trajectories that cannot be trained on; fails that episode only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedEpisode:
    """The payload and what the ledger line says about it."""

    payload: bytes
    num_trajectories: int
    num_tokens: int
    num_generated: int
    min_version: int
    """Oldest version of a generated token; -1 when none was generated."""
    max_version: int
    reward: float


def encode_episode(episode_id: int, group: TrajectoryGroup) -> EncodedEpisode:
    """Turn a group into its payload. TrajectoryError when lengths disagree or a reward is not finite."""
    if not group.trajectories:
        raise TrajectoryError("the workflow returned a group without trajectories; return None to reject an episode")
    try:
        return _encode(episode_id, group.trajectories)
    except TrajectoryError:
        raise
    except (TypeError, OverflowError, ValueError) as error:
        raise TrajectoryError(f"a trajectory holds a value of the wrong kind: {error}") from error


def _encode(episode_id: int, trajectories: list[Trajectory]) -> EncodedEpisode:
    token_ids: list[int] = []
    versions: list[int] = []
    logprobs: list[float] = []
    loss_mask = bytearray()
    for trajectory in trajectories:
        _check_shape(trajectory)
        token_ids += trajectory.token_ids
        versions += trajectory.output_versions
        logprobs += trajectory.rollout_logprobs
        loss_mask += bytes(list(trajectory.loss_mask))
    rewards = [trajectory.reward for trajectory in trajectories]
    seen = set(versions)
    seen.discard(-1)
    body = b"".join(
        (
            _HEADER.pack(_MAGIC, 0, episode_id, len(trajectories), len(token_ids))[_BODY_START:],
            array("i", [len(trajectory.token_ids) for trajectory in trajectories]).tobytes(),
            array("f", rewards).tobytes(),
            array("i", token_ids).tobytes(),
            array("i", versions).tobytes(),
            array("f", logprobs).tobytes(),
            loss_mask,
            bytes([trajectory.finished for trajectory in trajectories]),
        )
    )
    return EncodedEpisode(
        payload=_MAGIC + zlib.crc32(body).to_bytes(4, "little") + body,
        num_trajectories=len(trajectories),
        num_tokens=len(token_ids),
        num_generated=loss_mask.count(1),
        min_version=min(seen, default=-1),
        max_version=max(seen, default=-1),
        reward=sum(rewards) / len(rewards),
    )


def _check_shape(trajectory: Trajectory) -> None:
    size = len(trajectory.token_ids)
    columns = (trajectory.loss_mask, trajectory.rollout_logprobs, trajectory.output_versions)
    if size == 0 or not len(columns[0]) == len(columns[1]) == len(columns[2]) == size:
        raise TrajectoryError(
            f"a trajectory has {size} token_ids, {len(columns[0])} loss_mask, {len(columns[1])} rollout_logprobs and "
            f"{len(columns[2])} output_versions: they must be equally long and not empty"
        )
    if not math.isfinite(trajectory.reward):
        raise TrajectoryError(f"a trajectory has the reward {trajectory.reward}, which is not a finite number")


def check_trajectory(trajectory: Trajectory) -> None:
    """The further rules of rollout.check_trajectory_format. TrajectoryError naming the first one broken."""
    if any(token_id < 0 for token_id in trajectory.token_ids):
        raise TrajectoryError("token_ids holds a negative id")
    if not set(trajectory.loss_mask) <= {0, 1}:
        raise TrajectoryError(f"loss_mask holds {sorted(set(trajectory.loss_mask))}: only 0 and 1 may occur")
    if 1 not in trajectory.loss_mask:
        raise TrajectoryError("loss_mask marks no token to learn from")
    if trajectory.loss_mask[0]:
        raise TrajectoryError("loss_mask marks the first token, which nothing predicts")
    columns = zip(trajectory.loss_mask, trajectory.rollout_logprobs, trajectory.output_versions, strict=True)
    for position, (mask, logprob, version) in enumerate(columns):
        if not math.isfinite(logprob) or logprob > 1e-3:
            raise TrajectoryError(f"rollout_logprobs[{position}] is {logprob}: no log-probability")
        if mask and version < 0:
            raise TrajectoryError(f"token {position} is trained on, but output_versions[{position}] is {version}")
        if not mask and logprob != 0.0:
            raise TrajectoryError(f"rollout_logprobs[{position}] is {logprob} where loss_mask is 0: it must be 0.0")


def check_payload(episode_id: int, payload: bytes) -> None:
    """LedgerError unless `payload` is the whole, undamaged record of that episode."""
    if len(payload) < _HEADER.size or payload[:4] != _MAGIC:
        raise LedgerError(f"the payload of episode {episode_id} does not start like one")
    _, checksum, found, _, _ = _HEADER.unpack_from(payload)
    if checksum != zlib.crc32(memoryview(payload)[_BODY_START:]):
        raise LedgerError(f"the payload of episode {episode_id} is damaged: its checksum does not match")
    if found != episode_id:
        raise LedgerError(f"the payload of episode {episode_id} belongs to episode {found}")


def num_trajectories(payload: bytes) -> int:
    return _HEADER.unpack_from(payload)[3]


def num_tokens(payload: bytes) -> int:
    return _HEADER.unpack_from(payload)[4]


def join_columns(payloads: Iterable[bytes]) -> dict[str, bytes]:
    """The columns of several episodes, each joined in order, as raw bytes."""
    lengths, rewards, ids, versions, logprobs, masks, finished = columns = tuple(list[bytes]() for _ in FIELDS)
    start = _HEADER.size
    for payload in payloads:
        _, _, _, n, t = _HEADER.unpack_from(payload)
        a = start + 4 * n
        b = a + 4 * n
        c = b + 4 * t
        d = c + 4 * t
        e = d + 4 * t
        f = e + t
        lengths.append(payload[start:a])
        rewards.append(payload[a:b])
        ids.append(payload[b:c])
        versions.append(payload[c:d])
        logprobs.append(payload[d:e])
        masks.append(payload[e:f])
        finished.append(payload[f : f + n])
    return {name: b"".join(parts) for name, parts in zip(FIELDS, columns, strict=True)}
