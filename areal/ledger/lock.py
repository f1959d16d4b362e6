"""The lock of the one process that writes a ledger folder. It is released when the process ends, in any way."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from areal.api.errors import LedgerError


def not_writable(folder: Path, error: OSError) -> LedgerError:
    """The error for a ledger folder that cannot be opened, locked or recovered."""
    message = f"cannot open the ledger in {folder}: {error.strerror or error}"
    return LedgerError(message, code="ledger.not_writable")


class LedgerLock:
    """A lock that the controller holds while it lives, also while it is stopped (SIGSTOP)."""

    def __init__(self, folder: Path) -> None:
        """LedgerError with pid and host of the holder when another process writes this ledger."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / "writer.lock", "a+")  # noqa: SIM115 - open is what holds the lock
        except OSError as error:
            raise not_writable(folder, error) from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by children, unlike flock
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read() or "another controller"
            self._file.close()
            if not isinstance(error, BlockingIOError | PermissionError):
                raise not_writable(folder, error) from error
            message = f"{folder} is being written by {holder}: end that process first"
            raise LedgerError(message, code="ledger.locked") from None
        self._file.truncate(0)
        self._file.write(f"the controller with pid {os.getpid()} on host {socket.gethostname()}")
        self._file.flush()

    def release(self) -> None:
        self._file.close()
