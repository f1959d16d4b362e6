"""Set-up of a controller or trainer process: context, log, threads, seeds, ready report. No torch at import time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from areal.api.config import BaseExperimentConfig
from areal.api.errors import LaunchError
from areal.observe.log import configure_logging
from areal.observe.phase import PhaseClock
from areal.observe.trace import open_tracer
from areal.system.device import CudaClock, bind_to_gpu_node
from areal.system.discovery import NameRegistry, registry_of
from areal.system.heartbeat import Heartbeat, beating_thread, launched_heartbeat
from areal.system.process import ProcessContext, start_is_over
from areal.system.run_paths import RunPaths

if TYPE_CHECKING:
    from areal.engine.mesh import TrainerMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRank:
    """A trainer rank that is connected to the others."""

    context: ProcessContext
    mesh: TrainerMesh
    clock: PhaseClock
    heartbeat: Heartbeat


def join_run() -> ProcessContext:
    """Return this process's context and configure its log. Raises LaunchError when no launcher started it."""
    context = ProcessContext.from_env()
    if context is None:
        message = "start this script by a launcher: areal run SCRIPT --config CONFIG.yaml"
        raise LaunchError(message, code="launch.no_launcher")
    configure_logging(process_name=context.name)
    return context


def prepare_process(context: ProcessContext, seed: int) -> None:
    """Set thread counts and seeds of a trainer rank. Every rank has the same seed."""
    import torch

    from areal.trainer.recover import seed_process

    bind_to_gpu_node()
    torch.set_num_threads(context.num_threads)
    seed_process(seed)


@contextlib.contextmanager
def training_rank(config: BaseExperimentConfig, context: ProcessContext) -> Iterator[TrainingRank]:
    """Set up this trainer rank and connect it to the other ranks, until the block ends."""
    from areal.engine.mesh import TrainerMesh
    from areal.trainer.profiler import open_profiler

    prepare_process(context, config.seed)
    tracer = open_tracer(config.perf_tracer, RunPaths.of(config), context.name)
    with contextlib.ExitStack() as stack:
        stack.callback(tracer.flush if tracer else lambda: None)
        heartbeat = stack.enter_context(beating_thread(launched_heartbeat()))
        has_cuda = context.device.startswith("cuda")
        paths = RunPaths.of(config)
        profiler = open_profiler(config.perf_tracer, paths, context.name, rank=context.index, has_cuda=has_cuda)
        clock = PhaseClock(tracer, heartbeat, CudaClock() if has_cuda else None, profiler)
        stack.enter_context(clock.active())
        heartbeat.doing("meets the other ranks")
        mesh = TrainerMesh.open(context, registry_of(config), dims=config.allocation.train[0].parallel)
        stack.callback(mesh.close)
        heartbeat.doing("loads the models")
        yield TrainingRank(context=context, mesh=mesh, clock=clock, heartbeat=heartbeat)


def announce_ready(registry: NameRegistry, context: ProcessContext) -> None:
    """Report to the launcher that this rank is ready."""
    start_is_over()
    registry.add(f"ready/{context.name}", orjson.dumps({"pid": os.getpid()}).decode(), replace=True)
