"""The name registry through which the processes of a run find each other."""

import base64
import contextlib
import errno
import json
import logging
import os
import random
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from areal.api.config import BaseExperimentConfig
from areal.api.errors import ArealError, ConfigError, LaunchError, RequestError, ServerUnavailable
from areal.system.run_paths import RunPaths

if TYPE_CHECKING:
    from etcd3gw import Etcd3Client

# ----------------------------------------------------------------------------------------------------------------------
# The name registry in files: one file for each name, in a folder that all processes of the run share.

_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_POLL_S = 0.05
_MAX_POLL_S = 1.0
"""Hundreds of ranks may wait for the same name: the longer they have waited, the less often they look."""
_SETTLED_S = 2.0
"""File systems record times with a coarse clock: only a folder unchanged for this long is known by its time."""
_STALE_ATTEMPTS = 5
_NO_FILE = (errno.ENOENT, errno.ENOTDIR)


def name_segments(name: str) -> list[str]:
    """The parts of a registry name. RequestError when it contains other characters than the allowed ones."""
    segments = name.split("/")
    if not all(_SEGMENT.fullmatch(segment) for segment in segments):
        message = f"registry name {name!r}: only letters, digits, '_', '-', '.' and '/' are allowed"
        raise RequestError(message, code="process.bad_name")
    return segments


class FileRegistry:
    """Implements `NameRegistry` in a folder, which may be on NFS.

    A value is complete in a temporary file before it gets its name, and a reader opens the file for each read: an NFS
    client then asks the server for the newest content (close-to-open consistency). Three faults of NFS are handled:
    the answer to a link or rename that succeeded is lost, so that the repeated request fails; a client remembers that
    a name does not exist; a file is replaced while it is read (ESTALE).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listings: dict[str, _Listing] = {}

    def _path(self, name: str) -> Path:
        *folders, last = name_segments(name)
        return self._folder.joinpath(*folders, last + ".json")

    def add(self, name: str, value: str, *, replace: bool = False) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
        temporary.write_text(value)
        inode = temporary.stat().st_ino
        try:
            if replace:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)  # fails when the name exists, unlike a rename
        except (FileExistsError, FileNotFoundError) as error:
            if _inode(path) == inode:  # it succeeded, and only its answer was lost
                return
            if isinstance(error, FileNotFoundError):
                raise
            message = f"{name} is already registered in {self._folder}, as {self.get(name)}"
            raise LaunchError(message, code="process.name_taken") from None
        finally:
            temporary.unlink(missing_ok=True)

    def get(self, name: str) -> str | None:
        path = self._path(name)
        value = _read(path)
        if value is None:
            # An NFS client remembers for up to a minute that a name does not exist, unless the folder is opened.
            with contextlib.suppress(OSError):
                os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
                value = _read(path)
        return value

    def list(self, prefix: str) -> dict[str, str]:
        """List the names. A folder that has not changed is not read again: each `add` and `remove` changes it."""
        folder = self._folder.joinpath(prefix)
        changed_ns, now_s = _changed_ns(folder), time.monotonic()
        last = self._listings.get(prefix)
        if last is not None and last.changed_ns == changed_ns and last.read_s - last.first_s > _SETTLED_S:
            return dict(last.values)
        first_s = last.first_s if last is not None and last.changed_ns == changed_ns else now_s
        paths = sorted(folder.rglob("*.json"))
        names = [path.relative_to(self._folder).as_posix().removesuffix(".json") for path in paths]
        values = {name: value for name, path in zip(names, paths, strict=True) if (value := _read(path)) is not None}
        if not changed_ns or not any(entry.is_dir() for entry in os.scandir(folder)):  # whose changes it does not show
            self._listings[prefix] = _Listing(changed_ns, first_s, now_s, values)
        return dict(values)

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def wait(self, name: str, timeout_s: float) -> str:
        began_s = time.monotonic()
        while (value := self.get(name)) is None:
            waited_s = time.monotonic() - began_s
            if waited_s >= timeout_s:
                message = f"{name} was not registered in {self._folder} within {timeout_s:g} s"
                raise ServerUnavailable(message, code="process.not_registered")
            time.sleep(min(max(_POLL_S, waited_s / 10), _MAX_POLL_S, timeout_s - waited_s))
        return value

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Nothing is open between two calls."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """What a folder without subfolders contained."""

    changed_ns: int
    """When the folder last changed, by the clock of its file system."""
    first_s: float
    """When this change was first seen."""
    read_s: float
    values: dict[str, str]


def _changed_ns(folder: Path) -> int:
    """When a folder last changed; 0 when it does not exist. An NFS client asks the server when a folder is opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return 0
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _read(path: Path) -> str | None:
    """The content of a file; None when it does not exist."""
    for attempt in range(_STALE_ATTEMPTS):
        try:
            return path.read_text()
        except OSError as error:
            if error.errno in _NO_FILE:
                return None
            if error.errno != errno.ESTALE or attempt == _STALE_ATTEMPTS - 1:
                raise
    return None


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


