"""Owns looking into the payloads of accepted episodes: their columns, and whether they are what the events say."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from areal.api.errors import LedgerError
from areal.ledger.event_files import PayloadReader
from areal.ledger.payload import check_payload, has_baselines, payload_sizes
from areal.ledger.state import Event

_HEADER_BYTES = 24
"""Magic, checksum, episode id and the two counts. payload.py says how a payload is laid out."""


class EpisodeColumns(NamedTuple):
    """The trajectories of one episode, one after the other. n trajectories, T tokens."""

    lengths: np.ndarray  # [n] int32
    token_ids: np.ndarray  # [T] int32
    output_versions: np.ndarray  # [T] int32, -1 where not generated
    rewards: np.ndarray  # [n] float32
    rollout_logprobs: np.ndarray  # [T] float32
    loss_mask: np.ndarray  # [T] uint8
    finished: np.ndarray  # [n] uint8


def read_columns(reader: PayloadReader, event: Event) -> EpisodeColumns:
    """The trajectories that an `accepted` event points at. LedgerError when they are missing, damaged or others."""
    segment, offset, size = event["payload"]
    payload = reader.read((segment, offset, size))
    check_payload(event["id"], payload)
    n, t = payload_sizes(payload)
    if n == 0 or t == 0 or len(payload) != _HEADER_BYTES + (13 if has_baselines(payload) else 9) * n + 13 * t:
        raise LedgerError(f"the payload of episode {event['id']} does not have the size that its counts make")
    integers = np.frombuffer(payload, dtype="<i4", count=n + 2 * t, offset=_HEADER_BYTES)
    floats = np.frombuffer(payload, dtype="<f4", count=n + t, offset=_HEADER_BYTES + integers.nbytes)
    flags = np.frombuffer(payload, np.uint8, count=t + n, offset=_HEADER_BYTES + integers.nbytes + floats.nbytes)
    lengths = integers[:n]
    if sum(lengths.tolist()) != t:
        raise LedgerError(f"the payload of episode {event['id']}: its trajectories do not have {t} tokens in all")
    return EpisodeColumns(
        lengths=lengths,
        token_ids=integers[n : n + t],
        output_versions=integers[n + t :],
        rewards=floats[:n],
        rollout_logprobs=floats[n:],
        loss_mask=flags[:t],
        finished=flags[t:],
    )


def disagreements(event: Event, columns: EpisodeColumns) -> list[str]:
    """What an `accepted` event says otherwise than the payload it points at."""
    made = columns.output_versions[columns.output_versions != -1]
    found: dict[str, Any] = {
        "trajectories": len(columns.lengths),
        "tokens": len(columns.token_ids),
        "generated": columns.loss_mask.tobytes().count(1),
        "min_version": int(made.min()) if len(made) else -1,
        "max_version": int(made.max()) if len(made) else -1,
    }
    problems = [
        f"{name} is {event[name]} in the event, {value} in the payload"
        for name, value in found.items()
        if event[name] != value
    ]
    reward = sum(columns.rewards.tolist()) / len(columns.lengths)
    if not math.isclose(event["reward"], reward, rel_tol=1e-4, abs_tol=1e-4):  # the payload holds 32 bits
        problems.append(f"reward is {event['reward']} in the event, {reward:.6g} in the payload")
    return problems


def num_going_back(columns: EpisodeColumns) -> int:
    """Trajectories in which a generated token is of an older version than one before it."""
    made = np.flatnonzero(columns.output_versions >= 0)
    versions = columns.output_versions[made]
    falls = np.flatnonzero(versions[1:] < versions[:-1]) + 1
    if len(falls) == 0:
        return 0
    trajectory_of = np.repeat(np.arange(len(columns.lengths)), columns.lengths)[made]
    within = trajectory_of[falls] == trajectory_of[falls - 1]
    return len(np.unique(trajectory_of[falls][within]))
