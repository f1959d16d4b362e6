"""Processes for scripts of several ranks, forked from one server per test process that has imported torch."""

import multiprocessing
import runpy
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

_LIMIT_S = 250.0
_IMPORTED = ["torch", "transformers", "areal.engine.fsdp"]


def start(script: str | Path, run_name: str, *, imported: Sequence[str] = (), **variables: object) -> BaseProcess:
    """Start a process that runs `script` under the module name `run_name` with the given global variables.

    `imported`: further modules that the server imports when the first process starts.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, *imported])
    process = context.Process(target=runpy.run_path, args=(str(script), variables, run_name))
    process.start()
    return process


def run_ranks(
    script: str | Path,
    run_name: str,
    folder: Path,
    world_size: int = 2,
    *,
    imported: Sequence[str] = (),
    limit_s: float = _LIMIT_S,
) -> None:
    """Run `script` as `world_size` ranks, with the variables RANK and FOLDER, until all have ended without an error."""
    ranks = [start(script, run_name, imported=imported, RANK=rank, FOLDER=str(folder)) for rank in range(world_size)]
    assert _exit_codes(ranks, limit_s) == [0] * world_size


def _exit_codes(processes: Sequence[BaseProcess], limit_s: float = _LIMIT_S) -> list[int | None]:
    for process in processes:
        process.join(timeout=limit_s)
    for process in processes:
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in processes]
