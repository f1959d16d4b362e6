"""Foreign servers below the real launcher's supervisor: what dies or hangs comes back, and nothing is left behind."""

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from areal.api.errors import LaunchError
from areal.launcher import restart_rules
from areal.launcher.local import find_orphans, wait_for_orphans
from areal.system.discovery import FileRegistry
from tests.expect import in_order
from tests.fleet.foreign_host import host_argv, pid_of, processes_of, run_paths, wait_until
from tests.launcher.fake_run import Run

TESTS = Path(__file__).parents[1]
UNTIL_READY = "ready(); wait_for('ready/server-0.json')"
CONTROLLER = "ready(); live(until='over')"
OVER = "\nwrite(names / 'over', '')"


class ForeignRun(Run):
    """A scripted run whose server is a real host of a fake foreign server. A code may be a command, too."""

    def __init__(self, folder, **settings):
        super().__init__(folder, **({"stop_grace_s": 100.0} | settings))

    def planned(self, name, code, count):
        if isinstance(code, str):
            return super().planned(name, code, count)
        return dataclasses.replace(super().planned(name, "", count), argv=tuple(code))

    @property
    def registry(self):
        return FileRegistry(self.names)

    def wait_ready(self):
        self.until((self.names / "ready" / "server-0.json").exists)

    def with_server(self, *words, trainer="ready(); live()", **settings):
        return self(controller=CONTROLLER, server_0=host_argv(self.paths, *words, **settings), trainer_0=trainer + OVER)


@pytest.fixture
def make_run(tmp_path):
    paths = run_paths(tmp_path)
    paths.root.mkdir(parents=True)
    yield lambda **settings: ForeignRun(paths.root, **settings)
    assert processes_of(paths) == [], "processes were left behind"


@pytest.fixture
def run(make_run):
    return make_run()


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(restart_rules, "_BACKOFF_S", 0.02)


def strikes_once(action):
    """A trainer that waits for the server, does `action` to it, and is done when another one serves."""
    return (
        "import os, urllib.request\n"
        "ready(); server = names / 'servers' / '0.json'\n"
        "wait_for('servers/0.json'); first = server.read_text()\n"
        "def pid(name): return int((run / (name + '.pid')).read_text())\n"
        f"{action}\n"
        "def current():\n"
        "    try: return server.read_text()\n"
        "    except FileNotFoundError: return first  # the launcher has taken it out\n"
        "while current() == first: time.sleep(0.01)\n"
        "second = current()\n"
        "url, token = json.loads(second)['address'] + '/health', os.environ['AREAL_SERVER_TOKEN']\n"
        "bearer = {'Authorization': f'Bearer {token}'}\n"
        "urllib.request.urlopen(urllib.request.Request(url, headers=bearer)).close()\n"
        "note(first); note(second)\n"
    )


@pytest.mark.parametrize(
    ("victim", "values"),
    [
        ("server", ("server-0", 1, "vllm", "SIGKILL", "server-0.log")),
        ("engine", ("server-0", 1, "vllm", 1, "server-0.log")),
        ("host", ("server-0", "SIGKILL")),
    ],
    ids=["server", "engine", "host"],
)
def test_a_killed_foreign_server_restarts_under_its_name(run, victim, values):
    pid = "json.loads(first)['pid']" if victim == "host" else f"pid('{victim}')"
    outcome = run.with_server(trainer=strikes_once(f"os.kill({pid}, 9)"))
    assert outcome.status == "completed", outcome.cause
    assert list(outcome.restarts) == ["server-0"]
    assert any(in_order(line, *values) for line in run.screen.getvalue().splitlines())
    first, second = map(json.loads, run.notes())
    assert first["pid"] != second["pid"]
    assert outcome.exit_codes["server-0"] == 0, "the second one ended in order"


def until_it_is_missed(mark):
    """The server misbehaves from now on, until the launcher has taken it out."""
    return f"(run / '{mark}').touch()\nwhile server.exists(): time.sleep(0.01)\n(run / '{mark}').unlink()"


