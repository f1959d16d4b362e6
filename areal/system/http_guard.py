"""The rules that every HTTP request to a server of a run must satisfy, and how its body is read."""

import hmac
import ipaddress
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from areal.api.errors import RequestError
from areal.system.network import Host, is_loopback

BROKEN_BODY = (web.RequestPayloadError, HttpProcessingError, ConnectionError)
"""What aiohttp raises for a body that ends early or is not encoded as its headers say."""


async def read_body(request: web.Request) -> bytes:
    """The body of a request. RequestError when it ends early or is not encoded as its headers say."""
    try:
        return await request.read()
    except BROKEN_BODY as error:
        message = f"the body cannot be read: {type(error).__name__}"
        raise RequestError(message, code="request.broken_body") from error


class Refusal(NamedTuple):
    """The answer to a request that breaks a rule."""

    status: int
    message: str
    code: str


class RequestGuard:
    """Checks the token, the addressed host, the origin and the type of the body."""

    def __init__(self, token: str, host: Host) -> None:
        """`token`: what clients send as `Authorization: Bearer`. `host`: where the server listens."""
        if not token:
            raise ValueError("a server needs a token that its clients must have")
        self._expected = f"Bearer {token}".encode()
        self._names = {host.bind.lower(), host.advertise.lower()}

    def refusal(self, headers: Mapping[str, str], *, has_body: bool) -> Refusal | None:
        """Why a request is refused; None when it may pass. `headers` ignores the case of names."""
        return self.foreign(headers) or self.unauthorized(headers) or wrong_type(headers, has_body=has_body)

    def foreign(self, headers: Mapping[str, str]) -> Refusal | None:
        """The refusal of a request of a web page or for another host.

        A web page that was opened on this machine can send requests to loopback. A browser adds Origin to those that
        change something, and Host keeps the name of the page's server when that name now resolves to this machine.
        """
        if not self._is_own_name(headers.get("Host", "")) or "Origin" in headers:
            return Refusal(403, "requests of web pages and for other hosts are refused", "request.foreign_origin")
        return None

    def unauthorized(self, headers: Mapping[str, str]) -> Refusal | None:
        """The refusal of a request without the token."""
        sent = headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(sent, self._expected):
            return Refusal(401, "`Authorization: Bearer TOKEN` is required", "request.unauthorized")
        return None

    def _is_own_name(self, text: str) -> bool:
        """Whether a Host header is an IP address, or a name of this server."""
        try:
            name = urlsplit(f"//{text}").hostname or ""
            if name in self._names or is_loopback(name):
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def wrong_type(headers: Mapping[str, str], *, has_body: bool) -> Refusal | None:
    """The refusal of a body that is not declared as plain JSON."""
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    is_plain = headers.get("Content-Encoding", "identity").strip().lower() in ("", "identity")
    if has_body and not (kind == "application/json" and is_plain):
        message = "a body must have Content-Type: application/json, and no Content-Encoding"
        return Refusal(415, message, "request.content_type")
    return None


def guarded(guard: RequestGuard, answer: Callable[[int, str, str], web.Response]) -> Middleware:
    """A middleware that refuses what `guard` refuses. `answer(status, message, code)` makes the answer."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if refusal := guard.refusal(request.headers, has_body=request.can_read_body):
            return answer(*refusal)
        return await handler(request)

    return check
