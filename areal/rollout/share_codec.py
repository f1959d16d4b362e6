"""Owns what travels between controller and trainer: batch shares as safetensors blobs, weight updates as JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import load, save

from areal.api.data import BatchShare, WeightSpec, WeightUpdate
from areal.api.errors import RequestError

_ARRAYS = (
    "token_ids",
    "lengths",
    "loss_mask",
    "rollout_logprobs",
    "output_versions",
    "rewards",
    "group_index",
    "finished",
    "baselines",
)
_SHARE_KEY = "share"
"""The one metadata key: several would be written in no fixed order, and equal shares must have equal bytes."""


def encode_share(share: BatchShare) -> bytes:
    arrays: dict[str, np.ndarray] = {
        "token_ids": share.token_ids,
        "lengths": share.lengths,
        "loss_mask": share.loss_mask,
        "rollout_logprobs": share.rollout_logprobs,
        "output_versions": share.output_versions,
        "rewards": share.rewards,
        "group_index": share.group_index,
        "finished": share.finished,
        "baselines": share.baselines,
    }
    head = {"step": share.step, "version": share.version, "stats": share.stats}
    return save(arrays, metadata={_SHARE_KEY: orjson.dumps(head, option=orjson.OPT_SORT_KEYS).decode()})


def decode_share(blob: bytes) -> BatchShare:
    """The share of a blob. RequestError when it is none."""
    try:
        head_size = int.from_bytes(blob[:8], "little")
        head: dict[str, Any] = json.loads(json.loads(blob[8 : 8 + head_size])["__metadata__"][_SHARE_KEY])
        arrays = load(blob)
        columns = {name: arrays[name] for name in _ARRAYS}
        return BatchShare(step=head["step"], version=head["version"], stats=head["stats"], **columns)
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"these {len(blob)} bytes are no batch share: {error}") from error


def encode_update(update: WeightUpdate) -> bytes:
    return orjson.dumps(update)


def decode_update(body: dict[str, Any]) -> WeightUpdate:
    """The weight update of a JSON object. RequestError for anything unknown or missing."""
    try:
        buckets = [[WeightSpec(**spec) for spec in bucket] for bucket in body.get("buckets", [])]
        fields: dict[str, Any] = body | {"buckets": buckets}
        return WeightUpdate(**fields)
    except TypeError as error:
        raise RequestError(f"not a weight update: {error}") from error
