"""A folder on a disk of this machine that the processes of one run here use together. It ends with the last of them."""

import asyncio
import contextlib
import fcntl
import hashlib
import http.client
import itertools
import json
import os
import re
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO, Self
from urllib.parse import urlsplit

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from areal.api.errors import ArealError, InputError, RequestError, WeightSyncError
from areal.system.durable import COMPLETE, is_complete, publish_folder, writing_folder
from areal.system.folder_delta import byte_threads, change, rebuild
from areal.system.http_guard import RequestGuard, guarded
from areal.system.network import BACKLOG, Host, http_address, is_trainer, listen, store_prefix
from areal.system.process import in_daemon_thread

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LocalFolder:
    """`path` is below TMPDIR. It stays when this process is killed: the next process of the run finds it, and the first
    process of another run removes it. After the machine has started again it is another one: nothing is synced."""

    def __init__(self, key: str) -> None:
        """`key`: names the run; equal in all its processes. InputError when other users could write to the folder."""
        base = _private(Path(tempfile.gettempdir()) / f"areal-{os.getuid()}")
        key += f"-{_BOOT_ID.read_text()[:8]}" if _BOOT_ID.exists() else ""
        self.path = base / key
        self._lock = base / f"{key}.lock"
        self._held = self._join()
        for other in base.glob("*.lock"):
            if other != self._lock:
                _remove_unused(other)

    def close(self) -> None:
        """Leave the folder, and remove it unless another process uses it. May be repeated."""
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)
            _remove_unused(self._lock)

    def _join(self) -> int:
        while True:
            held = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(held, fcntl.LOCK_SH)  # waits only while another process removes the folder
            if os.fstat(held).st_nlink:
                self.path.mkdir(mode=0o700, exist_ok=True)
                return held
            os.close(held)  # it was removed between the two calls


def _private(base: Path) -> Path:
    """Create `base` for this user alone."""
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    status = base.lstat()
    if not base.is_dir() or base.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        message = f"{base} belongs to another user, or others can write to it: remove it, or set another TMPDIR"
        raise InputError(message, code="process.local_folder")
    return base


def _remove_unused(lock: Path) -> None:
    """Remove the folder of a lock that no process holds."""
    with contextlib.suppress(OSError):  # another process removes it, or uses it
        held = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
        finally:
            os.close(held)


@contextlib.contextmanager
def exclusive(lock: Path) -> Iterator[bool]:
    """Hold a lock file inside the block if no other process does; yields whether it is held."""
    held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(held)


# ----------------------------------------------------------------------------------------------------------------------
# The list of a folder's files with a checksum of each block, by which a copy of the folder is verified.

