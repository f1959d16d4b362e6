"""Owns the claim of one process to write a ledger folder. It ends with the process, however that ends."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from areal.api.errors import LedgerError


class LedgerLock:
    """Held by a controller for as long as it lives, a stopped one (SIGSTOP) included."""

    def __init__(self, folder: Path) -> None:
        """LedgerError, with pid and host of the holder, when another process writes this ledger."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / "writer.lock", "a+")  # noqa: SIM115 - open is what holds the lock
        except OSError as error:
            raise LedgerError(f"cannot open the ledger in {folder}: {error.strerror or error}") from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by children, unlike flock
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read() or "another controller"
            self._file.close()
            if not isinstance(error, BlockingIOError | PermissionError):
                raise LedgerError(f"cannot lock the ledger in {folder}: {error.strerror or error}") from error
            raise LedgerError(f"{folder} is being written by {holder}: end that process first") from None
        self._file.truncate(0)
        self._file.write(f"the controller with pid {os.getpid()} on host {socket.gethostname()}")
        self._file.flush()

    def release(self) -> None:
        self._file.close()
