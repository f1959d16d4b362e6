"""What travels from the controller to a trainer rank for a batch: its record, and payloads where files are not shared.

An answer is the size of the head (u4, little-endian), the head as JSON, and the payloads of the share of the rank. A
rank that reads the ledger itself gets the head only.
"""

import struct
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from areal.api.batch import BatchShare
from areal.api.errors import LedgerError, RequestError
from areal.ledger.event_files import PayloadReader
from areal.ledger.payload import check_payload, column_of, declaration, read_head
from areal.ledger.state import BatchRecord
from areal.rollout.train_batches import SharePart, build_share, share_parts

_SIZE = struct.Struct("<I")


class WeightsNeeded(RequestError):
    """A server waits for the current weights: the trainer must publish them again, then repeat the call (HTTP 409)."""

    code = "rollout.weights_needed"


class BatchHead(NamedTuple):
    """The head of an answer."""

    record: BatchRecord
    part: SharePart | None
    """None: the rank reads the payloads from the ledger."""


def encode_head(record: BatchRecord, part: SharePart | None = None) -> bytes:
    """Equal for equal arguments."""
    fields: dict[str, Any] = {
        "step": record.step,
        "version": record.version,
        "mask_before": record.mask_before,
        "ids": record.episode_ids,
        "payloads": record.payloads,
        "stats": record.stats,
        "by_tree": record.by_tree,
        "part": part and [part.indices, [declaration(column) for column in part.columns]],
    }
    head = orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
    return _SIZE.pack(len(head)) + head


def decode_head(answer: bytes) -> tuple[BatchHead, int]:
    """The head that `encode_head` wrote, and the offset of the payloads. Raises RequestError for other bytes."""
    try:
        (size,) = _SIZE.unpack_from(answer)
        end = _SIZE.size + size
        head: dict[str, Any] = orjson.loads(memoryview(answer)[_SIZE.size : end])
        record = BatchRecord(
            step=head["step"],
            version=head["version"],
            mask_before=head["mask_before"],
            episode_ids=tuple(head["ids"]),
            payloads=tuple((segment, offset, size) for segment, offset, size in head["payloads"]),
            stats=head["stats"],
            by_tree=head["by_tree"],
        )
        if head["part"] is None:
            return BatchHead(record, None), end
        indices, columns = head["part"]
        return BatchHead(record, SharePart(indices, tuple(map(column_of, columns)))), end
    except (struct.error, ValueError, KeyError, TypeError) as error:
        message = f"these {len(answer)} bytes are not a batch: {error}"
        raise RequestError(message, code="rollout.not_a_share") from error


def decode_share(answer: bytes) -> BatchShare:
    """The share in an answer that has the payloads. Raises RequestError for other bytes."""
    (record, part), offset = decode_head(answer)
    payloads: list[bytes] = []
    for index in part.indices if part is not None else ():
        size = record.payloads[index][2]
        payloads.append(answer[offset : offset + size])
        offset += size
    if part is None or offset != len(answer):
        message = f"a batch of {len(answer)} bytes does not have the payloads of its head"
        raise RequestError(message, code="rollout.not_a_share")
    try:
        for index, payload in zip(part.indices, payloads, strict=True):
            check_payload(record.episode_ids[index], payload)
    except LedgerError as error:
        raise RequestError(f"the batch was damaged on its way: {error}", code="rollout.not_a_share") from error
    return _share(record, part, payloads)


def read_share(reader: PayloadReader, record: BatchRecord, *, dp_rank: int, dp_size: int) -> BatchShare:
    """The share of a rank from the payload files of the ledger: the same as in an answer with payloads.

    Raises LedgerError when one of its episodes is missing or damaged.
    """
    episodes = list(zip(record.episode_ids, record.payloads, strict=True))
    heads = [read_head(reader, episode_id, where, with_tree=record.by_tree) for episode_id, where in episodes]
    part = share_parts(heads, dp_size)[dp_rank]
    payloads: list[bytes] = []
    for index in part.indices:
        episode_id, where = episodes[index]
        payload = reader.read(where)
        check_payload(episode_id, payload)
        payloads.append(payload)
    return _share(record, part, payloads)


def _share(record: BatchRecord, part: SharePart, payloads: list[bytes]) -> BatchShare:
    share = build_share(payloads, part, step=record.step, version=record.version, mask_before=record.mask_before)
    return replace(share, stats=record.stats)
