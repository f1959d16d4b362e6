"""Requests to an etcd cluster through the JSON gateway of its members. Only this module imports etcd3gw.

etcd3gw is synchronous, like the callers of the registry, and needs only HTTP: each request has a separate time limit,
so that a member that was stopped or cut off costs one time limit and then another member is asked. No gRPC threads run
in processes that start other processes, and no version of protobuf is required besides those of the servers.
"""

import base64
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from areal.api.errors import ConfigError, LaunchError, ServerUnavailable

if TYPE_CHECKING:
    from etcd3gw import Etcd3Client  # pyright: ignore[reportMissingImports]

_REQUEST_S = 3.0
"""Time limit of one request to one member. A new leader is elected within about two seconds."""
_PAUSE_S = 0.2
_REPORTED_AFTER_S = 2.0
_API = "/v3/"
_GRPC_NOT_FOUND = 5
_log = logging.getLogger(__name__)


class LeaseExpired(Exception):
    """The lease of a request does not exist any more. Never leaves the registry."""


def encoded(text: str) -> str:
    """A key or value as the gateway expects it."""
    return base64.b64encode(text.encode()).decode()


def decoded(text: str) -> str:
    return base64.b64decode(text).decode()


class EtcdClient:
    """Sends each request to one member, and to the next one when it does not answer. Thread-safe."""

    def __init__(self, addresses: str, *, timeout_s: float) -> None:
        """`addresses`: HOST:PORT of the members, separated by commas; `timeout_s`: limit for all attempts of a request.

        ConfigError when etcd3gw is missing.
        """
        self.addresses = addresses
        self._timeout_s = timeout_s
        self._members = _members(addresses)
        self._current = 0
        self._lock = threading.Lock()

    def call(self, path: str, body: dict[str, Any], *, limit_s: float | None = None) -> dict[str, Any]:
        """The answer to a request, which is repeated until a member answers.

        ServerUnavailable after `limit_s` (default: the limit of this client), LeaseExpired when the request names an
        expired lease, LaunchError when etcd refuses it.
        """
        from etcd3gw.exceptions import (  # pyright: ignore[reportMissingImports]
            ConnectionFailedError,
            ConnectionTimeoutError,
            Etcd3Exception,
            InternalServerError,
        )

        limit_s = self._timeout_s if limit_s is None else min(limit_s, self._timeout_s)
        began_s, was_reported = time.monotonic(), False
        while True:
            index, member = self._current, self._members[self._current]
            try:
                return member.post(member.get_url(path), json=body)
            except (ConnectionFailedError, ConnectionTimeoutError, InternalServerError) as error:
                self._leave(index)
                waited_s, reason = time.monotonic() - began_s, _reason(error)
                if waited_s >= limit_s:
                    message = f"etcd at {self.addresses} gave no answer in {limit_s:g} s: {reason}"
                    raise ServerUnavailable(message, code="process.registry_silent") from None
                if waited_s >= _REPORTED_AFTER_S and not was_reported:
                    was_reported = True
                    _log.warning("waiting up to %g s for etcd at %s: %s", limit_s, self.addresses, reason)
            except Etcd3Exception as error:
                if _grpc_code(error) == _GRPC_NOT_FOUND:
                    raise LeaseExpired from None
                raise self._refused(_reason(error)) from None
            except ValueError as error:  # an answer that is not JSON
                raise self._refused(f"the answer is not that of etcd: {error}") from None
            time.sleep(_PAUSE_S)

    def watch(self, key: str, range_end: str, revision: int, *, silence_s: float) -> Iterator[dict[str, Any]]:
        """The events of a range of keys from `revision` on. Ends after `silence_s` without an event, or if it fails."""
        from requests import RequestException

        create = {"key": encoded(key), "range_end": encoded(range_end), "start_revision": revision}
        member = self._members[self._current]
        try:
            with member.session.post(
                member.get_url("watch"),
                json={"create_request": create},
                stream=True,
                timeout=(_REQUEST_S, silence_s),
            ) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines(chunk_size=1 << 16):
                    result = json.loads(line).get("result", {}) if line else {}
                    if result.get("canceled"):
                        return
                    yield from result.get("events", [])
        except (RequestException, ValueError):  # silence, or a member that ended: the next request finds out which
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        for member in self._members:
            member.session.close()

    def _leave(self, index: int) -> None:
        """The next requests go to another member than `index`."""
        with self._lock:
            if self._current == index:
                self._current = (index + 1) % len(self._members)

    def _refused(self, reason: str) -> LaunchError:
        return LaunchError(f"etcd at {self.addresses} refused a request: {reason}", code="process.registry_refused")


def _members(addresses: str) -> "list[Etcd3Client]":
    try:
        from etcd3gw import Etcd3Client  # pyright: ignore[reportMissingImports]
    except ImportError:
        message = "cluster.name_resolve.type=etcd needs the package etcd3gw: pip install -e '.[etcd]'"
        raise ConfigError(message, code="launch.package_missing") from None
    members: list[Etcd3Client] = []
    for address in addresses.split(","):
        url = urlsplit(address.strip() if "://" in address else f"http://{address.strip()}")
        host, port = url.hostname or "", url.port or 2379
        member = Etcd3Client(host, port, protocol=url.scheme, timeout=_REQUEST_S, api_path=_API)
        member.session.trust_env = False  # without a proxy: etcd is in the network of the run
        members.append(member)
    return members


def _reason(error: Exception) -> str:
    text = getattr(error, "detail_text", None) or str(error)
    return " ".join(text.split())[:300]


def _grpc_code(error: Exception) -> int | None:
    try:
        return json.loads(getattr(error, "detail_text", None) or "").get("code")
    except (ValueError, AttributeError):
        return None
