"""Owns the frames between the reward pool and its workers: 4 bytes of length, then JSON."""

from __future__ import annotations

import struct
from typing import Any

import orjson

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size


def frame(message: Any) -> bytes:
    """One message as bytes."""
    body = orjson.dumps(message)
    return _LENGTH.pack(len(body)) + body


def body_length(header: bytes | bytearray | memoryview) -> int:
    """The length that a header announces."""
    return _LENGTH.unpack(header)[0]


class FrameReader:
    """Collects bytes as they come and gives back whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages completed by `data`."""
        buffer = self._buffer
        buffer += data
        messages: list[Any] = []
        start, end = 0, len(buffer)
        while end - start >= HEADER_BYTES:
            length = _LENGTH.unpack_from(buffer, start)[0]
            if end - start - HEADER_BYTES < length:
                break
            body = start + HEADER_BYTES
            messages.append(orjson.loads(memoryview(buffer)[body : body + length]))
            start = body + length
        if start:
            del buffer[:start]
        return messages