# ----------------------------------------------------------------------------------------------------------------------
# Requests to an etcd cluster through the JSON gateway of its members. Only this module imports etcd3gw.
#
# etcd3gw is synchronous, like the callers of the registry, and needs only HTTP: each request has a separate time limit,
# so that a member that was stopped or cut off costs one time limit and then another member is asked. No gRPC threads
# run in processes that start other processes, and no version of protobuf is required besides those of the servers.

_REQUEST_S = 3.0  # Time limit of one request to one member. A new leader is elected within about two seconds.
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
                member.get_url("watch"), json={"create_request": create}, stream=True, timeout=(_REQUEST_S, silence_s)
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


# ----------------------------------------------------------------------------------------------------------------------
# The name registry in etcd: names expire with their process, and readers follow a watch instead of polling.

_SILENCE_S = 5.0  # After this time without an event all names are read again, so a member that was cut off is noticed.
_RETRY_S = 0.5
_REFRESHES = 10  # Renewals of a lease during its time.


class EtcdRegistry:
    """Implements `NameRegistry` in etcd.

    What a process registers hangs on its lease, which a thread renews. When the lease has expired during an outage, the
    thread registers again what is missing, unless another process has registered the name since. The first `get` or
    `list` starts a thread that keeps a local copy of all names of the run, from which both are answered; `wait` alone
    watches one name. The threads end with `close` or with the process.
    """

    def __init__(self, addresses: str, run: str, *, lease_s: float, timeout_s: float) -> None:
        """`addresses`: see `EtcdClient`; `run`: the names of one run share it; `lease_s`: after a process was lost."""
        self._client = EtcdClient(addresses, timeout_s=timeout_s)
        self._prefix = f"areal/{run}/"
        self._lease_s = lease_s
        self._closed = threading.Event()
        self._writing = threading.Lock()
        self._lease: str | None = None
        self._own: dict[str, str] = {}
        self._keeper: threading.Thread | None = None
        self._changed = threading.Condition()
        self._known: dict[str, tuple[int, str | None]] = {}
        """The copy: revision and value of each name; None = removed at that revision."""
        self._is_known = False
        self._failure: ArealError | None = None
        self._follower: threading.Thread | None = None

    def add(self, name: str, value: str, *, replace: bool = False) -> None:
        key = self._key(name)
        with self._writing:
            condition = None if replace else {"target": "VERSION", "version": 0}
            try:
                lease = self._ensure_lease()
                answer = self._put(key, value, lease, only_when=condition)
            except LeaseExpired:
                self._lease = None
                lease = self._ensure_lease()
                answer = self._put(key, value, lease, only_when=condition)
            if not answer.get("succeeded"):
                pair = answer["responses"][0]["response_range"]["kvs"][0]
                # an earlier attempt may have succeeded although its answer was lost
                if pair.get("lease") != lease or decoded(pair["value"]) != value:
                    message = f"{name} is already registered in etcd, as {decoded(pair['value'])}"
                    raise LaunchError(message, code="process.name_taken")
            self._own[name] = value
            self._learn(name, int(answer["header"]["revision"]), value)

    def get(self, name: str) -> str | None:
        name_segments(name)
        self._follow()
        with self._changed:
            return self._known.get(name, (0, None))[1]

    def list(self, prefix: str) -> dict[str, str]:
        self._follow()
        below = f"{prefix.rstrip('/')}/" if prefix else ""
        with self._changed:
            values = sorted((name, value) for name, (_, value) in self._known.items() if name.startswith(below))
            return {name: value for name, value in values if value is not None}

    def remove(self, name: str) -> None:
        key = self._key(name)
        with self._writing:
            self._own.pop(name, None)
            answer = self._client.call("kv/deleterange", {"key": encoded(key)})
            self._learn(name, int(answer["header"]["revision"]), None)

    def wait(self, name: str, timeout_s: float) -> str:
        key, deadline = self._key(name), time.monotonic() + timeout_s
        while True:
            answer = self._client.call("kv/range", {"key": encoded(key)}, limit_s=max(deadline - time.monotonic(), 0.0))
            if pairs := answer.get("kvs"):
                return decoded(pairs[0].get("value", ""))
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                message = f"{name} was not registered in etcd at {self._client.addresses} within {timeout_s:g} s"
                raise ServerUnavailable(message, code="process.not_registered")
            revision = int(answer["header"]["revision"]) + 1
            for event in self._client.watch(key, f"{key}\0", revision, silence_s=min(left_s, _SILENCE_S)):
                if event.get("type") != "DELETE":
                    return decoded(event["kv"].get("value", ""))

    def clear(self) -> None:
        with self._writing:
            self._own.clear()
            answer = self._client.call("kv/deleterange", self._range())
            revision = int(answer["header"]["revision"])
            with self._changed:
                for name in list(self._known):
                    self._learn(name, revision, None)

    def close(self) -> None:
        self._closed.set()
        self._client.close()

    def _key(self, name: str) -> str:
        return self._prefix + "/".join(name_segments(name))

    def _range(self) -> dict[str, str]:
        return {"key": encoded(self._prefix), "range_end": encoded(self._range_end)}

    @property
    def _range_end(self) -> str:
        return self._prefix[:-1] + "0"  # the character after '/'

    # The lease

    def _ensure_lease(self) -> str:
        if self._lease is None:
            self._lease = self._client.call("lease/grant", {"TTL": round(self._lease_s), "ID": 0})["ID"]
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep_lease, name="renew the etcd lease", daemon=True)
            self._keeper.start()
        assert self._lease is not None
        return self._lease

    def _keep_lease(self) -> None:
        interval_s = self._lease_s / _REFRESHES
        pause_s = interval_s * random.random()  # processes that start together do not renew together
        while not self._closed.wait(pause_s):
            pause_s = interval_s
            try:
                with self._writing:
                    lease = self._lease
                if lease is None:
                    continue
                result = self._client.call("lease/keepalive", {"ID": lease}).get("result")
                if result is not None and int(result.get("TTL", 0)) <= 0:  # None: the member lost its leader
                    self._register_again(lease)
            except (ArealError, LeaseExpired) as error:
                if not self._closed.is_set():
                    _log.warning("the lease in etcd was not renewed: %s", error)

    def _register_again(self, expired: str) -> None:
        """Register what was lost with a lease, unless another process has taken the name."""
        with self._writing:
            if self._lease == expired:
                self._lease = None
            lease = self._ensure_lease()
            for name, value in list(self._own.items()):
                key = self._key(name)
                # absent, or it is this value on the expired lease
                for condition in ({"target": "VERSION", "version": 0}, {"target": "VALUE", "value": encoded(value)}):
                    answer = self._put(key, value, lease, only_when=condition)
                    if answer.get("succeeded"):
                        self._learn(name, int(answer["header"]["revision"]), value)
                        break
                else:
                    del self._own[name]
            _log.warning("the lease in etcd had expired: registered again as %s", ", ".join(sorted(self._own)))

    def _put(self, key: str, value: str, lease: str, *, only_when: dict[str, Any] | None) -> dict[str, Any]:
        """One transaction. Without success its answer holds the present entry."""
        compare = [] if only_when is None else [{"key": encoded(key), "result": "EQUAL", **only_when}]
        put = {"request_put": {"key": encoded(key), "value": encoded(value), "lease": lease}}
        present = {"request_range": {"key": encoded(key)}}
        return self._client.call("kv/txn", {"compare": compare, "success": [put], "failure": [present]})

    # The copy

    def _follow(self) -> None:
        """Return once the copy holds the names. Raises what the first reading raised."""
        with self._changed:
            if self._follower is None or not self._follower.is_alive():
                self._failure = None
                self._follower = threading.Thread(target=self._keep_copy, name="follow the names in etcd", daemon=True)
                self._follower.start()
            while not self._is_known:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()

    def _keep_copy(self) -> None:
        was_lost = False
        while not self._closed.is_set():
            try:
                revision = self._read_all()
            except ArealError as error:
                with self._changed:
                    if not self._is_known:  # `_follow` raises it, and the next call starts again
                        self._failure = error
                        self._changed.notify_all()
                        return
                if not was_lost and not self._closed.is_set():
                    _log.warning("names may be out of date: %s", error)
                was_lost = True
                self._closed.wait(_RETRY_S)
                continue
            if was_lost:
                _log.info("etcd at %s answers again", self._client.addresses)
                was_lost = False
            for event in self._client.watch(self._prefix, self._range_end, revision + 1, silence_s=_SILENCE_S):
                entry = event["kv"]
                value = None if event.get("type") == "DELETE" else decoded(entry.get("value", ""))
                self._learn(self._name(entry), int(entry["mod_revision"]), value)

    def _read_all(self) -> int:
        """Compare the copy with etcd. Returns the revision of the reading."""
        answer = self._client.call("kv/range", self._range())
        revision = int(answer["header"]["revision"])
        listed = {self._name(entry): entry for entry in answer.get("kvs", [])}
        with self._changed:
            for name in self._known.keys() - listed.keys():
                self._learn(name, revision, None)
            for name, entry in listed.items():
                self._learn(name, int(entry["mod_revision"]), decoded(entry.get("value", "")))
            self._is_known = True
            self._changed.notify_all()
        return revision

    def _name(self, entry: dict[str, Any]) -> str:
        return decoded(entry["key"]).removeprefix(self._prefix)

    def _learn(self, name: str, revision: int, value: str | None) -> None:
        """Events and answers come in any order: the highest revision counts."""
        with self._changed:
            if revision > self._known.get(name, (0, None))[0]:
                self._known[name] = (revision, value)