BLOCK_BYTES = 16 * 2**20
"""Unit of verification: a block with a wrong checksum is sent again alone."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    name: str
    num_bytes: int
    sums: list[int]
    """CRC-32 of each block of `FolderList.block_bytes`; the last block may be shorter. It finds faults of memory, disks
    and networks (one in 2^32 is missed), not attacks: blocks come from addresses of the run, for its token."""


@dataclass(frozen=True, slots=True)
class FolderList:
    block_bytes: int
    files: list[ListedFile]

    @classmethod
    def of(cls, folder: Path, block_bytes: int = BLOCK_BYTES) -> Self:
        """Read every file of a folder, which has no subfolders. The marker of a complete folder is left out."""
        files: list[ListedFile] = []
        with byte_threads() as pool:
            for path in sorted(path for path in folder.iterdir() if path.name != COMPLETE):
                size = path.stat().st_size
                sums = pool.map(partial(_sum_at, path, block_bytes), range(0, size, block_bytes))
                files.append(ListedFile(path.name, size, list(sums)))
        return cls(block_bytes, files)

    @classmethod
    def of_contents(cls, contents: Mapping[str, memoryview], block_bytes: int = BLOCK_BYTES) -> Self:
        """The list of a folder with these files."""
        files: list[ListedFile] = []
        with byte_threads() as pool:
            for name, content in sorted(contents.items()):
                starts = range(0, len(content), block_bytes)
                sums = pool.map(zlib.crc32, (content[start : start + block_bytes] for start in starts))
                files.append(ListedFile(name, len(content), list(sums)))
        return cls(block_bytes, files)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """InputError unless it is a list whose names are those of files in one folder."""
        try:
            fields = json.loads(data)
            made = cls(int(fields["block_bytes"]), [ListedFile(**entry) for entry in fields["files"]])
            for file in made.files:
                plain = bool(file.name) and "/" not in file.name and not file.name.startswith(".")
                if not plain or len(file.sums) != -(-file.num_bytes // made.block_bytes):
                    raise ValueError(f"the entry of {file.name[:100]!r} is not one of a file")
        except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
            raise InputError(f"a list of files cannot be read: {error}", code="weights.pull_failed") from error
        return made

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def name(self, prefix: str) -> str:
        """The last part of the address of a folder with these files: `prefix` and the SHA-256 of this list."""
        return f"{prefix}-{hashlib.sha256(self.to_bytes()).hexdigest()}"


def _sum_at(path: Path, block_bytes: int, start: int) -> int:
    checksum, rest = 0, block_bytes
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while rest and (piece := file.read(min(rest, 2**20))):
            checksum = zlib.crc32(piece, checksum)
            rest -= len(piece)
    return checksum


# ----------------------------------------------------------------------------------------------------------------------
# Serves folders of this machine over HTTP, from a thread, to clients that have the run's token.
#
# The address of a folder ends with the SHA-256 of its list of files, so a client that got the address can verify every
# byte.

PULLED_WEIGHTS = "/pulled_weights"
"""Path below which a server offers the folders that it has pulled, to servers that start later."""
NEEDS_WHOLE = ("weights.not_served", "weights.bad_delta")
"""Codes of errors of `FolderPuller.pull` after which the trainer must offer the version again, whole."""
_START_S = 30.0
KEPT = 2
"""Folders that stay: the newest, and the one before, which another server of this machine may still read."""


def write_folder(files: Mapping[str, NDArray[np.uint8]], folder: Path, parts: Iterable[Path] = ()) -> None:
    """Unless it is there, write a complete folder with these files and those of the folders `parts`. It does not
    survive a power failure."""
    if is_complete(folder):
        return
    writing = writing_folder(folder)
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir()
    for name, data in files.items():
        data.tofile(writing / name)
    for path in itertools.chain.from_iterable(map(files_in, parts)):
        shutil.copyfile(path, writing / path.name)
    publish_folder(writing, folder, sum_up=False, sync=False)


def files_in(folder: Path) -> list[Path]:
    """The files of a folder, without those that areal adds."""
    return [path for path in folder.iterdir() if path.name not in (COMPLETE, LIST)]


@dataclass(frozen=True, slots=True)
class OfferedFolder:
    path: Path
    listed: FolderList
    list_bytes: bytes
    write: Callable[[], None] | None = None
    """Makes the folder, unless its content is lost, when a client asks for a file of it."""


def folder_routes(
    find: Callable[[str], OfferedFolder | None], prefix: str, error: Callable[[int, str, str], web.Response]
) -> list[web.RouteDef]:
    """GET PREFIX/NAME is the list of a folder, GET PREFIX/NAME/K its file number K; ranges of bytes can be requested.

    `find`: the folder of a name. `error(status, message, code)` makes the answer when there is none.
    """

    async def send_list(request: web.Request) -> web.StreamResponse:
        offered = find(request.match_info["name"])
        if offered is None or (offered.write is None and not offered.path.is_dir()):
            return error(404, "this folder is not served, or not any more", "weights.not_served")
        return web.Response(body=offered.list_bytes, content_type="application/json")

    async def send_file(request: web.Request) -> web.StreamResponse:
        offered, index = find(request.match_info["name"]), request.match_info["index"]
        if offered is None or not index.isdecimal() or int(index) >= len(offered.listed.files):
            return error(404, "this file is not served", "weights.not_served")
        if offered.write is not None:
            await asyncio.to_thread(offered.write)
        path = offered.path / offered.listed.files[int(index)].name
        if not path.is_file():
            return error(404, "this folder is not served any more", "weights.not_served")
        return web.FileResponse(path)

    return [web.get(f"{prefix}/{{name}}", send_list), web.get(f"{prefix}/{{name}}/{{index}}", send_file)]


class FolderServer:
    """Serves `folder_routes` on a separate port."""

    def __init__(self, host: Host, token: str) -> None:
        self._bound = listen(host, token)
        self.address = http_address(self._bound, host.advertise)
        self._guard = RequestGuard(token, host)
        self._offered: dict[str, OfferedFolder] = {}
        """Name in the address -> folder. Replaced, never changed: the thread reads it."""
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        started: Future[None] = Future()
        self._thread = in_daemon_thread(lambda: self._loop.run_until_complete(self._serve(started)), "folder server")
        started.result(_START_S)

    def offer(self, folder: Path, listed: FolderList | None = None, write: Callable[[], None] | None = None) -> str:
        """Serve a folder as it is now, until it is deleted; returns its address. `listed`, `write`: of a folder that is
        written when a file of it is needed; the lists of the last `KEPT` such folders are served, and the files of
        those that `write` has made or still can make."""
        listed = listed or FolderList.of(folder)
        name = listed.name(folder.name)
        folders = self._offered | {name: OfferedFolder(folder, listed, listed.to_bytes(), write)}
        kept = [name for name, entry in folders.items() if entry.write is not None][-KEPT:]
        self._offered = {name: entry for name, entry in folders.items() if name in kept or entry.path.is_dir()}
        return f"{self.address}/{name}"

    def close(self) -> None:
        """Stop at once; running transfers break off. May be repeated."""
        if not self._thread.done():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.result(_START_S)

    async def _serve(self, started: Future[None]) -> None:
        app = web.Application(middlewares=[guarded(self._guard, _error)])
        app.add_routes(folder_routes(lambda name: self._offered.get(name), "", _error))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, self._bound, backlog=BACKLOG).start()
        started.set_result(None)
        try:
            await self._stopped.wait()
        finally:
            await runner.cleanup()


def _error(status: int, message: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": message}, "code": code}, status=status)


# ----------------------------------------------------------------------------------------------------------------------
# Copies folders from a `FolderServer`, from a server that has a copy, or from a shared disk, to this machine.
#
# The address of a folder on a shared disk is SHARED and its path. It has its list of files, and may have these files.
# A cut transfer continues where it stopped, from the same server or another one; every block is verified. A transfer
# waits for a server at most `_SILENCE_S` at a time. It leaves a mirror after `_MIRROR_FAILURES` attempts without a new
# verified block, and ends after `_MAX_FAILURES` such attempts with the server of the trainer.

FOLDER_NAME = re.compile(r"[A-Za-z0-9_]+-([0-9a-f]{64})")
"""See `FolderList.name`. Without a separator: it is a name in one folder."""
_SILENCE_S = 30.0
_MAX_FAILURES, _MIRROR_FAILURES = 8, 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_POLL_S = 0.05
_BUSY_S = 10.0
_IDLE_S = 300.0
"""After this time without a change to its files a process that pulls is not waited for."""
LIST = ".list"
"""File in a copy: the list by which others verify what they copy from here."""
SHARED = "file://"
_READ_BYTES = 2**20
_OTHER_WEIGHTS = "the differences made other weights"


class _Cut(Exception):
    """A transfer ended early or a block was wrong; the next attempt continues."""


class _NotServed(_Cut):
    """The server does not have the folder: there is no second attempt with it."""


DELTA = "delta_"
"""Before the name of a version: the folder with its difference from the version before."""
DELTA_FILE = "delta"
"""The only file of a folder that holds the difference between two others."""


@dataclass(frozen=True, slots=True)
class Pulled:
    path: Path
    problem: str
    """Why bytes of the folder were copied although there were differences from a folder that is here; else empty."""
    num_bytes: int
    """Received by this process, differences included."""


@dataclass(frozen=True, slots=True)
class HeldFolder:
    """A folder in memory."""

    offered: OfferedFolder
    files: dict[str, NDArray[np.uint8]]


class FolderPuller:
    """The folders that servers of a run on this machine have pulled. Its methods block; any thread may call them."""

    def __init__(self, token: str, environ: Mapping[str, str] | None = None, *, in_memory: bool = False) -> None:
        """`token`: the run's. `environ`: has the addresses of the trainers, the only ones that are asked. `in_memory`:
        a folder that is made by differences stays in the memory of this process, whose next version changes it."""
        self._token, self._in_memory = token, in_memory
        self._environ = os.environ if environ is None else environ
        self._lock = threading.Lock()
        self._local: LocalFolder | None = None
        self._offered: dict[str, OfferedFolder] = {}  # The folder that was requested last.
        self.held: HeldFolder | None = None
        """The folder in memory. Its files change while `_lock` is held: `reading` is for those who read them."""

    def pull(self, url: str, mirrors: Sequence[str] = (), deltas: Mapping[str, str] | None = None) -> Pulled:
        """The local copy of the folder at `url`, complete and verified. Processes of one machine share it, unless it is
        in memory: see `reading`.

        `mirrors`: addresses of the same folder on other servers of the run, which are asked first.
        `deltas`: name of an earlier folder -> address of the difference to the next one, the last to this one. The
        newest of them that is here, or beside `url`, is changed; a file is copied from its first block on that then
        differs. RequestError when the address is not one of this run or has the folder no more (weights.bad_delta: the
        folder is needed because the differences failed); WeightSyncError when the transfer does not succeed.
        """
        match, problem = self._name_in(url), ""
        transfers: list[_Transfer] = []
        usable = [mirror for mirror in mirrors if self._is_copy(mirror, match[0])]
        with self._lock:
            if self._local is None:
                self._local = LocalFolder(store_prefix(self._token, "pulled weights")[:24])
            final = self._local.path / match[0]
            try:
                if self._in_memory and deltas and not (self._is_held(final) or is_complete(final)):
                    problem, deltas = self._change(url, final, deltas, transfers), {}
                if not self._is_held(final):
                    with _pulling(self._local.path, lambda: is_complete(final)) as is_needed:
                        if is_needed:
                            transfers.append(transfer := _Transfer([*usable, url], match, self._token))
                            problem = problem or self._rebuild(transfer, unfinished(final), deltas or {}, transfers)
                            problem = _copy_rest(transfer, final, problem)
                            _remove_old(self._local.path, final)
                    self.held = None  # an older one
                    os.utime(final)
            except OSError as error:
                text = error.strerror or error
                message = f"the weights cannot be written to {self._local.path}: {text}"
                raise WeightSyncError(message, code="weights.pull_failed") from error
        return Pulled(final, problem, sum(each.num_copied for each in transfers))

    def _name_in(self, url: str) -> re.Match[str]:
        """The name of a folder and its checksum. RequestError unless it is shared or on the machine of a trainer."""
        parts, is_shared = urlsplit(url), url.startswith(SHARED)
        match = FOLDER_NAME.fullmatch(Path(url).name if is_shared else parts.path.removeprefix("/"))
        is_ours = is_shared or (parts.scheme == "http" and is_trainer(parts.hostname or "", self._environ))
        if match is None or not is_ours:
            message = f"{url[:200]} is no folder of a trainer of this run"
            raise RequestError(message, code="weights.unknown_trainer")
        return match

    def _rebuild(
        self, whole: "_Transfer", folder: Path, deltas: Mapping[str, str], transfers: "list[_Transfer]"
    ) -> str:
        """Fill the `folder` of the transfer `whole` from an earlier one and the differences since then, whose transfers
        are appended. Returns why it is not filled although an earlier one is here. OSError when it cannot write."""
        if (base := self._newest_base(whole.addresses[-1], folder.parent, deltas)) is None:
            return ""
        fetched: list[Path] = []
        try:
            for path in self._fetch(folder.parent, _since(base.name, deltas), transfers):
                fetched.append(path)
            listed = whole.listed()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            sizes = {file.name: file.num_bytes for file in listed.files}
            sums = rebuild(base, [path / DELTA_FILE for path in fetched], folder, sizes, listed.block_bytes)
            for file in listed.files:
                pairs = zip(file.sums, sums[file.name], strict=True)
                num_equal = next(
                    (number for number, (left, right) in enumerate(pairs) if left != right), len(file.sums)
                )
                whole.proven[file.name] = min(num_equal * listed.block_bytes, file.num_bytes)
        except ArealError as error:
            return str(error)
        finally:
            for path in fetched:
                shutil.rmtree(path, ignore_errors=True)
        if any(whole.proven[file.name] < file.num_bytes for file in listed.files):
            _drop(base, folder.parent)
        return ""

    def _newest_base(self, url: str, root: Path, deltas: Mapping[str, str]) -> Path | None:
        """The newest folder named in `deltas` that is below `root` or beside `url`."""
        roots = [Path(url.removeprefix(SHARED)).parent, root] if url.startswith(SHARED) else [root]
        bases = [parent / base for base in deltas if FOLDER_NAME.fullmatch(base) for parent in roots]
        return next(filter(is_complete, reversed(bases)), None)

    def _fetch(self, root: Path, urls: Sequence[str], transfers: "list[_Transfer]") -> Iterator[Path]:
        """Copy folders with differences to `root`, unless they are there."""
        for url in urls:
            match = self._name_in(url)
            folder = root / match[0]
            if not is_complete(folder):
                transfers.append(_Transfer([url], match, self._token, max_failures=_MIRROR_FAILURES))
                transfers[-1].run(folder)
            yield folder

    def _change(self, url: str, final: Path, deltas: Mapping[str, str], transfers: "list[_Transfer]") -> str:
        """Make the folder in memory `final` from the one there, or from one on a disk, and the differences since then.
        Returns why it was not made although there was an earlier one. OSError when differences cannot be written."""
        root, names = final.parent, list(deltas)
        base, files = self._newest_base(url, root, deltas), dict[str, NDArray[np.uint8]]()
        held = "" if self.held is None else self.held.offered.path.name
        if self.held is not None and held in names and (base is None or names.index(base.name) <= names.index(held)):
            base, files = self.held.offered.path, self.held.files
        if base is None:
            return ""
        try:
            with self._differences(root, base.name, deltas, transfers) as differences:
                self.held = None  # before another version is read
                files = files or _read_folder(base)
                for difference in differences:  # one at a time: together they may be as large as the weights
                    change(files, np.fromfile(difference, np.uint8).data)
        except ArealError as error:
            return str(error)
        listed = FolderList.of_contents({name: data.data for name, data in files.items()})
        if listed.name(final.name.rpartition("-")[0]) != final.name:
            _drop(base, root)
            return _OTHER_WEIGHTS
        data = listed.to_bytes()
        offered = OfferedFolder(final, listed, data, partial(self._write_held, final, np.frombuffer(data, np.uint8)))
        self.held = HeldFolder(offered, files)
        return ""

    @contextlib.contextmanager
    def _differences(
        self, root: Path, base: str, deltas: Mapping[str, str], transfers: "list[_Transfer]"
    ) -> Iterator[Sequence[BinaryIO]]:
        """The open files with the differences since the version `base`. They stay on the disk for other servers of this
        machine for as long as the trainer offers them."""
        with contextlib.ExitStack() as opened:
            with _pulling(root, lambda: False):
                paths = self._fetch(root, _since(base, deltas), transfers)
                files = [opened.enter_context(open(path / DELTA_FILE, "rb")) for path in paths]
                used = {url.rpartition("/")[2] for url in deltas.values()}
                for path in root.glob(f"*{DELTA}*"):
                    if path.name not in used:
                        shutil.rmtree(path, ignore_errors=True)
            yield files

    def _is_held(self, folder: Path) -> bool:
        return (held := self.held) is not None and held.offered.path == folder

    @contextlib.contextmanager
    def reading(self, folder: Path) -> Iterator[Mapping[str, NDArray[np.uint8]] | None]:
        """The files of a pulled folder that is in memory, which do not change inside the block; else None."""
        with self._lock:
            yield self.held.files if self.held is not None and self._is_held(folder) else None

    def _write_held(self, folder: Path, listed: NDArray[np.uint8]) -> None:
        """Write the folder in memory to the disk, for a server that joins. Nothing when it is another one by now, or
        while another process of this machine pulls for `_BUSY_S`: that one may be waiting for this folder."""
        give_up = time.monotonic() + _BUSY_S
        with self.reading(folder) as files:
            if files is None:
                return
            with _pulling(folder.parent, lambda: is_complete(folder) or time.monotonic() > give_up) as is_needed:
                if is_needed:
                    write_folder({**files, LIST: listed}, folder)
                    _remove_old(folder.parent, folder, differences=False)

    def _is_copy(self, mirror: str, name: str) -> bool:
        """Whether an address is that of a folder `name` on a machine of this run."""
        parts = urlsplit(mirror)
        is_known = parts.scheme == "http" and is_trainer(parts.hostname or "", self._environ)
        return is_known and parts.path == f"{PULLED_WEIGHTS}/{name}"

    def offered(self, name: str) -> OfferedFolder | None:
        """The copy with this name for `folder_routes`; None when it is not here or not complete."""
        if (held := self.held) is not None and held.offered.path.name == name:
            return held.offered
        if self._local is None or not FOLDER_NAME.fullmatch(name) or not is_complete(folder := self._local.path / name):
            return None
        if (known := self._offered.get(name)) is None:
            try:
                data = (folder / LIST).read_bytes()
            except OSError:
                return None  # it was removed meanwhile
            known = OfferedFolder(folder, FolderList.from_bytes(data), data)
            self._offered = {name: known}
        return known

    def close(self) -> None:
        """Remove the copies, unless another process of the run uses them. A pull that runs is not waited for."""
        local, self._local = self._local, None
        if local is not None:
            local.close()


@contextlib.contextmanager
def _pulling(root: Path, is_done: Callable[[], bool]) -> Iterator[bool]:
    """Be the only process of this machine that changes folders below `root`. False: `is_done` became true before.
    WeightSyncError when another one is that process and changes nothing for `_IDLE_S`."""
    since = time.time()
    while True:
        with exclusive(root / ".pulling") as is_exclusive:
            if (ends := is_done()) or is_exclusive:
                yield not ends
                return
        is_idle = time.time() - since > _IDLE_S  # as far as is known: a walk through the files costs time
        if is_idle and time.time() - (since := max(since, _last_change(root))) > _IDLE_S:
            text = f"another process of this machine pulls weights to {root} and has written nothing for {_IDLE_S:g} s"
            raise WeightSyncError(f"{text}: end the server that hangs", code="weights.pull_failed")
        time.sleep(_POLL_S)


def _last_change(root: Path) -> float:
    """Seconds since the epoch. A folder that disappears meanwhile is a change."""
    try:
        return max(path.stat().st_mtime for path in (root, *root.rglob("*")))
    except OSError:
        return time.time()


def _since(base: str, deltas: Mapping[str, str]) -> list[str]:
    """The addresses of the differences since the version `base`."""
    return list(deltas.values())[list(deltas).index(base) :]


def _read_folder(folder: Path) -> dict[str, NDArray[np.uint8]]:
    try:
        return {path.name: np.fromfile(path, np.uint8) for path in files_in(folder)}
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error}", code="weights.bad_delta") from error


def _drop(base: Path, root: Path) -> None:
    """Remove a folder from which differences made other weights: it may be damaged, so there is no second attempt."""
    if base.parent == root:
        shutil.rmtree(base, ignore_errors=True)


def _copy_rest(transfer: "_Transfer", final: Path, problem: str) -> str:
    """Copy what differences have not made; returns why that was needed although there were some. `problem`: why they
    could not be applied; else empty."""
    try:
        transfer.run(final)
    except RequestError as error:
        if not (problem or transfer.proven):
            raise
        message = f"the differences failed ({problem or _OTHER_WEIGHTS}), and {error}"
        raise RequestError(message, code="weights.bad_delta") from error
    if transfer.proven and transfer.num_copied:
        return f"{_OTHER_WEIGHTS}: {transfer.num_copied} bytes were copied"
    return problem


def unfinished(final: Path) -> Path:
    """The folder that is filled before it becomes `final`."""
    return final.with_name(f".{final.name}")


def _remove_old(root: Path, newest: Path, *, differences: bool = True) -> None:
    """Remove old versions, and what killed processes left. No other process may be pulling. `differences`: these too.
    Other processes may make their versions from them."""
    paths = [path for path in root.iterdir() if path.is_dir() and path != newest]
    paths = [path for path in paths if differences or DELTA not in path.name]
    versions = [path for path in paths if not path.name.startswith((".", DELTA)) and is_complete(path)]
    kept = sorted(versions, key=lambda path: path.stat().st_mtime)[-(KEPT - 1) :]
    for path in paths:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def copied_folder(url: str, root: Path, token: str) -> Path:
    """A copy of the folder that another process of the trainer offers at `url`, below `root`. WeightSyncError when the
    transfer does not succeed; OSError when it cannot be written."""
    name = FOLDER_NAME.fullmatch(urlsplit(url).path.removeprefix("/"))
    assert name is not None
    folder = root / name[0]
    if not is_complete(folder):
        try:
            _Transfer([url], name, token).run(folder)
        except RequestError as error:
            raise WeightSyncError(str(error), code="weights.pull_failed") from error
    return folder


class _Transfer:
    """One folder."""

    def __init__(
        self, addresses: list[str], name: re.Match[str], token: str, max_failures: int = _MAX_FAILURES
    ) -> None:
        """`addresses`: of the folder, in the order in which they are asked. `name`: with its checksum.
        `max_failures`: of the last address."""
        self.addresses, self._name, self._list_sum = addresses, name[0], name[1]
        self._headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity", "Connection": "close"}
        self._max_failures, self._failures = max_failures, 0
        self.num_copied = 0
        """Bytes of files that were received."""
        self.proven: dict[str, int] = {}
        """Bytes at the start of a file that are there, whose checksums were compared with the list."""
        self._list_bytes = b""

    def listed(self) -> FolderList:
        self._list_bytes = self._list_bytes or self._received_list()
        return FolderList.from_bytes(self._list_bytes)

    def run(self, final: Path) -> None:
        """OSError when it cannot be written; else see `_failed`."""
        partial = unfinished(final)
        partial.mkdir(exist_ok=True)
        listed = self.listed()
        for index, file in enumerate(listed.files):
            with open(partial / file.name, "ab+") as copy:
                self._copy(index, file, listed.block_bytes, copy)
        (partial / LIST).write_bytes(self._list_bytes)
        publish_folder(partial, final, sum_up=False, sync=False)

    def _received_list(self) -> bytes:
        while True:
            try:
                with self._get("", 0) as answer:
                    data = b"".join(_pieces(answer))
                if hashlib.sha256(data).hexdigest() == self._list_sum:
                    return data
                raise _Cut("the list of files has a wrong checksum")
            except _Cut as error:
                self._failed(error)

    def _copy(self, index: int, file: ListedFile, block_bytes: int, copy: BinaryIO) -> None:
        """Continue after what `copy` holds, until all of the file is there and verified."""
        blocks = _Blocks(file, block_bytes, copy)
        blocks.verify_stored(self.proven.get(file.name, 0))
        while blocks.position < file.num_bytes:
            verified = blocks.verified
            try:
                with self._get(f"/{index}", blocks.position) as answer:
                    for piece in _pieces(answer):
                        self.num_copied += len(piece)
                        blocks.add(piece)
                if blocks.position < file.num_bytes:
                    raise _Cut(f"{file.name} ended after {blocks.position} of {file.num_bytes} bytes")
            except _Cut as error:
                if blocks.verified > verified:
                    self._failures = 0
                self._failed(error)

    def _get(self, path: str, start: int) -> BufferedIOBase:
        if self.addresses[0].startswith(SHARED):
            return self._opened(path, start)
        folder = urlsplit(self.addresses[0])
        connection = http.client.HTTPConnection(folder.netloc, timeout=_SILENCE_S)
        headers = self._headers | ({"Range": f"bytes={start}-"} if start else {})
        try:
            connection.request("GET", f"{folder.path}{path}", headers=headers)
            answer = connection.getresponse()  # it holds the socket
        except (OSError, http.client.HTTPException) as error:
            raise _Cut(str(error) or type(error).__name__) from error
        if answer.status in (401, 403, 404):
            raise _NotServed(f"{folder.netloc} does not serve {self._name} (status {answer.status})")
        if answer.status != (206 if start else 200) or (
            start and not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        ):
            raise _Cut(f"status {answer.status} for the bytes from {start}")
        return answer

    def _opened(self, path: str, start: int) -> BufferedIOBase:
        folder = Path(self.addresses[0].removeprefix(SHARED))
        name = self.listed().files[int(path[1:])].name if path else LIST
        try:
            file = (folder / name).open("rb")
        except FileNotFoundError as error:
            raise _NotServed(f"{folder} has no {name}") from error
        except OSError as error:
            raise _Cut(str(error)) from error
        file.seek(start)
        return file

    def _failed(self, error: _Cut) -> None:
        """Wait before the next attempt, or turn to the next address; after the last one RequestError when it does not
        have the folder, else WeightSyncError."""
        self._failures += 1
        if len(self.addresses) > 1:
            if isinstance(error, _NotServed) or self._failures >= _MIRROR_FAILURES:
                self.addresses, self._failures = self.addresses[1:], 0
                return
        elif isinstance(error, _NotServed):
            raise RequestError(str(error), code="weights.not_served") from error
        elif self._failures >= self._max_failures:
            text = f"{self._failures} attempts without progress, the last: {error}"
            message = f"the weights {self._name[:60]} could not be pulled from {self.addresses[0]}: {text}"
            raise WeightSyncError(message, code="weights.pull_failed") from error
        time.sleep(min(_FIRST_PAUSE_S * 2 ** (self._failures - 1), _LONGEST_PAUSE_S))


def _pieces(answer: BufferedIOBase) -> Iterator[bytes]:
    """The body as it arrives. _Cut when the connection fails."""
    while True:
        try:
            piece = answer.read1(_READ_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _Cut(str(error) or type(error).__name__) from error
        if not piece:
            return
        yield piece


class _Blocks:
    """A file that grows at its end; each block is verified when it is complete."""

    def __init__(self, listed: ListedFile, block_bytes: int, file: BinaryIO) -> None:
        self._listed, self._block_bytes, self._file = listed, block_bytes, file
        self.position = 0
        """Bytes in the file."""
        self.verified = 0
        """Complete blocks whose checksum is right; bytes after them may follow."""
        self._sum = 0

    def verify_stored(self, proven: int) -> None:
        """Read what an earlier process stored, after the first `proven` bytes, which are whole blocks or all; the rest
        from the first wrong block on is dropped."""
        self.position, self.verified = proven, -(-proven // self._block_bytes)
        self._file.seek(proven)
        try:
            while piece := self._file.read(_READ_BYTES):
                self._take(piece, is_stored=True)
        except _Cut:
            pass  # the file is cut there
        if self._file.seek(0, os.SEEK_END) > self.position:
            self._truncate()

    def add(self, piece: bytes) -> None:
        """Write received bytes. _Cut when they end a block with a wrong checksum: then the block is dropped."""
        self._take(piece, is_stored=False)

    def _take(self, piece: bytes, *, is_stored: bool) -> None:
        rest = memoryview(piece)
        while rest:
            end = min((self.verified + 1) * self._block_bytes, self._listed.num_bytes)
            if end == self.position:
                raise _Cut(f"{self._listed.name} is longer than {self._listed.num_bytes} bytes")
            part, rest = rest[: end - self.position], rest[end - self.position :]
            if not is_stored:
                self._file.write(part)
            self._sum = zlib.crc32(part, self._sum)
            self.position += len(part)
            if self.position == end:
                self._end_block()

    def _end_block(self) -> None:
        checksum, self._sum = self._sum, 0
        if checksum != self._listed.sums[self.verified]:
            number = self.verified
            self._truncate()
            raise _Cut(f"block {number} of {self._listed.name} has a wrong checksum")
        self.verified += 1

    def _truncate(self) -> None:
        """Drop everything after the verified blocks."""
        self.position, self._sum = min(self.verified * self._block_bytes, self._listed.num_bytes), 0
        self._file.flush()
        self._file.truncate(self.position)
