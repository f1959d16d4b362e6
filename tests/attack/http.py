"""HTTP requests that no client sends: wrong methods, targets, headers, encodings, framings and lengths."""

from __future__ import annotations

import gzip
import re
import socket
import zlib
from typing import NamedTuple
from urllib.parse import urlsplit

from hypothesis import strategies as st

from tests.run_token import TOKEN

METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get", "X" * 9000, "G\0T"]
QUERIES = [
    "", "", "", "?", "?version=", "?version=-1", "?version=%C2%B2", "?version=" + "9" * 5000, "?%00", "#x", "/..",
]  # fmt: skip
TARGETS = ["*", "/", "//", "/../etc/passwd", "http://attacker.example/health", "/%ff", "/" + "x" * 9000, "é"]
CREDENTIALS = [
    *(
        "",
        f"Authorization: {TOKEN}",
        "Authorization: Bearer",
        "Authorization: Bearer wrong",
        "Authorization: Bearer w\xf6",
    ),
    *(f"Authorization: bearer {TOKEN}", f"Authorization: Basic {TOKEN}", f"Authorization: Bearer {TOKEN}x"),
    f"Authorization: Bearer wrong\r\nAuthorization: Bearer {TOKEN}",
]
"""Each must be refused."""
HOSTS = ["Host: attacker.example", "Host: [::1", "Host: ", "Host: 127.0.0.1\r\nOrigin: http://attacker.example"]
TYPES = ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx", "multipart/form-data; boundary=x"]
EXTRAS = [
    *("Expect: 100-continue", "Expect: x", "Connection: upgrade\r\nUpgrade: websocket", "Range: bytes=0-0", "X: \x00"),
    *("Content-Type: application/json; charset=utf-999", ": x", "X: " + "y" * 9000, "no colon", "Cookie: a=\xff"),
]
_BOMB = b" " * (1 << 22)
BODIES = {
    "": [b"", b"{}", b"{", b"\xff", b'{"run_id":0}', b"[" * 2000],
    "Content-Encoding: gzip": [gzip.compress(b"{}"), gzip.compress(_BOMB), b"{}", gzip.compress(b"{}")[:-9]],
    "Content-Encoding: deflate": [zlib.compress(b"{}"), zlib.compress(_BOMB), b"\x78\x9c\xff\xff"],
    "Content-Encoding: br": [b"{}", b"\xff" * 40],
    "Content-Encoding: zstd": [b"{}", b"\x28\xb5\x2f\xfd\xff"],
    "Content-Encoding: gzip, deflate": [gzip.compress(zlib.compress(b"{}"))],
    "Content-Encoding: x": [b"{}"],
}
LENGTHS = ["-1", "+2", "0x2", "2, 3", "2\r\nContent-Length: 3", "9" * 30, ""]
"""Of Content-Length; none is valid."""


class Exchange(NamedTuple):
    """A request as bytes."""

    data: bytes
    is_complete: bool
    """The server has all that its headers announce; otherwise the client closes its side after the last byte."""
    is_refused: bool
    """No answer may have the status 200."""


def chunked(body: bytes, size: int, ending: bytes) -> bytes:
    """A body in chunks of `size` bytes."""
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + ending


@st.composite
def exchanges(draw: st.DrawFn, paths: list[str]) -> Exchange:
    """Requests to `paths` with one or a few things wrong, or with none."""
    wrong = draw(
        st.sets(st.sampled_from(["method", "target", "token", "host", "type", "extra", "framing"]), max_size=2)
    )
    method = draw(st.sampled_from(METHODS if "method" in wrong else ["GET", "POST", "POST"]))
    target = draw(st.sampled_from(paths)) + draw(st.sampled_from(QUERIES))
    if "target" in wrong:
        target = draw(st.sampled_from(TARGETS))
    credentials = draw(st.sampled_from(CREDENTIALS)) if "token" in wrong else f"Authorization: Bearer {TOKEN}"
    host = draw(st.sampled_from(HOSTS)) if "host" in wrong else "Host: 127.0.0.1"
    kind = draw(st.sampled_from(TYPES)) if "type" in wrong else "application/json"
    encoding = draw(st.sampled_from(sorted(BODIES)))
    body = draw(st.sampled_from(BODIES[encoding]))
    head = [f"{method} {target} HTTP/1.1", host, credentials, f"Content-Type: {kind}", encoding, "Connection: close"]
    if "extra" in wrong:
        head.append(draw(st.sampled_from(EXTRAS)))
    is_complete = not wrong & {"method", "extra", "framing"}
    framing = draw(st.sampled_from(["length", "chunked"]))
    if "framing" in wrong:
        framing = draw(st.sampled_from(["bad length", "too long", "bad chunks", "both", "coded twice"]))
    match framing:
        case "length":
            head.append(f"Content-Length: {len(body)}")
        case "bad length":
            head.append(f"Content-Length: {draw(st.sampled_from(LENGTHS))}")
        case "too long":
            head.append(f"Content-Length: {len(body) + draw(st.sampled_from([1, 1000, 2**40]))}")
        case "both":
            head += ["Transfer-Encoding: chunked", "Content-Length: 5"]
        case "coded twice":
            head.append(f"Transfer-Encoding: {draw(st.sampled_from(['chunked, chunked', 'gzip, chunked', 'x']))}")
        case _:
            head.append("Transfer-Encoding: chunked")
    if framing not in ("length", "bad length", "too long"):
        endings = [
            b"", b"0\r\n", b"zz\r\n", b"-1\r\n\r\n", b"f" * 40 + b"\r\n", b"0\r\nX: " + b"y" * 9000 + b"\r\n\r\n",
        ]  # fmt: skip
        ending = draw(st.sampled_from(endings)) if "framing" in wrong else b"0\r\n\r\n"
        body = chunked(body, draw(st.sampled_from([1, 7, 1 << 20])) if len(body) < 100 else 1 << 14, ending)
    lines = "\r\n".join(line for line in head if line)
    is_refused = bool(wrong & {"token", "host"}) or (credentials in CREDENTIALS)
    return Exchange(lines.encode("latin-1", "replace") + b"\r\n\r\n" + body, is_complete, is_refused)


def statuses_of(address: str, exchange: Exchange) -> list[int]:
    """The status of each answer until the server closes the connection; interim answers are left out."""
    parts = urlsplit(address)
    received = b""
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        try:
            connection.sendall(exchange.data)
            if not exchange.is_complete:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                received += part
        except (ConnectionResetError, BrokenPipeError):
            pass  # the server has refused the rest of the request
    result = [int(status) for status in re.findall(rb"(?:^|\n|\})HTTP/1\.[01] (\d{3})", received)]
    return [status for status in result if status >= 200]
