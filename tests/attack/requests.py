"""Requests that every HTTP server of a run must refuse, for the tests of each server and for attacks on a whole run."""

from __future__ import annotations

import asyncio
import http.client
from urllib.parse import urlsplit

from tests.run_token import BEARER

JSON = {"Content-Type": "application/json"}
REFUSED_HEADERS = [
    ({**JSON}, 401),
    ({**JSON, "Authorization": "Bearer wrong"}, 401),
    ({**JSON, "Authorization": "Bearer w\u00f6rong"}, 401),  # not ASCII
    ({**JSON, "Authorization": BEARER["Authorization"].removeprefix("Bearer ")}, 401),
    ({**JSON, **BEARER, "Host": "attacker.example:4711"}, 403),  # a name that now resolves to this machine
    ({**JSON, **BEARER, "Host": ""}, 403),
    ({**JSON, **BEARER, "Host": "[::1"}, 403),
    ({**JSON, **BEARER, "Origin": "https://attacker.example"}, 403),
    ({**JSON, **BEARER, "Origin": "null"}, 403),
    ({**BEARER}, 415),
    ({**JSON, **BEARER, "Content-Encoding": "gzip"}, 415),
    ({**BEARER, "Content-Type": "text/plain"}, 415),  # a browser sends it without asking the server first
    ({**BEARER, "Content-Type": "application/x-www-form-urlencoded"}, 415),
]
"""(headers of a POST, the status of its answer)."""


def status_of(address: str, path: str, headers: dict[str, str], body: bytes = b"{}") -> int:
    """Status of the answer to a POST with exactly these headers."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        connection.putrequest("POST", path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            connection.putheader(name, value.encode("utf-8"))
        connection.endheaders(body)
        return connection.getresponse().status
    finally:
        connection.close()


BROKEN_BODIES = [
    (b"Content-Length: 10\r\n\r\n{}", b""),
    (b"Transfer-Encoding: chunked\r\n\r\n5\r\n{}", b""),
    (b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n", b" 400 "),
    (b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", b" 415 "),
]
"""(the last header and the body of a POST, its status). Without a status the body ends early, and with it the
connection."""


async def send_broken(address: str, path: str, rest: bytes, *, is_cut: bool) -> bytes:
    """The first line of the answer to a POST with a valid head, and `rest` as its last header and its body.

    `is_cut`: the connection ends there.
    """
    parts = urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Authorization: {BEARER['Authorization']}\r\n".encode() + rest)
    if is_cut:
        writer.write_eof()
    async with asyncio.timeout(60):
        answer = await reader.readline()
    writer.close()
    return answer
