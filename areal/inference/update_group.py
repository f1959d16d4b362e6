"""Owns the collective group that carries weights from trainer to servers, and the layout of one broadcast.

Shared by both ends. The group lives outside torch's default process group: the trainer has one of its own, a server
has none. Every wait here ends by itself: after `timeout_s`, or when the caller's `give_up` says so.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from areal.api.data import WeightSpec
from areal.api.errors import RequestError, WeightSyncError
from areal.system.network import is_loopback

ALIGNMENT_BYTES = 16
"""Every weight of a bucket starts at a multiple of this, so that its bytes may be viewed as any dtype."""
_POLL_S = 0.0005
_CONNECT_TIMEOUT_S = 10.0
_LEAVE_S = 1.0


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name` ("bfloat16"). RequestError for anything else."""
    dtype = torch.__dict__.get(name)
    if not isinstance(dtype, torch.dtype):
        raise RequestError(f"unknown weight dtype {name!r}: give a torch dtype name such as bfloat16")
    return dtype


def spec_bytes(spec: WeightSpec) -> int:
    """Bytes of one weight."""
    count = 1
    for size in spec.shape:
        count *= size
    return count * torch_dtype(spec.dtype).itemsize


def bucket_layout(specs: list[WeightSpec]) -> tuple[list[int], int]:
    """Where each weight starts in the bucket, and the bucket's size, both in bytes."""
    offsets: list[int] = []
    end = 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec_bytes(spec) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def bucket_views(buffer: Tensor, specs: list[WeightSpec]) -> list[Tensor]:
    """Each weight of a bucket as a tensor over the bytes of `buffer`, without copying."""
    offsets, total = bucket_layout(specs)
    if buffer.numel() < total:
        raise RequestError(f"bucket of {total} bytes does not fit into a buffer of {buffer.numel()}")
    views: list[Tensor] = []
    for spec, start in zip(specs, offsets, strict=True):
        flat = buffer[start : start + spec_bytes(spec)]
        views.append(flat.view(torch_dtype(spec.dtype)).view(spec.shape))
    return views


def open_store(host: str, port: int, *, is_master: bool, timeout_s: float) -> TCPStore:
    """The key-value store through which the ranks of a group find each other; port 0 lets the master choose.

    A client that finds no master gets a WeightSyncError at once: it is there before anybody is told of it. One whose
    master dies while they greet gets it after _CONNECT_TIMEOUT_S.
    """
    try:
        if not is_master:  # torch would go on trying for the whole time-out
            socket.create_connection((host, port), timeout=min(timeout_s, _CONNECT_TIMEOUT_S)).close()
            return _greet(host, port, timeout_s)
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except (OSError, RuntimeError) as error:
        raise WeightSyncError(f"no store of an update group at {host}:{port} ({_first_line(error)})") from error


def _greet(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect in a thread that is left behind when it takes too long: torch waits between two tries as it likes."""
    limit = timedelta(seconds=min(timeout_s, _CONNECT_TIMEOUT_S))
    made: list[TCPStore | RuntimeError] = []

    def connect() -> None:
        try:
            made.append(TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit))
        except RuntimeError as error:
            made.append(error)

    thread = threading.Thread(target=connect, name=f"greet {host}:{port}", daemon=True)
    thread.start()
    thread.join(limit.total_seconds())
    if not made:
        raise TimeoutError(f"it did not answer in {limit.total_seconds():g} s")
    if isinstance(made[0], RuntimeError):
        raise made[0]
    made[0].set_timeout(timedelta(seconds=timeout_s))
    return made[0]


class UpdateGroup:
    """A process group of the trainer's rank 0 and the servers; rank 0 sends."""

    def __init__(
        self,
        store: TCPStore,
        *,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float,
        join_timeout_s: float | None = None,
    ) -> None:
        """Meet the other ranks; blocks until all are there or `join_timeout_s` (else `timeout_s`) is over.

        `timeout_s` limits each broadcast. WeightSyncError when somebody does not come in time.
        """
        self.group_name = group_name
        self.world_size = world_size
        self.backend = backend
        self._timeout_s = timeout_s
        limit_s = join_timeout_s or timeout_s
        named = PrefixStore(group_name, store)
        try:
            group = _make_group(named, rank, world_size, backend, limit_s, loopback=is_loopback(store.host))
        except RuntimeError as error:
            raise WeightSyncError(
                f"update group {group_name}: rank {rank} of {world_size} did not meet the others within "
                f"{limit_s:g} s ({_first_line(error)})"
            ) from error
        self._groups = [group]
        """The one group; none once left."""

    def broadcast(self, buffer: Tensor, give_up: Callable[[], bool] | None = None) -> None:
        """Send (rank 0) or receive `buffer`. WeightSyncError after the time-out or once `give_up()` is true.

        The error does not keep torch's handle of the broadcast, which shares the connections with the group: whoever
        dropped it last, be it the garbage collector in an event loop, could run gloo's destructor (see `close`).
        """
        work: dist.Work | None = None
        deadline = time.monotonic() + self._timeout_s
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self._timeout_s)
        try:
            work = self._start(buffer, options)
            while True:
                gives_up = give_up is not None and give_up()
                if work.is_completed():
                    break
                if time.monotonic() > deadline:
                    raise WeightSyncError(f"update group {self.group_name}: no broadcast in {self._timeout_s:g} s")
                if gives_up:
                    raise WeightSyncError(f"update group {self.group_name}: broadcast given up")
                time.sleep(_POLL_S)
            work.wait()
        except RuntimeError as error:
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"update group {self.group_name}: {_first_line(error)}") from error
        finally:
            del work

    def _start(self, buffer: Tensor, options: dist.BroadcastOptions) -> dist.Work:
        if not self._groups:
            raise WeightSyncError(f"update group {self.group_name} was left")
        return self._groups[0].broadcast([buffer], options)  # pyright: ignore[reportAttributeAccessIssue] - no stub

    def close(self) -> None:
        """Leave at once, without waiting for anybody; a pending broadcast of another rank fails. May be repeated.

        Gloo's destructor waits for what is being sent, and to a peer that hangs that lasts until the peer is killed:
        it runs in a thread of its own, not wherever the last reference is dropped. It is usually done at once, and
        then waited for: a thread that is in torch when the interpreter ends aborts the process.
        """
        groups, self._groups = self._groups, []
        if groups:  # no variable here may hold the group
            groups[0].abort()
        leaving = threading.Thread(target=groups.clear, name=f"leave {self.group_name}", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)


def _make_group(
    store: PrefixStore, rank: int, world_size: int, backend: str, timeout_s: float, *, loopback: bool
) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] - no stub
        hostname = "127.0.0.1" if loopback else ""
        device = dist.ProcessGroupGloo.create_device(hostname=hostname) if hostname else None
        options._devices = [device or dist.ProcessGroupGloo.create_default_device()]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, world_size, options)
    if backend == "nccl":
        nccl_options = dist.ProcessGroupNCCL.Options()
        # NCCL's own watchdog ends the whole process; our deadline must come first.
        nccl_options._timeout = timeout * 2
        return dist.ProcessGroupNCCL(store, rank, world_size, nccl_options)
    raise RequestError(f"unknown backend {backend!r} of an update group: give gloo or nccl")


def _first_line(error: BaseException) -> str:
    """Of torch's message, without where in its source and what to read."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.partition(".cc:")[2].partition("] ")[2].partition(". ")[0] or line
