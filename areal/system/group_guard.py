"""Owns the guard of a process group: a tiny process that kills all of its group once the one who started it is gone.

A foreign server starts processes of its own, which outlive it when it is killed. They stay in its process group, and
that is what the guard ends: `kill -9` of whoever hosts the server leaves nothing behind. The guard waits for the end of
its standard input, a pipe whose other end only its starter holds; the starter's death, however it comes, closes that.

Run as a file and without the rest of areal, so that it is small and starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys


def start_guard() -> int:
    """Start the guard of this process's group, which strikes when this process has ended. Returns its pid.

    Only the leader of a group may ask for it: any other would take along processes that it knows nothing of.
    """
    if os.getpgrp() != os.getpid():
        raise RuntimeError("only the leader of a process group may have it guarded")
    # Nobody else gets the writing end, since it is closed at every exec, and we never close it: that is left to the
    # kernel, once our exit code is settled and the guard's blow cannot change it.
    reading, _ = os.pipe()
    argv = [sys.executable, "-I", "-S", __file__]
    pid = os.posix_spawn(
        sys.executable,
        argv,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)],
        setsigmask=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT],  # from its first moment on
    )
    os.close(reading)
    return pid


def _guard() -> None:
    while os.read(0, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    _guard()
