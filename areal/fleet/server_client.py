"""HTTP between a client and one inference server, what the clients of all backends share, and whether a refusal is a
fault of the request or of the server.

A call waits for its answer without a time limit; it ends with the answer, when the connection is lost, or when the
caller is cancelled.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import httptools
import numpy as np
import orjson

from areal.api.columns import Column, ExpertShape, RoutedExperts, Runs
from areal.api.data import GenerationRequest, WeightSpec, WeightUpdate
from areal.api.errors import ArealError, RequestError, ServerUnavailable
from areal.fleet.replica import NO_VERSION, AnswerForm, FinishReason, Replica
from areal.observe.log import get_logger

log = get_logger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_LATE_S = 1.0
"""A limit that ends this much later shows that this process was blocked: the server is tried again."""
_IDLE_LIMIT_S = 4.0
"""A connection that was idle for longer is not used again: uvicorn closes connections after 5 s."""
_TRY_ELSEWHERE = (408, 429)
"""Client-error statuses that describe the state of the server and not the request."""
WRONG_FIELD = (ValueError, KeyError, TypeError, IndexError, AttributeError)
"""Errors of a parser when a field is missing or wrong."""
_T = TypeVar("_T")


class Connection(asyncio.Protocol):
    """One connection to a server, for one call at a time."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        """Pieces of the body of the answer that were not read yet."""
        self.on_body = self._pieces.append
        """Called by the parser, as `on_message_complete` is."""
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_end = False
        self._error: ServerUnavailable | None = None
        self._path = ""
        self.status = 0
        """Of the answer, once `read` has returned."""
        self._has_ended = True
        """There is no answer, or all of it has arrived."""
        self._stays = True
        self._idle_since_s = 0.0

    def send(self, path: str, request: bytes) -> None:
        self._path = path
        if self._transport is None:
            raise self._lost("the connection was lost")
        self._has_ended = False
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    async def read(self, *, to_end: bool = False) -> bytes:
        """The next bytes of the body, all that have arrived; empty at its end. `to_end`: the whole rest."""
        self._waits_for_end = to_end
        while self._error is None and not self._has_ended and (to_end or not self._pieces):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        self.status = self._parser.get_status_code()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        return data

    def release(self, idle: list[Connection]) -> None:
        """The caller has what it wants: keep the connection, or drop it if more of the answer may come."""
        may_stay = self._has_ended and self._error is None and self._transport is not None
        # uvicorn closes after an error of its handler without announcing it
        if may_stay and self._stays and self.status < 500:
            self._pieces.clear()
            self._idle_since_s = time.monotonic()
            idle.append(self)
        else:
            self.abort()

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and self._idle_since_s > time.monotonic() - _IDLE_LIMIT_S

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._client.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.connections.discard(self)
        self._transport = None
        if self._has_ended:
            return
        if self._parser.get_status_code() and not self._parser.should_keep_alive():  # a body without a length ends here
            self._has_ended, self._stays = True, False
        else:
            self._error = self._error or self._lost(str(exc) if exc else "the connection was lost during the answer")
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            self.abort()  # data without a request
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            text = f"the answer cannot be read: {error!r}"
            self._error = self._error or self._lost(text, code="server.unreadable_answer")
            self.abort()
        if self._has_ended or self._error is not None or (self._pieces and not self._waits_for_end):
            self._wake()

    def on_message_complete(self) -> None:
        self._has_ended, self._stays = True, self._parser.should_keep_alive()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _lost(self, text: str, code: str = "fleet.no_answer") -> ServerUnavailable:
        return self._client.no_answer(self._path, text, code)


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
        self.connections: set[Connection] = set()
        self._closed = False

    async def get(self, path: str) -> bytes:
        return await self.call("GET", path)

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Send JSON; returns the body of the answer."""
        return await self.call("POST", path, body)

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The body of a 200; every other status is an error."""
        status, answer = await self.exchange(method, path, body)
        if status != 200:
            raise self.refusal(path, status, answer)
        return answer

    async def exchange(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body of the answer."""
        connection = await self._send(method, path, body)
        try:
            answer = await connection.read(to_end=True)
            return connection.status, answer
        finally:
            connection.release(self._idle)

    async def answers(self, path: str, body: dict[str, Any], *, is_streamed: bool) -> AsyncGenerator[bytes, None]:
        """The data of each server-sent event except the closing [DONE]; the whole answer of what is not streamed."""
        connection = await self._send("POST", path, body)
        try:
            data, rest = await connection.read(to_end=not is_streamed), b""
            if connection.status != 200:
                raise self.refusal(path, connection.status, data + await connection.read(to_end=True))
            if not is_streamed:
                yield data
                return
            while data:
                if not rest and data.startswith(b"data: {") and data.find(b"\n") == len(data) - 2:  # mostly one event
                    yield data[6:-2]
                else:
                    *events, rest = (rest + data).split(b"\n\n")
                    for event in events:
                        if event.startswith(b"data: ") and event != b"data: [DONE]":  # otherwise a comment or the end
                            yield event[6:]
                data = await connection.read()
        finally:
            connection.release(self._idle)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> Connection:
        """Send a request over a connection that nobody uses. The caller releases it."""
        connection: Connection | None = None
        while self._idle and connection is None:
            connection = self._idle.pop()
            if not connection.is_usable:
                connection.abort()
                connection = None
        if connection is None and not self._closed:
            connection = await self._connect(path)
        if self._closed or connection is None:
            if connection is not None:
                connection.abort()
            raise self.no_answer(path, "the connection was closed")
        data = b"" if body is None else orjson.dumps(body, default=_plain)
        head = (
            f"{method} {path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection.send(path, head.encode("latin-1") + data)
        return connection

    async def _connect(self, path: str) -> Connection:
        loop = asyncio.get_running_loop()
        while True:
            deadline_s = loop.time() + _CONNECT_TIMEOUT_S
            try:
                async with asyncio.timeout_at(deadline_s):
                    _, connection = await loop.create_connection(lambda: Connection(self), self._host, self._port)
                return connection
            except TimeoutError as error:
                if loop.time() - deadline_s < _LATE_S:
                    raise self.no_answer(path, f"no connection within {_CONNECT_TIMEOUT_S:g} s") from error
            except OSError as error:
                raise self.no_answer(path, error.strerror or str(error)) from error

    def no_answer(self, path: str, text: str, code: str = "fleet.no_answer") -> ServerUnavailable:
        return ServerUnavailable(f"{self.name} at {self.address} did not answer {path}: {text}", code=code)

    def refusal(self, path: str, status: int, answer: bytes) -> RequestError | ServerUnavailable:
        """The error for a status other than 200. The code of a native server's error is kept."""
        message, code = _message_and_code(answer)
        if 400 <= status < 500 and status not in _TRY_ELSEWHERE:
            return RequestError(f"{self.name} refused {path}: {message}", code=code or "server.request_refused")
        text = f"{self.name} failed {path} with status {status}: {message}"
        return ServerUnavailable(text, code=code or "server.request_failed")

    def parsed(self, payload: bytes, parse: Callable[[Any], _T]) -> _T:
        """The result of `parse` for the JSON of an answer. ServerUnavailable when a field is missing or wrong."""
        try:
            return parse(orjson.loads(payload))
        except ArealError:
            raise
        except WRONG_FIELD as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> ServerUnavailable:
        """The error for an answer that does not follow the server's protocol."""
        text = f"{self.name} sent an answer that cannot be read: {error!r}"
        return ServerUnavailable(text, code="server.unreadable_answer")

    def close(self) -> None:
        """Drop all connections: every running call fails with ServerUnavailable. The client cannot be used again."""
        self._closed = True
        self._idle.clear()
        for connection in list(self.connections):
            connection.abort()


class HttpReplica(Replica):
    """The base class of the clients of all servers: the connections, and the update group."""

    def __init__(self, name: str, address: str, token: str = "", form: AnswerForm | None = None) -> None:
        self.name = name
        self.form = form or AnswerForm()
        self._client = ServerClient(name, address, token=token)
        self._group_name = ""
        """The update group that the server has joined; empty without one."""
        self._pulled = ("", "")
        """Address or name of the version that was copied or received last, and its folder on the server's machine."""
        self._receiving: asyncio.Future[None] | None = None
        """The last call by which the host of a foreign server takes part in a broadcast."""

    @property
    def has_second_copy(self) -> bool:
        return False

    async def prepare_weights(self, update: WeightUpdate, *, rank: int) -> None:
        """See `areal.fleet.replica.Replica`."""
        if update.kind == "http":
            await self._pull_weights(update)
        elif update.published:
            await self._receive_by_host(update, rank)

    async def _pull_weights(self, update: WeightUpdate) -> None:
        """The native server, or the host of a foreign one, copies the folder."""
        body = {"url": update.path, "mirrors": update.mirrors, "deltas": update.deltas}
        await self._get_folder(update, "/pull_weights", body)

    async def _receive_by_host(self, update: WeightUpdate, rank: int) -> None:
        """The host of a foreign server takes part in the broadcast, until `abandon_update`."""
        fields = {"published": update.published, "listed": update.listed, "delta_bytes": update.delta_bytes}
        receiving = self._get_folder(update, "/receive_weights", group_body(update, rank) | fields)
        self._receiving = task = asyncio.ensure_future(receiving)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()  # the host leaves the group when its client leaves
            await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            raise ServerUnavailable(f"{self.name} has left the update group", code="fleet.update_failed")
        await task

    async def _get_folder(self, update: WeightUpdate, route: str, body: dict[str, Any]) -> None:
        try:
            answer = await self._client.post(route, body)
        except RequestError as error:
            self.failed_deltas += error.code == "weights.bad_delta"
            raise
        path, problem, num_bytes = self._client.parsed(
            answer, lambda fields: (str(fields["path"]), str(fields["problem"]), int(fields["num_bytes"]))
        )
        self._pulled = (update.path or update.published, path)
        self.pulled_bytes += num_bytes
        if problem:
            self.failed_deltas += 1
            text = "%s copied all weights of version %d, because their difference could not be applied: %s"
            log.warning(text, self.name, update.version, problem)

    async def _folder_of(self, update: WeightUpdate) -> str:
        """The folder from which the server loads an update; empty when it takes part in the broadcast itself."""
        if update.kind == "http" and self._pulled[0] != update.path:
            await self._pull_weights(update)
        if update.published and self._pulled[0] != update.published:
            text = f"{self.name} was connected again after the broadcast of version {update.version}"
            raise ServerUnavailable(text, code="fleet.replica_lost")
        return self._pulled[1] if update.kind == "http" or update.published else update.path

    async def abandon_update(self) -> None:
        """See `areal.fleet.replica.Replica`."""
        if self._receiving is not None:
            self._receiving.cancel()

    async def abort(self, request_id: str) -> None:
        """A client that takes no groups has nothing to do: the caller ends the only request of its call."""

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


def _plain(value: object) -> list[Any]:
    if isinstance(value, Column):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")


def _message_and_code(answer: bytes) -> tuple[str, str]:
    """The message in the error body of any kind of server, and areal's error code; empty for servers without one."""
    message, code = "", ""
    try:
        fields = orjson.loads(answer)
        code = fields.get("code", "")
        error = next(fields[name] for name in ("error", "message", "detail", "error_message") if fields.get(name))
        message = error["message"] if isinstance(error, dict) else error
        code = code or (error.get("code", "") if isinstance(error, dict) else "")
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        pass
    if not isinstance(message, str) or not message:
        message = answer[:200].decode(errors="replace") or "no message"
    return message, code if isinstance(code, str) and "." in code else ""  # the codes of other servers are numbers


def refuse_native_only(request: GenerationRequest) -> None:
    """RequestError for what foreign servers do not do in the same way."""
    if request.raw_logprobs or request.only_stops or request.scoring is not None:
        text = "raw_logprobs, only_stops and scoring need native servers"
        raise RequestError(text, code="server.unsupported_sampling")


def prior_output_bias(request: GenerationRequest) -> dict[int, float]:
    """Bias of logits by token id that applies the frequency penalty of the answer's earlier parts.

    For servers that treat all of `input_ids` as prompt and penalise only the output of the part. The penalty is
    linear in the count and subtracted before the temperature, so this bias plus the server's own penalty equals the
    penalty of the uninterrupted answer. A repetition penalty multiplies, so the sum does not hold together with one.
    """
    penalty, num_prior = request.gconfig.frequency_penalty, request.num_prior_output_tokens
    if penalty == 0 or num_prior == 0:
        return {}
    return {token: -penalty * count for token, count in Counter(request.input_ids[-num_prior:]).items()}


def checked_reason(reason: Any) -> FinishReason | None:
    """ValueError for a finish reason that is not one of the protocol."""
    if reason not in (None, "stop", "length", "abort"):
        raise ValueError(f"finish reason {reason!r}")
    return reason


def experts_of(meta: dict[str, Any], shape: ExpertShape | None, *, item_bytes: int) -> RoutedExperts | None:
    """The routed experts in the facts of an answer: base64 of numbers of `item_bytes` bytes, 0 = those of the shape.

    None when there are none. Raises ValueError for other than whole rows of existing experts.
    """
    text = meta.get("routed_experts")
    if shape is None or text is None:
        return None
    data = base64.b64decode(text, validate=True)
    if item_bytes not in (0, shape.item_bytes):
        numbers = np.frombuffer(data, f"<i{item_bytes}")
        if numbers.size and int(numbers.max()) >= shape.experts:
            raise ValueError(f"a routed expert has number {numbers.max()}, the model has {shape.experts}")
        data = numbers.astype("u1" if shape.item_bytes == 1 else "<i2").tobytes()  # -1, unknown, sets all bits
    return RoutedExperts(shape, data)


def version_number(reported: str, *, has_dummy_weights: bool = False) -> int:
    """The policy version from a foreign server's name for its weights.

    A server that was never given a version has its first weights: version 0, or none when they are random.
    """
    if reported == "default":
        return NO_VERSION if has_dummy_weights else 0
    return int(reported)


def versions_of(spans: Sequence[tuple[int, int, int]], num_tokens: int) -> Runs[int]:
    """Spans (version, start, end) of a chunk -> one version per token. ValueError unless they cover the chunk."""
    if len(spans) == 1 and spans[0][1] == 0 and spans[0][2] == num_tokens:  # nearly all chunks
        return Runs.of(spans[0][0], num_tokens)
    place = 0
    for _, start, end in spans:
        if start != place or end < start:
            raise ValueError(f"version spans {spans} have a gap or overlap")
        place = end
    if place != num_tokens:
        raise ValueError(f"version spans {spans} cover {place} of {num_tokens} tokens")
    return Runs((version, end - start) for version, start, end in spans)
