"""Weight channel over a collective: rank 0 of the trainer broadcasts buckets to a group with every replica.

`publish` waits for servers without a second copy to pause, for the replicas to join (JOIN_TIMEOUT_S) and for each
bucket (timeout_s). The request to the controller runs in a thread at the same time; when either side ends early, the
other one ends too. The fleet's health checks end the request when a replica dies or hangs, which ends every wait here.
`wait_served` waits for the end of the request (timeout_s).
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from io import BytesIO
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from areal.api.data import WeightSpec, WeightUpdate
from areal.api.engine import Ranks, WeightSource
from areal.api.errors import ArealError, WeightSyncError
from areal.api.metrics import Metrics
from areal.observe.log import get_logger
from areal.server_side.areal_transfer.layout import widest_first
from areal.system.folder_delta import pack
from areal.system.folders import BLOCK_BYTES, FolderList
from areal.system.network import Host, is_loopback, listen, required_token
from areal.system.process import in_daemon_thread
from areal.system.relay import MachineRelay
from areal.weights.control import FleetControl, send_once, succeeded
from areal.weights.published_weights import PublishedWeights, sent_metrics
from areal.weights.update_group import UpdateGroup, bucket_bytes, bucket_views, open_store, serve_store

log = get_logger(__name__)

UPDATE_TIMEOUT_S = 300.0
"""Time limit of a broadcast, and of the update of the servers after it."""
JOIN_TIMEOUT_S = 60.0
"""Maximum wait for all replicas to join a new group."""
MAX_ATTEMPTS = 3
"""Attempts to publish one version; each retry uses the replicas that are left."""
SETTLE_S = 2.0
"""After a failed attempt the list of replicas must be constant for this time, which exceeds the health interval."""
_POLL_S = 0.1


class CollectiveChannel:
    """Implements `areal.api.engine.WeightChannel`.

    Trainer ranks above 0 only gather. The group is kept while the replicas stay the same and nothing fails.
    """

    def __init__(
        self,
        engine: WeightSource,
        ranks: Ranks,
        control: FleetControl,
        *,
        bucket_bytes: int,
        backend: str,
        host: Host | None = None,
        may_join: Callable[[str], bool] = lambda address: True,
        ranks_per_replica: int = 1,
        timeout_s: float = UPDATE_TIMEOUT_S,
    ) -> None:
        """`backend`: nccl or gloo. `host`: where this process listens and how the servers reach it; None = loopback.
        `may_join`: whether the machine with this address has a server; it may block, and is not asked on loopback.
        `ranks_per_replica`: see `WeightUpdate`. `timeout_s`: maximum wait for one bucket, for the servers after the
        last one, and for a live replica."""
        self._engine, self._ranks, self._control = engine, ranks, control
        self._bucket_bytes = bucket_bytes
        self._backend = backend
        self._host = host or Host()
        self._token = required_token("the store of the weight update group") if ranks.rank == 0 else ""
        self._ranks_per_replica = ranks_per_replica
        self._timeout_s = timeout_s
        self._plan: list[list[WeightSpec]] = []
        self._group: UpdateGroup | None = None
        self._replicas: list[str] = []
        self._buffer: Tensor | None = None
        self._may_join = may_join
        self._store: TCPStore | None = None
        self._relay: MachineRelay | None = None
        self._joining: Future[UpdateGroup] | None = None
        self._has_failed = False
        self._request: Future[None] | None = None
        """Request of rank 0 to the controller for the version that was sent."""
        self._sent: int | None = None
        """The version that was sent and not waited for yet, on every rank."""
        self._attempts = 0
        """To publish that version."""

    def publish(self, version: int) -> str:
        if not self._plan:  # names, shapes and dtypes never change
            self._plan = self._planned(self._engine.weight_specs())
        self._attempts = 0
        return self._attempt(version)

    def wait_served(self) -> None:
        while (version := self._sent) is not None:
            self._sent = None
            error: Exception | None = None
            request, self._request = self._request, None
            if request is not None:
                try:
                    self._wait_until_served(request, version)
                    self._has_failed = False
                except Exception as failure:  # noqa: BLE001 - the other ranks must be notified before it is raised
                    error, self._has_failed = failure, True
                    self._leave()
            if not succeeded(self._ranks, version, error, may_retry=self._attempts < MAX_ATTEMPTS):
                self._attempt(version)

    def _attempt(self, version: int) -> str:
        """Publish with the attempts that are left."""
        self._sent = None
        if (request := self._request) is not None:  # a server lost its weights before the version was waited for
            self._leave()
            wait([request], self._timeout_s)
            self._request = None
        while True:
            self._attempts += 1
            may_retry = self._attempts < MAX_ATTEMPTS
            send = partial(self._send, version)
            weights = self._weights()
            checksum = send_once(weights, self._ranks, version, send, may_retry=may_retry)
            if checksum is not None:
                self._sent = version
                return checksum

    def metrics(self) -> Metrics:
        return {}

    def close(self) -> None:
        """May be repeated."""
        self._leave()

    def _leave(self) -> None:
        """Leave the group; without one nothing happens."""
        group, self._group = self._group, None
        self._store = None
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close()
        if group is not None:
            group.close()
        if self._joining is not None:
            wait([self._joining], JOIN_TIMEOUT_S)  # a thread inside torch at exit would abort the process
            self._joining = None

    def _send(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> None:
        """One attempt by rank 0: returns when the weights are sent. A failure closes the group and waits for the
        request to end.

        Returns without an error when the fleet serves the version, even if a replica missed it: the next update
        includes that replica.
        """
        request: Future[None] | None = None
        try:
            replicas = self._wait_for_replicas(version)
            if not replicas:
                return
            update = self._update_of(version, replicas)
            request = in_daemon_thread(partial(self._control.publish, update), f"publish version {version}")
            if self._group is None:
                self._group = self._join(request, update)
                self._replicas = replicas
            self._broadcast(self._group, weights, request.done)
            self._request = request
        except BaseException as failure:
            self._leave()  # replicas that wait for a broadcast fail now, so the request ends soon
            self._has_failed = True
            if request is None:
                raise
            if not isinstance(failure, WeightSyncError):  # an error of the trainer: a retry does not help
                with contextlib.suppress(ArealError):
                    self._wait_until_served(request, version)
                raise
            self._wait_until_served(request, version)  # raises the controller's error, which is more precise
            log.warning("version %d is served, but not by all replicas: %s", version, failure)

    def _wait_until_served(self, request: Future[None], version: int) -> None:
        """Wait for the request to the controller. Raises its error."""
        wait([request], self._timeout_s)
        if not request.done():
            message = f"version {version} was sent, but is not served after {self._timeout_s:g} s"
            raise WeightSyncError(message, code="weights.update_ended")
        request.result()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """What an attempt sends."""
        return self._engine.named_weights()

    def _planned(self, specs: list[WeightSpec]) -> list[list[WeightSpec]]:
        return plan_buckets(specs, self._bucket_bytes)

    def _broadcast(
        self, group: UpdateGroup, weights: Iterator[tuple[str, Tensor]], give_up: Callable[[], bool]
    ) -> None:
        """Send what `_update_of` describes."""
        for bucket in self._plan:
            group.broadcast(self._fill(bucket, weights), give_up)

    def _update_of(self, version: int, replicas: list[str]) -> WeightUpdate:
        """Describe the update; opens a new store when the group must be formed again."""
        host = self._host
        if self._group is None or replicas != self._replicas:
            self._leave()
            # A new name excludes confusion with a group that a replica is still in. It is random and sent over
            # token-protected HTTP only: the store's keys cannot be guessed without it.
            group_name = f"weights-{uuid.uuid4().hex}"
            self._store = serve_store(Host(), self._token, timeout_s=JOIN_TIMEOUT_S)
            if not is_loopback(host.bind):
                addresses = {host.bind, host.advertise}
                self._relay = MachineRelay(
                    listen(host, self._token), lambda peer: peer in addresses or self._may_join(peer), self._store.port
                )
        else:
            group_name = self._group.group_name
        return WeightUpdate(
            version=version,
            kind="collective",
            master_address=host.advertise,
            master_port=self._port,
            backend=self._backend,
            buckets=self._plan,
            group_name=group_name,
            replicas=replicas,
            ranks_per_replica=self._ranks_per_replica,
        )

    @property
    def _port(self) -> int:
        """Port of the store, on the address of the host."""
        assert self._store is not None
        return self._store.port if self._relay is None else self._relay.port

    def _wait_for_replicas(self, version: int) -> list[str]:
        """The replicas without the version; [] once the fleet serves it.

        After a failure the fleet checks its replicas one after another, so wait until their list is constant.
        """
        deadline = time.monotonic() + self._timeout_s
        replicas = self._control.live_replicas(version)
        settle_s = SETTLE_S if self._has_failed else 0.0
        unchanged_since = time.monotonic()
        while time.monotonic() - unchanged_since < settle_s or not (replicas or self._is_served(version)):
            if time.monotonic() >= deadline:
                message = f"no live replica for {self._timeout_s:g} s, so version {version} reaches none"
                raise WeightSyncError(message, code="weights.no_replica")
            time.sleep(_POLL_S)
            before, replicas = replicas, self._control.live_replicas(version)
            if replicas != before:
                unchanged_since = time.monotonic()
        return replicas

    def _is_served(self, version: int) -> bool:
        try:
            self._control.publish(WeightUpdate(version=version, kind="collective"))  # addressed to no replica
        except WeightSyncError:
            return False
        return True

    def _join(self, request: Future[None], update: WeightUpdate) -> UpdateGroup:
        """Form the group, in a thread, so that a failed request to the controller ends the wait."""
        # A separate connection: when the channel drops the store, the thread fails at once.
        store = open_store(self._host.advertise, self._port, timeout_s=JOIN_TIMEOUT_S)
        join = partial(
            UpdateGroup,
            store,
            rank=0,
            world_size=update.world_size,
            group_name=update.group_name,
            backend=self._backend,
            timeout_s=self._timeout_s,
            join_timeout_s=JOIN_TIMEOUT_S,
        )
        joining = self._joining = in_daemon_thread(join, f"join {update.group_name}")
        both: list[Future[Any]] = [joining, request]
        wait(both, return_when=FIRST_COMPLETED)
        if not joining.done():
            request.result()
            message = f"{update.group_name}: the update of the servers ended before all replicas had joined"
            raise WeightSyncError(message, code="weights.update_ended")
        return joining.result()

    def _fill(self, bucket: list[WeightSpec], weights: Iterator[tuple[str, Tensor]]) -> Tensor:
        """Copy the next weights into the send buffer."""
        total = bucket_bytes(bucket)
        if self._buffer is None or self._buffer.numel() < total:
            device = "cuda" if self._backend == "nccl" else "cpu"
            self._buffer = torch.zeros(total, dtype=torch.uint8, device=device)
        buffer = self._buffer[:total]
        views = bucket_views(buffer, bucket)
        for _ in bucket:  # the next weights of the engine, which may come in another order
            name, value = next(weights)
            view = views.pop(name, None)
            if view is None or view.shape != value.shape or view.dtype != value.dtype:
                message = f"the engine yielded {name} {value.dtype} {list(value.shape)}, which its weight_specs lack"
                raise WeightSyncError(message, code="weights.unexpected")
            view.copy_(value.detach())
        return buffer


_KEPT_SHARE = 0.25
"""Bytes of the differences that are kept for replicas that missed versions, as a share of the weights."""


class DeltaCollectiveChannel(CollectiveChannel):
    """Broadcasts the differences since the versions that the replicas have, or all weights when one has none of these.

    A native replica keeps the weights as they were published in host memory, the host of another server keeps them in a
    folder below TMPDIR; both verify their checksum. All weights are sent as the first version of a process, every
    `FULL_EVERY`-th one, and whenever a replica joins or has failed.
    """

    _published: PublishedWeights | None = None
    _name = ""
    """On rank 0: the name of the version that was taken last, with the checksum."""
    _listed = FolderList(BLOCK_BYTES, [])
    """On rank 0: of that version."""
    _deltas: Mapping[str, NDArray[np.uint8]] = MappingProxyType({})
    """Name of a version -> the difference to the next one, the last to `_published`."""
    _held: Mapping[str, str] = MappingProxyType({})
    """Replica -> name of the version that it has."""
    _chain: Mapping[str, NDArray[np.uint8]] = MappingProxyType({})
    """The part of `_deltas` that is sent; empty: all weights."""
    _contents: Iterator[NDArray[np.uint8]] = iter(())
    """What the attempt broadcasts."""

    def publish(self, version: int) -> str:
        published = self._take(version)
        super().publish(version)
        return published.checksum()  # while servers update

    def metrics(self) -> Metrics:
        sent = sum(map(len, self._chain.values())) or self._listed.num_bytes
        return sent_metrics(float(sent), float(self._listed.num_bytes), self._ranks)

    def close(self) -> None:
        super().close()
        if self._published is not None:
            self._published.close()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())  # `_take` has them

    def _planned(self, specs: list[WeightSpec]) -> list[list[WeightSpec]]:
        return [specs]

    def _take(self, version: int) -> PublishedWeights:
        """Take the weights of the engine; a collective."""
        if (published := self._published) is None:
            published = PublishedWeights(self._engine.weight_specs(), {}, self._ranks, self._host)
            self._published = published
        compare, packed = published.has_base(version), BytesIO()
        listed = published.replace(self._engine.named_weights(), partial(pack, packed), compare=compare)
        published.keep(version)
        base, name = self._name, listed.name(str(version))
        self._name, self._listed = name, listed
        if self._ranks.rank == 0 and name != base:
            deltas = {**self._deltas, base: np.frombuffer(packed.getbuffer(), np.uint8)} if compare else {}
            while len(deltas) > 1 and sum(map(len, deltas.values())) > _KEPT_SHARE * listed.num_bytes:
                del deltas[next(iter(deltas))]
            self._deltas = {} if sum(map(len, deltas.values())) >= listed.num_bytes else deltas
        return published

    def _update_of(self, version: int, replicas: list[str]) -> WeightUpdate:
        assert self._published is not None
        held = {self._held.get(replica, "") for replica in replicas}
        bases = list(self._deltas)
        first = min(bases.index(base) for base in held) if held <= self._deltas.keys() else len(bases)
        self._chain = {base: self._deltas[base] for base in bases[first:]}
        # Copied now: later the servers wait.
        self._contents = iter(self._chain.values()) if self._chain else self._published.contents()
        # Until they have the version, no difference fits these replicas.
        self._held = {replica: base for replica, base in self._held.items() if replica not in replicas}
        update = super()._update_of(version, replicas)
        sizes = {base: len(delta) for base, delta in self._chain.items()}
        listed = self._listed.to_bytes().decode()
        return replace(update, published=self._name, listed=listed, delta_bytes=sizes)

    def _broadcast(
        self, group: UpdateGroup, weights: Iterator[tuple[str, Tensor]], give_up: Callable[[], bool]
    ) -> None:
        device = torch.device("cuda" if self._backend == "nccl" else "cpu")
        for content in self._contents:
            group.broadcast_bytes(content, device, give_up)

    def _wait_until_served(self, request: Future[None], version: int) -> None:
        super()._wait_until_served(request, version)
        lacking = self._control.live_replicas(version)
        self._held = {**self._held, **{name: self._name for name in self._replicas if name not in lacking}}


def plan_buckets(specs: Iterable[WeightSpec], max_bytes: int) -> list[list[WeightSpec]]:
    """Partition the weights, in order, into broadcasts of at most `max_bytes`; a larger weight is sent alone. Within a
    broadcast the widest dtypes come first."""
    plan: list[list[WeightSpec]] = []
    room = 0
    for spec in specs:
        size = bucket_bytes([spec])
        if not plan or size > room:
            plan.append([])
            room = max_bytes
        plan[-1].append(spec)
        room -= size
    return [[bucket[index] for index in widest_first([spec.dtype for spec in bucket])] for bucket in plan]
