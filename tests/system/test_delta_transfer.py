"""A folder is made from an earlier one and the differences since then, and always has the trainer's bytes."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from areal.system import folders
from areal.system.durable import is_complete
from areal.system.folder_delta import change, write_delta
from areal.system.folders import (
    DELTA_FILE,
    PULLED_WEIGHTS,
    FolderPuller,
    FolderServer,
    Pulled,
    exclusive,
    folder_routes,
)
from areal.system.network import Host
from tests.expect import raises_code
from tests.system.test_folder_delta import changes

SIZE = 200_000


@pytest.fixture(autouse=True)
def short_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folders, "_FIRST_PAUSE_S", 0.0)


@dataclass
class Trainer:
    """Versions v0, v1, ... of a file of random bytes, of which 1% change each time."""

    root: Path
    server: FolderServer

    def __post_init__(self) -> None:
        self.urls: list[str] = []
        self.deltas: list[str] = []
        """The difference between version i and the next one."""

    def folder(self, version: int) -> Path:
        return self.root / f"v{version:06d}"

    def publish(self) -> None:
        version = len(self.urls)
        draw = np.random.default_rng(version)
        content = draw.integers(0, 256, SIZE, np.uint8)
        if version:
            content = np.fromfile(self.folder(version - 1) / "model", np.uint8)
            content[draw.random(SIZE) < 0.01] += 1
        folder = self.folder(version)
        folder.mkdir()
        content.tofile(folder / "model")
        if version:
            difference = self.root / f"delta_v{version:06d}"
            difference.mkdir()
            write_delta(difference / DELTA_FILE, changes(self.folder(version - 1), folder))
            self.deltas.append(self.server.offer(difference))
        self.urls.append(self.server.offer(folder))

    def name(self, version: int) -> str:
        return self.urls[version].rpartition("/")[2]

    def chain(self, start: int, end: int) -> dict[str, str]:
        return {self.name(version): self.deltas[version] for version in range(start, end)}


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path, FolderServer(Host(), "secret"))
    for _ in range(4):
        made.publish()
    yield made
    made.server.close()


@pytest.fixture
def puller() -> Iterator[FolderPuller]:
    made = FolderPuller("secret", {})
    yield made
    made.close()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Name and received bytes of each transfer."""
    result: list[tuple[str, int]] = []
    run = folders._Transfer.run

    def noted(self: folders._Transfer, final: Path) -> None:
        run(self, final)
        result.append((final.name.partition("-")[0], self.num_copied))

    monkeypatch.setattr(folders._Transfer, "run", noted)
    return result


def is_version(pulled: Pulled, trainer: Trainer, version: int) -> bool:
    files = {path.name: path.read_bytes() for path in pulled.path.iterdir() if path.name not in ("COMPLETE", ".list")}
    return is_complete(pulled.path) and files == {"model": (trainer.folder(version) / "model").read_bytes()}


def test_versions_are_made_from_the_newest_one_that_is_here(
    trainer: Trainer, puller: FolderPuller, copied: list[tuple[str, int]]
) -> None:
    """The first pull has no earlier version; the third one skips a version and takes two differences."""
    for version in (0, 1, 3):
        pulled = puller.pull(trainer.urls[version], (), trainer.chain(0, version))
        assert (pulled.problem, is_version(pulled, trainer, version)) == ("", True)
    names = [name for name, _ in copied]
    assert names == ["v000000", "delta_v000001", "v000001", "delta_v000002", "delta_v000003", "v000003"]
    sizes = [size for _, size in copied]
    assert (sizes[0], sizes[2], sizes[5]) == (SIZE, 0, 0)
    assert max(sizes[1], sizes[3], sizes[4]) < 0.05 * SIZE
    assert pulled.num_bytes == sizes[3] + sizes[4]
    assert puller.pull(trainer.urls[3]).num_bytes == 0
    left = {path.name.partition("-")[0] for path in pulled.path.parent.iterdir() if path.is_dir()}
    assert left == {"v000001", "v000003"}


def test_what_another_process_pulls_stays(trainer: Trainer, puller: FolderPuller) -> None:
    root = puller.pull(trainer.urls[0]).path.parent
    puller.pull(trainer.urls[1])
    others = [root / f".{trainer.name(3)}", root / trainer.deltas[2].rpartition("/")[2]]
    for folder in others:
        folder.mkdir()
        os.utime(folder, (1, 1))
    with exclusive(root / ".pulling") as is_held:
        assert is_held
        puller.pull(trainer.urls[1])
    assert [folder.is_dir() for folder in others] == [True, True]


