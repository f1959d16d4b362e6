"""The binary format of the trajectories of one episode. A payload is written once, when the episode is accepted
(or rejected, see kept.py).

Little-endian: a header, then arrays in the dtypes of BatchShare, so that a batch is a concatenation:
lengths i4[n], token_ids i4[T], output_versions i4[T], rewards f4[n], rollout_logprobs f4[T], loss_mask u1[T],
finished u1[n]. The magic says which columns follow (`_Kind`), in this order: baselines f4[n], if a greedy answer was
generated; names of several reward functions as a JSON list (u4 length, bytes) and their scores f4[n, k]; sessions
i4[n], turns i4[T], turn_rewards f4[T], and a JSON text for reward functions (u4 length, bytes); temperatures f4[T],
where tokens have others than the run; the routed experts of the tokens: their bytes, then layers, choices and experts
as u4; images: digest (32 bytes) and grid u4[3] of each, numbers of images u4[n], their sum u4. Missing numbers are NaN.
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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import orjson

from areal.api.columns import Runs, to_array, to_runs
from areal.api.data import Trajectory, TrajectoryGroup, first_of_sessions
from areal.api.errors import ArealError, LedgerError
from areal.api.images import ImageRef
from areal.api.routed_experts import ExpertShape, RoutedExperts
from areal.ledger.event_files import PayloadReader
from areal.ledger.state import Event, TokenCounts, count_by_version

# ----------------------------------------------------------------------------------------------------------------------
# Columns of a payload that few trajectories have, in the bytes of `areal.ledger.payload`.

LENGTH = struct.Struct("<I")
EXPERT_SHAPE = struct.Struct("<III")  # layers, choices, experts
_IMAGE = struct.Struct("<32s3I")  # digest, grid


class TrajectoryError(ArealError, ValueError):
    """A workflow returned trajectories that cannot be trained on. It fails this episode only."""


def baselines_of(trajectories: Sequence[Trajectory]) -> array[float]:
    """One per trajectory, NaN without a greedy answer; empty when no trajectory has one."""
    if all(trajectory.baseline is None for trajectory in trajectories):
        return array("f")
    given = [trajectory.baseline for trajectory in trajectories]
    for baseline in given:
        if baseline is not None and not math.isfinite(baseline):
            raise not_finite("baseline", baseline)
    return array("f", [math.nan if baseline is None else baseline for baseline in given])


def parts_of(trajectories: Sequence[Trajectory]) -> tuple[bytes, array[float]]:
    """Names of the reward functions with their length, and the scores of each trajectory; empty when there are none."""
    names = sorted({name for trajectory in trajectories for name in trajectory.reward_parts})
    if not names:
        return b"", array("f")
    for trajectory in trajectories:
        for name, score in trajectory.reward_parts.items():
            if not math.isfinite(score):
                raise not_finite(f"reward_parts[{name!r}]", score)
    text = json.dumps(names).encode()
    scores = [trajectory.reward_parts.get(name, math.nan) for trajectory in trajectories for name in names]
    return LENGTH.pack(len(text)) + text, array("f", scores)


def sessions_of(trajectories: Sequence[Trajectory], record: str) -> bytes:
    """The columns of sessions and the text for reward functions; empty when no trajectory is a part of a session."""
    if all(trajectory.session < 0 for trajectory in trajectories) and not record:
        return b""
    turns, rewards = array("i", [one.session for one in trajectories]), array("f")
    of_session: dict[int, float] = {}
    for number, one in enumerate(trajectories):
        size = len(one.token_ids)
        if one.session >= 0 and of_session.setdefault(one.session, one.reward) != one.reward:
            text = f"rows of session {one.session} have rewards {of_session[one.session]} and {one.reward}: give one"
            raise TrajectoryError(text, code="workflow.session_rewards")
        by_answer = Runs((number if flag else -1, count) for flag, count in to_runs(one.loss_mask).runs)
        turns += to_array("i", one.turns or by_answer)
        rewards += to_array("f", given := one.turn_rewards or Runs([(one.reward, size)]))
        if len(one.turns) not in (0, size) or len(one.turn_rewards) not in (0, size):
            raise uneven(one)
        for reward in (reward for reward in _distinct(given) if not math.isfinite(reward)):
            raise not_finite("turn_rewards", reward)
    if sys.byteorder == "big":
        turns.byteswap()
        rewards.byteswap()
    text = record.encode()
    return b"".join((turns, rewards, LENGTH.pack(len(text)), text))


def _distinct(column: Sequence[float]) -> Sequence[float]:
    return column.values if isinstance(column, Runs) else column


def temperatures_of(trajectories: Sequence[Trajectory]) -> array[float]:
    """One per token, NaN where it is that of the run; empty when that is so for all."""
    if not any(trajectory.temperatures for trajectory in trajectories):
        return array("f")
    result = array("f")
    for trajectory in trajectories:
        own, size = trajectory.temperatures, len(trajectory.token_ids)
        if own and len(own) != size:
            message = f"a trajectory has {len(own)} temperatures for {size} token_ids: give one for each, or none"
            raise TrajectoryError(message, code="workflow.trajectory_lengths")
        if bad := [value for value in _distinct(own) if value <= 0 or math.isinf(value)]:
            raise not_finite("temperature", bad[0])
        result += to_array("f", own or Runs([(math.nan, size)]))
    return result


def experts_of(trajectories: Sequence[Trajectory]) -> bytes:
    """Rows of all tokens, unknown where a trajectory has none, and their shape; empty when no trajectory has any."""
    given = [trajectory.routed_experts for trajectory in trajectories if trajectory.routed_experts is not None]
    if not given:
        return b""
    shape, rows = given[0].shape, list[RoutedExperts]()
    for trajectory in trajectories:
        size, own = len(trajectory.token_ids), trajectory.routed_experts
        if own is not None and (len(own) != size or own.shape != shape):
            text = f"a trajectory has {len(own)} rows of routed_experts {own.shape} for {size} token_ids"
            raise TrajectoryError(f"{text}: give one for each, or None", code="workflow.trajectory_lengths")
        rows.append(RoutedExperts.unknown(shape, size) if own is None else own)
    return RoutedExperts.joined(rows).data + EXPERT_SHAPE.pack(shape.layers, shape.choices, shape.experts)


def images_of(trajectories: Sequence[Trajectory]) -> bytes:
    """The images: those of all trajectories in order, how many each has, and their number; empty without images."""
    images = [image for trajectory in trajectories for image in trajectory.images]
    if not images:
        return b""
    rows = [_IMAGE.pack(bytes.fromhex(image.sha256), *image.grid) for image in images]
    numbers = (len(trajectory.images) for trajectory in trajectories)
    return b"".join([*rows, *map(LENGTH.pack, numbers), LENGTH.pack(len(images))])


def image_bytes(payload: bytes, num_trajectories: int) -> int:
    """Size of what `images_of` wrote at the end of a payload."""
    (num_images,) = LENGTH.unpack_from(payload, len(payload) - LENGTH.size)
    return num_images * _IMAGE.size + (num_trajectories + 1) * LENGTH.size


def images_at_end(payload: bytes, num_trajectories: int) -> list[tuple[ImageRef, ...]]:
    """The images of each trajectory, as `images_of` wrote them."""
    start = len(payload) - image_bytes(payload, num_trajectories)
    end = len(payload) - (num_trajectories + 1) * LENGTH.size
    rows = (
        ImageRef(digest.hex(), (time, height, width))
        for digest, time, height, width in _IMAGE.iter_unpack(payload[start:end])
    )
    return [
        tuple(next(rows) for _ in range(number))
        for (number,) in LENGTH.iter_unpack(payload[end : len(payload) - LENGTH.size])
    ]


def uneven(trajectory: Trajectory) -> TrajectoryError:
    return TrajectoryError(
        f"a trajectory has {len(trajectory.token_ids)} token_ids, {len(trajectory.loss_mask)} loss_mask, "
        f"{len(trajectory.rollout_logprobs)} rollout_logprobs and {len(trajectory.output_versions)} output_versions: "
        "they must be equally long and not empty",
        code="workflow.trajectory_lengths",
    )


def not_finite(name: str, value: float) -> TrajectoryError:
    return TrajectoryError(f"a trajectory has {name}={value}, which is not finite", code="workflow.not_finite")


_START = struct.Struct("<4sI")  # magic, CRC-32 of all that follows
_SIZES = struct.Struct("<QII")  # episode id, n, T
_DATA = _START.size + _SIZES.size
_NO_NAMES = LENGTH.pack(2) + b"[]"
_NO_BASELINE = struct.pack("<f", math.nan)


class _Kind(NamedTuple):
    """Which columns a payload has."""

    level: int
    """1 = those of all payloads, 2 = and baselines, 3 = and scores of reward functions, 4 = and sessions."""
    has_temperatures: bool = False
    has_experts: bool = False
    has_images: bool = False

    @property
    def magic(self) -> bytes:
        letter = b"E" if self.has_experts else b"T" if self.has_temperatures else b"R"
        return (b"a" if self.has_images else b"A") + letter + b"P%d" % self.level


_KINDS = {
    kind.magic: kind
    for level in (1, 2, 3, 4)
    for rare in ((False, False), (True, False), (True, True))
    for kind in (_Kind(level, *rare), _Kind(level, *rare, has_images=True))
    if level >= (3 if kind.has_temperatures else 2 if kind.has_images else 1)
}
"""Magic -> kind. Images come with baselines, and temperatures with scores; experts come with temperatures."""


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


def check_episode(group: TrajectoryGroup) -> None:
    """Raise TrajectoryError for a group without trajectories, unequal lengths or a reward that is not finite."""
    _require_trajectories(group)
    try:
        for trajectory in group.trajectories:
            _checked_length(trajectory, is_scored=True)
    except TypeError as error:
        raise _wrong_type(error) from error


def encode_episode(episode_id: int, group: TrajectoryGroup) -> EncodedEpisode:
    """The payload of a group. Raises TrajectoryError as `check_episode`, and for values of a wrong type or range."""
    _require_trajectories(group)
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
        raise _wrong_type(error) from error


def _require_trajectories(group: TrajectoryGroup) -> None:
    if not group.trajectories:
        raise TrajectoryError(
            "the workflow returned a group without trajectories; return None to reject an episode",
            code="workflow.trajectory_lengths",
        )


def _wrong_type(error: Exception) -> TrajectoryError:
    message = f"a trajectory holds a value of the wrong type or range: {error}"
    return TrajectoryError(message, code="workflow.wrong_type")


def _checked_length(trajectory: Trajectory, *, is_scored: bool) -> int:
    """The number of tokens of a trajectory that passes the checks."""
    size = len(trajectory.token_ids)
    columns = (trajectory.loss_mask, trajectory.rollout_logprobs, trajectory.output_versions)
    if not size or any(len(column) != size for column in columns):
        raise uneven(trajectory)
    if is_scored and not math.isfinite(trajectory.reward):
        raise not_finite("reward", trajectory.reward)
    return size


def _joined(episode_id: int, trajectories: list[Trajectory], *, is_scored: bool, record: str) -> EncodedEpisode:
    lengths: list[int] = []
    rewards: list[float] = []
    token_ids, versions, logprobs, loss_mask = array("i"), array("i"), array("f"), bytearray()
    # Rows of short answers to one prompt mostly share these two columns: they become an array once.
    last_mask = last_made = mask_numbers = made_numbers = None
    for trajectory in trajectories:
        mask, made = trajectory.loss_mask, trajectory.output_versions
        lengths.append(_checked_length(trajectory, is_scored=is_scored))
        rewards.append(trajectory.reward)
        if mask_numbers is None or mask is not last_mask:
            last_mask, mask_numbers = mask, to_array("B", mask)
        if made_numbers is None or made is not last_made:
            last_made, made_numbers = made, to_array("i", made)
        token_ids += to_array("i", trajectory.token_ids)
        versions += made_numbers
        logprobs += to_array("f", trajectory.rollout_logprobs)
        loss_mask += mask_numbers
    num_trajectories, num_tokens = len(lengths), len(token_ids)
    finished = bytes([trajectory.finished for trajectory in trajectories])
    by_version = count_by_version(np.frombuffer(versions, "i4"), np.frombuffer(loss_mask, np.uint8))
    integers, floats = (array("i", lengths), token_ids, versions), (array("f", rewards), logprobs)
    baselines, (names, parts) = baselines_of(trajectories), parts_of(trajectories)
    temperatures, sessions = temperatures_of(trajectories), sessions_of(trajectories, record)
    experts, images = experts_of(trajectories), images_of(trajectories)
    if experts and not temperatures:
        temperatures = array("f", [math.nan]) * num_tokens
    level = 4 if sessions else 3 if parts or temperatures else 2 if baselines or images else 1
    if level > 1 and not baselines:
        baselines = array("f", [math.nan] * num_trajectories)
    if level > 2:
        names = names or _NO_NAMES
    magic = _Kind(level, bool(temperatures), bool(experts), bool(images)).magic
    if sys.byteorder == "big":
        for numbers in (*integers, *floats, baselines, parts, temperatures):
            numbers.byteswap()
    sizes = _SIZES.pack(episode_id, num_trajectories, num_tokens)
    rare = (baselines, names, parts, sessions, temperatures, experts, images)
    body = (sizes, *integers, *floats, loss_mask, finished, *rare)
    checksum = functools.reduce(lambda crc, piece: zlib.crc32(piece, crc), body, 0)
    made_by = [version for version, _, _ in by_version if version != -1]
    return EncodedEpisode(
        b"".join((_START.pack(magic, checksum), *body)),
        num_tokens,
        loss_mask.count(1),
        min(made_by, default=-1),
        max(made_by, default=-1),
        _counts(trajectories, max(lengths), by_version),
    )


def _counts(trajectories: list[Trajectory], longest: int, by_version: tuple[tuple[int, int, int], ...]) -> TokenCounts:
    found = first_of_sessions(trajectories)
    num_finished, reward = sum(one.finished for one in found), sum(one.reward for one in found) / len(found)
    return TokenCounts(len(trajectories), len(found), num_finished, longest, reward, by_version)


def routed_experts(payload: bytes) -> RoutedExperts | None:
    """The experts of all tokens of a payload, if it has them."""
    if not _KINDS[payload[:4]].has_experts:
        return None
    end = len(payload) - _image_bytes(payload) - EXPERT_SHAPE.size
    shape = ExpertShape(*EXPERT_SHAPE.unpack_from(payload, end))
    return RoutedExperts(shape, payload[end - payload_sizes(payload)[1] * shape.row_bytes : end])


def images(payload: bytes) -> list[tuple[ImageRef, ...]]:
    """The images of each trajectory; empty when none has any."""
    return images_at_end(payload, payload_sizes(payload)[0]) if _KINDS[payload[:4]].has_images else []


def _image_bytes(payload: bytes) -> int:
    return image_bytes(payload, payload_sizes(payload)[0]) if _KINDS[payload[:4]].has_images else 0


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
    (n, t), kind = payload_sizes(payload), _KINDS[payload[:4]]
    size = _DATA + 9 * n + 13 * t + _image_bytes(payload)
    if kind.level < 3:
        return size + 4 * n * (kind.level - 1)
    names, first = _reward_names(payload)
    size = first + 4 * n * len(names) + _image_bytes(payload)
    if kind.level == 4:
        (length,) = LENGTH.unpack_from(payload, first + 4 * n * len(names) + 4 * n + 8 * t)
        size += 4 * n + 8 * t + LENGTH.size + length
    return size + 4 * t * kind.has_temperatures + _expert_bytes(payload)


def _expert_bytes(payload: bytes) -> int:
    found = routed_experts(payload)
    return 0 if found is None else len(found.data) + EXPERT_SHAPE.size


def temperatures_start(payload: bytes) -> int | None:
    """The offset of the temperatures f4[T]; None when the payload has none."""
    if not _KINDS[payload[:4]].has_temperatures:
        return None
    return len(payload) - _image_bytes(payload) - _expert_bytes(payload) - 4 * payload_sizes(payload)[1]


def _reward_names(payload: bytes) -> tuple[list[str], int]:
    """Names of the reward functions of a payload, and the offset of their scores."""
    n, t = payload_sizes(payload)
    start = _DATA + 13 * (n + t) + LENGTH.size
    if _KINDS[payload[:4]].level < 3:
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
    level = _KINDS[start[:4]].level if start[:4] in _KINDS else 1
    if level < 3:
        return PayloadHead(t, [], has_sessions=False)
    names = offset + _DATA + 13 * (n + t)
    try:
        (length,) = LENGTH.unpack(reader.read((segment, names, LENGTH.size)))
        return PayloadHead(t, json.loads(reader.read((segment, names + LENGTH.size, length))), level == 4)
    except ValueError as error:
        raise _bad_payload(episode_id, f"is damaged: {error}") from error


def sessions_start(payload: bytes) -> int | None:
    """The offset of the columns of sessions; None when the payload has none."""
    if _KINDS[payload[:4]].level < 4:
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


# ----------------------------------------------------------------------------------------------------------------------
# Columns that few payloads have: which trajectories are one session, the order of its answers, temperatures.


class SessionColumns(NamedTuple):
    """Which trajectories of an episode are one session. n trajectories, T tokens."""

    sessions: np.ndarray  # [n] int32, -1 = a session of one
    turns: np.ndarray  # [T] int32, -1 for tokens that are not in the loss
    turn_rewards: np.ndarray  # [T] float32, where turns is not -1
    record: str
    """JSON text that the workflow recorded for reward functions."""


def join_sessions(payloads: Sequence[bytes]) -> list[SessionColumns]:
    """The sessions of several episodes, also of those whose trajectories are sessions of one."""
    return [session_columns(payload) or _one_each(payload) for payload in payloads]


def _one_each(payload: bytes) -> SessionColumns:
    """Sessions of one."""
    columns = join_columns([payload])
    lengths, mask = np.frombuffer(columns["lengths"], "<i4"), np.frombuffer(columns["loss_mask"], np.uint8)
    rewards = np.repeat(np.frombuffer(columns["rewards"], "<f4"), lengths)
    return SessionColumns(np.full(lengths.size, -1, np.int32), np.where(mask, 0, -1).astype(np.int32), rewards, "")


def session_columns(payload: bytes) -> SessionColumns | None:
    """The sessions of an episode; None when its trajectories are sessions of one."""
    start = sessions_start(payload)
    if start is None:
        return None
    n, t = payload_sizes(payload)
    integers = np.frombuffer(payload, "<i4", n + t, start)
    rewards = np.frombuffer(payload, "<f4", t, start + integers.nbytes)
    size_at = start + integers.nbytes + rewards.nbytes
    text = size_at + LENGTH.size
    (size,) = LENGTH.unpack_from(payload, size_at)
    return SessionColumns(integers[:n], integers[n:], rewards, payload[text : text + size].decode())


def recorded_sessions(record: str) -> list[Mapping[str, Any]]:
    """The sessions of an agent in the text that its workflow recorded; those without trajectories are last."""
    sessions: list[Mapping[str, Any]] = orjson.loads(record).get("sessions", []) if record else []
    return sessions


def group_of_payload(episode_id: int, payload: bytes) -> TrajectoryGroup:
    """The group that `encode_episode` wrote, with its record, without statistics. LedgerError when it is damaged."""
    columns, sessions = to_columns(episode_id, payload), session_columns(payload)
    names = payload_head(payload).reward_names
    parts = reward_parts([payload], names).tolist()
    baselines = np.frombuffer(join_columns([payload])["baselines"], "<f4").tolist()
    sampled_at, experts = temperatures([payload]), routed_experts(payload)
    pictures = images(payload)
    trajectories: list[Trajectory] = []
    end = 0
    for row, size in enumerate(columns.lengths.tolist()):
        span = slice(end, end + size)
        end += size
        scores = {name: score for name, score in zip(names, parts[row], strict=True) if score == score}
        one = Trajectory(
            token_ids=columns.token_ids[span].tolist(),
            loss_mask=columns.loss_mask[span].tolist(),
            rollout_logprobs=columns.rollout_logprobs[span].tolist(),
            output_versions=columns.output_versions[span].tolist(),
            reward=float(columns.rewards[row]),
            finished=bool(columns.finished[row]),
            reward_parts=scores,
            baseline=baselines[row] if baselines[row] == baselines[row] else None,
        )
        if sessions is not None:
            turns, rewards = sessions.turns[span].tolist(), sessions.turn_rewards[span].tolist()
            one = replace(one, session=int(sessions.sessions[row]), turns=turns, turn_rewards=rewards)
        if not np.isnan(sampled_at).all():
            one = replace(one, temperatures=sampled_at[span].tolist())
        if experts is not None:
            one = replace(one, routed_experts=experts[span])
        if pictures:
            one = replace(one, images=pictures[row])
        trajectories.append(one)
    return TrajectoryGroup(trajectories=trajectories, record="" if sessions is None else sessions.record)


def temperatures(payloads: Sequence[bytes]) -> np.ndarray:
    """Temperatures of the tokens of several episodes, NaN = that of the run; empty = all are. -> [T] or [0] float32"""
    starts = [temperatures_start(payload) for payload in payloads]
    if not any(starts):
        return np.zeros(0, np.float32)
    rows: list[np.ndarray] = []
    for payload, start in zip(payloads, starts, strict=True):
        t = payload_sizes(payload)[1]
        rows.append(np.full(t, np.nan, np.float32) if start is None else np.frombuffer(payload, "<f4", t, start))
    return np.concatenate(rows)


def join_experts(payloads: Sequence[bytes]) -> np.ndarray:
    """Routed experts of the tokens of several episodes, -1 = not recorded; empty without any. -> [T, layers, k] int16

    Raises LedgerError when they are of different models.
    """
    found = [routed_experts(payload) for payload in payloads]
    shapes = {one.shape for one in found if one is not None}
    if not shapes:
        return np.zeros((0, 0, 0), np.int16)
    if len(shapes) > 1:
        raise LedgerError("episodes have routed experts of models of different sizes", code="ledger.bad_payload")
    (shape,) = shapes
    rows: list[np.ndarray] = []
    for payload, one in zip(payloads, found, strict=True):
        data = b"\xff" * (shape.row_bytes * payload_sizes(payload)[1]) if one is None else one.data
        if shape.item_bytes == 1:
            numbers = np.frombuffer(data, np.uint8).astype(np.int16)
            numbers[numbers == 255] = -1
        else:
            numbers = np.frombuffer(data, "<i2").astype(np.int16)
        rows.append(numbers)
    return np.concatenate(rows).reshape(-1, shape.layers, shape.choices)


def join_images(payloads: Sequence[bytes]) -> list[tuple[ImageRef, ...]]:
    """Images of each trajectory of several episodes; empty when none has any."""
    found = [images(payload) for payload in payloads]
    if not any(found):
        return []
    return [
        row for payload, rows in zip(payloads, found, strict=True) for row in rows or [()] * payload_sizes(payload)[0]
    ]
