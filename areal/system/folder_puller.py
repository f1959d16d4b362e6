"""Copies folders from a `FolderServer`, or from a server that has a copy, to this machine.

A cut transfer continues where it stopped, from the same server or another one; every block is verified. A transfer
waits for a server at most `_SILENCE_S` at a time. It leaves a mirror after `_MIRROR_FAILURES` attempts without a new
verified block, and ends after `_MAX_FAILURES` such attempts with the server of the trainer.
"""

import http.client
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from areal.api.errors import RequestError, WeightSyncError
from areal.system.durable import is_complete, publish_folder
from areal.system.folder_list import FolderList, ListedFile, new_sum, sum_of
from areal.system.folder_server import PULLED_WEIGHTS, OfferedFolder
from areal.system.local_folder import LocalFolder, exclusive
from areal.system.network import is_trainer, store_prefix

KEPT = 2
"""Folders that stay: the newest, and the one before, which another server of this machine may still read."""
_NAME = re.compile(r"[A-Za-z0-9_]+-([0-9a-f]{64})")
_SILENCE_S = 30.0
_MAX_FAILURES, _MIRROR_FAILURES = 8, 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_POLL_S = 0.05
_LIST = ".list"
"""File in a copy: the list by which other servers verify what they copy from here."""
_READ_BYTES = 2**20


class _Cut(Exception):
    """A transfer ended early or a block was wrong; the next attempt continues."""


class _NotServed(_Cut):
    """The server does not have the folder: there is no second attempt with it."""


class FolderPuller:
    """The folders that servers of a run on this machine have pulled. Its methods block; any thread may call them."""

    def __init__(self, token: str, environ: Mapping[str, str] | None = None) -> None:
        """`token`: the run's. `environ`: has the addresses of the trainers, the only ones that are asked."""
        self._token = token
        self._environ = os.environ if environ is None else environ
        self._lock = threading.Lock()
        self._local: LocalFolder | None = None
        self._offered: dict[str, OfferedFolder] = {}
        """The folder that was requested last."""

    def pull(self, url: str, mirrors: Sequence[str] = ()) -> Path:
        """The local copy of the folder at `url`, complete and verified. Processes of one machine share it.

        `mirrors`: addresses of the same folder on other servers of the run, which are asked first.
        RequestError when the address is not one of this run or serves the folder no more; WeightSyncError when the
        transfer does not succeed.
        """
        parts, match = urlsplit(url), _NAME.fullmatch(urlsplit(url).path.removeprefix("/"))
        if match is None or parts.scheme != "http" or not is_trainer(parts.hostname or "", self._environ):
            message = f"{url[:200]} is no folder of a trainer of this run"
            raise RequestError(message, code="weights.unknown_trainer")
        usable = [mirror for mirror in mirrors if self._is_copy(mirror, match[0])]
        with self._lock:
            if self._local is None:
                self._local = LocalFolder(store_prefix(self._token, "pulled weights")[:24])
            final = self._local.path / match[0]
            while not is_complete(final):
                with exclusive(self._local.path / ".pulling") as is_held:
                    if is_held and not is_complete(final):
                        _Transfer([*usable, url], match[0], match[1], self._token).run(final)
                if not is_held:
                    time.sleep(_POLL_S)  # another process of this machine pulls it
            _remove_old(self._local.path, final)
        return final

    def _is_copy(self, mirror: str, name: str) -> bool:
        """Whether an address is that of a folder `name` on a machine of this run."""
        parts = urlsplit(mirror)
        is_known = parts.scheme == "http" and is_trainer(parts.hostname or "", self._environ)
        return is_known and parts.path == f"{PULLED_WEIGHTS}/{name}"

    def offered(self, name: str) -> OfferedFolder | None:
        """The copy with this name for `folder_routes`; None when it is not here or not complete."""
        if self._local is None or not _NAME.fullmatch(name) or not is_complete(folder := self._local.path / name):
            return None
        if (known := self._offered.get(name)) is None:
            try:
                data = (folder / _LIST).read_bytes()
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