def test_a_process_that_pulls_is_waited_for_while_it_writes(
    trainer: Trainer, puller: FolderPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = puller.pull(trainer.urls[0]).path
    os.utime(pulled / "model", (2**33, 2**33))
    assert folders._last_change(pulled.parent) == 2**33
    clock_s, walked_s = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal clock_s
        clock_s += seconds

    def last_change(_: Path) -> float:
        walked_s.append(clock_s)
        return 350.0

    monkeypatch.setattr(folders, "_last_change", last_change)
    monkeypatch.setattr(folders, "_POLL_S", 100.0)
    monkeypatch.setattr(folders, "time", SimpleNamespace(time=lambda: clock_s, sleep=sleep, monotonic=time.monotonic))
    with (
        exclusive(pulled.parent / ".pulling") as is_held,
        raises_code("weights.pull_failed", "written nothing for 300 s"),
    ):
        assert is_held
        puller.pull(trainer.urls[1])
    assert walked_s == [400.0, 700.0], "only when 300 s have passed since the last change that is known"


def test_leftovers_of_killed_processes_are_removed_and_push_out_no_version(
    trainer: Trainer, puller: FolderPuller
) -> None:
    root = puller.pull(trainer.urls[0]).path.parent
    puller.pull(trainer.urls[1])
    for name in (trainer.deltas[2].rpartition("/")[2], f".{trainer.name(3)}"):
        (root / name).mkdir()
    puller.pull(trainer.urls[2])
    assert {path.name for path in root.iterdir() if path.is_dir()} == {trainer.name(1), trainer.name(2)}


def flip(trainer: Trainer, local: Path) -> None:
    """Bytes of the earlier version change on the disk of the server."""
    (stored,) = local.glob("v000000-*/model")
    content = bytearray(stored.read_bytes())
    content[1000] ^= 1
    stored.write_bytes(content)


def unreadable(trainer: Trainer, local: Path) -> None:
    """The earlier version cannot be opened."""
    (stored,) = local.glob("v000000-*/model")
    stored.unlink()
    stored.mkdir()
    stored.with_name("COMPLETE").write_text('{"files": {}}')


def wrong_difference(trainer: Trainer, local: Path) -> None:
    """The trainer offers the difference between two other versions."""
    trainer.deltas[0] = trainer.deltas[1]


def damaged_difference(trainer: Trainer, local: Path) -> None:
    folder = trainer.root / "delta_v000009"
    folder.mkdir()
    (folder / DELTA_FILE).write_bytes((trainer.root / "delta_v000001" / DELTA_FILE).read_bytes()[:-9])
    trainer.deltas[0] = trainer.server.offer(folder)


def lost_difference(trainer: Trainer, local: Path) -> None:
    (trainer.root / "delta_v000001").rename(trainer.root / "gone")


@pytest.fixture
def native(tmp_path: Path) -> Iterator[FolderPuller]:
    made = FolderPuller("secret", {}, in_memory=True)
    yield made
    made.close()


def is_held(puller: FolderPuller, pulled: Pulled, trainer: Trainer, version: int) -> bool:
    with puller.reading(pulled.path) as files:
        return files is not None and files["model"].tobytes() == (trainer.folder(version) / "model").read_bytes()


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (flip, "the differences made other weights"),
        (unreadable, "Is a directory"),
        (wrong_difference, "the differences made other weights"),
        (damaged_difference, "cannot be applied"),
        (lost_difference, "does not serve"),
    ],
)
def test_a_difference_that_makes_other_weights_or_none_is_replaced_by_a_copy(
    trainer: Trainer, request: pytest.FixtureRequest, harm: Callable[[Trainer, Path], None], words: str, in_memory: bool
) -> None:
    puller: FolderPuller = request.getfixturevalue("native" if in_memory else "puller")
    first = puller.pull(trainer.urls[0])
    harm(trainer, first.path.parent)
    pulled = puller.pull(trainer.urls[1], (), trainer.chain(0, 1))
    assert is_version(pulled, trainer, 1)
    assert words in pulled.problem
    assert pulled.num_bytes >= SIZE
    pulled = puller.pull(trainer.urls[2], (), {trainer.name(1): trainer.deltas[1]})
    assert pulled.problem == ""
    assert is_held(puller, pulled, trainer, 2) if in_memory else is_version(pulled, trainer, 2)


