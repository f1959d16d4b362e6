"""Ranks of an update group meet those that torch's own helper makes, and agree on the bytes of a bucket."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areal.server_side import FOLDER
from areal.server_side.areal_transfer import group, layout
from areal.server_side.areal_transfer.group import TransferError
from areal.system.network import Host
from areal.weights.update_group import serve_store

DTYPES = ["float32", "int32", "bfloat16", "float16", "float8_e4m3fn", "uint8"]
SHAPES = [[3], [2, 2], [5], [], [7], [0, 4]]


def test_a_bucket_has_no_padding_and_shares_its_bytes() -> None:
    assert layout.bucket_bytes(DTYPES, SHAPES) == 12 + 16 + 10 + 2 + 7 + 0
    buffer = torch.zeros(50, dtype=torch.uint8)
    views = layout.views(buffer, DTYPES, SHAPES)
    assert [list(view.shape) for view in views] == SHAPES
    assert [str(view.dtype) for view in views] == [f"torch.{dtype}" for dtype in DTYPES]
    views[3].fill_(1.5)
    assert buffer[38:40].view(torch.float16).item() == 1.5
    views[4].copy_(torch.full((7,), 0.5))
    assert buffer[40:47].tolist() == [0x30] * 7
    assert buffer[47:].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("dtypes", "shapes", "values"),
    [
        (["bfloat16", "float32"], [[3], [2]], r"\b1\b.* float32.* 6\b"),
        (["float33"], [[3]], "'float33'"),
        (["Tensor"], [[3]], "'Tensor'"),
        (["float32"], [[3], [2]], r"\b2\b"),
        (["float32"], [[5]], r"\b16\b"),
    ],
)
def test_a_bucket_that_cannot_be_viewed_is_refused(dtypes: list[str], shapes: list[list[int]], values: str) -> None:
    with pytest.raises(ValueError, match=values):
        layout.views(torch.zeros(16, dtype=torch.uint8), dtypes, shapes)


def test_weights_are_sorted_by_item_size_and_the_sort_is_stable() -> None:
    dtypes = ["uint8", "bfloat16", "float32", "float16", "float64", "int32"]
    order = layout.widest_first(dtypes)
    assert [dtypes[index] for index in order] == ["float64", "float32", "int32", "bfloat16", "float16", "uint8"]
    sizes = layout.bucket_bytes([dtypes[index] for index in order], [[3]] * 6)
    assert sizes == 24 + 12 + 12 + 6 + 6 + 3


FOREIGN_RANK = """
import sys
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, rendezvous
url, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store, _, _ = next(rendezvous(url, rank, world_size))
store = PrefixStore("weights-1", store)
group, _ = _new_process_group_helper(
    world_size, rank, [], Backend("gloo"), store, group_name="weights-1", timeout=dist.constants.default_pg_timeout
)
_world.pg_group_ranks[group] = {i: i for i in range(world_size)}
buffer = torch.empty(1000, dtype=torch.uint8)
dist.broadcast(buffer, src=0, group=group)
print(int(buffer.long().sum()))
"""


def test_a_group_with_a_rank_that_is_created_as_in_sglang_broadcasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = serve_store(Host(), "secret", timeout_s=250)
    url = f"tcp://127.0.0.1:{store.port}"
    foreign = subprocess.Popen([sys.executable, "-c", FOREIGN_RANK, url, "1", "3"], stdout=subprocess.PIPE)
    buffers = [torch.arange(1000).to(torch.uint8), torch.empty(1000, dtype=torch.uint8)]
    threads = [
        threading.Thread(target=exchange, args=(store.port, rank, buffer))
        for rank, buffer in zip((0, 2), buffers, strict=True)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # each has its limit
        assert torch.equal(buffers[0], buffers[1])
        printed, _ = foreign.communicate(timeout=100)
    finally:
        foreign.kill()
        foreign.wait()
    assert int(printed) == int(buffers[0].long().sum())


def exchange(port: int, rank: int, buffer: Tensor) -> None:
    joined = group.connect(
        "127.0.0.1", port, rank=rank, world_size=3, group_name="weights-1", backend="gloo", timeout_s=250
    )
    group.broadcast(joined, buffer, 250)
    group.leave(joined)


def test_a_rank_without_peers_fails_within_the_time_limit() -> None:
    store = serve_store(Host(), "secret", timeout_s=200)
    names = {"group_name": "g", "backend": "gloo", "timeout_s": 0.5}
    with pytest.raises(TransferError, match=r"\bg\b.* 1 .* 2 .* 0\.5 s"):
        group.connect("127.0.0.1", store.port, rank=1, world_size=2, **names)
    with pytest.raises(ValueError, match="'mpi'"):
        group.connect("127.0.0.1", store.port, rank=1, world_size=2, **(names | {"backend": "mpi"}))


def test_a_broadcast_fails_at_its_time_limit_and_when_the_peer_leaves() -> None:
    was_initialized = dist.is_initialized()  # other tests of this process may have done that
    store = serve_store(Host(), "secret", timeout_s=200)
    made: dict[int, group.TransferGroup] = {}

    def join(rank: int) -> None:
        made[rank] = group.connect(
            "127.0.0.1", store.port, rank=rank, world_size=2, group_name="g", backend="gloo", timeout_s=200
        )

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sender, receiver = made[0], made[1]
    buffer = torch.empty(1 << 20, dtype=torch.uint8)
    with pytest.raises(TransferError, match=r"\bg\b"):
        group.broadcast(receiver, buffer, 0.2)
    group.leave(sender)
    with pytest.raises(TransferError, match=r"\bg\b"):
        group.broadcast(receiver, buffer, 1e4)  # nobody may wait for so long
    group.leave(receiver)
    group.leave(receiver)
    with pytest.raises(TransferError, match=r"\bg\b"):
        group.broadcast(receiver, buffer, 60)
    assert dist.is_initialized() == was_initialized, "torch's own register of groups is left alone"


def test_a_group_is_dropped_in_a_separate_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def abort(self) -> None:
            aborted.append(True)

    aborted: list[bool] = []
    made = group.TransferGroup("g", Group())  # type: ignore[arg-type]
    gone = weakref.ref(made.groups[0])
    started: list[bool] = []

    class Thread(threading.Thread):
        def start(self) -> None:
            assert gone() is not None, "it is there until the thread drops it"
            super().start()
            self.join()
            started.append(gone() is None)

    monkeypatch.setattr(group.threading, "Thread", Thread)
    group.leave(made)
    assert started == [True]
    assert aborted == [True], "what waits in it ends"


def test_an_absent_store_is_an_immediate_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(TransferError, match=f"127.0.0.1:{port}"):
        group.open_store("127.0.0.1", port, timeout_s=200)


def test_a_master_that_dies_during_the_connection_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_CONNECT_TIMEOUT_S", 0.5)
    server = socket.create_server(("127.0.0.1", 0))

    def die_at_the_greeting() -> None:
        server.accept()[0].close()  # the first connection only asks whether somebody is there
        connection, _ = server.accept()
        server.close()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    port = server.getsockname()[1]
    threading.Thread(target=die_at_the_greeting, daemon=True).start()
    with pytest.raises(TransferError, match=f"127.0.0.1:{port}"):
        group.open_store("127.0.0.1", port, timeout_s=1e4)


def test_a_connection_attempt_fails_at_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    store = serve_store(Host(), "secret", timeout_s=20)
    monkeypatch.setattr(group, "_CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(group, "TCPStore", lambda *_, **__: released.wait(100))
    with pytest.raises(TransferError, match=r"\b0\.2 s"):
        group.open_store("127.0.0.1", store.port, timeout_s=20)
    released.set()


def test_a_broadcast_that_never_completes_fails_at_its_time_limit() -> None:
    """NCCL's own limit ends the process."""

    class Work:
        def is_completed(self) -> bool:
            return False

        def wait(self) -> None: ...

    class Group:
        def broadcast(self, tensors: list[Tensor], options: object) -> Work:
            return Work()

    hanging = group.TransferGroup("g", Group())  # type: ignore[arg-type]
    with pytest.raises(TransferError, match=r"\bg\b.* 0\.1 s"):
        group.broadcast(hanging, torch.empty(3, dtype=torch.uint8), 0.1)


