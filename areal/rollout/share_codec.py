"""What travels between controller and trainers: batch shares as safetensors, and one error."""

import json
from dataclasses import fields
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import load, save

from areal.api.batch_share import BatchShare
from areal.api.errors import RequestError

_HEAD = ("step", "version", "stats", "reward_names")
_ARRAYS = tuple(field.name for field in fields(BatchShare) if field.name not in _HEAD)
_SHARE_KEY = "share"
"""The only metadata key: safetensors writes several in no fixed order, and equal shares must have equal bytes."""


class WeightsNeeded(RequestError):
    """A server waits for the current weights: the trainer must publish them again, then repeat the call (HTTP 409)."""

    code = "rollout.weights_needed"


def encode_share(share: BatchShare) -> bytes:
    arrays: dict[str, np.ndarray] = {name: getattr(share, name) for name in _ARRAYS}
    head = {name: getattr(share, name) for name in _HEAD}
    return save(arrays, metadata={_SHARE_KEY: orjson.dumps(head, option=orjson.OPT_SORT_KEYS).decode()})


def decode_share(blob: bytes) -> BatchShare:
    """Inverse of `encode_share`. Raises RequestError for other bytes."""
    try:
        head_size = int.from_bytes(blob[:8], "little")
        head: dict[str, Any] = json.loads(json.loads(blob[8 : 8 + head_size])["__metadata__"][_SHARE_KEY])
        arrays = load(blob)
        values: dict[str, Any] = {name: head[name] for name in _HEAD} | {name: arrays[name] for name in _ARRAYS}
        return BatchShare(**values)
    except (ValueError, KeyError, TypeError) as error:
        message = f"these {len(blob)} bytes are not a batch share: {error}"
        raise RequestError(message, code="rollout.not_a_share") from error
