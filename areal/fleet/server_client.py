"""Owns how an adapter talks JSON to its server, and what a refusal means: a fault of the request, or of the server.

A call waits for its answer, as long as that takes; `HttpClient` tells what ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.http_connection import HttpClient, OnData

_TRY_ELSEWHERE = (408, 429)
"""Client-error statuses that speak of the server's state, not of the request."""

_Found = TypeVar("_Found")


class ServerClient:
    """Requests to one server. All raise ServerUnavailable when it gives no whole answer or one of status 5xx, and
    RequestError when it refuses what was sent (4xx)."""

    def __init__(self, name: str, address: str, *, token: str = "") -> None:
        """`name` and `address` are what errors say."""
        self.name = name
        self.address = address
        self._http = HttpClient(address, token=token)

    async def get(self, path: str) -> bytes:
        """The body of the answer."""
        return await self.request("GET", path)

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Send JSON; the body of the answer."""
        return await self.request("POST", path, orjson.dumps(body))

    async def stream(self, path: str, body: dict[str, Any], on_event: Callable[[bytes], None]) -> None:
        """Send JSON; `on_event` gets the data of each server-sent event but the closing [DONE]."""
        rest = b""

        def on_data(data: bytes) -> None:
            nonlocal rest
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: ") and event != b"data: [DONE]":  # else a comment, a keep-alive, the end
                    on_event(event[6:])

        await self.request("POST", path, orjson.dumps(body), on_data)

    async def request(self, method: str, path: str, body: bytes = b"", on_data: OnData | None = None) -> bytes:
        """The body of a 200; every other status is an error."""
        status, answer = await self.exchange(method, path, body, on_data)
        if status != 200:
            raise self.refusal(path, status, answer)
        return answer

    async def exchange(
        self, method: str, path: str, body: bytes = b"", on_data: OnData | None = None
    ) -> tuple[int, bytes]:
        """Status and body, whatever the status."""
        try:
            return await self._http.request(method, path, body, on_data)
        except ServerUnavailable as error:
            raise ServerUnavailable(f"{self.name} at {self.address} did not answer {path}: {error}") from error

    def refusal(self, path: str, status: int, answer: bytes) -> RequestError | ServerUnavailable:
        """The error that says what a status other than 200 means."""
        message = _message(answer)
        if 400 <= status < 500 and status not in _TRY_ELSEWHERE:
            return RequestError(f"{self.name} refused {path}: {message}")
        return ServerUnavailable(f"{self.name} failed {path} with status {status}: {message}")

    def parsed(self, payload: bytes, parse: Callable[[Any], _Found]) -> _Found:
        """What `parse` makes of the JSON of an answer. ServerUnavailable where it does not find what was agreed."""
        try:
            return parse(orjson.loads(payload))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ServerUnavailable(f"{self.name} sent an answer that cannot be read: {error!r}") from error

    def close(self) -> None:
        """Drop all connections: every running call fails with ServerUnavailable."""
        self._http.close()


def _message(answer: bytes) -> str:
    """What an error body says, in any of the servers' forms."""
    try:
        found = orjson.loads(answer)
        error = next(found[name] for name in ("error", "message", "detail", "error_message") if found.get(name))
        text = error["message"] if isinstance(error, dict) else error
        if isinstance(text, str):
            return text
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        pass
    return answer[:200].decode(errors="replace") or "no message"
