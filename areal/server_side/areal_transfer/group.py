"""The ranks of an update group: how they find each other, send, and leave.

Rank 0, a trainer, holds the store. The keys are those of torch's helper for a new process group, because SGLang
creates its side with that helper. This side calls the backend directly, so it needs no default process group and
leaves no state in torch. Every wait ends at its limit, or when `give_up()` is true.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from math import inf
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

_T = TypeVar("_T")

_POLL_S = 0.0005
GIVE_UP_S = 1.0
_CONNECT_TIMEOUT_S = 10.0
_START_POLL_S = 0.01
_LEAVE_S = 1.0
_STORED_FOR = {"gloo": "cpu", "nccl": "cuda"}
"""Backend -> the device below whose name torch keeps its keys: the first of those it works for."""


TRAINERS_VARIABLE = "AREAL_TRAINER_ADDRESSES"
"""Environment variable of a server: the addresses of the trainers that may update it, separated by commas."""


def is_trainer(host: str, environ: Mapping[str, str]) -> bool:
    """Whether a server with these environment variables may join a group whose store is at `host`.

    The launcher sets the addresses. Without any, only loopback addresses are allowed. Nothing is looked up.
    """
    hosts = [part.strip() for part in environ.get(TRAINERS_VARIABLE, "").split(",") if part.strip()]
    if hosts:
        return host in hosts
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class TransferError(RuntimeError):
    """Ranks did not meet, or a broadcast failed or took too long."""


class TransferGroup:
    """One rank of a group. Opaque: `connect` or `meet` returns it, `broadcast` and `leave` use it."""

    def __init__(self, name: str, group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL) -> None:
        self.name = name
        self.groups = [group]
        """The only reference to torch's group; none once left."""
        self.is_connected = isinstance(group, dist.ProcessGroupGloo)
        """The ranks have exchanged data or, with gloo, have met. Until then a broadcast of NCCL may block."""