def test_versions_in_memory_take_no_space_on_the_disk_and_differences_are_copied_once_for_a_machine(
    trainer: Trainer, native: FolderPuller, copied: list[tuple[str, int]]
) -> None:
    other = FolderPuller("secret", {}, in_memory=True)
    for version in (0, 1, 3):
        for puller in (native, other):
            pulled = puller.pull(trainer.urls[version], (), trainer.chain(0, version))
            assert (pulled.problem, is_held(puller, pulled, trainer, version)) == ("", version > 0)
    assert native.pull(trainer.urls[3], (), trainer.chain(0, 3)).num_bytes == 0
    names = [name for name, _ in copied]
    assert names == ["v000000", "delta_v000001", "delta_v000002", "delta_v000003"]
    native.pull(trainer.urls[3], (), trainer.chain(0, 3))
    left = {path.name.partition("-")[0] for path in pulled.path.parent.iterdir() if path.is_dir()}
    assert left == {"v000000", "delta_v000001", "delta_v000002", "delta_v000003"}
    trainer.publish()
    native.pull(trainer.urls[4], (), trainer.chain(3, 4))
    left = {path.name.partition("-")[0] for path in pulled.path.parent.iterdir() if path.is_dir()}
    assert left == {"v000000", "delta_v000004"}, "those that the trainer offers"
    other.close()


def test_a_server_that_starts_again_makes_the_version_in_memory_from_the_last_folder(
    trainer: Trainer, native: FolderPuller, copied: list[tuple[str, int]]
) -> None:
    for version in (0, 1):
        native.pull(trainer.urls[version], (), trainer.chain(0, version))
    again = FolderPuller("secret", {}, in_memory=True)
    pulled = again.pull(trainer.urls[2], (), trainer.chain(0, 2))
    assert (pulled.problem, is_held(again, pulled, trainer, 2)) == ("", True)
    assert [name for name, _ in copied] == ["v000000", "delta_v000001", "delta_v000002"]
    again.close()


def test_a_version_in_memory_stays_when_a_difference_is_lost_and_a_newer_folder_is_preferred(
    trainer: Trainer, native: FolderPuller, copied: list[tuple[str, int]]
) -> None:
    for version in (0, 1):
        native.pull(trainer.urls[version], (), trainer.chain(0, version))
    lost = trainer.chain(1, 2) | {trainer.name(1): trainer.deltas[1].replace("delta", "lost")}
    pulled = native.pull(trainer.urls[2], (), lost)
    assert "does not serve" in pulled.problem
    assert is_version(pulled, trainer, 2)
    copied.clear()
    pulled = native.pull(trainer.urls[3], (), trainer.chain(1, 3))
    assert (pulled.problem, is_held(native, pulled, trainer, 3)) == ("", True)
    assert [name for name, _ in copied] == ["delta_v000003"]


def test_bits_that_change_in_memory_are_found(trainer: Trainer, native: FolderPuller) -> None:
    for version in (0, 1):
        pulled = native.pull(trainer.urls[version], (), trainer.chain(0, version))
    with native.reading(pulled.path) as files:
        assert files is not None
        files["model"][1000] ^= 1
    pulled = native.pull(trainer.urls[2], (), trainer.chain(0, 2))
    assert pulled.problem == "the differences made other weights"
    assert is_version(pulled, trainer, 2)


def test_a_version_in_memory_does_not_change_while_it_is_read(trainer: Trainer, native: FolderPuller) -> None:
    for version in (0, 1):
        pulled = native.pull(trainer.urls[version], (), trainer.chain(0, version))
    with ThreadPoolExecutor() as pool:
        with native.reading(pulled.path) as files:
            assert files is not None
            next_pull = pool.submit(native.pull, trainer.urls[2], (), trainer.chain(0, 2))
            assert files["model"].tobytes() == (trainer.folder(1) / "model").read_bytes()
            assert not next_pull.done()
        assert is_held(native, next_pull.result(30), trainer, 2)
    with native.reading(pulled.path) as files:
        assert files is None, "it is another version by now"


