"""The collective group that carries weights from the trainer to the servers, with areal's records and errors.

Both ends use it. The protocol is that of `areal.server_side.areal_transfer`, which SGLang and vLLM servers use too. The
group is separate from torch's default process group. Every wait ends after `timeout_s`, or when the caller's `give_up`
returns true.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from areal.api.data import WeightSpec
from areal.api.errors import RequestError, WeightSyncError
from areal.server_side.areal_transfer import group, layout
from areal.system.network import TRAINERS_VARIABLE, Host, is_trainer, listen, required_token
from areal.system.process import run_main

is_finite = layout.is_finite
PART_BYTES = 2**26
"""Largest broadcast of `broadcast_bytes`."""


def bucket_bytes(specs: list[WeightSpec]) -> int:
    """Size of the flat bucket that holds these weights. Raises RequestError when it cannot be viewed in place."""
    with _as_ours():
        return layout.bucket_bytes([spec.dtype for spec in specs], [spec.shape for spec in specs])


def bucket_views(buffer: Tensor, specs: list[WeightSpec]) -> dict[str, Tensor]:
    """Each weight of a bucket, by name, as a tensor over the bytes of `buffer`, without copying."""
    with _as_ours():
        views = layout.views(buffer, [spec.dtype for spec in specs], [spec.shape for spec in specs])
    return {spec.name: view for spec, view in zip(specs, views, strict=True)}


def serve_store(host: Host, token: str, *, timeout_s: float) -> TCPStore:
    """Serve the store through which the ranks of a group find each other, on a free port of `host`.

    `token`: the run's. The store itself checks none: the keys of a group begin with its name, which is random and which
    the servers get by requests with the token.
    """
    listening = listen(host, token)  # torch alone would listen on every interface
    return TCPStore(
        host.advertise,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )


def open_store(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """See `areal_transfer.group.open_store`. Raises WeightSyncError when there is no store."""
    with _as_ours():
        return group.open_store(host, port, timeout_s=timeout_s)


def check_trainer(host: str) -> None:
    """RequestError when this server must not connect to a store at `host`. See `areal.system.network.is_trainer`."""
    if not is_trainer(host, os.environ):
        message = f"{host} is no address of a trainer of this run ({TRAINERS_VARIABLE})"
        raise RequestError(message, code="weights.unknown_trainer")


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
        """Form the group; blocks until all ranks have joined, at most `join_timeout_s` (else `timeout_s`).

        `timeout_s` limits each broadcast. Raises WeightSyncError when a rank does not join in time.
        """
        self.group_name = group_name
        self.backend = backend
        self._timeout_s, self._sends = timeout_s, rank == 0
        limit_s = join_timeout_s or timeout_s
        with _as_ours():
            self._group = group.meet(
                store,
                rank=rank,
                world_size=world_size,
                group_name=group_name,
                backend=backend,
                timeout_s=limit_s,
                broadcast_s=timeout_s,
            )

    def broadcast(self, buffer: Tensor, give_up: Callable[[], bool] | None = None) -> None:
        """Send (rank 0) or receive `buffer`. Raises WeightSyncError after the time-out or once `give_up()` is true."""
        with _as_ours():
            group.broadcast(self._group, buffer, self._timeout_s, give_up)

    def broadcast_bytes(
        self, content: NDArray[np.uint8], device: torch.device, give_up: Callable[[], bool] | None = None
    ) -> None:
        """`broadcast` of bytes in host memory, in parts through `device`, that of the backend."""
        for begin in range(0, len(content), PART_BYTES):
            part = torch.from_numpy(content[begin : begin + PART_BYTES])
            is_filled = self._sends or device.type == "cpu"
            buffer = part.to(device) if is_filled else torch.empty_like(part, device=device)
            self.broadcast(buffer, give_up)
            if buffer is not part and not self._sends:
                part.copy_(buffer)

    def close(self) -> None:
        """Leave without waiting; a pending broadcast of another rank fails. May be repeated."""
        group.leave(self._group)


@contextmanager
def _as_ours() -> Iterator[None]:
    try:
        yield
    except group.TransferError as error:
        raise WeightSyncError(str(error), code="weights.transfer_failed") from error
    except ValueError as error:
        raise RequestError(str(error), code="weights.invalid_bucket") from error


# ----------------------------------------------------------------------------------------------------------------------
# The store in which the ranks of a server over several machines find each other, on loopback:
#
# `python -m areal.weights.update_group` prints its port and ends with the process that started it.

_TIMEOUT_S = 600.0


def _serve_parts() -> None:
    store = serve_store(Host(), required_token("the store of the parts"), timeout_s=_TIMEOUT_S)
    sys.stdout.write(f"{store.port}\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    run_main(_serve_parts)
