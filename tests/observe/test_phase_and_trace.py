import json
import logging
import subprocess
import sys
import threading

import pytest

from areal.api.config import PerfTracerConfig
from areal.observe.log import configure_logging, get_logger
from areal.observe.phase import PhaseClock, phase
from areal.observe.trace import ChromeTracer, join_traces, open_tracer
from areal.system.heartbeat import HEARTBEAT, Heartbeat, NodeBeats
from areal.system.run_paths import RunPaths


def test_phases_are_summed_and_popped(monkeypatch):
    now = iter([0, 10, 30, 60, 100, 150])
    monkeypatch.setattr("areal.observe.phase.time.perf_counter_ns", lambda: next(now) * 10**9)
    clock = PhaseClock()
    with clock.active():
        with phase("update"), phase("inner"):  # update 0..60, inner 10..30
            pass
        with pytest.raises(ValueError, match="x"), phase("update"):  # 100..150
            raise ValueError("x")
    assert clock.end_step() == {"inner": 20.0, "update": 110.0}
    assert clock.end_step() == {}


def test_phase_without_a_clock_does_nothing():
    with phase("x"):
        pass


def test_clock_is_active_only_where_it_was_made_active():
    clock = PhaseClock()

    def elsewhere():
        with phase("thread"):
            pass

    with clock.active():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert clock.end_step() == {}


def test_tracer_writes_by_interval_and_on_close(tmp_path):
    tracer = ChromeTracer(tmp_path / "t" / "a.jsonl", "trainer-0", save_interval=2)
    with PhaseClock(tracer).active(), phase("update"):
        pass
    tracer.end_step()
    assert not (tmp_path / "t" / "a.jsonl").exists()
    tracer.end_step()
    named, span = map(json.loads, (tmp_path / "t" / "a.jsonl").read_text().splitlines())
    assert named["args"] == {"name": "trainer-0"}
    assert (span["name"], span["ph"]) == ("update", "X")
    assert span["dur"] >= 0
    tracer.add_span("late", 0, 5)
    tracer.flush()
    assert '"late"' in (tmp_path / "t" / "a.jsonl").read_text()


def test_tracer_is_opened_as_configured(tmp_path):
    paths = RunPaths(tmp_path)
    assert open_tracer(None, paths, "a") is None
    assert open_tracer(PerfTracerConfig(), paths, "a") is None
    open_tracer(PerfTracerConfig(enabled=True), paths, "a").flush()
    assert (tmp_path / "trace" / "a.jsonl").exists()


def test_join_keeps_processes_apart_and_skips_torn_lines(tmp_path):
    folder = tmp_path / "trace"
    for name in ("a", "b"):
        tracer = ChromeTracer(folder / f"{name}.jsonl", name)
        tracer.add_span("work", 0, 1000)
        tracer.flush()
    with open(folder / "a.jsonl", "a") as file:
        file.write('{"name": "torn')
    again = ChromeTracer(folder / "a.jsonl", "a")
    again.add_span("after", 0, 1000)
    again.flush()
    trace = join_traces(folder)
    work = [event for event in trace["traceEvents"] if event["name"] == "work"]
    assert len({event["pid"] for event in work}) == 2
    assert any(event["name"] == "after" for event in trace["traceEvents"])
    assert trace["otherData"] == {"skipped_lines": 1}


def test_command_joins_a_run_and_names_what_is_missing(tmp_path):
    command = [sys.executable, "-m", "areal.observe.trace", str(tmp_path), "-o", str(tmp_path / "out.json")]
    missing = subprocess.run(command, capture_output=True, text=True)
    assert missing.returncode == 2
    assert "perf_tracer.enabled=true" in missing.stderr
    ChromeTracer(tmp_path / "trace" / "a.jsonl", "a").flush()
    subprocess.run(command, check=True)
    assert len(json.loads((tmp_path / "out.json").read_text())["traceEvents"]) == 1


def test_log_lines_carry_the_process_and_leave_others_alone(capsys):
    foreign = list(logging.getLogger().handlers)
    configure_logging("info", "server-0 100%")
    configure_logging("info", "server-0 100%")
    get_logger("areal.rollout.gate").info("open")
    get_logger("short").debug("hidden")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "INFO server-0 100% areal.rollout.gate open" in lines[0]
    assert logging.getLogger().handlers == foreign
    ours = logging.getLogger("areal")
    ours.handlers.clear()
    ours.propagate = True


def test_the_heartbeat_tells_the_innermost_phase_and_its_step():
    node = NodeBeats()
    heartbeat = Heartbeat(node.slot("trainer-0")[HEARTBEAT])

    def told():
        heartbeat.beat()
        beat = node.read()["trainer-0"]
        return beat.doing, beat.step

    clock = PhaseClock(heartbeat=heartbeat)
    assert told() == ("starts", None)
    with clock.active():
        with phase("joins"):
            assert told() == ("joins", None)
        clock.begin_step(41)
        with phase("rollout"):
            with phase("publish_weights"):
                assert told() == ("publish_weights", 41)
            assert told() == ("rollout", 41)
        assert told() == ("after rollout", 41)


def test_phases_of_a_device_have_the_time_in_which_it_works():
    class Device:
        """Reaches mark n at n * n seconds, and the host never waits inside a phase."""

        def __init__(self):
            self.marks, self.waits = 0, []

        def mark(self):
            self.marks += 1
            return self.marks

        def seconds(self, start, end):
            self.waits.append(end)
            return end * end - start * start

    device = Device()
    clock = PhaseClock(device=device)
    with clock.active():
        with phase("update"):
            assert device.waits == []
        with phase("publish"):
            pass
        with phase("update"):
            pass
    assert device.waits == []
    assert clock.end_step() == {"update": 3.0 + 11.0, "publish": 7.0}
    assert clock.end_step() == {}


def test_a_run_without_a_trace_is_told_how_to_get_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    command = [sys.executable, "-m", "areal.observe.trace", str(tmp_path), "-o", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "perf_tracer.enabled=true" in done.stderr
