import io
import json
import os
import signal
import sys
import threading
import time

import psutil
import pytest

from areal.api.config import LauncherConfig
from areal.launcher import supervisor as supervisor_module
from areal.launcher.job import Identities, LaunchPlan, PlannedProcess
from areal.launcher.status import StatusLine, StatusSource
from areal.launcher.supervisor import Interruptions, MemoryMeter, Supervisor
from areal.system.discovery import FileNameRegistry

NUMBERS = Identities(
    episodes_per_step=1,
    samples_per_step=1,
    optimizer_steps_per_train_step=1,
    max_concurrent_episodes=1,
    max_staleness=0,
    on_stale="train",
    rows=None,
    steps_per_epoch=None,
    total_steps=None,
    total_optimizer_steps=None,
)

PRELUDE = """
import os, pathlib, signal, subprocess, sys, time
name, names = sys.argv[1], pathlib.Path(sys.argv[2])
def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new"); new.write_text(text); new.replace(path)
def ready():
    write(names / "ready" / (name + ".json"), str(os.getpid()))
def wait_for(path, seconds=20):
    end = time.time() + seconds
    while not (names / path).exists() and time.time() < end: time.sleep(0.01)
"""
SERVE = "ready(); time.sleep(60)"
DONE = "ready(); wait_for('ready/server-0.json'); print('bye')"


class Run:
    """Fake processes below a supervisor, everything in one folder."""

    def __init__(self, folder, **settings):
        self.folder = folder
        self.names = folder / "names"
        self.config = LauncherConfig(**({"stop_grace_s": 0.3, "ready_timeout_s": 20.0} | settings))
        self.interruptions = Interruptions()
        self.meter = MemoryMeter()
        self.screen = io.StringIO()

    def __call__(self, **codes):
        """Run processes given as name=code, `server_0` meaning server-0."""
        plan = LaunchPlan(
            run_dir=str(self.folder),
            run_id=0,
            recover=False,
            allocation="",
            ports="",
            processes=tuple(self._planned(name.replace("_", "-"), code) for name, code in codes.items()),
            identities=NUMBERS,
        )
        registry = FileNameRegistry(self.names)
        source = StatusSource(registry, self.folder / "metrics.jsonl", has_controller=True, total_steps=None)
        self.supervisor = Supervisor(
            plan,
            self.config,
            registry=registry,
            source=source,
            line=StatusLine(self.screen),
            meter=self.meter,
            interruptions=self.interruptions,
        )
        return self.supervisor.run()

    def _planned(self, name, code):
        role, _, index = name.partition("-")
        return PlannedProcess(
            name=name,
            role=role,
            index=int(index or 0),
            argv=(sys.executable, "-S", "-c", PRELUDE + code, name, str(self.names)),
            env={},
            log_path=str(self.folder / "logs" / f"{name}.log"),
            device="cpu",
            gpu=None,
            num_threads=1,
            memory_bytes=None,
        )

    def log(self, name):
        return (self.folder / "logs" / f"{name}.log").read_text()

    def pid_of(self, name):
        """Of a process that is ready, from its sign."""
        deadline = time.monotonic() + 20
        path = self.names / "ready" / f"{name}.json"
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return int(path.read_text())


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def run(tmp_path):
    before = set(psutil.Process().children(recursive=True))
    yield Run(tmp_path)
    assert set(psutil.Process().children(recursive=True)) <= before, "processes were left behind"


def test_run_ends_when_controller_and_trainers_end(run):
    outcome = run(controller=DONE, server_0=SERVE, trainer_0=DONE, trainer_1=DONE)
    assert outcome.status == "completed"
    assert outcome.was_ready
    assert outcome.exit_codes == {
        "controller": 0,
        "server-0": -signal.SIGTERM,
        "trainer-0": 0,
        "trainer-1": 0,
    }
    assert outcome.restarts == {}
    assert run.log("trainer-1") == "bye\n"
    assert run.meter.peak_bytes > 10 * 2**20


def test_first_death_stops_all_and_is_told_first(run):
    fails = "ready(); wait_for('ready/server-0.json'); print('areal: error: row 7 has no answer'); sys.exit(2)"
    outcome = run(controller=SERVE, server_0=SERVE, trainer_0=fails)
    assert outcome.status == "failed"
    assert outcome.cause.startswith("trainer-0 exited with 2: row 7 has no answer (log: ")
    assert outcome.exit_codes["trainer-0"] == 2
    assert outcome.exit_codes["controller"] == -signal.SIGTERM


def test_cause_is_the_earliest_of_deaths_that_follow_each_other(run):
    first = (
        "ready(); wait_for('ready/trainer-0.json'); print('gone bad', flush=True); write(names / 'dead', '')\n"
        "time.sleep(.2); sys.exit(3)"
    )
    then = "ready(); wait_for('dead'); time.sleep(.1); print('areal: error: connection lost'); sys.exit(2)"
    outcome = run(trainer_0=then, trainer_1=first)
    assert outcome.cause.startswith("trainer-1 exited with 3: gone bad")
    assert "\n  then trainer-0 exited with 2: connection lost" in outcome.cause


def test_traceback_is_quoted(run):
    outcome = run(trainer_0="ready(); raise ValueError('a bug of ours')")
    assert "trainer-0 exited with 1: ValueError: a bug of ours (log: " in outcome.cause
    assert "\n    Traceback" in outcome.cause


def test_killed_trainer_is_named_with_its_signal(run):
    outcome = run(trainer_0="ready(); os.kill(os.getpid(), 9)", controller=SERVE)
    assert outcome.cause.startswith("trainer-0 was killed by SIGKILL (out of memory")
    assert "printed nothing" in outcome.cause


