"""A folder arrives on another machine byte by byte, whatever happens to the connection, the processes and the bytes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from areal.api.errors import RequestError, WeightSyncError
from areal.system import folders as folder_puller
from areal.system.durable import is_complete
from areal.system.folders import FolderList, FolderPuller, FolderServer, LocalFolder
from areal.system.network import Host
from tests.expect import raises_code

BLOCK = 1000
CONTENT = {"model.safetensors": bytes(range(256)) * 50, "config.json": b"{}", "empty": b""}


@pytest.fixture(autouse=True)
def short_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folder_puller, "_FIRST_PAUSE_S", 0.0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "v000007"
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("COMPLETE", ".list")}


class FaultyServer:
    """The protocol of `FolderServer` with small blocks. `answer(start, data)` returns the bytes that it sends."""

    def __init__(self, folder: Path) -> None:
        self.listed = FolderList.of(folder, BLOCK)
        self.answer: Callable[[int, bytes], bytes] = lambda start, data: data
        self.starts: list[int] = []
        """The first byte of every request for the model."""
        faulty = self
        name = f"{folder.name}-{hashlib.sha256(self.listed.to_bytes()).hexdigest()}"

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = self.path.removeprefix("/pulled_weights").split("/")
                assert (parts[1], self.headers["Authorization"]) == (name, "Bearer secret")
                if len(parts) == 2:
                    self.send(200, faulty.listed.to_bytes(), faulty.listed.to_bytes(), 0)
                    return
                file = faulty.listed.files[int(parts[2])]
                data = (folder / file.name).read_bytes()
                start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
                sent = data[start:]
                if file.name == "model.safetensors":
                    faulty.starts.append(start)
                    sent = faulty.answer(start, sent)
                self.send(206 if start else 200, data[start:], sent, start)

            def send(self, status: int, whole: bytes, sent: bytes, start: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(whole)))
                self.send_header("Content-Range", f"bytes {start}-{start + len(whole) - 1}/{start + len(whole)}")
                self.end_headers()
                self.wfile.write(sent)
                self.close_connection = True

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/{name}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def faulty(source: Path) -> Iterator[FaultyServer]:
    server = FaultyServer(source)
    yield server
    server.close()


@pytest.fixture
def puller() -> Iterator[FolderPuller]:
    made = FolderPuller("secret", {})
    yield made
    made.close()


def test_a_folder_arrives_complete_and_is_pulled_once_on_a_machine(source: Path, puller: FolderPuller) -> None:
    server = FolderServer(Host(), "secret")
    url = server.offer(source)
    result = puller.pull(url).path
    assert is_complete(result)
    assert contents(result) == CONTENT
    assert result.parent.stat().st_mode & 0o077 == 0
    server.close()
    other = FolderPuller("secret", {})  # another server of the same run and machine
    assert other.pull(url).path == result
    other.close()
    assert result.is_dir(), "a process of the run still uses it"
    puller.close()
    assert not result.exists()


def test_only_clients_with_the_token_get_a_folder_of_a_known_trainer(source: Path, puller: FolderPuller) -> None:
    server = FolderServer(Host(), "other")
    url = server.offer(source)
    with raises_code("weights.not_served"):
        puller.pull(url)
    with raises_code("weights.unknown_trainer"):
        FolderPuller("other", {"AREAL_TRAINER_ADDRESSES": "10.0.0.1"}).pull(url)
    for wrong in ("", "v000001", "../etc-" + "0" * 64, "v1-" + "0" * 63):
        with raises_code("weights.unknown_trainer"):
            FolderPuller("other", {}).pull(f"{server.address}/{wrong}")
    server.close()


def test_a_deleted_folder_is_not_served(source: Path, puller: FolderPuller) -> None:
    server = FolderServer(Host(), "secret")
    url = server.offer(source)
    source.rename(source.with_name("gone"))
    with pytest.raises(RequestError) as error:
        puller.pull(url)
    assert error.value.code == "weights.not_served"
    server.close()


def test_a_copy_comes_from_the_mirrors_while_the_trainer_does_not_answer(
    source: Path, puller: FolderPuller, faulty: FaultyServer
) -> None:
    """The first that has the folder dies after 2345 bytes; the transfer continues there with the next one."""
    dying, without = FaultyServer(source), FolderServer(Host(), "secret")
    dying.answer = lambda start, data: b"" if start else data[:2345]
    name = faulty.url.rpartition("/")[2]
    closed, foreign = "http://127.0.0.1:9", "http://10.9.9.9:9"
    bases = [foreign, closed, without.address, *(item.url.rpartition("/")[0] for item in (dying, faulty))]
    result = puller.pull(f"{closed}/{name}", [f"{base}/pulled_weights/{name}" for base in bases]).path
    assert contents(result) == CONTENT
    assert (dying.starts, faulty.starts) == ([0, 2345], [2345])
    offered = puller.offered(name)
    assert offered is not None
    assert offered.listed == faulty.listed
    assert puller.offered(name[:-1] + "0") is puller.offered("../" + name) is None
    dying.close()
    without.close()


def test_a_cut_transfer_continues_where_it_stopped(faulty: FaultyServer, puller: FolderPuller) -> None:
    faulty.answer = lambda start, data: data[:2345]
    assert contents(puller.pull(faulty.url).path) == CONTENT
    assert faulty.starts == list(range(0, len(CONTENT["model.safetensors"]), 2345))


def test_only_a_block_with_a_wrong_checksum_is_sent_again(faulty: FaultyServer, puller: FolderPuller) -> None:
    def flip_once(start: int, data: bytes) -> bytes:
        if len(faulty.starts) > 1:
            return data
        at = 4 * BLOCK + 17
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    faulty.answer = flip_once
    assert contents(puller.pull(faulty.url).path) == CONTENT
    assert faulty.starts == [0, 4 * BLOCK]


def test_bytes_that_are_always_wrong_are_refused(faulty: FaultyServer, puller: FolderPuller) -> None:
    faulty.answer = lambda start, data: bytes(len(data))
    with pytest.raises(WeightSyncError) as error:
        puller.pull(faulty.url)
    assert error.value.code == "weights.pull_failed"
    assert len(faulty.starts) == folder_puller._MAX_FAILURES


def test_a_list_with_a_wrong_checksum_is_refused(faulty: FaultyServer, puller: FolderPuller) -> None:
    faulty.listed = FolderList(BLOCK, faulty.listed.files[1:])
    with raises_code("weights.pull_failed"):
        puller.pull(faulty.url)
    assert faulty.starts == []


def test_after_a_kill_of_the_puller_the_next_one_continues(faulty: FaultyServer, puller: FolderPuller) -> None:
    """The first process is killed while it waits for byte 5500; the next one verifies what is stored and continues."""
    reached, killed = threading.Event(), threading.Event()

    def hold(start: int, data: bytes) -> bytes:
        if start == 0:
            reached.set()
            return data[:5500]
        assert killed.wait(60)
        return data

    faulty.answer = hold
    code = (
        "import sys, tempfile\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "from areal.system.folders import FolderPuller\n"
        "FolderPuller('secret', {}).pull(sys.argv[2])\n"
    )
    first = subprocess.Popen([sys.executable, "-c", code, str(tempfile.gettempdir()), faulty.url])
    assert reached.wait(60)
    partial = LocalFolder(folder_puller.store_prefix("secret", "pulled weights")[:24])
    while len(faulty.starts) < 2:  # the second request of the first process: all before it is stored
        os.sched_yield()
    first.send_signal(signal.SIGKILL)
    first.wait()
    killed.set()
    (stored,) = partial.path.glob(".v*/model.safetensors")
    damaged = bytearray(stored.read_bytes())
    assert len(damaged) <= 5500
    damaged[3 * BLOCK + 1] ^= 1  # by a disk that lost a write
    stored.write_bytes(damaged)
    assert contents(puller.pull(faulty.url).path) == CONTENT
    assert faulty.starts[1:3] == [5500, 3 * BLOCK]
    partial.close()


def test_old_folders_are_removed(source: Path, puller: FolderPuller) -> None:
    server = FolderServer(Host(), "secret")
    result: list[Path] = []
    for version in range(4):
        (source / "config.json").write_text(f'{{"v": {version}}}')
        result.append(puller.pull(server.offer(source)).path)
    assert [path.exists() for path in result] == [False, False, True, True]
    server.close()


def test_a_folder_of_an_ended_run_is_removed_by_the_next_one(tmp_path: Path) -> None:
    code = "import sys, tempfile, os\ntempfile.tempdir = sys.argv[1]\n"
    code += "from areal.system.folders import LocalFolder\nLocalFolder('first')\nos._exit(9)\n"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (base,) = tmp_path.glob("areal-*")
    (first,) = (path for path in base.glob("first*") if path.is_dir())
    second = LocalFolder("second")
    assert not first.exists()
    assert second.path.is_dir()
    second.close()
    assert list(base.iterdir()) == []


def test_after_a_restart_of_the_machine_a_run_has_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was synced, so files may have lost content in a power failure."""
    for boot in ("4b0c2f9a-1", "4b0c2f9a-1", "99999999-1"):
        (tmp_path / "boot_id").write_text(boot)
        monkeypatch.setattr(folder_puller, "_BOOT_ID", tmp_path / "boot_id")
        folder = LocalFolder("run")
        (folder.path / boot).touch()
        assert [path.name for path in folder.path.iterdir()] == [boot]
        os.close(folder._held)  # killed


def test_a_folder_that_others_can_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"areal-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"areal-{os.getuid()}").chmod(0o777)
    with raises_code("process.local_folder"):
        LocalFolder("run")