@pytest.mark.parametrize(
    ("action", "settings"),
    [
        pytest.param("os.kill(pid('server'), signal.SIGSTOP)", {}, id="stopped"),
        pytest.param(until_it_is_missed("engine-is-dead"), {}, id="dead engine", marks=pytest.mark.slow),
        pytest.param(until_it_is_missed("engine-hangs"), {"update_s": 1.0}, id="silent engine", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_hangs_is_killed_and_restarted(make_run, action, settings):
    run = make_run(hang_s=3.0)
    outcome = run.with_server("ignores-engine", trainer=strikes_once(action), **settings)
    assert outcome.status == "completed", outcome.cause
    (reason,) = outcome.restarts["server-0"]
    assert "launcher.hang_s" in reason


def test_a_server_that_never_gets_ready_ends_the_run(run):
    def clock():
        """Jumps far ahead once everything has started and the launcher has had a round to see that."""
        is_up = (run.folder / "server.pid").exists() and len(run.registry.list("ready")) == 2
        return time.monotonic() + (1000.0 if is_up and next(looks) > 30 else 0.0)

    looks = itertools.count()
    run.clock = clock
    outcome = run.with_server("never-ready")
    assert outcome.status == "failed"
    assert in_order(outcome.cause, "server-0", "200 s", "launcher.ready_timeout_s")


def test_a_server_that_reports_a_start_error_ends_the_run(run):
    outcome = run.with_server("says-why")
    assert outcome.status == "failed"
    assert in_order(outcome.cause, "server-0", 1, "vllm", 1, "server-0.log")
    assert outcome.server_error == ["ValueError: no such model"]
    assert "ValueError: no such model" in run.screen.getvalue().splitlines()
    assert outcome.restarts == {}


@pytest.mark.parametrize("word", ["killed-at-start", "port-taken"])
def test_transient_start_failures_are_retried(run, word):
    outcome = run.with_server(word, trainer=UNTIL_READY)
    assert outcome.status == "completed", outcome.cause
    assert len(outcome.restarts["server-0"]) == 1


def test_ctrl_c_ends_a_server_that_ignores_sigterm(make_run):
    run = make_run(stop_grace_s=0.5)
    threading.Thread(target=lambda: (run.wait_ready(), run.interruptions.add(signal.SIGINT)), daemon=True).start()
    assert run.with_server("ignores-sigterm", grace_s=0.5).status == "interrupted"


LAUNCHER = f"""
import sys
sys.path.insert(0, {str(TESTS.parent)!r})
from pathlib import Path
from tests.faults.test_foreign_servers import ForeignRun
ForeignRun(Path(sys.argv[1])).with_server("ignores-engine", "ignores-sigterm")
"""


def test_after_kill_9_of_the_launcher_no_process_remains_and_a_second_launch_starts(make_run):
    run = make_run()
    first = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(run.folder)])
    try:
        pid_of(run.paths, "engine")
        wait_until((run.names / "servers" / "0.json").exists)
        wait_until((run.names / "ready" / "trainer-0.json").exists)
        assert len(processes_of(run.paths)) == 6, "controller, trainer, host, guard, server, engine"
    finally:
        first.kill()
        first.wait()
    wait_for_orphans(run.paths, limit_s=200.0, say=print)
    wait_until(lambda: not processes_of(run.paths))
    (run.names / "servers" / "0.json").unlink()
    (run.names / "ready" / "server-0.json").unlink()
    outcome = run.with_server(trainer=UNTIL_READY)
    assert (outcome.status, outcome.restarts) == ("completed", {})


def test_remaining_processes_of_a_foreign_server_are_orphans(make_run):
    """It may hold the GPU, though no module of ours runs in it."""
    run = make_run()
    planned = run.planned("server-0", "", {"trainer": 1, "server": 1})
    argv = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"]
    with subprocess.Popen(argv, env=os.environ | planned.env, stdout=subprocess.PIPE) as engine:
        try:
            assert engine.stdout.readline() == b"up\n"
            assert [(orphan.pid, orphan.name) for orphan in find_orphans(run.paths)] == [(engine.pid, "server-0")]
            with pytest.raises(LaunchError, match=rf"server-0 \(pid {engine.pid}\).*kill -9 {engine.pid}"):
                wait_for_orphans(run.paths, limit_s=0.1, say=print)
        finally:
            engine.kill()
