"""JSON over HTTP between an adapter and one server, and whether a refusal is a fault of the request or of the server.

A call waits for its answer without a time limit; see `areal.fleet.server_client`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import orjson

from areal.api.columns import Column
from areal.api.data import WeightSpec, WeightUpdate
from areal.api.errors import ArealError, RequestError, ServerUnavailable
from areal.fleet.replica import Replica

# ----------------------------------------------------------------------------------------------------------------------
# One HTTP/1.1 connection: requests as bytes, answers whole or streamed.
#
# Written by hand because a request costs a third of what it costs with a general client, and the rollout controller
# sends hundreds at a time. A call waits for its answer without a time limit; it ends with the answer, when the
# connection is lost or aborted, or when the caller is cancelled.

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


_CONNECT_TIMEOUT_S = 10.0
_LATE_S = 1.0
"""A limit that ends this much later shows that this process was blocked: the server is tried again."""
_IDLE_LIMIT_S = 4.0
"""A connection that was idle for longer is not used again: uvicorn closes connections after 5 s."""
_TRY_ELSEWHERE = (408, 429)
"""Client-error statuses that describe the state of the server and not the request."""
_WRONG = (ValueError, KeyError, TypeError, IndexError, AttributeError)
"""Errors of a parser when a field is missing or wrong."""
_Found = TypeVar("_Found")
Body = bytes | Callable[[], bytes]
"""A function is called when the request is sent, so that the bytes of a long prompt do not stay until the answer."""


class ServerClient:
    """All connections to one server, kept alive between requests.

    Calls raise ServerUnavailable when the server gives no complete answer or one of status 5xx, and RequestError when
    it refuses what was sent (4xx).
    """

    def __init__(self, name: str, address: str, *, token: str = "") -> None:
        """`name` and `address` appear in errors. RequestError unless the address is http://host:port."""
        parts = urlsplit(address)
        if parts.scheme != "http" or not parts.hostname:
            text = f"server address {address!r} is not of the form http://host:port"
            raise RequestError(text, code="fleet.invalid_address")
        self.name = name
        self.address = address
        self._host = parts.hostname
        self._port = parts.port or 80
        self._head = f"Host: {parts.netloc}\r\n"
        if token:
            self._head += f"Authorization: Bearer {token}\r\n"
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._closed = False

    async def get(self, path: str) -> bytes:
        return await self.request("GET", path)

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Send JSON; returns the body of the answer."""
        return await self.request("POST", path, _json(body))

    async def stream(self, path: str, body: Body, on_event: Callable[[bytes], None]) -> None:
        """`on_event` gets the data of each server-sent event except the closing [DONE]."""
        rest = b""

        def on_data(data: bytes) -> None:
            nonlocal rest
            is_whole = data.startswith(b"data: {") and data.endswith(b"\n\n")
            if is_whole and not rest and data.find(b"\n") == len(data) - 2:  # mostly exactly one event
                on_event(data[6:-2])
                return
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: ") and event != b"data: [DONE]":  # otherwise a comment or the end
                    on_event(event[6:])

        await self.request("POST", path, body, on_data)

    async def request(self, method: str, path: str, body: Body = b"", on_data: OnData | None = None) -> bytes:
        """The body of a 200; every other status is an error."""
        status, answer = await self.exchange(method, path, body, on_data)
        if status != 200:
            raise self.refusal(path, status, answer)
        return answer

    async def exchange(
        self, method: str, path: str, body: Body = b"", on_data: OnData | None = None
    ) -> tuple[int, bytes]:
        """Status and body of the answer. With `on_data`, the body of a 200 is passed to it piece by piece instead.

        An exception of `on_data` ends the call and is raised here.
        """
        try:
            connection = await self._acquire()
            try:
                return await connection.call(partial(self._request_bytes, method, path, body), on_data)
            finally:
                if connection.is_reusable and not self._closed:
                    connection.idle_since = time.monotonic()
                    self._idle.append(connection)
                else:
                    connection.abort()
        except ServerUnavailable as error:
            text = f"{self.name} at {self.address} did not answer {path}: {error}"
            raise ServerUnavailable(text, code=error.code) from error

    def _request_bytes(self, method: str, path: str, body: Body) -> bytes:
        data = body() if callable(body) else body
        head = (
            f"{method} {path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode("latin-1") + data

    async def _acquire(self) -> Connection:
        if self._closed:
            raise ServerUnavailable("the connection was closed", code="fleet.no_answer")
        oldest_useful = time.monotonic() - _IDLE_LIMIT_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and connection.idle_since >= oldest_useful:
                return connection
            connection.abort()
        connection = await self._connect()
        if self._closed:
            connection.abort()
            raise ServerUnavailable("the connection was closed", code="fleet.no_answer")
        return connection

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        while True:
            deadline_s = loop.time() + _CONNECT_TIMEOUT_S
            try:
                async with asyncio.timeout_at(deadline_s):
                    _, connection = await loop.create_connection(lambda: Connection(self._all), self._host, self._port)
                return connection
            except TimeoutError as error:
                if loop.time() - deadline_s < _LATE_S:
                    text = f"no connection within {_CONNECT_TIMEOUT_S:g} s"
                    raise ServerUnavailable(text, code="fleet.no_answer") from error
            except OSError as error:
                raise ServerUnavailable(error.strerror or str(error), code="fleet.no_answer") from error

    def refusal(self, path: str, status: int, answer: bytes) -> RequestError | ServerUnavailable:
        """The error for a status other than 200. The code of a native server's error is kept."""
        message, code = _message_and_code(answer)
        if 400 <= status < 500 and status not in _TRY_ELSEWHERE:
            return RequestError(f"{self.name} refused {path}: {message}", code=code or "server.request_refused")
        text = f"{self.name} failed {path} with status {status}: {message}"
        return ServerUnavailable(text, code=code or "server.request_failed")

    def parsed(self, payload: bytes, parse: Callable[[Any], _Found]) -> _Found:
        """The result of `parse` for the JSON of an answer. ServerUnavailable when a field is missing or wrong."""
        try:
            return parse(orjson.loads(payload))
        except ArealError:
            raise
        except _WRONG as error:
            raise self.unreadable(error) from error

    def read(self, answer: Any, parse: Callable[[Any], _Found]) -> _Found:
        """The same for what was parsed already."""
        try:
            return parse(answer)
        except ArealError:
            raise
        except _WRONG as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> ServerUnavailable:
        """The error for an answer that does not follow the server's protocol."""
        text = f"{self.name} sent an answer that cannot be read: {error!r}"
        return ServerUnavailable(text, code="server.unreadable_answer")

    def close(self) -> None:
        """Drop all connections: every running call fails with ServerUnavailable. The client cannot be used again."""
        self._closed = True
        self._idle.clear()
        for connection in list(self._all):
            connection.abort()


