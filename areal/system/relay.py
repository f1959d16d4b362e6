"""Relays for stores of torch, which check no token: a store listens on loopback, and other machines reach its relay."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable

from areal.system.network import LOOPBACK, bind_socket

_log = logging.getLogger(__name__)

_NONCE_BYTES = 32
_ADMITTED = b"+"
_HANDSHAKE_S = 10.0
_BLOCK_BYTES = 1 << 16


class _Port:
    """Serves the connections at a socket in a thread, until `close` or the end of the process."""

    def __init__(self, bound: socket.socket, name: str) -> None:
        self.port = int(bound.getsockname()[1])
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(bound,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections. May be repeated."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()

    def _run(self, bound: socket.socket) -> None:
        with self._runner:  # it cancels the connections
            self._runner.run(self._serve(bound))

    async def _serve(self, bound: socket.socket) -> None:
        server = await asyncio.start_server(self._handled, sock=bound)
        try:
            await self._ending.wait()
        finally:
            server.close()

    async def _handled(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # `close` cancels it: asyncio of Python 3.11 would log that with a traceback.
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await self._handle(reader, writer)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class TokenRelay(_Port):
    """Passes connections at `bound` on to a port of loopback, if the client proves that it has the token.

    The relay sends random bytes, and the client answers with their HMAC-SHA256 under the token.
    """

    def __init__(self, bound: socket.socket, token: str, port: int) -> None:
        self._token = token
        self._target = port
        super().__init__(bound, "token relay")

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        writer.write(nonce)
        proof = b""
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_HANDSHAKE_S):
                proof = await reader.readexactly(len(_proof(self._token, nonce)))
        if not hmac.compare_digest(proof, _proof(self._token, nonce)):
            _log.warning("refused a connection from %s without the token", writer.get_extra_info("peername")[0])
            return
        writer.write(_ADMITTED)
        await pass_on_to(LOOPBACK, self._target, reader, writer)


class MachineRelay(_Port):
    """Passes connections at `bound` on to a port of loopback, if `may_join(address of the client)` is true.

    For clients that cannot send a proof. `may_join` may block.
    """

    def __init__(self, bound: socket.socket, may_join: Callable[[str], bool], port: int) -> None:
        self._may_join = may_join
        self._target = port
        super().__init__(bound, "machine relay")

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")[0]
        if not await asyncio.to_thread(self._may_join, peer):
            _log.warning("refused a connection from %s, which is no machine of the run", peer)
            return
        await pass_on_to(LOOPBACK, self._target, reader, writer)


class TokenTunnel(_Port):
    """A free port on loopback. Its connections reach what a `TokenRelay` at host:port passes them on to."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._far = host, port
        self._token = token
        bound = bind_socket()
        bound.listen()
        super().__init__(bound, "token tunnel")

    def is_admitted(self, timeout_s: float) -> bool:
        """Whether the relay accepts this token. OSError or TimeoutError when it does not answer."""

        async def try_it() -> bool:
            opened = await self._opened(timeout_s)
            if opened is not None:
                opened[1].close()
            return opened is not None

        return asyncio.run_coroutine_threadsafe(try_it(), self._loop).result()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            opened = await self._opened(_HANDSHAKE_S)
        except OSError as error:
            _log.warning("no connection to %s:%d: %r", *self._far, error)
            return
        if opened is not None:
            await _both(reader, writer, *opened)

    async def _opened(self, timeout_s: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to the relay; None when it refuses the token. OSError or TimeoutError without an answer."""
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(*self._far)
            try:
                writer.write(_proof(self._token, await reader.readexactly(_NONCE_BYTES)))
                await reader.readexactly(len(_ADMITTED))
            except asyncio.IncompleteReadError:
                writer.close()
                return None
            except BaseException:
                writer.close()
                raise
            return reader, writer


def _proof(token: str, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), nonce, "sha256")


async def pass_on_to(host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect a client to host:port until one of both ends. OSError when nothing listens there."""
    await _both(reader, writer, *await asyncio.open_connection(host, port))


async def _both(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    with contextlib.suppress(ConnectionError):
        await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward what `reader` gets until its end; then the other side gets no more either."""
    try:
        while data := await reader.read(_BLOCK_BYTES):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