def open_store(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """Connect to the key-value store through which the ranks of a group find each other.

    A client that finds no store gets a TransferError at once, because the trainer listens before its address is sent.
    A client whose trainer dies during the connection gets it after _CONNECT_TIMEOUT_S.
    """
    try:  # torch would retry until its time-out
        socket.create_connection((host, port), timeout=min(timeout_s, _CONNECT_TIMEOUT_S)).close()
        return _greet(host, port, timeout_s)
    except (OSError, RuntimeError) as error:
        raise TransferError(f"no store of an update group at {host}:{port} ({_first_line(error)})") from error


def _greet(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect in a thread, because torch's waits between two tries cannot be limited."""
    limit_s = min(timeout_s, _CONNECT_TIMEOUT_S)
    limit = timedelta(seconds=limit_s)
    store = _abandoned_after(
        lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit),
        f"greet {host}:{port}",
        time.monotonic() + limit_s,
    )
    if store is None:
        raise TimeoutError(f"it did not answer in {limit_s:g} s")
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _abandoned_after(
    call: Callable[[], _T], name: str, deadline: float, give_up: Callable[[], bool] | None = None
) -> _T | None:
    """The result of `call` in a daemon thread; None at `deadline` (monotonic) or once `give_up()` is true.

    The thread is then left running. Raises the RuntimeError of `call`.
    """
    made: list[_T | RuntimeError] = []

    def run() -> None:
        try:
            made.append(call())
        except RuntimeError as error:
            made.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    while not made:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or (give_up is not None and give_up()):
            return None
        thread.join(left_s if give_up is None else min(left_s, _START_POLL_S))
    result = made.pop()
    if isinstance(result, RuntimeError):
        raise result
    return result


def nccl_options(timeout_s: float) -> dist.ProcessGroupNCCL.Options:
    """Options of a group of NCCL whose longest wait for another rank is `timeout_s`.

    blocking = 0: the call that connects the ranks returns at once, and the connection is made in the background. The
    default call has no time limit and cannot be aborted. torch's watchdog ends the whole process at its limit, so that
    limit is later than every wait of this module.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0
    options._timeout = timedelta(seconds=2 * timeout_s)
    return options


def meet(
    store: TCPStore,
    *,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout_s: float,
    broadcast_s: float = 0.0,
) -> TransferGroup:
    """Join the group over an open store; blocks until all ranks have joined. TransferError after `timeout_s`.

    `broadcast_s`: the longest time limit of a later broadcast. With nccl this call starts the connection of the ranks
    on the current CUDA device and does not wait for it, because SGLang's ranks connect at the first broadcast.
    """
    if backend not in _STORED_FOR:
        raise ValueError(f"unknown backend {backend!r} of an update group: give gloo or nccl")
    named = PrefixStore(f"{_STORED_FOR[backend]}/", PrefixStore(f"{group_name}/", PrefixStore(group_name, store)))
    timeout = timedelta(seconds=timeout_s)
    try:
        if backend == "nccl":
            nccl = dist.ProcessGroupNCCL(named, rank, world_size, nccl_options(max(timeout_s, broadcast_s)))
            nccl.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
            return TransferGroup(group_name, nccl)
        if not _is_loopback(store.host):  # the interface: GLOO_SOCKET_IFNAME, else that of the host's name
            return TransferGroup(group_name, dist.ProcessGroupGloo(named, rank, world_size, timeout=timeout))
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] - no stub
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=store.host)]
        options._timeout = timeout
        return TransferGroup(group_name, dist.ProcessGroupGloo(named, rank, world_size, options))
    except RuntimeError as error:
        raise TransferError(
            f"update group {group_name}: rank {rank} of {world_size} did not meet the others within "
            f"{timeout_s:g} s ({_first_line(error)})"
        ) from error


def connect(
    host: str, port: int, *, rank: int, world_size: int, group_name: str, backend: str, timeout_s: float
) -> TransferGroup:
    """Join the group whose store rank 0 holds at host:port; blocks until all ranks have joined. TransferError when
    there is no store, or not all ranks join within `timeout_s`."""
    store = open_store(host, port, timeout_s=timeout_s)
    return meet(store, rank=rank, world_size=world_size, group_name=group_name, backend=backend, timeout_s=timeout_s)


def broadcast(
    group: TransferGroup, buffer: Tensor, timeout_s: float, give_up: Callable[[], bool] | None = None
) -> None:
    """Send (rank 0) or receive `buffer`. TransferError after `timeout_s`, when a peer has ended, or GIVE_UP_S after
    `give_up()` became true; such a group cannot be used again. The peers may have all data, and report it, before the
    handle of this rank is complete.

    The error does not keep torch's handle of the broadcast, which shares the connections with the group: the code that
    drops it last, for example the garbage collector in an event loop, would run gloo's destructor (see `leave`).
    """
    work: dist.Work | None = None
    given_up_s = inf
    deadline = time.monotonic() + timeout_s
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=timeout_s)
    try:
        work = _start(group, buffer, options, deadline, give_up)
        while True:
            if given_up_s == inf and give_up is not None and give_up():
                given_up_s = time.monotonic()
            if work is not None and work.is_completed():
                break
            if time.monotonic() > deadline:
                raise TransferError(f"update group {group.name}: no broadcast in {timeout_s:g} s")
            if work is None or time.monotonic() > given_up_s + GIVE_UP_S:
                raise TransferError(f"update group {group.name}: broadcast given up")
            time.sleep(_POLL_S)
        work.wait()
    except RuntimeError as error:
        if isinstance(error, TransferError):
            raise
        raise TransferError(f"update group {group.name}: {_first_line(error)}") from error
    finally:
        del work


def _start(
    group: TransferGroup,
    buffer: Tensor,
    options: dist.BroadcastOptions,
    deadline: float,
    give_up: Callable[[], bool] | None,
) -> dist.Work | None:
    """None when the call did not return by `deadline`, or `give_up()` is true."""
    if not group.groups:
        raise TransferError(f"update group {group.name} was left")

    def start() -> dist.Work:  # no variable here may hold torch's group
        return group.groups[0].broadcast([buffer], options)  # pyright: ignore[reportAttributeAccessIssue] - no stub

    if group.is_connected:
        return start()
    # The first call of NCCL waits until all ranks are connected, holds NCCL's lock and cannot be aborted.
    work = _abandoned_after(start, f"connect {group.name}", deadline, give_up)
    group.is_connected = work is not None
    return work


def leave(group: TransferGroup) -> None:
    """Leave at once, without waiting for other ranks; a pending broadcast of another rank fails. May be repeated.

    Gloo's destructor waits until all data is sent, and with a hanging peer until that peer is killed. It therefore runs
    in a separate thread, not where the last reference is dropped. Usually it ends at once and this call waits for it,
    because a thread that is in torch when the interpreter exits aborts the process.
    """
    groups, group.groups = group.groups, []

    def end() -> None:  # no variable here may hold torch's group
        try:
            if groups:
                groups[0].abort()  # that of NCCL waits for a call that still connects the ranks
        finally:
            groups.clear()

    leaving = threading.Thread(target=end, name=f"leave {group.name}", daemon=True)
    leaving.start()
    leaving.join(_LEAVE_S)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False


def _first_line(error: BaseException) -> str:
    """The first line of torch's message, without source positions and hints."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.partition(".cc:")[2].partition("] ")[2].partition(". ")[0] or line
