"""Network addresses of a run's processes, their listening sockets, and the token that protects them.

This is the only module of areal that contains a loopback address: every other one takes its addresses from a `Host`.
"""

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from areal.api.errors import ConfigError, LaunchError

LOOPBACK = "127.0.0.1"
TOKEN_VARIABLE = "AREAL_SERVER_TOKEN"
"""Environment variable that holds the run's token. A token is never in a plan, a command line or a log."""
TEACHER_TOKEN = "AREAL_TEACHER_TOKEN"
"""Environment variable with the token or API key of the servers of teachers. Code of users gets neither."""
_TOKEN = re.compile(r"[!-~]+")
BACKLOG = 4096
TRAINERS_VARIABLE = "AREAL_TRAINER_ADDRESSES"
"""Environment variable of a server: addresses of the trainers to which it may connect for weight updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The address on which a process listens, and that under which others reach it. The default is loopback."""

    bind: str = LOOPBACK
    """Address that its servers and stores listen on."""
    advertise: str = LOOPBACK
    """Address under which other processes connect to them."""
    node: str = ""
    """Name of the machine."""


def run_token(environ: Mapping[str, str] | None = None) -> str:
    """The run's token; empty when none is set. Clients send it with every request, servers compare it."""
    return (os.environ if environ is None else environ).get(TOKEN_VARIABLE, "")


def new_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_urlsafe(32)


def required_token(what: str, environ: Mapping[str, str] | None = None) -> str:
    """The token that `what`, a server or store, requires of its clients, also on loopback.

    ConfigError when none is set, or when it cannot be sent in an HTTP header.
    """
    token = run_token(environ)
    if not token:
        message = f"{what} needs a token: set {TOKEN_VARIABLE} to a secret, such as 32 random letters"
        raise ConfigError(message, code="launch.token_missing")
    if not _TOKEN.fullmatch(token):
        message = f"{TOKEN_VARIABLE} has characters that an HTTP header cannot carry: use letters and digits"
        raise ConfigError(message, code="launch.token_invalid")
    return token


def listen(host: Host, token: str, port: int = 0) -> socket.socket:
    """A listening socket on the host's address. Every listening socket of areal comes from here.

    `token`: what its server or store requires of clients; ConfigError without one. Port 0 = any free one. LaunchError
    when the address cannot be used.
    """
    if not token:
        raise ConfigError("a listening socket needs a token for its clients", code="launch.token_missing")
    bound = bind_socket(host.bind, port)
    bound.listen(BACKLOG)
    return bound


def bind_collectives(host: Host) -> None:
    """Make gloo and NCCL, which choose an interface themselves, listen in this process on that of `host`.

    A choice of the user in the environment stays. To call before the first process group.
    """
    addresses = {host.bind, host.advertise}
    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.address in addresses for entry in entries):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": this name, not all that begin with it


def store_prefix(token: str, name: str) -> str:
    """Prefix for all keys of a store. It cannot be guessed without the token, which itself is not sent."""
    return hmac.new(token.encode(), name.encode(), hashlib.sha256).hexdigest()


def bind_socket(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A bound TCP socket, not yet listening; port 0 lets the system choose a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((address, port))
    except OSError as error:
        bound.close()
        message = f"cannot listen on {address}:{port}: {error.strerror or error}"
        raise LaunchError(message, code="process.cannot_listen") from error
    return bound


def port_number(text: str) -> int:
    """The port that a command-line argument names."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ArgumentTypeError(f"{text!r} is no port from 1 to 65535")
    return int(text)


def http_address(bound: socket.socket, advertise: str | None = None) -> str:
    """URL of a server on `bound`, for example http://10.0.0.1:4711; `advertise` None = the address it is bound to."""
    host, port = bound.getsockname()[:2]
    host = advertise or host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_trainer(host: str, environ: Mapping[str, str]) -> bool:
    """Whether a server with these environment variables may get weights from a trainer at `host`.

    The launcher sets the addresses. Without any, only loopback addresses are allowed. Nothing is looked up.
    """
    hosts = [part.strip() for part in environ.get(TRAINERS_VARIABLE, "").split(",") if part.strip()]
    return host in hosts if hosts else host != "localhost" and is_loopback(host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
