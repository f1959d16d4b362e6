"""The processes of a replay: starts the ranks and waits until all have exited.

It polls its children 20 times per second. When one fails, the others are killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from areal.api.errors import LaunchError
from areal.system.process import ERROR_PREFIX, ProcessContext, kill_trees, spawn
from areal.system.run_paths import RunPaths

_POLL_S = 0.05
_GRACE_S = 2.0
_TAIL_BYTES = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """One rank, not yet started."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    """Added to the environment of this process."""
    log: Path


def plan_ranks(recorded: Sequence[tuple[ProcessContext, dict[str, str]]], folder: Path) -> list[RankProcess]:
    """The ranks of the recorded run, in the folder of a replay."""
    planned: list[RankProcess] = []
    argv = (sys.executable, "-m", "areal.replay.rank")
    for context, env in recorded:
        own = replace(context, run_dir=str(folder), run_id=0, recover=False)
        log = RunPaths(folder).log_of(own.name)
        planned.append(RankProcess(name=own.name, argv=argv, env=env | own.to_env(), log=log))
    return planned


def run_ranks(ranks: Sequence[RankProcess], on_poll: Callable[[], None]) -> None:
    """Run all ranks to their end. When one fails, kill the others and raise LaunchError with its last output."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in ranks:
            started.append(spawn(rank.argv, {**os.environ, **rank.env}, rank.log))
        while any(process.poll() is None for process in started):
            _raise_failed(ranks, started)
            on_poll()
            time.sleep(_POLL_S)
        _raise_failed(ranks, started)
        on_poll()
    finally:
        kill_trees([process.pid for process in started if process.poll() is None], _GRACE_S)
        for process in started:
            process.wait()


def _raise_failed(ranks: Sequence[RankProcess], started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Prefer a rank that printed an error: the others often only lost their connection to it."""
    failed = [(rank, process.returncode) for rank, process in zip(ranks, started, strict=True) if process.poll()]
    if not failed:
        return
    rank, exit_code = failed[0]
    message, log = f"{rank.name} exited with code {exit_code}: {_last_line(rank.log)}", rank.log
    for rank, _ in reversed(failed):
        if (line := _last_line(rank.log)).startswith(ERROR_PREFIX):
            message, log = line.removeprefix(ERROR_PREFIX), rank.log
    raise LaunchError(f"{message} (log: {log})", code="replay.rank_failed")


def _last_line(log: Path) -> str:
    """The one-line error that an areal process prints, else the last line of the log."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return "it printed nothing"
    return next((line for line in reversed(lines) if line.startswith(ERROR_PREFIX)), lines[-1] if lines else "nothing")
