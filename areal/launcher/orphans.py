"""Orphans: processes that an earlier launcher of a run left behind on this machine.

Children die with their launcher, so there are normally none; the kernel can hold one (a hung disk or GPU). A new
launcher waits a short time for their end, because two processes of one role must never work on one run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from areal.api.errors import LaunchError
from areal.system.process import AREAL_PROCESS, ProcessContext
from areal.system.run_paths import RunPaths

_POLL_S = 0.1
_REPORTED_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Orphan:
    """A living process of a run without its launcher."""

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
            raise LaunchError(
                f"{paths.root} is in use by processes of a launcher that died: {names}; end them (kill -9 {pids}), "
                "then start again",
                code="launch.run_in_use",
            )
        if not was_reported and waited_s >= _REPORTED_AFTER_S:
            was_reported = True
            say(f"areal: waiting up to {limit_s:g} s for processes of a launcher that died: {names}")
        time.sleep(_POLL_S)


def _orphan(process: psutil.Process, paths: RunPaths) -> Orphan | None:
    try:
        text = process.environ().get(AREAL_PROCESS)
        if text is None or process.status() == psutil.STATUS_ZOMBIE:
            return None
        context = ProcessContext.from_env({AREAL_PROCESS: text})
        # Processes that user code starts inherit the environment and do not count. A server runs no user code: every
        # process with its name belongs to it, also a foreign engine.
        is_ours = context is not None and (context.role == "server" or _runs_areal(process.cmdline()))
    except (psutil.Error, OSError, LaunchError):  # ended meanwhile, of another user, or with another format
        return None
    if context is None or not is_ours or context.run_dir != str(paths.root):
        return None
    return Orphan(process.pid, context.name)


def _runs_areal(argv: list[str]) -> bool:
    """Whether it runs a module of areal."""
    return any(flag == "-m" and module.startswith("areal.") for flag, module in itertools.pairwise(argv))
