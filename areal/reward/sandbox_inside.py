"""The two processes of a sandbox: the keeper, which the reward worker starts, and the program, which the keeper forks.

The program's process confines itself and then runs foreign code. The keeper runs no foreign code. It waits for the end
of that process, for SIGTERM (also sent by the kernel when the reward worker dies) or for the end of `keep_s`. Then it
kills every process below it and exits with the program's exit code. Both import only what this file imports.

Started as `python -m areal.reward.sandbox_inside CHANNEL PARENT_PID`. CHANNEL is the descriptor of a socket, on which
one line of JSON says what to run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from functools import partial

from areal.reward import sandbox_roles
from areal.reward.sandbox_confine import (
    drop_capabilities,
    enter_namespaces,
    refuse_system_calls,
    remove_folder,
    set_limits,
)

TYPE_CHECKING = False  # importing typing takes longer than the rest of this file
if TYPE_CHECKING:
    from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


def main(argv: list[str]) -> NoReturn:
    channel, parent = int(argv[0]), int(argv[1])
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # for sigtimedwait; the program unblocks them
    with open(channel, "rb", closefd=False) as lines:  # one line: the sender then waits for the answer
        line = lines.readline()
    if not line:
        os._exit(1)
    orders = json.loads(line)
    limits, folder = orders["limits"], orders["folder"]
    outside = os.open(os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY)  # opened now: later it is hidden
    enter = partial(enter_namespaces, folder, limits["folder_bytes"], orders["visible"])
    if orders["isolate"] and (problem := _problem_of(enter)):
        _refuse(channel, f"namespaces: {problem}")
    _end_with(parent, signal.SIGTERM)
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(outside)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        _end_with(keeper, signal.SIGKILL)
        _run(orders, channel)
    os.close(channel)
    status = _keep(child, until_s=time.monotonic() + orders["keep_s"])
    _sweep()
    # The reward worker removes the folder too, unless it was killed.
    if orders["isolate"]:
        with contextlib.suppress(OSError):
            os.rmdir(os.path.basename(folder), dir_fd=outside)
    else:
        remove_folder(folder)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _problem_of(step: Any) -> str:
    """Why a step of the confinement failed; empty = it succeeded."""
    if sys.platform != "linux":
        return f"not on {sys.platform}"
    try:
        step()
    except OSError as error:
        return f"{error.strerror or error}"
    return ""


def _refuse(channel: int, problem: str) -> NoReturn:
    """Report that a protection is missing, and exit without running the program."""
    os.write(channel, json.dumps({"missing": problem}).encode() + b"\n")
    os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _end_with(parent: int, number: int) -> None:
    """Get a signal when the parent process ends; exit now when it has already ended."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() not in (parent, 0):  # 0 = outside this process namespace
        os._exit(1)


def _keep(child: int, *, until_s: float) -> int:
    """Wait for the program's end; kill it on SIGTERM or at `until_s`. Returns its wait status."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    while True:
        got = signal.sigtimedwait({signal.SIGTERM, signal.SIGCHLD}, max(0.0, until_s - time.monotonic()))
        if got is None or got.si_signo == signal.SIGTERM:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return status


def _sweep() -> None:
    """Kill all descendants: the orphans of a killed process become children of this one, and are killed next."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
                children = [int(text) for text in file.read().split()]
        except OSError:
            children = []  # in namespaces no process is left, and /proc is hidden
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0 if children else os.WNOHANG)
        except ChildProcessError:
            return
        if not children:
            return


def _run(orders: dict[str, Any], channel: int) -> NoReturn:
    """Confine this process and run the program in its role; exits with the program's exit code."""
    home = "/tmp" if orders["isolate"] else orders["folder"]
    os.chdir(home)
    with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(orders["source"])
    os.environ.clear()
    os.environ.update({"HOME": home, "TMPDIR": home, "OPENBLAS_NUM_THREADS": "1"})
    sys.path[:] = [path for path in sys.path if path != orders["root"]] + orders["packages"]
    sys.dont_write_bytecode = True
    sys.set_int_max_str_digits(0)
    set_limits(orders["limits"])
    drop_capabilities()
    if orders["refuse"] and (problem := _problem_of(refuse_system_calls)):
        _refuse(channel, f"system calls: {problem}")
    if orders["role"] == "checker":
        _prctl(_PR_SET_DUMPABLE, 0)  # without namespaces the program could read the tests in this process's memory
    os.write(channel, b'{"missing": ""}\n')
    sandbox_roles.play(orders["role"], channel)
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
