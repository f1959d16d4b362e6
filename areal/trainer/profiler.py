"""Profiles of chosen train steps by torch.profiler: time of every operation, and memory on CUDA."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from areal.api.config import PerfTracerConfig
from areal.system.run_paths import RunPaths

_MAX_ALLOCATIONS = 100_000  # Allocations of a memory snapshot; older ones are left out.


class TorchProfiler:
    """Writes `NAME-step-000005.json.gz` (chrome://tracing, Perfetto) for train step 5; see `StepProfiler`.

    On CUDA also `NAME-step-000005.pickle`, a memory snapshot for https://docs.pytorch.org/memory_viz.
    """

    def __init__(self, folder: Path, name: str, steps: Collection[int], *, has_cuda: bool) -> None:
        """`steps`: counted from 1."""
        self._folder = folder
        self._name = name
        self._steps = frozenset(steps)
        self._has_cuda = has_cuda
        self._running: profile | None = None
        self._step = 0

    def begin_step(self, step: int) -> None:
        self._step = step + 1
        if self._step not in self._steps:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._has_cuda else [])]
        if self._has_cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
        self._running = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._running.start()

    def region(self, name: str) -> AbstractContextManager[object]:
        return nullcontext() if self._running is None else record_function(name)

    def end_step(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        running.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._name}-step-{self._step:06d}"
        running.export_chrome_trace(f"{path}.json.gz")
        if self._has_cuda:
            torch.cuda.memory._dump_snapshot(f"{path}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)


def open_profiler(
    options: PerfTracerConfig | None, paths: RunPaths, name: str, *, rank: int, has_cuda: bool
) -> TorchProfiler | None:
    """The profiler of a trainer rank as configured, None when it is off for this rank."""
    if options is None or not options.profile_steps or rank not in options.profile_ranks:
        return None
    return TorchProfiler(paths.profile, name, options.profile_steps, has_cuda=has_cuda)