def _remove_old(root: Path, newest: Path) -> None:
    os.utime(newest)
    found = [path for path in root.iterdir() if path.is_dir() and path != newest]
    for path in sorted(found, key=lambda path: path.stat().st_mtime)[: max(0, len(found) - (KEPT - 1))]:
        shutil.rmtree(path, ignore_errors=True)


class _Transfer:
    """One folder."""

    def __init__(self, addresses: list[str], name: str, list_sum: str, token: str) -> None:
        """`addresses`: of the folder, in the order in which they are asked."""
        self._addresses, self._name, self._list_sum = addresses, name, list_sum
        self._headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity", "Connection": "close"}
        self._failures = 0

    def run(self, final: Path) -> None:
        partial = final.with_name(f".{final.name}")
        try:
            partial.mkdir(exist_ok=True)
            data = self._list()
            listed = FolderList.from_bytes(data)
            for index, file in enumerate(listed.files):
                with open(partial / file.name, "ab+") as copy:
                    self._copy(index, file, listed.block_bytes, copy)
            (partial / _LIST).write_bytes(data)
            publish_folder(partial, final, sum_up=False)
        except OSError as error:
            message = f"the weights cannot be written to {final.parent}: {error.strerror or error}"
            raise WeightSyncError(message, code="weights.pull_failed") from error

    def _list(self) -> bytes:
        while True:
            try:
                with self._get("", 0) as answer:
                    data = b"".join(_pieces(answer))
                if sum_of(data) == self._list_sum:
                    return data
                raise _Cut("the list of files has a wrong checksum")
            except _Cut as error:
                self._failed(error)

    def _copy(self, index: int, file: ListedFile, block_bytes: int, copy: BinaryIO) -> None:
        """Continue after what `copy` holds, until all of the file is there and verified."""
        blocks = _Blocks(file, block_bytes, copy)
        blocks.verify_stored()
        while blocks.position < file.num_bytes:
            verified = blocks.verified
            try:
                with self._get(f"/{index}", blocks.position) as answer:
                    for piece in _pieces(answer):
                        blocks.add(piece)
                if blocks.position < file.num_bytes:
                    raise _Cut(f"{file.name} ended after {blocks.position} of {file.num_bytes} bytes")
            except _Cut as error:
                if blocks.verified > verified:
                    self._failures = 0
                self._failed(error)

    def _get(self, path: str, start: int) -> http.client.HTTPResponse:
        folder = urlsplit(self._addresses[0])
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

    def _failed(self, error: _Cut) -> None:
        """Wait before the next attempt, or turn to the next address; after the last one RequestError when it does not
        have the folder, else WeightSyncError."""
        self._failures += 1
        if len(self._addresses) > 1:
            if isinstance(error, _NotServed) or self._failures >= _MIRROR_FAILURES:
                self._addresses, self._failures = self._addresses[1:], 0
                return
        elif isinstance(error, _NotServed):
            raise RequestError(str(error), code="weights.not_served") from error
        elif self._failures >= _MAX_FAILURES:
            text = f"{self._failures} attempts without progress, the last: {error}"
            message = f"the weights {self._name[:60]} could not be pulled from {self._addresses[0]}: {text}"
            raise WeightSyncError(message, code="weights.pull_failed") from error
        time.sleep(min(_FIRST_PAUSE_S * 2 ** (self._failures - 1), _LONGEST_PAUSE_S))


def _pieces(answer: http.client.HTTPResponse) -> Iterator[bytes]:
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
        self._sum = new_sum()

    def verify_stored(self) -> None:
        """Read what an earlier process stored; the rest from the first wrong block on is dropped."""
        self._file.seek(0)
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
            self._sum.update(part)
            self.position += len(part)
            if self.position == end:
                self._end_block()

    def _end_block(self) -> None:
        found, self._sum = self._sum.hexdigest(), new_sum()
        if found != self._listed.sums[self.verified]:
            number = self.verified
            self._truncate()
            raise _Cut(f"block {number} of {self._listed.name} has a wrong checksum")
        self.verified += 1

    def _truncate(self) -> None:
        """Drop everything after the verified blocks."""
        self.position, self._sum = min(self.verified * self._block_bytes, self._listed.num_bytes), new_sum()
        self._file.flush()
        self._file.truncate(self.position)
