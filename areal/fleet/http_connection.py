"""One HTTP/1.1 connection: requests as bytes, answers whole or streamed.

Written by hand because a request costs a third of what it costs with a general client, and the rollout controller sends
hundreds at a time. A call waits for its answer without a time limit; it ends with the answer, when the connection is
lost or aborted, or when the caller is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from areal.api.errors import ArealError, ServerUnavailable

_MAX_HEAD_BYTES = 65536

OnData = Callable[[bytes], None]


class Connection(asyncio.Protocol):
    """One connection to a server, for one call at a time; parses the answer while it arrives."""

    def __init__(self, registry: set[Connection]) -> None:
        self._registry = registry
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._on_data: OnData | None = None
        self._keep_alive = True
        self.idle_since = 0.0
        self._start_answer()

    @property
    def is_reusable(self) -> bool:
        return self._keep_alive and self._answer is None and self._transport is not None

    async def call(self, request: Callable[[], bytes], on_data: OnData | None) -> tuple[int, bytes]:
        """Send the bytes of a request and wait for its answer."""
        if self._transport is None:
            raise ServerUnavailable("the connection was lost", code="fleet.no_answer")
        data = request()
        self._answer = asyncio.get_running_loop().create_future()
        self._on_data = on_data
        self._start_answer()
        self._transport.write(data)
        del data  # long prompts
        try:
            return await self._answer
        finally:
            if not self._finished:
                self.abort()
            self._answer = None

    def abort(self) -> None:
        self._keep_alive = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._registry.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.discard(self)
        self._transport = None
        if self._answer is not None and not self._answer.done():
            if self._until_close:
                self._finish()
            else:
                text = str(exc) if exc else "the connection was lost during the answer"
                self._fail(ServerUnavailable(text, code="fleet.no_answer"))

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # data without a request
            return
        try:
            if self._chunked:
                self._read_chunks(data)
            else:
                self._parse(data)
        except ArealError as error:  # of on_data
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - of the parser or of on_data: the caller gets it
            self._fail(ServerUnavailable(f"the answer cannot be read: {error!r}", code="server.unreadable_answer"))

    # The answer

    def _start_answer(self) -> None:
        self._status = 0
        self._rest = b""
        self._pieces: list[bytes] = []
        self._chunked = False
        self._until_close = False
        self._remaining = 0
        """Bytes still to come: of the body, or of the current chunk with its line end."""
        self._finished = False

    def _parse(self, data: bytes) -> None:
        if self._status == 0:
            data = self._rest + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > _MAX_HEAD_BYTES:
                    raise ValueError("the head of the answer is too long")
                self._rest = data
                return
            self._rest = b""
            self._read_head(data[:end])
            data = data[end + 4 :]
        if self._chunked:
            self._read_chunks(data)
        elif self._until_close:
            self._deliver(data)
        else:
            self._remaining -= len(data)
            if self._remaining < 0:
                raise ValueError("the answer is longer than its content-length")
            self._deliver(data)
            if self._remaining == 0:
                self._finish()

    def _read_head(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        if not lines[0].startswith(b"HTTP/1."):
            raise ValueError(f"the answer starts with {lines[0][:40]!r}")
        self._status = int(lines[0][9:12])
        self._until_close = True
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip().lower()
            if name == b"content-length":
                self._remaining, self._until_close = int(value), False
            elif name == b"transfer-encoding" and value == b"chunked":
                self._chunked, self._until_close = True, False
            elif name == b"connection" and value == b"close":
                self._keep_alive = False
        if self._until_close or self._status >= 500:  # uvicorn closes after such a failure without announcing it
            self._keep_alive = False

    def _read_chunks(self, data: bytes) -> None:
        """Chunk by chunk; `_rest` holds an unfinished size line, `_remaining` counts the open chunk and its CRLF."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        elif self._remaining == 0:  # mostly exactly one chunk
            end = data.find(b"\r\n")
            if end > 0 and data[0] != 0x30 and len(data) == int(data[:end].partition(b";")[0], 16) + end + 4:
                self._deliver(data[end + 2 : -2])
                return
        position = 0
        while position < len(data):
            if self._remaining == 0:
                end = data.find(b"\r\n", position)
                if end < 0:
                    self._rest = data[position:]
                    return
                size = int(data[position:end].partition(b";")[0], 16)
                if size == 0:
                    if len(data) < end + 4:  # the empty line after it is part of this answer
                        self._rest = data[position:]
                        return
                    self._finish()
                    return
                position = end + 2
                self._remaining = size + 2
            piece = data[position : position + self._remaining]
            position += len(piece)
            self._remaining -= len(piece)
            if self._remaining < 2:
                piece = piece[: len(piece) - min(len(piece), 2 - self._remaining)]
            self._deliver(piece)

    def _deliver(self, piece: bytes) -> None:
        if piece and self._on_data is not None and self._status == 200:
            self._on_data(piece)
        elif piece:
            self._pieces.append(piece)

    def _finish(self) -> None:
        self._finished = True
        if self._answer is not None:
            self._answer.set_result((self._status, b"".join(self._pieces)))

    def _fail(self, error: ArealError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()
