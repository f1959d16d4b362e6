"""Ranks of a trainer: functions in processes that are forked from one server per test process, which has torch."""

import json
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from areal.api.allocation import ParallelDims
from areal.engine.mesh import TrainerMesh
from areal.system.discovery import FileRegistry
from tests.process_context import a_context

_LIMIT_S = 250.0
_IMPORTED = ["torch", "transformers", "areal.engine.fsdp"]
TWO = ParallelDims(dp=2)


def start(work: Callable[..., object], *arguments: object, imported: Sequence[str] = ()) -> BaseProcess:
    """Start a process that calls `work`, a function of a module.

    `imported`: further modules that the server imports when the first process starts.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, *imported])
    process = context.Process(target=work, args=arguments)
    process.start()
    return process


def run_processes(
    work: Callable[..., object],
    world_size: int,
    *arguments: object,
    imported: Sequence[str] = (),
    limit_s: float = _LIMIT_S,
) -> None:
    """Call `work(rank, *arguments)` in each of `world_size` processes, until all have ended without an error."""
    processes = [start(work, rank, *arguments, imported=imported) for rank in range(world_size)]
    for process in processes:
        process.join(timeout=limit_s)
    for process in processes:
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * world_size


def run_ranks(
    scenario: Callable[[TrainerMesh, Path], object],
    folder: Path,
    dims: ParallelDims = TWO,
    *,
    run_id: int = 1,
    imported: Sequence[str] = (),
    limit_s: float = _LIMIT_S,
) -> list[Any]:
    """Call `scenario(mesh, folder)` on each rank of a mesh; what each rank returned, as JSON."""
    arguments = (scenario, folder, dims, run_id)
    run_processes(_run_scenario, dims.world_size, *arguments, imported=imported, limit_s=limit_s)
    return [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in range(dims.world_size)]


def _run_scenario(
    rank: int, scenario: Callable[[TrainerMesh, Path], object], folder: Path, dims: ParallelDims, run_id: int
) -> None:
    mesh = open_mesh(rank, folder, dims, run_id)
    facts = scenario(mesh, folder)
    (folder / f"facts-{rank}.json").write_text(json.dumps(facts))
    mesh.close()


def open_mesh(rank: int, folder: Path, dims: ParallelDims, run_id: int) -> TrainerMesh:
    """Connect this process to the other ranks; it computes with one thread."""
    torch.set_num_threads(1)
    context = a_context(index=rank, world_size=dims.world_size, num_servers=0, run_id=run_id, run_dir=str(folder))
    return TrainerMesh.open(context, FileRegistry(folder / "names"), dims=dims, timeout_s=200)
