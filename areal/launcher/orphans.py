"""Owns the search for processes that an earlier launcher of a run left behind: two of a kind on one run never happen.

Children die with their launcher, so there is normally none; one that the kernel holds (a hung disk or GPU) may be left.
Waits for their end, a short while; only they, or whoever kills them, can end it.
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
_TOLD_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Leftover:
    """A living process of a run."""

    pid: int
    name: str


def leftovers(paths: RunPaths) -> list[Leftover]:
    """The processes on this machine that were started for this run, as their environment tells."""
    return [found for process in psutil.process_iter() if (found := _leftover(process, paths)) is not None]


def wait_for_leftovers(paths: RunPaths, *, limit_s: float, tell: Callable[[str], None]) -> None:
    """Return once none is left. LaunchError, with their pids, after `limit_s`."""
    began_s = time.monotonic()
    told = False
    while found := leftovers(paths):
        waited_s = time.monotonic() - began_s
        names = ", ".join(f"{one.name} (pid {one.pid})" for one in found)
        if waited_s >= limit_s:
            pids = " ".join(str(one.pid) for one in found)
            raise LaunchError(
                f"{paths.root} is still in use by what a dead launcher left behind: {names}; "
                f"end them (kill -9 {pids}), then start again"
            )
        if not told and waited_s >= _TOLD_AFTER_S:
            told = True
            tell(f"areal: waiting up to {limit_s:g} s for the end of what a dead launcher left behind: {names}")
        time.sleep(_POLL_S)


def _leftover(process: psutil.Process, paths: RunPaths) -> Leftover | None:
    try:
        text = process.environ().get(AREAL_PROCESS)
        if text is None or process.status() == psutil.STATUS_ZOMBIE:
            return None
        context = ProcessContext.from_env({AREAL_PROCESS: text})
        # What user code starts inherits the environment too, and is not ours. A server runs no user code: whatever
        # carries its name is part of it, a foreign engine too.
        is_ours = context is not None and (context.role == "server" or _runs_areal(process.cmdline()))
    except (psutil.Error, OSError, LaunchError):  # gone meanwhile, another user's, or not of our making
        return None
    if context is None or not is_ours or context.run_dir != str(paths.root):
        return None
    return Leftover(process.pid, context.name)


def _runs_areal(argv: list[str]) -> bool:
    """Whether it runs one of our own modules."""
    return any(flag == "-m" and module.startswith("areal.") for flag, module in itertools.pairwise(argv))
