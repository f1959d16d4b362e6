"""Columns that few payloads have: which trajectories are one session, the order of its answers, temperatures."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import orjson

from areal.api.data import Trajectory, TrajectoryGroup
from areal.api.errors import LedgerError
from areal.api.images import ImageRef
from areal.ledger.payload import (
    images,
    join_columns,
    payload_head,
    payload_sizes,
    reward_parts,
    routed_experts,
    sessions_start,
    temperatures_start,
    to_columns,
)
from areal.ledger.rare_columns import LENGTH


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
    found: list[Mapping[str, Any]] = orjson.loads(record).get("sessions", []) if record else []
    return found


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