async def test_a_version_in_memory_is_written_for_a_server_that_joins_which_then_survives_the_next_version(
    trainer: Trainer, native: FolderPuller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (0, 1):
        pulled = await asyncio.to_thread(native.pull, trainer.urls[version], (), trainer.chain(0, version))
    requests: list[str] = []
    get = folders._Transfer._get

    def cut(self: folders._Transfer, path: str, start: int) -> BufferedIOBase:
        """The first answer for a file is lost, and the next version comes before the second request."""
        answer = get(self, path, start)
        requests.append(path)
        if requests == ["", "/0"]:
            native.pull(trainer.urls[2], (), trainer.chain(0, 2))
            raise folders._Cut("lost")
        return answer

    app = web.Application()
    app.add_routes(folder_routes(native.offered, PULLED_WEIGHTS, lambda status, text, code: web.Response(status=404)))
    async with TestServer(app) as server:
        mirror = str(server.make_url(f"{PULLED_WEIGHTS}/{pulled.path.name}"))
        (folder := tmp_path / "joins").mkdir()
        joins = FolderPuller("secret", {}, in_memory=True)
        joins._local = elsewhere(folder, monkeypatch)
        away = trainer.folder(1).rename(tmp_path / "away")
        with monkeypatch.context() as patch:
            patch.setattr(folders._Transfer, "_get", cut)
            copy = await asyncio.to_thread(joins.pull, trainer.urls[1], [mirror])
        away.rename(trainer.folder(1))
        assert requests[:2] + requests[-1:] == ["", "/0", "/0"]
        assert is_version(copy, trainer, 1)
        assert is_version(pulled, trainer, 1), "written when it was asked for"
        assert native._is_held(pulled.path.with_name(trainer.name(2)))
        joins.close()


def elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> folders.LocalFolder:
    """As on another machine."""
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        return folders.LocalFolder("copies")


def write(puller: FolderPuller, name: str) -> None:
    offered = puller.offered(name)
    assert offered is not None
    assert offered.write is not None
    offered.write()


def versions_of(root: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in root.iterdir() if path.is_dir() and "delta_" not in path.name}


def test_a_version_that_has_left_the_memory_is_not_written(trainer: Trainer, native: FolderPuller) -> None:
    for version in (0, 1):
        pulled = native.pull(trainer.urls[version], (), trainer.chain(0, version))
    old = native.offered(trainer.name(1))
    native.pull(trainer.urls[2], (), trainer.chain(0, 2))
    assert native.offered(trainer.name(1)) is None
    assert old is not None
    assert old.write is not None
    old.write()
    assert not pulled.path.exists()


def test_of_versions_that_are_written_for_servers_that_join_two_stay_on_the_disk(
    trainer: Trainer, native: FolderPuller
) -> None:
    for version in range(4):
        root = native.pull(trainer.urls[version], (), trainer.chain(0, version)).path.parent
        if version:
            write(native, trainer.name(version))
    assert versions_of(root) == {"v000002", "v000003"}
    left = {path.name for path in root.glob("delta_*")}
    assert left == {url.rpartition("/")[2] for url in trainer.deltas}, "other servers of the machine need them"


@pytest.mark.parametrize("other_version", [1, 3])
def test_a_version_is_written_whole_while_another_process_of_the_machine_writes_or_pulls(
    trainer: Trainer, native: FolderPuller, monkeypatch: pytest.MonkeyPatch, other_version: int
) -> None:
    """The other process begins when all files are written and the folder has no name yet."""
    other = FolderPuller("secret", {}, in_memory=True)
    for version in (0, 1):
        for each in (native, other):
            pulled = each.pull(trainer.urls[version], (), trainer.chain(0, version))
    publish, lock, is_met, started = (
        folders.publish_folder,
        folders.exclusive,
        threading.Event(),
        list[Future[object]](),
    )

    @contextmanager
    def noted(path: Path) -> Iterator[bool]:
        with lock(path) as is_exclusive:
            if not is_exclusive:
                is_met.set()
            yield is_exclusive

    def meanwhile(writing: Path, final: Path, *, sum_up: bool, sync: bool) -> None:
        if not started:
            call = (write, other, trainer.name(1)) if other_version == 1 else (other.pull, trainer.urls[3])
            started.append(pool.submit(*call))
            started[0].add_done_callback(lambda _: is_met.set())
            assert is_met.wait(60)
        publish(writing, final, sum_up=sum_up, sync=sync)

    monkeypatch.setattr(folders, "exclusive", noted)
    monkeypatch.setattr(folders, "publish_folder", meanwhile)
    with ThreadPoolExecutor() as pool:
        write(native, trainer.name(1))
        started[0].result(60)
    assert is_version(pulled, trainer, 1)
    assert versions_of(pulled.path.parent) == {"v000001", "v000000" if other_version == 1 else "v000003"}
    other.close()


async def test_a_process_that_pulls_does_not_wait_for_a_copy_of_its_own_machine_which_waits_for_it(
    trainer: Trainer, native: FolderPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_BUSY_S", 0.0)
    for version in (0, 1):
        await asyncio.to_thread(native.pull, trainer.urls[version], (), trainer.chain(0, version))
    app = web.Application()
    app.add_routes(folder_routes(native.offered, PULLED_WEIGHTS, lambda status, text, code: web.Response(status=404)))
    async with TestServer(app) as server:
        mirror = str(server.make_url(f"{PULLED_WEIGHTS}/{trainer.name(1)}"))
        joins = FolderPuller("secret", {}, in_memory=True)
        copy = await asyncio.to_thread(joins.pull, trainer.urls[1], [mirror])
        assert is_version(copy, trainer, 1), "from the trainer"
        joins.close()


def test_a_whole_copy_replaces_the_version_in_memory(trainer: Trainer, native: FolderPuller) -> None:
    for version in (0, 1):
        native.pull(trainer.urls[version], (), trainer.chain(0, version))
    pulled = native.pull(trainer.urls[2])
    assert is_version(pulled, trainer, 2)
    assert native.offered(trainer.name(1)) is None
    assert not native._is_held(pulled.path.with_name(trainer.name(1)))


def test_the_differences_of_a_chain_are_in_memory_one_at_a_time(
    trainer: Trainer, native: FolderPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.pull(trainer.urls[0])
    read = list[weakref.ref[object]]()

    def noted(files: dict[str, np.ndarray], delta: memoryview) -> None:
        assert [each() for each in read] == [None] * len(read)
        read.append(weakref.ref(delta.obj))
        change(files, delta)

    monkeypatch.setattr(folders, "change", noted)
    pulled = native.pull(trainer.urls[3], (), trainer.chain(0, 3))
    assert (len(read), is_held(native, pulled, trainer, 3)) == (3, True)


def test_names_that_leave_the_folder_and_other_machines_are_not_followed(
    trainer: Trainer, puller: FolderPuller
) -> None:
    first = puller.pull(trainer.urls[0])
    outside = first.path.parent.parent / f"out-{'0' * 64}"
    first.path.rename(outside)
    pulled = puller.pull(trainer.urls[1], (), {f"../{outside.name}": trainer.deltas[0]})
    assert (pulled.problem, is_version(pulled, trainer, 1)) == ("", True), "the earlier folder is none"
    away = trainer.deltas[1].replace("127.0.0.1", "10.9.9.9")
    pulled = puller.pull(trainer.urls[2], (), {trainer.name(1): away})
    assert "is no folder of a trainer" in pulled.problem
    assert is_version(pulled, trainer, 2)


def test_a_process_that_still_reads_a_version_gets_its_bytes_while_later_ones_are_made(
    trainer: Trainer, puller: FolderPuller
) -> None:
    with (puller.pull(trainer.urls[0]).path / "model").open("rb") as reader:
        for version in (1, 2, 3):
            pulled = puller.pull(trainer.urls[version], (), trainer.chain(0, version))
            assert (pulled.problem, is_version(pulled, trainer, version)) == ("", True)
        assert reader.read() == (trainer.folder(0) / "model").read_bytes()


def test_a_version_whose_removal_was_interrupted_pushes_out_no_complete_one(
    trainer: Trainer, puller: FolderPuller
) -> None:
    """To remove a file makes its folder the newest one."""
    for version in range(2):
        root = puller.pull(trainer.urls[version], (), trainer.chain(0, version)).path.parent
    (root / trainer.name(0) / "model").unlink()
    puller.pull(trainer.urls[2], (), trainer.chain(0, 2))
    assert {path.name for path in root.iterdir() if path.is_dir()} == {trainer.name(1), trainer.name(2)}


def test_a_full_disk_of_the_server_is_no_wrong_difference(
    trainer: Trainer, puller: FolderPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer would write whole weights for it, which do not fit either."""
    puller.pull(trainer.urls[0])

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with raises_code("weights.pull_failed", os.strerror(errno.ENOSPC)):
            puller.pull(trainer.urls[1], (), trainer.chain(0, 1))
    pulled = puller.pull(trainer.urls[1], (), trainer.chain(0, 1))
    assert (pulled.problem, is_version(pulled, trainer, 1)) == ("", True)
