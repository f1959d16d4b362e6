"""Owns publication over a collective: rank 0 of the trainer broadcasts buckets to a group with every replica.

Waits for: the fleet to pause, the replicas to join (JOIN_TIMEOUT_S) and each bucket to be taken in (timeout_s). Both
sides of a publication run at once, the request to the controller in a thread; when either ends early, so does the
other. A replica that dies or hangs ends the request as soon as the fleet notices (its health checks), and with that
every wait here.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from areal.api.data import WeightSpec, WeightUpdate
from areal.api.engine import WeightSource
from areal.api.errors import ArealError, WeightSyncError
from areal.observe.log import get_logger
from areal.server_side.areal_transfer.layout import widest_first
from areal.system.network import Host, required_token
from areal.weights.control import PublishControl, agree
from areal.weights.update_group import UpdateGroup, bucket_bytes, bucket_views, open_store

log = get_logger(__name__)

JOIN_TIMEOUT_S = 60.0
"""Longest wait for all replicas to join a new group."""
MAX_ATTEMPTS = 3
"""Publications of one version before the trainer gives up; each later one is made with the replicas left."""
SETTLE_S = 2.0
"""After a failed attempt the list of replicas must stay the same for this long; above the usual health interval."""
_POLL_S = 0.1


class CollectiveChannel:
    """Implements `areal.api.engine.WeightChannel`.

    Trainer ranks above 0 only gather. The group is kept while the replicas stay the same and nothing fails.
    """

    def __init__(
        self,
        engine: WeightSource,
        control: PublishControl,
        *,
        bucket_bytes: int,
        backend: str,
        is_rank0: bool,
        host: Host | None = None,
        ranks_per_replica: int = 1,
        timeout_s: float = 300.0,
    ) -> None:
        """`host`: where this process listens and how the servers reach it; None = loopback. `ranks_per_replica`:
        devices of one server. `timeout_s`: the longest wait for one bucket, and for some replica to be there at all."""
        self._engine = engine
        self._is_rank0 = is_rank0
        self._plan: list[list[WeightSpec]] | None = None
        self._bucket_bytes = bucket_bytes
        self._sender: _Sender | None = None
        if is_rank0:
            self._sender = _Sender(
                control, backend=backend, host=host or Host(), ranks_per_replica=ranks_per_replica, timeout_s=timeout_s
            )

    def publish(self, version: int) -> None:
        """Send the weights to every replica that lacks them; every rank calls it. WeightSyncError on all when no
        attempt succeeds."""
        if self._plan is None:  # names, shapes and dtypes never change
            self._plan = plan_buckets(self._engine.weight_specs(), self._bucket_bytes)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            error = self._attempt(version, self._plan)
            may_retry = attempt < MAX_ATTEMPTS and isinstance(error, WeightSyncError)
            if agree(self._engine, error, version, may_retry=may_retry):
                return
            if self._is_rank0:
                log.warning("attempt %d to publish version %d failed: %s", attempt, version, error)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _attempt(self, version: int, plan: list[list[WeightSpec]]) -> BaseException | None:
        weights = self._engine.named_weights()
        error: BaseException | None = None
        if self._sender is not None:
            try:
                self._sender.send(version, plan, weights)
            except Exception as failure:  # noqa: BLE001 - the other ranks must hear of it before it is raised
                error = failure
        for _ in weights:  # gathering is a collective: every rank goes through to the end, also after an error
            pass
        return error


class _Sender:
    """Rank 0's part: the store, the group and the broadcasts."""

    def __init__(
        self, control: PublishControl, *, backend: str, host: Host, ranks_per_replica: int, timeout_s: float
    ) -> None:
        self._control = control
        self._backend = backend
        required_token(host, "the store of the weight update group")
        self._host = host
        self._ranks_per_replica = ranks_per_replica
        self._timeout_s = timeout_s
        self._group: UpdateGroup | None = None
        self._replicas: list[str] = []
        self._buffer: Tensor | None = None
        self._store: TCPStore | None = None
        self._joining: threading.Thread | None = None
        self._has_failed = False

    def send(self, version: int, plan: list[list[WeightSpec]], weights: Iterator[tuple[str, Tensor]]) -> None:
        """One attempt; any failure leaves no group and no request behind. It is none once the fleet serves the version:
        what the others lack is a later publication's."""
        publication: _Publication | None = None
        try:
            replicas = self._wait_for_replicas(version)
            if not replicas:
                return
            if self._group is None or replicas != self._replicas:
                self.close()
                # A name never used before: no replica can mistake it for a group it is in already.
                # It is random and sent over token-protected HTTP only: the store's keys cannot be guessed without it.
                group_name = f"weights-{uuid.uuid4().hex}"
                self._store = open_store(
                    self._host.advertise, 0, is_master=True, timeout_s=JOIN_TIMEOUT_S, bind=self._host.bind
                )
            else:
                group_name = self._group.group_name
            assert self._store is not None
            update = WeightUpdate(
                version=version,
                kind="collective",
                master_address=self._host.advertise,
                master_port=self._store.port,
                backend=self._backend,
                buckets=plan,
                group_name=group_name,
                replicas=replicas,
                ranks_per_replica=self._ranks_per_replica,
            )
            publication = _Publication(self._control, update)
            if self._group is None:
                self._group = self._join(publication, update)
                self._replicas = replicas
            for bucket in plan:
                self._group.broadcast(self._fill(bucket, weights), give_up=publication.is_over)
            publication.wait(self._timeout_s)
            self._has_failed = False
        except BaseException as failure:
            self.close()  # replicas that still wait for a broadcast fail now, so the request ends soon
            self._has_failed = True
            if publication is None:
                raise
            if not isinstance(failure, WeightSyncError):  # the trainer's fault, so another attempt is of no use
                with contextlib.suppress(ArealError):
                    publication.wait(self._timeout_s)
                raise
            publication.wait(self._timeout_s)  # its own error is the better one
            log.warning("version %d is served, but not by all replicas: %s", version, failure)

    def close(self) -> None:
        group, self._group = self._group, None
        self._store = None
        if group is not None:
            group.close()
        if self._joining is not None:
            self._joining.join(JOIN_TIMEOUT_S)  # a thread left in torch at exit would abort the process
            self._joining = None

    def _wait_for_replicas(self, version: int) -> list[str]:
        """Who lacks the version; nobody once the fleet serves it. After a failure the fleet looks at its replicas
        anew, one by one: wait until their list stands still."""
        deadline = time.monotonic() + self._timeout_s
        replicas = self._control.live_replicas(version)
        still_s = SETTLE_S if self._has_failed else 0.0
        unchanged_since = time.monotonic()
        while time.monotonic() - unchanged_since < still_s or not (replicas or self._is_served(version)):
            if time.monotonic() >= deadline:
                raise WeightSyncError(f"no replica was there to take in weights for {self._timeout_s:g} s")
            time.sleep(_POLL_S)
            before, replicas = replicas, self._control.live_replicas(version)
            if replicas != before:
                unchanged_since = time.monotonic()
        return replicas

    def _is_served(self, version: int) -> bool:
        try:
            self._control.publish(WeightUpdate(version=version, kind="collective"))  # by nobody
        except WeightSyncError:
            return False
        return True

    def _join(self, publication: _Publication, update: WeightUpdate) -> UpdateGroup:
        """Meet the replicas, in a thread, so that a failed request to the controller ends the meeting."""
        made: list[UpdateGroup | BaseException] = []
        assert self._store is not None
        # A connection of its own: when the sender drops the store, the meeting fails at once.
        store = open_store(self._host.advertise, self._store.port, is_master=False, timeout_s=JOIN_TIMEOUT_S)

        def join() -> None:
            try:
                group = UpdateGroup(
                    store,
                    rank=0,
                    world_size=update.world_size,
                    group_name=update.group_name,
                    backend=self._backend,
                    timeout_s=self._timeout_s,
                    join_timeout_s=JOIN_TIMEOUT_S,
                )
                made.append(group)
            except BaseException as failure:  # noqa: BLE001 - raised in the thread that waits
                made.append(failure)

        thread = self._joining = threading.Thread(target=join, name=f"join {update.group_name}", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.002)
            if publication.is_over():
                publication.wait(0.0)
                raise WeightSyncError(f"{update.group_name}: the publication ended before all had joined")
        if isinstance(made[0], BaseException):
            raise made[0]
        return made[0]

    def _fill(self, bucket: list[WeightSpec], weights: Iterator[tuple[str, Tensor]]) -> Tensor:
        """Put the next weights into the send buffer."""
        total = bucket_bytes(bucket)
        if self._buffer is None or self._buffer.numel() < total:
            device = "cuda" if self._backend == "nccl" else "cpu"
            self._buffer = torch.zeros(total, dtype=torch.uint8, device=device)
        buffer = self._buffer[:total]
        views = bucket_views(buffer, bucket)
        for _ in bucket:  # which holds the weights that come next, in an order of its own
            name, value = next(weights)
            view = views.pop(name, None)
            if view is None or view.shape != value.shape or view.dtype != value.dtype:
                raise WeightSyncError(f"the engine yielded {name} {value.dtype} {list(value.shape)}, which was not due")
            view.copy_(value.detach())
        return buffer


class _Publication:
    """The request to the controller, running in a thread."""

    def __init__(self, control: PublishControl, update: WeightUpdate) -> None:
        self._error: BaseException | None = None
        self._update = update
        self._thread = threading.Thread(
            target=self._run, args=(control, update), name=f"publish version {update.version}", daemon=True
        )
        self._thread.start()

    def _run(self, control: PublishControl, update: WeightUpdate) -> None:
        try:
            control.publish(update)
        except BaseException as failure:  # noqa: BLE001 - raised in the thread that waits
            self._error = failure

    def is_over(self) -> bool:
        """Well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        """Until the fleet serves the version; raises what the request raised."""
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise WeightSyncError(f"version {self._update.version} was sent, but is not served after {timeout_s:g} s")


def plan_buckets(specs: Iterable[WeightSpec], max_bytes: int) -> list[list[WeightSpec]]:
    """Cut the weights, in order, into broadcasts of at most `max_bytes`; a larger weight gets one of its own. Within a
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
