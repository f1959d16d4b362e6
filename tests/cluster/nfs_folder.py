"""A folder as an NFS client shows it, mounted over itself: what other clients do becomes visible late.

    python -m tests.cluster.nfs_folder FOLDER

Needs Linux, root, libfuse 3 and the package mfusepy. Each mount is a client:

- what a process writes reaches the others when the file is synced, closed, or looked at on this client (close-to-open)
- a client remembers for `REMEMBERS_S` that a name exists or does not exist
- a file that another client has replaced or deleted cannot be read further through an open descriptor (ESTALE)
- locks are those of one client

Answers to a rename that are lost are in tests/system/test_durable.py.
"""

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

REMEMBERS_S = 3.0


def missing() -> str:
    """Why such a folder cannot be mounted here; empty when it can."""
    if not Path("/dev/fuse").exists():
        return "a folder as NFS shows it needs /dev/fuse"
    try:
        ctypes.CDLL("libfuse3.so.3")
    except OSError:
        return "a folder as NFS shows it needs libfuse 3 (Debian package libfuse3-3)"
    result = subprocess.run(
        [sys.executable, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('mfusepy') is None)"],
        check=False,
    )
    return "a folder as NFS shows it needs the package mfusepy" if result.returncode else ""


class Handle:
    """An open file of one client, with what it has written and not yet sent."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.unsent: list[tuple[int, bytes]] = []
        self.is_own_deletion = False

    def send(self) -> None:
        for offset, data in self.unsent:
            os.pwrite(self.descriptor, data, offset)
        self.unsent.clear()


class Client:
    """The operations of FUSE on a folder, which the mount hides."""

    def __init__(self, folder: str) -> None:
        self._root = f"/proc/self/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"
        self._handles: dict[int, Handle] = {}
        self._paths: dict[int, str] = {}
        self._lock = threading.RLock()

    def __call__(self, operation: str, *arguments: Any) -> Any:
        with self._lock:
            return getattr(self, operation)(*arguments)

    def _send(self, path: str) -> None:
        for number, ours in self._paths.items():
            if ours == path:
                self._handles[number].send()

    def _opened(self, path: str, descriptor: int) -> int:
        self._handles[descriptor], self._paths[descriptor] = Handle(descriptor), path
        return descriptor

    def _deleted(self, path: str) -> None:
        for number, ours in self._paths.items():
            if ours == path:
                self._handles[number].is_own_deletion = True  # a client renames such a file instead (.nfs...)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._send(path)
        result = os.fstat(fh) if fh in self._handles else os.lstat(f"{self._root}{path}")
        names = ("mode", "nlink", "uid", "gid", "size", "ino", "rdev")
        times = {f"st_{name}": getattr(result, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
        return {f"st_{name}": getattr(result, f"st_{name}") for name in names} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(f"{self._root}{path}")]

    def readlink(self, path: str) -> str:
        return os.readlink(f"{self._root}{path}")

    def symlink(self, target: str, source: str) -> None:
        os.symlink(source, f"{self._root}{target}")

    def open(self, path: str, flags: int) -> int:
        return self._opened(path, os.open(f"{self._root}{path}", flags & ~os.O_APPEND))

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return self._opened(path, os.open(f"{self._root}{path}", os.O_RDWR | os.O_CREAT, mode))

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._send(path)
        handle = self._handles[fh]
        if not os.fstat(fh).st_nlink and not handle.is_own_deletion:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._handles[fh].unsent.append((offset, bytes(data)))
        return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        self._send(path)
        os.truncate(f"{self._root}{path}" if fh is None else fh, length)

    def flush(self, path: str, fh: int) -> None:
        self._handles[fh].send()

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self._handles[fh].send()
        os.fsync(fh)

    def release(self, path: str, fh: int) -> None:
        self._handles.pop(fh).send()
        del self._paths[fh]
        os.close(fh)

    def unlink(self, path: str) -> None:
        self._deleted(path)
        os.unlink(f"{self._root}{path}")

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        self._send(old)
        self._deleted(new)
        os.rename(f"{self._root}{old}", f"{self._root}{new}")
        for number, ours in list(self._paths.items()):
            if ours == old or ours.startswith(f"{old}/"):
                self._paths[number] = new + ours[len(old) :]

    def link(self, target: str, source: str) -> None:
        self._send(source)
        os.link(f"{self._root}{source}", f"{self._root}{target}")

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(f"{self._root}{path}", mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(f"{self._root}{path}")

    def chmod(self, path: str, mode: int, fh: int | None = None) -> None:
        os.chmod(f"{self._root}{path}", mode)

    def chown(self, path: str, uid: int, gid: int, fh: int | None = None) -> None:
        os.chown(f"{self._root}{path}", uid, gid)

    def utimens(self, path: str, times: tuple[int, int] | None = None, fh: int | None = None) -> None:
        os.utime(f"{self._root}{path}", ns=times)

    def statfs(self, path: str) -> dict[str, Any]:
        result = os.statvfs(f"{self._root}{path}")
        names = ("bavail", "bfree", "blocks", "bsize", "favail", "ffree", "files", "flag", "frsize", "namemax")
        return {f"f_{name}": getattr(result, f"f_{name}") for name in names}


def main(folder: str) -> None:
    os.environ["FUSE_LIBRARY_PATH"] = "libfuse3.so.3"  # else mfusepy asks `ld`, which as root replaces /dev/null
    import mfusepy

    known = {name: vars(Client)[name] for name in vars(Client) if not name.startswith("_")}
    client = Client(folder)

    def locked(name: str) -> Any:
        return lambda self, *arguments: client(name, *arguments)

    operations = type("Locked", (mfusepy.Operations,), {name: locked(name) for name in known} | {"use_ns": True})
    times = {"entry_timeout": REMEMBERS_S, "negative_timeout": REMEMBERS_S, "attr_timeout": 0}
    with contextlib.suppress(KeyboardInterrupt):
        mfusepy.FUSE(operations(), folder, foreground=True, allow_other=True, default_permissions=True, **times)


if __name__ == "__main__":
    main(sys.argv[1])