class HttpReplica(Replica):
    """The base class of the clients of all servers: the connections, and the update group."""

    def __init__(self, name: str, address: str, token: str = "") -> None:
        self.name = name
        self._client = ServerClient(name, address, token=token)
        self._group_name = ""
        """The update group that the server has joined; empty without one."""
        self._pulled = ("", "")
        """Address of the last http update, and the folder of its copy on the server's machine."""

    @property
    def has_second_copy(self) -> bool:
        return False

    async def prepare_weights(self, update: WeightUpdate, *, rank: int) -> None:
        """See `areal.fleet.replica.Replica`."""
        if update.kind == "http":
            await self._pull_weights(update)

    async def _pull_weights(self, update: WeightUpdate) -> None:
        """The native server, or the host of a foreign one, copies the folder."""
        answer = await self._client.post("/pull_weights", {"url": update.path, "mirrors": update.mirrors})
        self._pulled = (update.path, self._client.parsed(answer, lambda found: str(found["path"])))

    async def _folder_of(self, update: WeightUpdate) -> str:
        """The folder from which the server loads an update of kind disk or http."""
        if update.kind == "disk":
            return update.path
        if self._pulled[0] != update.path:
            await self._pull_weights(update)
        return self._pulled[1]

    async def _send_part(
        self, path: str, is_streamed: bool, make_body: Callable[[], dict[str, Any]], on_event: Callable[[bytes], None]
    ) -> None:
        """Send the request of a part; `on_event` gets the answer, or each event of a stream."""

        def body() -> bytes:
            return _json(make_body())

        if is_streamed:
            await self._client.stream(path, body, on_event)
        else:
            on_event(await self._client.request("POST", path, body))

    def _unfinished(self) -> ServerUnavailable:
        text = f"{self.name} ended an answer without a finish reason"
        return ServerUnavailable(text, code="server.unreadable_answer")

    async def close(self) -> None:
        self._client.close()


def group_body(update: WeightUpdate, rank: int) -> dict[str, Any]:
    """The fields of a request to join the update group with ranks from `rank`."""
    return {
        "master_address": update.master_address,
        "master_port": update.master_port,
        "rank_offset": rank,
        "world_size": update.world_size,
        "group_name": update.group_name,
        "backend": update.backend,
    }


def flat_bucket(bucket: list[WeightSpec], group_name: str, *, flush_cache: bool) -> dict[str, Any]:
    """The body of /update_weights_from_distributed, without the version: it is valid once all weights have arrived."""
    return {
        "names": [spec.name for spec in bucket],
        "dtypes": [spec.dtype for spec in bucket],
        "shapes": [spec.shape for spec in bucket],
        "group_name": group_name,
        "flush_cache": flush_cache,
        "load_format": "flattened_bucket",
    }


def _json(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body, default=_plain)


def _plain(value: object) -> list[Any]:
    if isinstance(value, Column):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")


def _message_and_code(answer: bytes) -> tuple[str, str]:
    """The message in the error body of any kind of server, and areal's error code; empty for servers without one."""
    message, code = "", ""
    try:
        found = orjson.loads(answer)
        code = found.get("code", "")
        error = next(found[name] for name in ("error", "message", "detail", "error_message") if found.get(name))
        message = error["message"] if isinstance(error, dict) else error
        code = code or (error.get("code", "") if isinstance(error, dict) else "")
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        pass
    if not isinstance(message, str) or not message:
        message = answer[:200].decode(errors="replace") or "no message"
    return message, code if isinstance(code, str) and "." in code else ""  # the codes of other servers are numbers
