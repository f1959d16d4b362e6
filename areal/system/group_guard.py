"""Owns the guard of a process group: a tiny process that kills all of its group once the one who started it is gone.

A foreign server starts processes of its own, which outlive it when it is killed. They stay in its process group, and
that is what the guard ends: `kill -9` of whoever hosts the server leaves nothing behind. The guard waits for the end of
its standard input, a pipe whose other end only its starter holds; the starter's death, however it comes, closes that.

Run as a file and without the rest of areal, so that it is small and starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def start_guard() -> subprocess.Popen[bytes]:
    """Start the guard of this process's group. It strikes when its standard input is closed: by us, or by our end.

    Only the leader of a group may ask for it: any other would take along processes that it knows nothing of.
    """
    if os.getpgrp() != os.getpid():
        raise RuntimeError("only the leader of a process group may have it guarded")
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        env={},  # it is not one of the run's processes, and must not look like one
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert guard.stdout is not None
    guard.stdout.read(1)  # from here on it heeds no other signal
    guard.stdout.close()
    return guard


def _guard() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, b"+")
    os.close(1)
    while os.read(0, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    _guard()
