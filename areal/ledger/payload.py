"""The binary format of the trajectories of one episode. A payload is written once, when the episode is accepted
(or rejected, see kept.py).

Little-endian: a header, then arrays in the dtypes of BatchShare, so that a batch is a concatenation:
lengths i4[n], token_ids i4[T], output_versions i4[T], rewards f4[n], rollout_logprobs f4[T], loss_mask u1[T],
finished u1[n], and, if a greedy answer was generated, baselines f4[n]. Payloads with baselines have another magic;
those with the scores of several reward functions have a third one, always baselines, then their names as a JSON list
(u4 length, bytes) and scores f4[n, k]. Missing numbers are NaN. Payloads with sessions have a fourth one: as the third,
then sessions i4[n], turns i4[T], turn_rewards f4[T], and a JSON text for reward functions (u4 length, bytes). The fifth
and the sixth are the third and the fourth followed by temperatures f4[T], where tokens have others than the run. The
seventh and the eighth are the fifth and the sixth followed by the routed experts of the tokens: their bytes, then
layers, choices and experts as u4. With images the magic starts with a small letter, and the images follow all other
columns, which include baselines: digest (32 bytes) and grid u4[3] of each, numbers of images u4[n], their sum u4.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from areal.api.columns import to_array
from areal.api.data import Trajectory, TrajectoryGroup, first_of_sessions
from areal.api.errors import LedgerError
from areal.api.images import ImageRef
from areal.api.routed_experts import ExpertShape, RoutedExperts
from areal.ledger.event_files import PayloadReader
from areal.ledger.rare_columns import (
    EXPERT_SHAPE,
    LENGTH,
    TrajectoryError,
    baselines_of,
    experts_of,
    image_bytes,
    images_at_end,
    images_of,
    not_finite,
    parts_of,
    sessions_of,
    temperatures_of,
    uneven,
)
from areal.ledger.state import Event
from areal.ledger.token_counts import TokenCounts, count_by_version

_START = struct.Struct("<4sI")  # magic, CRC-32 of all that follows
_SIZES = struct.Struct("<QII")  # episode id, n, T
_DATA = _START.size + _SIZES.size
_MAGIC = b"ARP1"
_MAGIC_WITH_BASELINES = b"ARP2"
_MAGIC_WITH_PARTS = b"ARP3"
_MAGIC_WITH_SESSIONS = b"ARP4"
_AND_TEMPERATURES = {_MAGIC_WITH_PARTS: b"ATP3", _MAGIC_WITH_SESSIONS: b"ATP4"}
_AND_EXPERTS = {_MAGIC_WITH_PARTS: b"AEP3", _MAGIC_WITH_SESSIONS: b"AEP4"}
_PLAIN = (_MAGIC, _MAGIC_WITH_BASELINES, _MAGIC_WITH_PARTS, _MAGIC_WITH_SESSIONS)
_ROWS = {magic: magic for magic in _PLAIN} | {
    magic: kind for table in (_AND_TEMPERATURES, _AND_EXPERTS) for kind, magic in table.items()
}
_WITH_IMAGES = {magic: b"a" + magic[1:] for magic in _ROWS if magic != _MAGIC}
_KINDS = _ROWS | {magic: _ROWS[plain] for plain, magic in _WITH_IMAGES.items()}
"""Magic -> the magic of the same columns without temperatures, experts and images."""
_NO_NAMES = LENGTH.pack(2) + b"[]"
_NO_BASELINE = struct.pack("<f", math.nan)


class EncodedEpisode(NamedTuple):
    """The payload and the fields of its `accepted` event."""

    payload: bytes
    num_tokens: int
    num_generated: int
    min_version: int
    """Oldest version of a generated token; -1 when none was generated."""
    max_version: int
    counts: TokenCounts
    turn_ids: tuple[str, ...] = ()
    """Turns of agents that it adopts."""

    @property
    def reward(self) -> float:
        """Mean over the sessions."""
        return self.counts.reward


def encode_episode(episode_id: int, group: TrajectoryGroup) -> EncodedEpisode:
    """The payload of a group. Raises TrajectoryError for unequal lengths or a reward that is not finite."""
    if not group.trajectories:
        raise TrajectoryError(
            "the workflow returned a group without trajectories; return None to reject an episode",
            code="workflow.trajectory_lengths",
        )
    return _encode(episode_id, group.trajectories, record=group.record)._replace(turn_ids=tuple(group.turn_ids))


def encode_unscored(episode_id: int, trajectories: list[Trajectory]) -> bytes:
    """The payload of trajectories without rewards. Raises TrajectoryError for unequal lengths."""
    return _encode(episode_id, trajectories, is_scored=False).payload


def _encode(
    episode_id: int, trajectories: list[Trajectory], *, is_scored: bool = True, record: str = ""
) -> EncodedEpisode:
    try:
        return _joined(episode_id, trajectories, is_scored=is_scored, record=record)
    except TrajectoryError:
        raise
    except (TypeError, OverflowError, ValueError) as error:
        message = f"a trajectory holds a value of the wrong type or range: {error}"
        raise TrajectoryError(message, code="workflow.wrong_type") from error


def _joined(episode_id: int, trajectories: list[Trajectory], *, is_scored: bool, record: str) -> EncodedEpisode:
    lengths: list[int] = []
    rewards: list[float] = []
    token_ids, versions, logprobs, loss_mask = array("i"), array("i"), array("f"), bytearray()
    for trajectory in trajectories:
        ids, mask, reward = trajectory.token_ids, trajectory.loss_mask, trajectory.reward
        given, made = trajectory.rollout_logprobs, trajectory.output_versions
        size = len(ids)
        if not size or not size == len(mask) == len(given) == len(made):
            raise uneven(trajectory)
        if is_scored and not math.isfinite(reward):
            raise not_finite("reward", reward)
        lengths.append(size)
        rewards.append(reward)
        token_ids += to_array("i", ids)
        versions += to_array("i", made)
        logprobs += to_array("f", given)
        loss_mask += to_array("B", mask)
    num_trajectories, num_tokens = len(lengths), len(token_ids)
    finished = bytes([trajectory.finished for trajectory in trajectories])
    by_version = count_by_version(np.frombuffer(versions, "i4"), np.frombuffer(loss_mask, np.uint8))
    integers, floats = (array("i", lengths), token_ids, versions), (array("f", rewards), logprobs)
    baselines, (names, parts) = baselines_of(trajectories), parts_of(trajectories)
    magic, temperatures = _MAGIC_WITH_BASELINES if baselines else _MAGIC, temperatures_of(trajectories)
    sessions, experts, images = sessions_of(trajectories, record), experts_of(trajectories), images_of(trajectories)
    if images and not baselines:
        magic, baselines = _MAGIC_WITH_BASELINES, array("f", [math.nan] * num_trajectories)
    if experts and not temperatures:
        temperatures = array("f", [math.nan]) * num_tokens
    if parts or sessions or temperatures:
        magic, baselines = _MAGIC_WITH_PARTS, baselines or array("f", [math.nan] * num_trajectories)
    if sessions or temperatures:
        magic, names = _MAGIC_WITH_SESSIONS if sessions else magic, names or _NO_NAMES
    if temperatures:
        magic = (_AND_EXPERTS if experts else _AND_TEMPERATURES)[magic]
    magic = _WITH_IMAGES[magic] if images else magic
    if sys.byteorder == "big":
        for numbers in (*integers, *floats, baselines, parts, temperatures):
            numbers.byteswap()
    sizes = _SIZES.pack(episode_id, num_trajectories, num_tokens)
    rare = (baselines, names, parts, sessions, temperatures, experts, images)
    body = (sizes, *integers, *floats, loss_mask, finished, *rare)
    checksum = functools.reduce(lambda crc, piece: zlib.crc32(piece, crc), body, 0)
    made_by = [version for version, _, _ in by_version if version != -1]
    found = first_of_sessions(trajectories)
    return EncodedEpisode(
        b"".join((_START.pack(magic, checksum), *body)),
        num_tokens,
        loss_mask.count(1),
        min(made_by, default=-1),
        max(made_by, default=-1),
        TokenCounts(
            num_trajectories,
            len(found),
            sum(one.finished for one in found),
            max(lengths),
            sum(one.reward for one in found) / len(found),
            by_version,
        ),
    )


def routed_experts(payload: bytes) -> RoutedExperts | None:
    """Those of all tokens of a payload, if it has them."""
    if _columns(payload) not in _AND_EXPERTS.values():
        return None
    end = len(payload) - _image_bytes(payload) - EXPERT_SHAPE.size
    shape = ExpertShape(*EXPERT_SHAPE.unpack_from(payload, end))
    return RoutedExperts(shape, payload[end - payload_sizes(payload)[1] * shape.row_bytes : end])


def images(payload: bytes) -> list[tuple[ImageRef, ...]]:
    """The images of each trajectory; empty when none has any."""
    return images_at_end(payload, payload_sizes(payload)[0]) if payload[:4] in _WITH_IMAGES.values() else []


def _columns(payload: bytes) -> bytes:
    """The magic of the same columns without images."""
    return payload[:4].upper()


def _image_bytes(payload: bytes) -> int:
    return image_bytes(payload, payload_sizes(payload)[0]) if payload[:4] in _WITH_IMAGES.values() else 0


def check_payload(episode_id: int, payload: bytes) -> None:
    """LedgerError unless `payload` is the complete, undamaged record of that episode."""
    if len(payload) < _DATA or payload[:4] not in _KINDS:
        raise _bad_payload(episode_id, "does not start with the magic of a payload")
    if _START.unpack_from(payload)[1] != zlib.crc32(memoryview(payload)[_START.size :]):
        raise _bad_payload(episode_id, "is damaged: its checksum does not match")
    found, _, _ = _SIZES.unpack_from(payload, _START.size)
    if found != episode_id:
        raise _bad_payload(episode_id, f"belongs to episode {found}")


def _bad_payload(episode_id: int, problem: str) -> LedgerError:
    return LedgerError(f"the payload of episode {episode_id} {problem}", code="ledger.bad_payload")


def _expected_bytes(payload: bytes) -> int:
    """The size that the counts of a payload imply."""
    n, t = payload_sizes(payload)
    size = _DATA + 9 * n + 13 * t + _image_bytes(payload)
    if payload[:4] == _MAGIC:
        return size
    if _columns(payload) == _MAGIC_WITH_BASELINES:
        return size + 4 * n
    names, first = _reward_names(payload)
    size = first + 4 * n * len(names) + _image_bytes(payload)
    if _KINDS[payload[:4]] == _MAGIC_WITH_SESSIONS:
        (length,) = LENGTH.unpack_from(payload, first + 4 * n * len(names) + 4 * n + 8 * t)
        size += 4 * n + 8 * t + LENGTH.size + length
    return size + (4 * t if _columns(payload) not in _PLAIN else 0) + _expert_bytes(payload)


def _expert_bytes(payload: bytes) -> int:
    found = routed_experts(payload)
    return 0 if found is None else len(found.data) + EXPERT_SHAPE.size


def temperatures_start(payload: bytes) -> int | None:
    """The offset of the temperatures f4[T]; None when the payload has none."""
    if _columns(payload) in _PLAIN:
        return None
    return len(payload) - _image_bytes(payload) - _expert_bytes(payload) - 4 * payload_sizes(payload)[1]


def _reward_names(payload: bytes) -> tuple[list[str], int]:
    """Names of the reward functions of a payload, and the offset of their scores."""
    n, t = payload_sizes(payload)
    start = _DATA + 13 * (n + t) + LENGTH.size
    if _KINDS[payload[:4]] not in (_MAGIC_WITH_PARTS, _MAGIC_WITH_SESSIONS):
        return [], start
    (length,) = LENGTH.unpack_from(payload, start - LENGTH.size)
    return json.loads(payload[start : start + length]), start + length


def reward_parts(payloads: Sequence[bytes], names: Sequence[str]) -> np.ndarray:
    """Scores of the reward functions `names` for the trajectories of several episodes, or NaN. -> [n, K] float32"""
    rows: list[np.ndarray] = []
    for payload in payloads:
        own, first = _reward_names(payload)
        n = payload_sizes(payload)[0]
        scores = np.full((n, len(names)), np.nan, np.float32)
        found = np.frombuffer(payload, "<f4", n * len(own), first if own else 0).reshape(n, len(own))
        for place, name in enumerate(own):
            scores[:, names.index(name)] = found[:, place]
        rows.append(scores)
    return np.concatenate(rows) if rows else np.zeros((0, len(names)), np.float32)


class PayloadHead(NamedTuple):
    """What decides which rank trains on an episode."""

    num_tokens: int
    reward_names: list[str]
    has_sessions: bool


def payload_head(payload: bytes) -> PayloadHead:
    return PayloadHead(payload_sizes(payload)[1], _reward_names(payload)[0], sessions_start(payload) is not None)


def read_head(reader: PayloadReader, episode_id: int, where: tuple[int, int, int]) -> PayloadHead:
    """The head of a recorded payload, of a few bytes at its start and after its arrays. Raises LedgerError."""
    segment, offset, _ = where
    start = reader.read((segment, offset, _DATA))
    n, t = payload_sizes(start)
    kind = _KINDS.get(start[:4])
    has_sessions = kind == _MAGIC_WITH_SESSIONS
    if kind != _MAGIC_WITH_PARTS and not has_sessions:
        return PayloadHead(t, [], has_sessions)
    names = offset + _DATA + 13 * (n + t)
    try:
        (length,) = LENGTH.unpack(reader.read((segment, names, LENGTH.size)))
        return PayloadHead(t, json.loads(reader.read((segment, names + LENGTH.size, length))), has_sessions)
    except ValueError as error:
        raise _bad_payload(episode_id, f"is damaged: {error}") from error


def sessions_start(payload: bytes) -> int | None:
    """The offset of the columns of sessions; None when the payload has none."""
    if _KINDS[payload[:4]] != _MAGIC_WITH_SESSIONS:
        return None
    names, first = _reward_names(payload)
    return first + 4 * payload_sizes(payload)[0] * len(names)


def payload_sizes(payload: bytes) -> tuple[int, int]:
    """Number of trajectories and of tokens."""
    _, num_trajectories, num_tokens = _SIZES.unpack_from(payload, _START.size)
    return num_trajectories, num_tokens


class EpisodeColumns(NamedTuple):
    """The trajectories of one episode, concatenated. n trajectories, T tokens."""

    lengths: np.ndarray  # [n] int32
    token_ids: np.ndarray  # [T] int32
    output_versions: np.ndarray  # [T] int32, -1 where not generated
    rewards: np.ndarray  # [n] float32
    rollout_logprobs: np.ndarray  # [T] float32
    loss_mask: np.ndarray  # [T] uint8
    finished: np.ndarray  # [n] uint8


def read_columns(reader: PayloadReader, event: Event) -> EpisodeColumns:
    """The trajectories of an `accepted` event. Raises LedgerError when its payload is missing, damaged or another."""
    segment, offset, size = event["payload"]
    return to_columns(event["id"], reader.read((segment, offset, size)))


def to_columns(episode_id: int, payload: bytes) -> EpisodeColumns:
    """The trajectories of the payload of an episode. Raises LedgerError when it is damaged or another's."""
    check_payload(episode_id, payload)
    n, t = payload_sizes(payload)
    if n == 0 or t == 0 or len(payload) != _expected_bytes(payload):
        raise _bad_payload(episode_id, f"has {len(payload)} bytes, which do not match its counts")
    integers = np.frombuffer(payload, dtype="<i4", count=n + 2 * t, offset=_DATA)
    floats = np.frombuffer(payload, dtype="<f4", count=n + t, offset=_DATA + integers.nbytes)
    flags = np.frombuffer(payload, np.uint8, count=t + n, offset=_DATA + integers.nbytes + floats.nbytes)
    lengths = integers[:n]
    if sum(lengths.tolist()) != t:
        raise _bad_payload(episode_id, f"has trajectory lengths whose sum is not {t}")
    return EpisodeColumns(
        lengths=lengths,
        token_ids=integers[n : n + t],
        output_versions=integers[n + t :],
        rewards=floats[:n],
        rollout_logprobs=floats[n:],
        loss_mask=flags[:t],
        finished=flags[t:],
    )


_COLUMNS = (*EpisodeColumns._fields, "baselines")


def join_columns(payloads: Sequence[bytes]) -> dict[str, bytes]:
    """The columns of several episodes as raw bytes, each concatenated in order."""
    pieces: list[list[bytes]] = []
    for payload in payloads:
        n, t = payload_sizes(payload)
        ends = list(itertools.accumulate((4 * n, 4 * t, 4 * t, 4 * n, 4 * t, t, n), initial=_DATA))
        columns = [payload[start:end] for start, end in itertools.pairwise(ends)]
        pieces.append([*columns, payload[ends[-1] : ends[-1] + 4 * n] or _NO_BASELINE * n])
    joined = zip(*pieces, strict=True) if pieces else ((),) * len(_COLUMNS)
    return {name: b"".join(parts) for name, parts in zip(_COLUMNS, joined, strict=True)}
