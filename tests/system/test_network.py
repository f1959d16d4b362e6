import ast
import os
import re
import socket

import psutil
import pytest

from areal.api.errors import ConfigError, LaunchError
from areal.system.discovery import FileRegistry
from areal.system.network import (
    TOKEN_VARIABLE,
    Host,
    bind_collectives,
    bind_socket,
    http_address,
    is_loopback,
    listen,
    new_token,
    required_token,
    store_prefix,
)
from areal.system.process import ProcessContext
from tests.process_context import a_context
from tests.test_layering import MODULES, PACKAGE

EVERYWHERE = Host(bind="0.0.0.0", advertise="127.0.0.2", node="here")
LOOPBACK_LITERAL = re.compile(r"""127\.0\.0\.\d|localhost|["']::1["']""")
FOREIGN_VALUES = {"api/config/launcher.py": "localhost:2379"}
"""The default address of etcd, which is not an address of a process of the run."""


def test_one_module_contains_a_loopback_address():
    result = []
    for path in MODULES:
        name = path.relative_to(PACKAGE).as_posix()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if LOOPBACK_LITERAL.search(line.replace(FOREIGN_VALUES.get(name, "\0"), "")) and name not in (
                "system/network.py",
                "environments/nemo_gym_worker.py",
                "environments/openenv_worker.py",
            ):
                result.append(f"areal/{name}:{number}: {line.strip()}")
    assert not result, "take the address from a Host:\n" + "\n".join(result)


def test_bound_socket_is_ours_alone():
    with bind_socket() as bound:
        port = bound.getsockname()[1]
        assert http_address(bound) == f"http://127.0.0.1:{port}"
        assert http_address(bound, "10.0.0.7") == f"http://10.0.0.7:{port}"
        assert http_address(bound, "fd00::7") == f"http://[fd00::7]:{port}"
        bound.listen()
        with pytest.raises(LaunchError) as error:
            bind_socket(port=port)
        assert error.value.code == "process.cannot_listen"
        assert f"127.0.0.1:{port}" in str(error.value)
        with socket.create_connection(("127.0.0.1", port), 5):
            pass


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.3.4.5", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("node7", False),
    ],
)
def test_is_loopback(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("environ", "code"),
    [
        ({}, "launch.token_missing"),
        ({TOKEN_VARIABLE: ""}, "launch.token_missing"),
        ({TOKEN_VARIABLE: "two words"}, "launch.token_invalid"),
        ({TOKEN_VARIABLE: "line\nX-Other: 1"}, "launch.token_invalid"),
        ({TOKEN_VARIABLE: "\u00f6"}, "launch.token_invalid"),
    ],
)
def test_a_token_is_required_and_fits_into_a_header(environ, code):
    with pytest.raises(ConfigError) as error:
        required_token("it", environ)
    assert error.value.code == code
    assert not any(value in str(error.value) for value in environ.values() if value)


def test_a_new_token_is_valid_and_random():
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(required_token("it", {TOKEN_VARIABLE: token}) == token and len(token) >= 40 for token in tokens)


def test_a_socket_listens_only_with_a_token_and_on_the_address_of_the_host():
    with listen(Host(bind="127.0.0.3", advertise="127.0.0.3"), "secret") as listening:
        assert listening.getsockname()[0] == "127.0.0.3"
        with socket.create_connection(listening.getsockname(), 5):
            pass
    with pytest.raises(ConfigError) as error:
        listen(Host(), "")
    assert error.value.code == "launch.token_missing"


def test_a_process_gets_its_host_from_the_environment():
    context = rank(0)
    assert ProcessContext.from_env(context.to_env()) == context
    assert context.host == EVERYWHERE
    assert "secret" not in store_prefix("secret", "name")


def rank(index):
    return a_context(index=index, world_size=2, num_servers=0, host=EVERYWHERE)


@pytest.mark.parametrize("is_local", [True, False])
def test_only_ranks_with_the_token_see_the_keys_of_the_trainers_store(tmp_path, monkeypatch, is_local):
    """Off loopback the store itself is on loopback, behind a relay on the address of rank 0."""
    from areal.engine import mesh

    monkeypatch.setattr(mesh, "is_loopback", lambda host: is_local)
    registry = FileRegistry(tmp_path)
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(ConfigError) as missing:
        mesh._open_store(rank(0), registry, 20.0)
    assert missing.value.code == "launch.token_missing"

    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    store, relay = mesh._open_store(rank(0), registry, 20.0)
    assert (relay is None) == is_local
    assert '"127.0.0.2"' in (registry.get(f"{mesh.STORE_NAME}/0") or "")
    store.set("key", "of rank 0")
    result, tunnel = mesh._open_store(rank(1), registry, 20.0)
    assert result.get("key") == b"of rank 0"
    for other in ("wrong", ""):
        monkeypatch.setenv(TOKEN_VARIABLE, other)
        with pytest.raises(LaunchError) as mismatch:
            mesh._open_store(rank(1), registry, 20.0)
        assert mismatch.value.code == "launch.token_mismatch"
    for port in () if tunnel is None else (tunnel, relay):
        port.close()


LISTENS = {"bind", "listen", "start_server", "create_server", "start_unix_server", "TCPSite", "HTTPServer", "run_app"}
STORES = {"areal/weights/update_group.py"}
"""Modules that serve a store of torch, on a socket from `listen`."""
RELAYS = {"areal/fleet/server_host.py", "areal/system/relay.py"}
"""Modules whose sockets pass on the connections of clients with the token or of known machines only, or of loopback."""
SILENT = {"areal/launcher/preflight.py", "areal/environments/openenv_worker.py"}
"""Modules whose sockets read and answer nothing. That of the worker, which runs where areal is not installed, chooses
the port of a server on loopback."""


def test_every_listening_socket_comes_from_one_function():
    result = []
    for path in MODULES:
        name = path.relative_to(PACKAGE.parent).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or name == "areal/system/network.py" or name in SILENT | RELAYS:
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            inputs = {word.arg: ast.unparse(word.value) for word in node.keywords}
            is_ours = isinstance(node.func, ast.Name) and called in ("listen", "bind")
            if called in LISTENS and not is_ours and not (called == "run_app" and "sock" in inputs):
                result.append(f"{name}:{node.lineno}: {called}")
            if called not in ("TCPStore", "init_process_group"):
                continue
            is_served = called == "TCPStore" and inputs.get("is_master", "True") != "False"
            if is_served and (name not in STORES or "master_listen_fd" not in inputs):
                result.append(f"{name}:{node.lineno}: TCPStore on a socket of its own")
            if called == "init_process_group" and "store" not in inputs:
                result.append(f"{name}:{node.lineno}: init_process_group with a store of its own")
    assert not result, "use areal.system.network.listen:\n" + "\n".join(result)


def test_gloo_and_nccl_listen_on_the_interface_of_the_host(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    addresses = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    bind_collectives(Host())
    assert os.environ["GLOO_SOCKET_IFNAME"] == addresses["127.0.0.1"]
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={addresses['127.0.0.1']}"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    bind_collectives(Host())
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"