@pytest.mark.parametrize("ends_by", ["its limit", "give_up"])
def test_a_first_broadcast_that_blocks_while_it_connects_fails_in_time_and_so_does_leaving(ends_by: str) -> None:
    """NCCL connects the ranks in that call, which blocks when a peer is dead, and holds the lock that abort needs."""
    blocked, released = threading.Event(), threading.Event()
    main_thread = threading.get_ident()

    class Group:
        def broadcast(self, tensors: list[Tensor], options: object) -> None:
            assert threading.get_ident() != main_thread, "the caller's thread must not block: it sends heartbeats"
            blocked.set()
            assert released.wait(100)
            raise RuntimeError("aborted")

        def abort(self) -> None:
            assert released.wait(100)

    joining = group.TransferGroup("g", Group())  # type: ignore[arg-type]
    limit_s = 0.1 if ends_by == "its limit" else 1e4
    with pytest.raises(TransferError, match=r"\bg\b"):
        group.broadcast(joining, torch.empty(3, dtype=torch.uint8), limit_s, give_up=lambda: ends_by == "give_up")
    assert blocked.wait(100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "_LEAVE_S", 0.01)
        group.leave(joining)  # returns although the abort waits
    released.set()


def test_a_group_of_nccl_connects_without_blocking_and_its_watchdog_is_later_than_every_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)

    connected: list[torch.device] = []

    class Nccl:
        def __init__(self, store: object, rank: int, world_size: int, options: object) -> None:
            self.made_with = rank, world_size, options

        def eager_connect_single_device(self, device: torch.device) -> None:
            connected.append(device)

    Nccl.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(group.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(group.torch.cuda, "current_device", lambda: 3)
    store = serve_store(Host(), "secret", timeout_s=20)
    made = group.meet(
        store, rank=0, world_size=3, group_name="g", backend="nccl", timeout_s=60, broadcast_s=300
    ).groups[0]
    rank, world_size, options = made.made_with  # type: ignore[attr-defined]
    assert (rank, world_size) == (0, 3)
    assert options.config.blocking == 0
    assert options._timeout.total_seconds() == 600
    assert connected == [torch.device("cuda", 3)]


def test_a_store_keeps_the_time_limit_it_was_opened_with() -> None:
    master = serve_store(Host(), "secret", timeout_s=20)
    client = group.open_store("127.0.0.1", master.port, timeout_s=20)
    assert client.timeout.total_seconds() == 20
    client.set("a", "b")
    assert master.get("a") == b"b"


def test_the_transfer_package_imports_without_areal(tmp_path: Path) -> None:
    code = "import sys; from areal_transfer import group, layout; assert 'areal' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(FOLDER)}, check=True, timeout=250)
