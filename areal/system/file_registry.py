"""The name registry in files: one file for each name, in a folder that all processes of the run share."""

import contextlib
import errno
import os
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from areal.api.errors import LaunchError, RequestError, ServerUnavailable

_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_POLL_S = 0.05
_MAX_POLL_S = 1.0
"""Hundreds of ranks may wait for the same name: the longer they have waited, the less often they look."""
_SETTLED_S = 2.0
"""File systems record times with a coarse clock: only a folder unchanged for this long is known by its time."""
_STALE_ATTEMPTS = 5
_NO_FILE = (errno.ENOENT, errno.ENOTDIR)


def name_segments(name: str) -> list[str]:
    """The parts of a registry name. RequestError when it contains other characters than the allowed ones."""
    segments = name.split("/")
    if not all(_SEGMENT.fullmatch(segment) for segment in segments):
        message = f"registry name {name!r}: only letters, digits, '_', '-', '.' and '/' are allowed"
        raise RequestError(message, code="process.bad_name")
    return segments


class FileRegistry:
    """Implements `NameRegistry` in a folder, which may be on NFS.

    A value is complete in a temporary file before it gets its name, and a reader opens the file for each read: an NFS
    client then asks the server for the newest content (close-to-open consistency). Three faults of NFS are handled:
    the answer to a link or rename that succeeded is lost, so that the repeated request fails; a client remembers that
    a name does not exist; a file is replaced while it is read (ESTALE).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listings: dict[str, _Listing] = {}

    def _path(self, name: str) -> Path:
        *folders, last = name_segments(name)
        return self._folder.joinpath(*folders, last + ".json")

    def add(self, name: str, value: str, *, replace: bool = False) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
        temporary.write_text(value)
        inode = temporary.stat().st_ino
        try:
            if replace:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)  # fails when the name exists, unlike a rename
        except (FileExistsError, FileNotFoundError) as error:
            if _inode(path) == inode:  # it succeeded, and only its answer was lost
                return
            if isinstance(error, FileNotFoundError):
                raise
            message = f"{name} is already registered in {self._folder}, as {self.get(name)}"
            raise LaunchError(message, code="process.name_taken") from None
        finally:
            temporary.unlink(missing_ok=True)

    def get(self, name: str) -> str | None:
        path = self._path(name)
        value = _read(path)
        if value is None:
            # An NFS client remembers for up to a minute that a name does not exist, unless the folder is opened.
            with contextlib.suppress(OSError):
                os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
                value = _read(path)
        return value

    def list(self, prefix: str) -> dict[str, str]:
        """List the names. A folder that has not changed is not read again: each `add` and `remove` changes it."""
        folder = self._folder.joinpath(prefix)
        changed_ns, now_s = _changed_ns(folder), time.monotonic()
        last = self._listings.get(prefix)
        if last is not None and last.changed_ns == changed_ns and last.read_s - last.first_s > _SETTLED_S:
            return dict(last.found)
        first_s = last.first_s if last is not None and last.changed_ns == changed_ns else now_s
        paths = sorted(folder.rglob("*.json"))
        names = [path.relative_to(self._folder).as_posix().removesuffix(".json") for path in paths]
        found = {name: value for name, path in zip(names, paths, strict=True) if (value := _read(path)) is not None}
        if not changed_ns or not any(entry.is_dir() for entry in os.scandir(folder)):  # whose changes it does not show
            self._listings[prefix] = _Listing(changed_ns, first_s, now_s, found)
        return dict(found)

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def wait(self, name: str, timeout_s: float) -> str:
        began_s = time.monotonic()
        while (value := self.get(name)) is None:
            waited_s = time.monotonic() - began_s
            if waited_s >= timeout_s:
                message = f"{name} was not registered in {self._folder} within {timeout_s:g} s"
                raise ServerUnavailable(message, code="process.not_registered")
            time.sleep(min(max(_POLL_S, waited_s / 10), _MAX_POLL_S, timeout_s - waited_s))
        return value

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Nothing is open between two calls."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """What a folder without subfolders contained."""

    changed_ns: int
    """When the folder last changed, by the clock of its file system."""
    first_s: float
    """When this change was first seen."""
    read_s: float
    found: dict[str, str]


def _changed_ns(folder: Path) -> int:
    """When a folder last changed; 0 when it does not exist. An NFS client asks the server when a folder is opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return 0
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _read(path: Path) -> str | None:
    """The content of a file; None when it does not exist."""
    for attempt in range(_STALE_ATTEMPTS):
        try:
            return path.read_text()
        except OSError as error:
            if error.errno in _NO_FILE:
                return None
            if error.errno != errno.ESTALE or attempt == _STALE_ATTEMPTS - 1:
                raise
    return None


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
