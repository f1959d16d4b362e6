import gzip
import json

import pytest
import torch

from areal.observe.phase import PhaseClock, phase
from areal.trainer.profiler import TorchProfiler


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
