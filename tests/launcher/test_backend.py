"""The supervisor over a backend that starts no process: it needs nothing else to observe and restart processes."""

import ast
import dataclasses
import io
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from areal.api.config import LauncherConfig, RecoverConfig
from areal.api.errors import LaunchError
from areal.launcher import backend, restart_rules
from areal.launcher.result import recorded_restarts
from areal.launcher.status import StatusLine, StatusSource
from areal.launcher.supervisor import Interruptions, Supervisor
from areal.system.discovery import FileRegistry
from areal.system.heartbeat import Beat
from areal.system.run_paths import RunPaths
from tests.launcher.fake_backend import FakeBackend, plan_of, planned_process
from tests.test_layering import PACKAGE, facts

NAMES = ("controller", "server-0", "trainer-0", "trainer-1")


class FakeProcesses:
    """A run whose processes get ready when they start; `script(name, start)` decides what happens then."""

    def __init__(self, folder, monkeypatch, *, retries=3, **settings):
        monkeypatch.setattr(restart_rules, "_BACKOFF_S", 0.0)
        self.paths = RunPaths(folder)
        self.backend = FakeBackend()
        self.registry = FileRegistry(folder / "names")
        self.screen = io.StringIO()
        self.settings = settings
        self.retries = retries
        self.now_s = 0.0

    def clock(self):
        self.now_s += 0.01
        return self.now_s

    def run(self, script):
        def on_start(name, count):
            self.registry.add(f"ready/{name}", "", replace=True)
            if (code := script(name, count)) is not None:
                self.backend.exit_codes[name] = code

        self.backend.on_start = on_start
        processes = [planned_process(name, num_trainers=2, run_dir=self.paths.root) for name in NAMES]
        plan = plan_of(processes, self.paths.root)
        return Supervisor(
            plan,
            LauncherConfig(**({"stop_grace_s": 0.0} | self.settings)),
            RecoverConfig(mode="auto", freq_steps=1, retries=self.retries),
            self.paths,
            self.backend,
            registry=self.registry,
            source=StatusSource(self.registry, self.paths.metrics, has_controller=False, total_steps=None),
            line=StatusLine(self.screen),
            interruptions=Interruptions(),
            clock=self.clock,
        ).run()

    def end_trainers(self):
        for name in ("trainer-0", "trainer-1"):
            self.backend.exit_codes[name] = 0


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return lambda **settings: FakeProcesses(tmp_path, monkeypatch, **settings)


def test_a_dead_server_is_restarted_alone(fake):
    processes = fake()

    def script(name, start):
        if name == "server-0" and start == 2:
            processes.end_trainers()
        return -signal.SIGKILL if (name, start) == ("server-0", 1) else None

    outcome = processes.run(script)
    assert (outcome.status, list(outcome.restarts)) == ("completed", ["server-0"])
    assert [name for name, _ in processes.backend.starts] == [*NAMES, "server-0"]
    assert outcome.peak_rss_bytes == 123
    assert processes.backend.stopped == list(NAMES), "the end goes through the backend too"
    assert recorded_restarts(processes.paths) == outcome.restarts


def test_a_restart_that_cannot_be_recorded_is_said_and_made(fake):
    processes = fake()
    processes.paths.restarts.mkdir()

    def script(name, start):
        if name == "server-0" and start == 2:
            processes.end_trainers()
        return -signal.SIGKILL if (name, start) == ("server-0", 1) else None

    assert processes.run(script).status == "completed"
    assert "restarts.jsonl is not written: Is a directory" in processes.screen.getvalue()


def test_a_dead_rank_restarts_all_ranks_with_a_new_run_id(fake):
    processes = fake()

    def script(name, start):
        if (name, start) == ("trainer-1", 2):
            processes.end_trainers()
        return -signal.SIGKILL if (name, start) == ("trainer-1", 1) else None

    outcome = processes.run(script)
    assert (outcome.status, list(outcome.restarts)) == ("completed", ["trainers"])
    assert ("trainer-0", signal.SIGKILL) in processes.backend.signals
    ranks = [(name, context.run_id) for name, context in processes.backend.starts if name.startswith("trainer")]
    assert ranks == [("trainer-0", 0), ("trainer-1", 0), ("trainer-0", 1), ("trainer-1", 1)]


@pytest.mark.parametrize("code", [1, 2])
def test_restarts_end_at_a_user_error_or_at_the_limit(fake, code):
    processes = fake(retries=2)
    processes.backend.lines["server-0"] = ["loading", "areal: error: no such model [checkpoint.missing]"]
    outcome = processes.run(lambda name, start: code if name == "server-0" else None)
    assert outcome.status == "failed"
    assert outcome.cause.startswith(f"server-0 exited with {code}: no such model [checkpoint.missing]")
    assert processes.backend.count("server-0") == (3 if code == 1 else 1)


def test_a_process_that_quotes_the_error_of_another_is_not_reported_twice(fake):
    processes = fake()
    processes.backend.lines["trainer-0"] = ["areal: error: bad row 7 [data.bad_row]"]
    processes.backend.lines["trainer-1"] = ["areal: error: trainer-0 failed: bad row 7, so it ends [process.failed]"]
    outcome = processes.run(lambda name, start: 2 if name.startswith("trainer") else None)
    assert outcome.cause.count("bad row 7") == 1


def test_a_hung_process_writes_its_stacks_and_is_killed(fake):
    processes = fake(hang_s=2.0)

    def script(name, start):
        if name == "controller" and start == 1:
            pid = 1000 + len(processes.backend.starts)
            beat = Beat(pid=pid, beats=1, doing="x", for_s=0.0, step=None)
            processes.backend.heartbeats["controller"] = beat
        elif name == "controller":
            processes.end_trainers()

    outcome = processes.run(script)
    assert outcome.status == "completed"
    assert ("controller", signal.SIGKILL) in processes.backend.signals
    assert processes.backend.stacks[0][0] == "controller"
    assert "launcher.hang_s" in outcome.restarts["controller"][0]


