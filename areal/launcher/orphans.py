"""Orphans: processes of a run that still run on this machine after their launcher has ended.

Children die with their launcher, so there are normally none; the kernel can hold one (a hung disk or GPU). A new
launcher waits a short time for their end, because two processes of one role must never work on one run.
"""

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

from areal.api.errors import LaunchError
from areal.system.process import AREAL_PROCESS, ProcessContext
from areal.system.run_paths import RunPaths

_POLL_S = 0.1
_REPORTED_AFTER_S = 1.0


class Orphan(NamedTuple):
    pid: int
    name: str


def find_orphans(paths: RunPaths) -> list[Orphan]:
    """The processes on this machine whose environment names this run."""
    return [found for process in psutil.process_iter() if (found := _orphan(process, paths)) is not None]


def wait_for_orphans(paths: RunPaths, *, limit_s: float, say: Callable[[str], None]) -> None:
    """Return once none is left. LaunchError, with their pids, after `limit_s`."""
    began_s, was_reported = time.monotonic(), False
    while found := find_orphans(paths):
        waited_s = time.monotonic() - began_s
        names = ", ".join(f"{one.name} (pid {one.pid})" for one in found)
        if waited_s >= limit_s:
            pids = " ".join(str(one.pid) for one in found)
            message = f"{paths.root} is in use by processes of an earlier launcher: {names}; end them: kill -9 {pids}"
            raise LaunchError(message, code="launch.run_in_use")
        if not was_reported and waited_s >= _REPORTED_AFTER_S:
            was_reported = True
            say(f"areal: waiting up to {limit_s:g} s for the end of processes of an earlier launcher: {names}")
        time.sleep(_POLL_S)


def _orphan(process: psutil.Process, paths: RunPaths) -> Orphan | None:
    try:
        text = process.environ().get(AREAL_PROCESS)
        if text is None or process.status() == psutil.STATUS_ZOMBIE:
            return None
        context = ProcessContext.from_env({AREAL_PROCESS: text})
        # Processes that user code starts inherit the environment and do not count. A server runs no user code, so
        # every process with its name belongs to it, also one that SGLang or vLLM started.
        words = itertools.pairwise(process.cmdline())
        runs_areal = any(flag == "-m" and module.startswith("areal.") for flag, module in words)
        is_ours = context is not None and (context.role == "server" or runs_areal)
    except (psutil.Error, OSError, LaunchError):  # ended meanwhile, of another user, or with another format
        return None
    if context is not None and is_ours and context.run_dir == str(paths.root):
        return Orphan(process.pid, context.name)
    return None
