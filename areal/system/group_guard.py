"""The guard of a process group: a small process that kills its group when the leader of the group dies.

Processes that a foreign server started survive it when it is killed, but stay in its process group, so the guard ends
them. It waits for the end of its standard input, a pipe whose other end only the leader holds and the kernel closes.

Run as a file and without the rest of areal, so that it is small and starts in milliseconds.
"""

import os
import signal
import sys


def start_guard() -> int:
    """Start the guard of this process's group, which kills the group when this process has ended. Returns its pid.

    Only for the leader of a group: otherwise the group contains processes of others.
    """
    if os.getpgrp() != os.getpid():
        raise RuntimeError("only the leader of a process group can start its guard")
    # The writing end is closed at every exec, so no other process gets it. This process leaves it open: the kernel
    # closes it when the exit code is final, and the guard's kill cannot change that.
    reading, _ = os.pipe()
    argv = [sys.executable, "-I", "-S", __file__]
    pid = os.posix_spawn(
        sys.executable,
        argv,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)],
        setsigmask=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT],  # from its start on
    )
    os.close(reading)
    return pid


def _guard() -> None:
    while os.read(0, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    _guard()
