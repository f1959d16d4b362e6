"""The program that a remote service runs for a test of functions: it calls the tested program and checks assertions.

The tested program runs in a child process, which is forked before this one reads the test. The child holds no
descriptor of this process except a socket, and this process cannot be inspected by it. Imports only the standard
library and the files that are sent along.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from typing import Any

from areal.reward.sandbox_confine import drop_capabilities, refuse_system_calls
from areal.reward.sandbox_roles import AssertionChecker, Functions, Lines

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38


def main() -> None:
    with open("program.py", encoding="utf-8") as file:
        source = file.read()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # before the program could open this process's memory
    ours, theirs = socket.socketpair()
    home = tempfile.mkdtemp()
    child = os.fork()
    if child == 0:
        ours.close()
        run_program(theirs.detach(), source, home)
    theirs.close()
    job = json.loads(sys.stdin.readline())
    lines = Lines(ours.fileno())
    result = outcome(lines, job)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    shutil.rmtree(home, ignore_errors=True)
    sys.stdout.write(f"\n{job['nonce']}{json.dumps(result)}\n")


def outcome(lines: Lines, job: dict[str, Any]) -> dict[str, Any]:
    """The result of one test; {"failed": true} = the program does not load."""
    answer = lines.read()
    if not isinstance(answer, dict) or "value" not in answer:
        return {"failed": True}
    if "order" in job:
        return {"passed": AssertionChecker(lines).passes(job["order"])}
    lines.write(job["question"])
    return {"answer": lines.read()}


def run_program(channel: int, source: str, home: str) -> None:
    try:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.dup2(channel, 3)
        os.closerange(4, 1 << 16)
        os.chdir(home)
        with open("program.py", "w", encoding="utf-8") as file:
            file.write(source)
        if sys.platform == "linux":
            libc = ctypes.CDLL(None)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        drop_capabilities()  # root, too, can then not inspect the process above
        with contextlib.suppress(OSError):  # other machines have no table of system calls
            refuse_system_calls()
        sys.path[0] = home
        sys.argv[:] = ["program.py"]
        Functions(3).serve()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
