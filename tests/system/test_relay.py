"""Relays to a port of loopback: only clients with the token, or on a machine of the run, reach what listens there."""

import logging
import socket
import threading
from collections.abc import Iterator

import pytest

from areal.system import relay as relays
from areal.system.network import bind_socket
from areal.system.relay import MachineRelay, TokenRelay, TokenTunnel


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that answers each block in upper case."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(client,), daemon=True).start()

        def answer(client: socket.socket) -> None:
            with client:
                while data := client.recv(100):
                    client.sendall(data.upper())

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def asked(port: int, *, skips: int = 0) -> bytes:
    """What comes back for b"key"; b"" when the connection was closed. `skips`: bytes that come before."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(b"key".ljust(32))
        try:
            greeting = client.recv(skips, socket.MSG_WAITALL) if skips else b""
            return client.recv(100) if len(greeting) == skips else b""
        except ConnectionResetError:
            return b""


def test_only_a_client_with_the_token_reaches_what_is_behind_the_relay(
    echo: int, caplog: pytest.LogCaptureFixture
) -> None:
    relay = TokenRelay(_listening(), "token", echo)
    assert asked(relay.port, skips=32) == b""
    ours, foreign = (TokenTunnel("127.0.0.1", relay.port, token) for token in ("token", "other"))
    assert (ours.is_admitted(20), foreign.is_admitted(20)) == (True, False)
    assert [asked(ours.port).strip() for _ in range(3)] == [b"KEY"] * 3
    assert asked(foreign.port) == b""
    assert [record.levelname for record in caplog.records if "without the token" in record.message] == ["WARNING"] * 3
    relay.close()
    relay.close()
    with pytest.raises(OSError):  # noqa: PT011 - of the system: nothing listens
        ours.is_admitted(20)
    assert asked(ours.port) == b""
    for tunnel in (ours, foreign):
        tunnel.close()


@pytest.mark.parametrize("closed", [0, 1])
def test_an_open_connection_ends_with_each_of_its_ends(
    echo: int, caplog: pytest.LogCaptureFixture, closed: int
) -> None:
    relay = TokenRelay(_listening(), "token", echo)
    tunnel = TokenTunnel("127.0.0.1", relay.port, "token")
    with socket.create_connection(("127.0.0.1", tunnel.port), timeout=20) as client:
        client.sendall(b"key")
        assert client.recv(100) == b"KEY"
        (relay, tunnel)[closed].close()
        assert client.recv(100) == b""
    relay.close()
    tunnel.close()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_only_machines_of_the_run_reach_a_store_whose_clients_cannot_prove_anything(
    echo: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    answers, peers = [True, False], list[str]()
    relay = MachineRelay(_listening(), lambda peer: peers.append(peer) or answers.pop(), echo)
    assert asked(relay.port) == b""
    assert asked(relay.port).strip() == b"KEY"
    assert peers == ["127.0.0.1"] * 2
    relay.close()


def test_a_tunnel_does_not_wait_for_a_far_end_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relays, "_HANDSHAKE_S", 0.05)
    with _listening() as silent:
        tunnel = TokenTunnel("127.0.0.1", silent.getsockname()[1], "token")
        with pytest.raises(TimeoutError):
            tunnel.is_admitted(0.05)
        assert asked(tunnel.port) == b""
        tunnel.close()
    assert [record.levelname for record in caplog.records if record.name == relays.__name__] == ["WARNING"]


def _listening() -> socket.socket:
    bound = bind_socket()
    bound.listen()
    return bound
