"""A folder on a disk of this machine that the processes of one run here use together. It ends with the last of them."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from areal.api.errors import InputError


class LocalFolder:
    """`path` is below TMPDIR. It stays when this process is killed: the next process of the run finds it, and the first
    process of another run removes it."""

    def __init__(self, key: str) -> None:
        """`key`: names the run; equal in all its processes. InputError when other users could write to the folder."""
        base = _private(Path(tempfile.gettempdir()) / f"areal-{os.getuid()}")
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
    found = base.lstat()
    if not base.is_dir() or base.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
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
