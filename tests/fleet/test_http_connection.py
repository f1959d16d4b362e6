"""The HTTP client reads any split of an answer, uses connections again, and ends calls when it should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.server_client import Connection, ServerClient
from tests.fleet.fake_server import until

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
REFUSED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 3\r\n\r\nbad"

FAILED = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 3\r\n\r\nbad"


class RawServer:
    """Answers each request with what `answers` says next; None closes the connection."""

    def __init__(self) -> None:
        self.answers: list[bytes | None] = []
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.num_open = 0

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return "http://127.0.0.1:%d" % self._server.sockets[0].getsockname()[1]  # noqa: UP031

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                if answer is None:
                    return
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass
        finally:
            self.num_open -= 1
            writer.close()

    async def stop(self) -> None:
        self._server.close()


@pytest.fixture
async def raw() -> AsyncIterator[tuple[RawServer, ServerClient]]:
    server = RawServer()
    client = ServerClient("server-0", await server.start(), token="secret")
    yield server, client
    client.close()
    await server.stop()


async def test_answers_and_their_connection_are_used_again(raw: tuple[RawServer, ServerClient]) -> None:
    server, client = raw
    server.answers = [PLAIN, CHUNKED, REFUSED, EMPTY]
    assert await client.exchange("POST", "/a", {"a": 1}) == (200, b"hello")
    assert await client.exchange("GET", "/b") == (200, b"hello")
    assert await client.exchange("GET", "/c") == (400, b"bad")
    assert await client.exchange("GET", "/d") == (200, b"")
    assert server.num_connections == 1
    assert server.requests[0].startswith(b"POST /a HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer secret\r\n" in server.requests[0]
    assert server.requests[0].endswith(b'\r\nContent-Length: 7\r\n\r\n{"a":1}')


async def test_a_connection_is_not_used_again_after_a_failure_of_the_server(
    raw: tuple[RawServer, ServerClient],
) -> None:
    """uvicorn closes it after its handler's error, at some moment, and does not say so."""
    server, client = raw
    server.answers = [FAILED, PLAIN]
    assert await client.exchange("GET", "/a") == (500, b"bad")
    assert await client.exchange("GET", "/b") == (200, b"hello")
    assert server.num_connections == 2


def fed(connection: Connection, answer: bytes, cuts: list[int]) -> None:
    connection.connection_made(Mock())
    connection.send("/", b"")
    for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True):
        connection.data_received(answer[start:end])


@given(st.data())
def test_an_answer_may_come_in_any_pieces(data: st.DataObject) -> None:
    async def run() -> None:
        answer = data.draw(st.sampled_from([PLAIN, CHUNKED, EMPTY]))
        connection = Connection(ServerClient("server-0", "http://127.0.0.1:1"))
        fed(connection, answer, sorted(data.draw(st.sets(st.integers(1, len(answer) - 1)))))
        assert await connection.read(to_end=True) == (b"" if answer == EMPTY else b"hello")
        assert connection.status == 200

    asyncio.run(run())


@given(st.data())
def test_the_events_of_a_stream_may_come_in_any_pieces(data: st.DataObject) -> None:
    events = data.draw(st.lists(st.sampled_from([b'{"a":1}', b"{}", b'{"b":"\\n"}']), min_size=1, max_size=4))
    stream = b": a comment\n\n" + b"".join(b"data: %s\n\n" % event for event in events) + b"data: [DONE]\n\n"
    ends = [place + 2 for place in range(len(stream)) if stream.startswith(b"\n\n", place)]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1)) | st.sets(st.sampled_from(ends[:-1]))))

    async def run() -> None:
        client = ServerClient("server-0", "http://127.0.0.1:1")
        connection = Connection(client)
        connection.connection_made(Mock())
        pieces = iter([stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)])

        async def read(*, to_end: bool = False) -> bytes:
            return next(pieces, b"")

        async def send(method: str, path: str, body: object) -> Connection:
            connection.send(path, b"")
            connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            connection.status = 200
            return connection

        client._send, connection.read = send, read  # pyright: ignore[reportAttributeAccessIssue]
        assert [event async for event in client.answers("/generate", {}, is_streamed=True)] == events

    asyncio.run(run())


async def test_a_lost_connection_fails_the_call(raw: tuple[RawServer, ServerClient]) -> None:
    server, client = raw
    server.answers = [None, PLAIN]
    with pytest.raises(ServerUnavailable) as error:
        await client.exchange("GET", "/")
    assert error.value.code == "fleet.no_answer"
    assert await client.exchange("GET", "/") == (200, b"hello")


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    connection, idle = Connection(ServerClient("server-0", "http://127.0.0.1:1")), list[Connection]()
    fed(connection, b"HTTP/1.0 200 OK\r\n\r\nhello", [24])
    connection.connection_lost(None)
    assert await connection.read(to_end=True) == b"hello"
    connection.release(idle)
    assert idle == []


@pytest.mark.parametrize(
    "answer",
    [
        b"SMTP ready\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"x" * 70000,
    ],
)
async def test_an_answer_that_is_not_http_fails_the_call(raw: tuple[RawServer, ServerClient], answer: bytes) -> None:
    server, client = raw
    server.answers = [answer]
    with pytest.raises(ServerUnavailable) as error:
        await client.exchange("GET", "/")
    assert error.value.code == "server.unreadable_answer"


async def test_a_caller_that_leaves_a_stream_drops_the_connection(raw: tuple[RawServer, ServerClient]) -> None:
    server, client = raw
    server.answers = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n"]
    async with aclosing(client.answers("/generate", {}, is_streamed=True)) as answers:
        assert await anext(answers) == b"1"
    await until(lambda: server.num_open == 0)


async def test_cancel_and_close_drop_connections(raw: tuple[RawServer, ServerClient]) -> None:
    server, client = raw
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe"
    server.answers = [half, half]
    first, second = (asyncio.create_task(client.exchange("GET", "/")) for _ in range(2))
    await until(lambda: not server.answers)
    first.cancel()
    await until(lambda: server.num_open == 1)
    client.close()
    with pytest.raises(ServerUnavailable):
        await second
    with pytest.raises(ServerUnavailable) as error:
        await client.exchange("GET", "/")
    assert error.value.code == "fleet.no_answer"
    await until(lambda: server.num_open == 0)


async def test_an_absent_server_and_a_bad_address_fail() -> None:
    with pytest.raises(ServerUnavailable) as missing:
        await ServerClient("server-0", "http://127.0.0.1:9").exchange("GET", "/")
    assert missing.value.code == "fleet.no_answer"
    assert "http://127.0.0.1:9" in str(missing.value)
    for address in ("https://host:1", "host:1", "http://"):
        with pytest.raises(RequestError) as error:
            ServerClient("server-0", address)
        assert error.value.code == "fleet.invalid_address"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error": {"message": "too long"}, "code": "request.too_long"}', "request.too_long"),
        (b'{"error": {"message": "too long", "code": 400}}', "server.request_refused"),  # vLLM
        (b'{"object": "error", "message": "too long", "code": 400}', "server.request_refused"),  # SGLang
        (b"[]", "server.request_refused"),
    ],
)
def test_a_refusal_keeps_the_code_of_a_native_server(body: bytes, code: str) -> None:
    assert ServerClient("server-0", "http://127.0.0.1:9").refusal("/generate", 400, body).code == code
