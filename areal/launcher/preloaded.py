"""A parent that has imported torch and transformers once, and forks the processes of a run from itself.

The imports take 2.5 s of CPU in every process. The launcher of a run without GPUs starts this parent first, and it
imports while the configuration is checked. A forked process becomes a child of the launcher, which is the subreaper
(prctl(2)) during a fork; the process in between ends at once. Linux only.

`python -m areal.launcher.preloaded LAUNCHER DESCRIPTOR` reads orders from a socket and answers each with a process id.
"""

import ctypes
import gc
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from areal.system.process import opened_log, tied_to_this_process, watch_parent

PRELOAD = "AREAL_PRELOAD"
"""The variable with which a user turns this parent off: 0."""
_MODULES = ("areal.inference.engine", "areal.trainer.ppo_loop", "areal.rollout.controller_process", "areal.engine.fsdp")
"""What server, trainer and controller import. They start no thread and use no device."""
_FORKED = ("areal.inference.server", "areal.trainer", "areal.evaluate")
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
"""Variables that the C library reads when a process starts -> parameters of mallopt(3)."""
_OF_PROCESSES = ("PATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", *_MALLOPT)
"""Variables that may differ from the parent's: a forked process sets its thread counts itself."""
_ROOM = 1 << 13
"""Bytes of arguments, and bytes of environment, that /proc can show of a forked process beyond those of the parent."""
_LIMIT_S = 120.0
_MAX_ORDER = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class ForkedProcess:
    """A child that the preloaded parent has forked, with the part of `subprocess.Popen` that a launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        return self._collect(os.WNOHANG)

    def wait(self) -> int | None:
        return self._collect(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _collect(self, options: int) -> int | None:
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, options)
            self._exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self._exit_code


class PreloadedParent:
    """The launcher's end of the parent."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """`env`: variables that libraries read when they are imported."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        room = " " * _ROOM
        self._env = {**os.environ, **env}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno()), room],
            env={**self._env, "OMP_NUM_THREADS": "1", "AREAL_ROOM": room},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # when an import fails, a process that is started without this parent reports it
            pass_fds=(theirs.fileno(),),
            process_group=0,
            preexec_fn=tied_to_this_process(),
        )
        theirs.close()
        self.pid = self._process.pid

    def can_fork(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether it is a command of areal, with the variables that this parent had at its imports."""
        differing = {name for name, value in env.items() if self._env.get(name) != value}
        is_ours = (*argv[:2],) == (sys.executable, "-m") and argv[2] in _FORKED
        return is_ours and all(name in _OF_PROCESSES or name.startswith("AREAL_") for name in differing)

    def fork(
        self, argv: Sequence[str], env: Mapping[str, str], log: Path, descriptors: Sequence[int]
    ) -> ForkedProcess | None:
        """Start `argv` as the leader of a new process group, output appended to `log`. It inherits `descriptors`.

        Waits for the imports. None when this parent is dead or does not answer. LaunchError without a log.
        """
        order = json.dumps({"argv": list(argv), "env": dict(env), "descriptors": list(descriptors)}).encode()
        prctl = ctypes.CDLL(None).prctl
        reading, writing = os.pipe()  # the process runs only when the launcher knows its id
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            with opened_log(log) as file:
                socket.send_fds(self._socket, [order], [reading, file.fileno(), *descriptors])
            has_answer = select.select([self._socket], [], [], _LIMIT_S)[0]
            answer = self._socket.recv(64) if has_answer else b""
            if not answer:
                self._process.kill()
                return None
            os.write(writing, b"1")
            return ForkedProcess(int(answer))
        except ConnectionError:
            return None
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0)
            os.close(reading)
            os.close(writing)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()


# ----------------------------------------------------------------------------------------------------------------------
# The parent itself.


def _fork_for_orders(launcher: int, orders: socket.socket) -> str:
    """Fork a process for each order until the launcher ends. Returns only in a forked process, the module to run."""
    gc.disable()  # its passes would take a quarter of the imports
    for module in _MODULES:
        import_module(module)
    gc.enable()
    gc.freeze()  # the collector of a forked process does not touch the pages of the imports, so they stay shared
    while True:
        order, received, _, _ = socket.recv_fds(orders, _MAX_ORDER, 8)
        if not order:
            os._exit(0)
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            if (pid := os.fork()) == 0:
                break
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # the launcher is the parent before it has the answer
        orders.send(os.read(reading, 64))
        for descriptor in (reading, writing, *received):
            os.close(descriptor)
    for descriptor in (reading, writing, orders.detach()):
        os.close(descriptor)
    while os.getppid() == between:
        time.sleep(0.001)
    watch_parent()
    if os.getppid() != launcher or not os.read(received[0], 1):  # the launcher has started this process in another way
        os._exit(1)
    os.close(received[0])
    return _become(json.loads(order), received[1:])


def _become(order: Mapping[str, Any], received: Sequence[int]) -> str:
    """Give this process what a started one has: group, output, descriptors, variables and arguments."""
    log, *descriptors = received
    os.setpgid(0, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for descriptor, wanted in zip(descriptors, order["descriptors"], strict=True):
        os.dup2(descriptor, wanted)
    for descriptor in {*received} - {*order["descriptors"]}:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["env"])
    for name in _MALLOPT.keys() & order["env"].keys():
        ctypes.CDLL(None).mallopt(_MALLOPT[name], int(order["env"][name]))
    argv: list[str] = order["argv"]
    _show(argv, [f"{name}={value}" for name, value in order["env"].items()])
    sys.orig_argv[:], sys.argv[:] = argv, argv[2:]
    return argv[2]


def _show(argv: Sequence[str], env: Sequence[str]) -> None:
    """Write arguments and environment to where the kernel reads /proc/PID/cmdline and environ: see proc(5).

    Nothing else uses that memory any more: `os.environ` has copies.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    bounds = [int(field) for field in fields[45:49]]  # fields 48 to 51 of the file
    for begin, end, words in ((*bounds[:2], argv), (*bounds[2:], env)):
        text = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
        ctypes.memmove(begin, text[: end - begin].ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    MODULE = _fork_for_orders(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
