"""Owns listening sockets: bound once and handed on, never a port number that somebody else may take meanwhile."""

from __future__ import annotations

import ipaddress
import socket

from areal.api.errors import LaunchError


def bind_socket(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A bound TCP socket, not yet listening; port 0 lets the system choose a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return bound


def http_address(bound: socket.socket) -> str:
    """URL of a server on `bound`, for example http://127.0.0.1:4711."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
