"""A store of an update group whose master is not there, or dies while a client greets it."""

import socket
import struct
import threading
import time

import pytest

from areal.api.errors import WeightSyncError
from areal.inference import update_group
from areal.inference.update_group import open_store


def test_a_store_that_nobody_opened_is_an_error_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(WeightSyncError, match=f"no store of an update group at 127.0.0.1:{port}"):
        open_store("127.0.0.1", port, is_master=False, timeout_s=30)


def test_a_master_that_dies_while_it_is_greeted_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(update_group, "_CONNECT_TIMEOUT_S", 0.5)
    server = socket.create_server(("127.0.0.1", 0))

    def die_at_the_greeting() -> None:
        server.accept()[0].close()  # the first connection only asks whether somebody is there
        connection, _ = server.accept()
        server.close()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    threading.Thread(target=die_at_the_greeting, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="no store of an update group"):
        open_store("127.0.0.1", server.getsockname()[1], is_master=False, timeout_s=20)
    assert time.monotonic() - began < 10


def test_a_store_keeps_the_time_limit_it_was_opened_with():
    master = open_store("127.0.0.1", 0, is_master=True, timeout_s=20)
    client = open_store("127.0.0.1", master.port, is_master=False, timeout_s=20)
    assert client.timeout.total_seconds() == 20
    client.set("a", "b")
    assert master.get("a") == b"b"