class NameRegistry(Protocol):
    """Maps names like `servers/0` to short JSON values, for all processes of a run. Its methods are thread-safe.

    A registry that needs a server raises ServerUnavailable when that does not answer for its time limit, except from
    `get` and `list` after their first success: these then answer from what was last known.
    """

    def add(self, name: str, value: str, *, replace: bool = False) -> None:
        """Register a value. LaunchError when the name is taken and `replace` is false."""
        ...

    def get(self, name: str) -> str | None: ...

    def list(self, prefix: str) -> dict[str, str]:
        """All names below `prefix` (a whole path such as `servers`), in order."""
        ...

    def remove(self, name: str) -> None:
        """Remove a name, if it is there."""
        ...

    def wait(self, name: str, timeout_s: float) -> str:
        """Block until the name is registered. ServerUnavailable after `timeout_s`."""
        ...

    def clear(self) -> None:
        """Remove all names of the run."""
        ...

    def close(self) -> None:
        """End the threads of this registry. What it has registered stays until others remove it or it expires."""
        ...


def registry_of(config: BaseExperimentConfig) -> NameRegistry:
    """The registry of the configured run."""
    options = config.cluster.name_resolve
    if options.type.startswith("etcd"):
        return EtcdRegistry(
            options.etcd3_addr,
            f"{config.experiment_name}/{config.trial_name}",
            lease_s=options.etcd_lease_s,
            timeout_s=options.etcd_timeout_s,
        )
    if options.nfs_record_root:
        root = Path(options.nfs_record_root).expanduser().absolute()
        return FileRegistry(root / config.experiment_name / config.trial_name)
    return FileRegistry(RunPaths.of(config).names)


def announce_server(registry: NameRegistry, index: int, process_name: str, address: str) -> None:
    """Register a server at `address`, and this process, which serves there or hosts the server, as ready."""
    pid = os.getpid()
    registry.add(f"servers/{index}", json.dumps({"address": address, "pid": pid}), replace=True)
    registry.add(f"ready/{process_name}", json.dumps({"pid": pid}), replace=True)


def has_server(registry: NameRegistry, address: str) -> bool:
    """Whether a registered server, or a part of one, is on the machine with this address. It may look names up."""
    urls = [json.loads(value)["address"] for value in registry.list("servers").values()]
    hosts = {urlsplit(url).hostname or "" for url in urls} | set(registry.list("part_hosts").values())
    return address in hosts or any(address in _addresses(host) for host in hosts)


def _addresses(host: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
