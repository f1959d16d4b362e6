"""A peer process that dies or hangs before the first bucket is an error here, and heartbeats continue."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from areal.server_side.areal_transfer import group
from areal.server_side.areal_transfer.group import TransferError
from areal.system.network import Host
from areal.weights.update_group import serve_store

PEER = """
import sys
from areal.server_side.areal_transfer import group
port, rank = int(sys.argv[1]), int(sys.argv[2])
made = group.connect("127.0.0.1", port, rank=rank, world_size=2, group_name="g", backend="gloo", timeout_s=200)
print("met", flush=True)
sys.stdin.read()
"""
BYTES = 64 * 2**20
"""More than the buffers of a socket: a broadcast to a dead peer cannot complete."""


@contextmanager
def beating() -> Iterator[list[int]]:
    """Counts how often another thread of this process runs."""
    beats, stopped = [0], threading.Event()

    def beat() -> None:
        while not stopped.wait(0.01):
            beats[0] += 1

    thread = threading.Thread(target=beat, name="beats")
    thread.start()
    try:
        yield beats
    finally:
        stopped.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("own_rank", [0, 1], ids=["the receiver", "the sender"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_peer_that_is_lost_before_the_first_bucket_is_an_error_within_the_limit(own_rank, number):
    store = serve_store(Host(), "secret", timeout_s=200)
    argv = [sys.executable, "-c", PEER, str(store.port), str(1 - own_rank)]
    peer = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        made = group.connect(
            "127.0.0.1", store.port, rank=own_rank, world_size=2, group_name="g", backend="gloo", timeout_s=200
        )
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"met\n"
        peer.send_signal(number)
        # A dead peer is noticed at once, so that its limit is never reached. A hanging one is not.
        limit_s = 1.0 if number == signal.SIGSTOP else 1e4
        with beating() as beats, pytest.raises(TransferError):
            group.broadcast(made, torch.zeros(BYTES, dtype=torch.uint8), limit_s)
        if number == signal.SIGSTOP:
            assert beats[0] > 3
        group.leave(made)
    finally:
        peer.kill()
        peer.wait()