def test_killed_server_comes_back(run):
    dies_once = "n = names / 'killed'\nif not n.exists(): ready(); write(n, ''); os.kill(os.getpid(), 9)\n"
    waits = "ready(); wait_for('killed'); wait_for('again')"
    outcome = run(controller=waits, server_0=dies_once + "write(names / 'again', ''); " + SERVE, trainer_0=waits)
    assert outcome.status == "completed"
    assert outcome.restarts == {"server-0": 1}
    assert "server-0 was killed by SIGKILL" in run.screen.getvalue()
    assert "server-0 starts again" in run.screen.getvalue()


def test_restart_forgets_the_registration_of_the_dead(run):
    (run.names / "servers").mkdir(parents=True)
    (run.names / "servers" / "0.json").write_text("{}")
    dies_once = (
        "n = names / 'killed'\nif not n.exists(): ready(); write(n, ''); os.kill(os.getpid(), 9)\n"
        "write(names / 'again', str((names / 'servers' / '0.json').exists())); "
    )
    waits = "ready(); wait_for('again')"
    assert run(controller=waits, server_0=dies_once + SERVE).status == "completed"
    assert (run.names / "again").read_text() == "False"


def test_server_that_keeps_dying_ends_the_run(run, monkeypatch):
    monkeypatch.setattr(supervisor_module, "_BACKOFF_S", 0.01)
    dies = "ready(); print('areal: error: no memory'); time.sleep(.1); sys.exit(1)"
    outcome = run(controller=SERVE, server_0=dies)
    assert outcome.status == "failed"
    assert outcome.cause.startswith("server-0 exited with 1: no memory")
    assert "5 restarts before" in outcome.cause
    assert outcome.restarts == {"server-0": 5}


def test_server_that_never_got_ready_ends_the_run_at_once(run):
    outcome = run(controller=SERVE, server_0="print('areal: error: no such model'); sys.exit(2)")
    assert outcome.cause.startswith("server-0 exited with 2: no such model")
    assert outcome.restarts == {}
    assert not outcome.was_ready


def test_process_that_is_not_ready_in_time_is_named(tmp_path):
    outcome = Run(tmp_path, ready_timeout_s=0.5)(controller=SERVE, trainer_0="print('loading'); time.sleep(60)")
    assert outcome.cause.startswith("trainer-0 was not ready after 0.5 s (launcher.ready_timeout_s)")


def test_who_is_awaited_is_told(run):
    outcome = run(trainer_0="time.sleep(0.3); ready()")
    assert outcome.status == "completed"
    assert "for trainer-0 to get ready" in run.screen.getvalue()


def test_trainer_that_hangs_after_the_others_ended_is_named(tmp_path):
    outcome = Run(tmp_path, ready_timeout_s=0.6)(trainer_0="ready()", trainer_1=SERVE)
    assert outcome.cause == "trainer-1 did not end within 0.6 s after the other processes had ended"


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
write(names / "grandchild", str(child.pid))
ready(); time.sleep(60)
"""


@pytest.mark.parametrize("grace_s", [0.2, 30.0])
def test_interruption_leaves_no_process(tmp_path, grace_s):
    run = Run(tmp_path, stop_grace_s=grace_s)
    pids = []

    def interrupt():
        pids.extend(run.pid_of(name) for name in ("controller", "server-0"))
        pids.append(int((run.names / "grandchild").read_text()))
        run.interruptions.add()
        if grace_s > 1:  # impatient: the second request ends the polite part
            time.sleep(0.2)
            run.interruptions.add()

    thread = threading.Thread(target=interrupt)
    thread.start()
    began = time.monotonic()
    outcome = run(controller=SERVE, server_0=STUBBORN)
    thread.join()
    assert time.monotonic() - began < 10
    assert outcome.status == "interrupted"
    assert outcome.exit_codes == {"controller": -signal.SIGTERM, "server-0": -signal.SIGKILL}
    assert not any(alive(pid) for pid in pids)


def test_what_a_dead_process_leaves_in_its_group_is_killed(run):
    leaves = (
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "write(names / 'orphan', str(child.pid)); ready(); os.kill(os.getpid(), 9)"
    )
    run(controller=leaves)
    orphan = int((run.names / "orphan").read_text())
    deadline = time.monotonic() + 5
    while alive(orphan):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_log_of_an_earlier_attempt_is_not_quoted(run):
    (run.folder / "logs").mkdir()
    (run.folder / "logs" / "trainer-0.log").write_text("areal: error: old story\n")
    outcome = run(trainer_0="sys.exit(4)")
    assert "printed nothing" in outcome.cause
    assert os.path.exists(run.folder / "logs" / "trainer-0.log")
    assert json.dumps(outcome.exit_codes) == '{"trainer-0": 4}'


def test_processes_that_die_of_one_mistake_say_it_once(run):
    code = "print('areal: error: reward_fn is not known', flush=True); sys.exit(2)"
    outcome = run(controller=code, trainer_0=code)
    assert "\n" not in outcome.cause
    raises = run(controller="raise ValueError('of the user')", trainer_0="raise ValueError('of the user')")
    assert raises.cause.count("\n    ValueError: of the user") == 1


def test_a_process_that_ends_without_taking_part_is_a_failure(run):
    outcome = run(controller=SERVE, trainer_0="print('hello')")
    assert outcome.status == "failed"
    assert outcome.cause.startswith("trainer-0 ended without taking part in the run: a script must call train(...)")
