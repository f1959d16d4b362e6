import gzip
import json

import pytest
import torch

from areal.api.config import PerfTracerConfig
from areal.observe.phase import PhaseClock, phase
from areal.system.run_paths import RunPaths
from areal.trainer.profiler import TorchProfiler, open_profiler


def test_the_chosen_step_has_a_trace_with_phases_and_operations(tmp_path):
    clock = PhaseClock(profiler=TorchProfiler(tmp_path / "profile", "trainer-0", [2], has_cuda=False))
    weight = torch.ones(4, 4)
    with clock.active():
        for step in range(3):
            clock.begin_step(step)
            with phase(f"update-{step}"):
                weight @ weight
            assert list(clock.end_step()) == [f"update-{step}"]
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "trainer-0-step-000002.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {"update-1", "aten::mm"} <= names
    assert not {"update-0", "update-2"} & names


@pytest.mark.parametrize(("ranks", "rank", "is_profiled"), [([0], 0, True), ([0], 1, False), ([1, 2], 2, True)])
def test_only_the_chosen_ranks_have_a_profile(tmp_path, ranks, rank, is_profiled):
    options = PerfTracerConfig(profile_steps=[1], profile_ranks=ranks)
    profiler = open_profiler(options, RunPaths(tmp_path), f"trainer-{rank}", rank=rank, has_cuda=False)
    clock = PhaseClock(profiler=profiler)
    with clock.active():
        clock.begin_step(0)
        clock.end_step()
    files = [path.name for path in tmp_path.rglob("*.gz")]
    assert files == ([f"trainer-{rank}-step-000001.json.gz"] if is_profiled else [])
    assert open_profiler(None, RunPaths(tmp_path), "trainer-0", rank=0, has_cuda=False) is None
    assert open_profiler(PerfTracerConfig(), RunPaths(tmp_path), "trainer-0", rank=0, has_cuda=False) is None


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_on_cuda_the_chosen_step_has_a_memory_snapshot_too(tmp_path, monkeypatch: pytest.MonkeyPatch):
    calls: list[object] = []

    def record(enabled: str | None = "all", *, max_entries: int = 0):
        calls.append("start" if enabled else "stop")

    def dump(path: str):
        calls.append(path)

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    profiler = TorchProfiler(tmp_path, "trainer-0", [2], has_cuda=True)
    for step in range(3):
        profiler.begin_step(step)
        profiler.end_step()
    assert calls == ["start", f"{tmp_path}/trainer-0-step-000002.pickle", "stop"]
