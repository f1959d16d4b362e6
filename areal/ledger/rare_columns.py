"""Columns of a payload that few trajectories have, in the bytes of `areal.ledger.payload`."""

from __future__ import annotations

import json
import math
import struct
import sys
from array import array
from collections.abc import Sequence

from areal.api.columns import Runs, to_array, to_runs
from areal.api.data import Trajectory
from areal.api.errors import ArealError
from areal.api.images import ImageRef
from areal.api.routed_experts import RoutedExperts

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
    found = array("f")
    for trajectory in trajectories:
        own, size = trajectory.temperatures, len(trajectory.token_ids)
        if own and len(own) != size:
            message = f"a trajectory has {len(own)} temperatures for {size} token_ids: give one for each, or none"
            raise TrajectoryError(message, code="workflow.trajectory_lengths")
        if bad := [value for value in _distinct(own) if value <= 0 or math.isinf(value)]:
            raise not_finite("temperature", bad[0])
        found += to_array("f", own or Runs([(math.nan, size)]))
    return found


def experts_of(trajectories: Sequence[Trajectory]) -> bytes:
    """Rows of all tokens, unknown where a trajectory has none, and their shape; empty when no trajectory has any."""
    given = [one.routed_experts for one in trajectories if one.routed_experts is not None]
    if not given:
        return b""
    shape, rows = given[0].shape, list[RoutedExperts]()
    for one in trajectories:
        size, own = len(one.token_ids), one.routed_experts
        if own is not None and (len(own) != size or own.shape != shape):
            text = f"a trajectory has {len(own)} rows of routed_experts {own.shape} for {size} token_ids"
            raise TrajectoryError(f"{text}: give one for each, or None", code="workflow.trajectory_lengths")
        rows.append(RoutedExperts.unknown(shape, size) if own is None else own)
    return RoutedExperts.joined(rows).data + EXPERT_SHAPE.pack(shape.layers, shape.choices, shape.experts)


def images_of(trajectories: Sequence[Trajectory]) -> bytes:
    """The images: those of all trajectories in order, how many each has, and their number; empty without images."""
    images = [image for one in trajectories for image in one.images]
    if not images:
        return b""
    rows = [_IMAGE.pack(bytes.fromhex(image.sha256), *image.grid) for image in images]
    numbers = (len(one.images) for one in trajectories)
    return b"".join([*rows, *map(LENGTH.pack, numbers), LENGTH.pack(len(images))])


def image_bytes(payload: bytes, num_trajectories: int) -> int:
    """Size of what `images_of` wrote at the end of a payload."""
    (num_images,) = LENGTH.unpack_from(payload, len(payload) - LENGTH.size)
    return num_images * _IMAGE.size + (num_trajectories + 1) * LENGTH.size


def images_at_end(payload: bytes, num_trajectories: int) -> list[tuple[ImageRef, ...]]:
    """Inverse of `images_of`: the images of each trajectory."""
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