def test_a_process_that_cannot_be_started_ends_the_run_with_its_code(fake):
    processes = fake()

    def script(name, start):
        if name == "trainer-0":
            raise LaunchError("no node is free", code="process.cannot_start")

    outcome = processes.run(script)
    assert (outcome.status, outcome.cause) == ("failed", "no node is free [process.cannot_start]")
    assert processes.backend.stopped == ["controller", "server-0"]


def test_the_memory_of_a_process_contains_what_it_started(tmp_path):
    made = backend.LocalBackend(RunPaths(tmp_path))
    code = """
import subprocess, sys, zlib, os
inner = subprocess.Popen([sys.executable, "-S", "-c", "held = b'x' * 80_000_000; input()"], stdin=subprocess.PIPE)
record = b'{"pid": 1, "beats": 1, "doing": "", "for_s": 0, "step": null}'
descriptor, _, offset = map(int, os.environ["AREAL_HEARTBEAT"].split(":"))
os.pwrite(descriptor, zlib.crc32(record).to_bytes(4) + len(record).to_bytes(2) + record, offset)
inner.wait()
"""
    for name, text in (("server-0", code), ("server-1", code.replace("80_", "0_"))):
        made.start(
            dataclasses.replace(planned_process(name, run_dir=tmp_path), argv=(sys.executable, "-S", "-c", text))
        )

    def sizes():
        made.resident_bytes()
        return {name: beat.resident_bytes or 0 for name, beat in made.beats().items()}

    try:
        deadline = time.monotonic() + 200.0
        while len(result := sizes()) < 2 or result["server-0"] < 80e6 or not result["server-1"]:
            assert time.monotonic() < deadline, result
            time.sleep(0.01)
        assert result["server-0"] - result["server-1"] > 60e6
        assert all(0 < (beat.cpu_s or 0.0) < 200 for beat in made.beats().values())
    finally:
        made.stop(["server-0", "server-1"], 0.0, hurry=lambda: True)


class Child:
    """A process whose `ends_at` finds that it has ended; it answers the calls before."""

    def __init__(self, pid, parent, ends_at=""):
        self.pid, self._parent, self._ends_at = pid, parent, ends_at

    def _answer(self, call, answer):
        if call == self._ends_at:
            raise psutil.NoSuchProcess(self.pid)
        return answer

    def ppid(self):
        return self._answer("ppid", self._parent)

    def memory_info(self):
        return self._answer("memory_info", SimpleNamespace(rss=1000))

    def cpu_times(self):
        return self._answer("cpu_times", (1.0, 2.0, 4.0, 8.0, 16.0))


@pytest.mark.parametrize("call", ["ppid", "memory_info", "cpu_times"])
def test_a_process_that_ends_while_it_is_measured_is_left_out_and_ended_children_count(tmp_path, monkeypatch, call):
    made = backend.LocalBackend(RunPaths(tmp_path))
    made._processes["server-0"] = SimpleNamespace(pid=-1)
    children = [Child(-1, -9), Child(-2, -1), Child(-3, -1, ends_at=call)]
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: children)
    made.resident_bytes()
    assert made._used == {"server-0": (2000, 30.0)}, "user, system, and both of ended children; no waiting for disks"


def test_a_process_that_the_kernel_ended_for_its_memory_is_told_apart(tmp_path, monkeypatch):
    group = tmp_path / "memory.events"
    monkeypatch.setattr(backend, "_memory_kills", lambda: backend._oom_kills(group) or 0)
    group.write_text("max 7\noom 4\noom_kill 4\n")
    made = backend.LocalBackend(RunPaths(tmp_path))
    kills_itself = (sys.executable, "-S", "-c", "import os; print('up', flush=True); os.kill(os.getpid(), 9)")
    for name in ("server-0", "server-1"):
        made.start(dataclasses.replace(planned_process(name, run_dir=tmp_path), argv=kills_itself))
        made._processes[name].wait()
    assert made.last_lines("server-1").lines == ["up"]
    group.write_text("max 9\noom 5\noom_kill 5\n")
    result = made.last_lines("server-0").lines
    assert result[0] == "up"
    assert "launch.out_of_memory" in result[1]
    assert made.last_lines("server-0").lines == result
    assert made.last_lines("server-1").lines == ["up"]
    assert backend._oom_kills(tmp_path / "none") is None


def test_only_the_backend_touches_processes():
    users = {
        path.name: name
        for path in (PACKAGE / "launcher").glob("*.py")
        for _, name in facts(path).imports
        if name.split(".")[0] in ("subprocess", "psutil") or name.endswith((".kill_trees", ".spawn", ".request_stacks"))
    }
    kills = {
        path.name
        for path in (PACKAGE / "launcher").glob("*.py")
        for node in ast.walk(ast.parse(Path(path).read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("kill", "killpg") and ast.unparse(node.value) == "os"
    }
    before_a_run = {"local.py", "preflight.py"}  # orphans of an earlier run, trials in a subprocess
    backends = {"backend.py", "preloaded.py", "nodes.py", "node_agent.py", "ray.py", "node_link.py"}
    slurm = {"slurm_job.py", "slurm.py"}  # commands of Slurm; a signal to the launcher itself
    sweep = {"__main__.py"}  # each run of a sweep is a launcher
    assert set(users) | kills <= backends | before_a_run | slurm | sweep
