"""Replicas that join and leave a running run, asked for by another command."""

import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from areal.api.errors import LaunchError
from areal.launcher import attach
from areal.launcher import supervisor as replicas
from areal.launcher.attach import Request
from areal.launcher.backend import LocalBackend
from areal.launcher.preflight import run_lock
from areal.launcher.status import StatusLine
from areal.system.network import Host
from tests.expect import in_order, raises_code
from tests.launcher.fake_run import SERVE, alive

ADD = ["--add-replica"]
SERVER = "write(names / 'servers' / f\"{context['index']}.json\", '{}'); " + SERVE
UNTIL_DONE = "ready(); wait_for('done')"


@pytest.fixture
def run(make_run):
    return make_run(stop_grace_s=60.0)


@pytest.fixture(autouse=True)
def short_leave(monkeypatch):
    monkeypatch.setattr(replicas, "_UNREGISTERED_S", 0.3)


class Session:
    """A run in the main thread, and commands that are attached to it from another one."""

    def __init__(self, run, commands):
        self._run = run
        self._commands = commands
        self.results = []
        self.outcome = None

    def __call__(self, **codes):
        thread = threading.Thread(target=self._ask_all)
        with run_lock(self._run.paths):
            thread.start()
            self.outcome = self._run(
                **({"controller": UNTIL_DONE, "server_0": SERVER, "trainer_0": UNTIL_DONE} | codes)
            )
        thread.join()
        return self.results

    def _ask_all(self):
        for name in ("controller", "server-0", "trainer-0"):
            self._run.pid_of(name)
        try:
            for command in self._commands:
                self.results.append(command() if callable(command) else self._ask(command))
        finally:
            (self._run.names / "done").touch()

    def _ask(self, words):
        while True:
            paths, request = attach.read_command_line(["--attach", str(self._run.folder), *words])  # with a new id
            try:
                return attach.ask(paths, request, StatusLine(self._run.screen))
            except LaunchError as error:
                if "still starting" not in str(error):
                    return error


def test_a_replica_joins_and_another_leaves(run, capsys):
    state = {}

    def look():
        state["servers"] = sorted(path.name for path in (run.names / "servers").iterdir())
        state["pid"] = run.pid_of("server-0")

    def look_again():
        state["left"] = sorted(path.name for path in (run.names / "servers").iterdir())
        state["alive"] = alive(state["pid"])

    def leave():
        words = ["--attach", str(run.folder), "--remove-replica", "server-0", "--json"]
        assert attach.run_command(words) == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["run"], result["action"], result["state"]) == (str(run.folder), "remove-replica", "done")
        return result["text"]

    session = Session(run, [ADD, look, leave, look_again])
    joined, _, left, _ = session()
    assert in_order(joined, "server-1")
    assert state["servers"] == ["0.json", "1.json"]
    assert in_order(left, "server-0", "server-1")
    assert state["left"] == ["1.json"]
    assert not state["alive"]
    assert session.outcome.status == "completed"
    assert session.outcome.restarts == {}
    assert in_order(run.screen.getvalue(), f"areal: {joined}\n", f"areal: {left}\n")
    assert set(session.outcome.exit_codes) == {"controller", "server-0", "server-1", "trainer-0"}
    assert list(run.paths.requests.iterdir()) == [], "the command that asked removes its request"


def test_a_server_that_leaves_is_out_of_the_registry_before_it_is_stopped(run):
    leaves = (
        "write(names / 'servers' / '0.json', '{}')\n"
        "def stop(*_): note(str((names / 'servers' / '0.json').exists())); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop); " + SERVE
    )
    (left,) = Session(run, [["--remove-replica", "server-0"]])(server_0=leaves, server_1=SERVER)
    assert in_order(left, "server-0", "server-1")
    assert run.notes() == ["False"]


@pytest.mark.parametrize(
    ("words", "values"),
    [(["--remove-replica", "server-0"], ["server-0"]), (["--remove-replica", "server-7"], ["server-7", "server-0"])],
)
def test_impossible_replica_changes_are_refused(run, words, values):
    session = Session(run, [words])
    (refusal,) = session()
    assert refusal.code == "launch.request_refused"
    assert in_order(str(refusal), *values)
    assert session.outcome.status == "completed"


def test_a_run_without_servers_refuses(run):
    session = Session(run, [ADD])
    run.pid_of = lambda name: None
    run.names.mkdir()
    trainer = UNTIL_DONE
    thread = threading.Thread(target=session._ask_all)
    with run_lock(run.paths):
        thread.start()
        run(trainer_0=trainer)
    thread.join()
    assert session.results[0].code == "launch.request_refused"


def test_a_replica_needs_a_gpu_where_the_others_have_one(run):
    run.gpus = {"server-0": ("0",)}
    run.spare_gpus = ((Host(), ("4",)),)
    shows = "note(f\"{name} {os.environ.get('CUDA_VISIBLE_DEVICES')}\"); " + SERVER
    session = Session(run, [ADD, ADD, ["--remove-replica", "server-1"], ADD])
    joined, refused, _, again = session(server_0=shows)
    assert in_order(joined, "server-1")
    assert refused.code == "launch.request_refused"
    assert in_order(str(refused), 1, 0)
    assert in_order(again, "server-1"), "its GPU is free again"
    assert run.notes()[1:] == ["server-1 4", "server-1 4"]


def test_a_replica_takes_no_gpu_of_a_process_that_moved(run):
    """server-0 was planned for GPU 0, and runs on GPU 4 since its node was lost."""

    class Moved(LocalBackend):
        def place_of(self, planned):
            return planned.host, ("4",) if planned.name == "server-0" else planned.gpus

    run.gpus = {"server-0": ("0",)}
    run.spare_gpus = ((Host(), ("4",)),)
    run.backend = Moved(run.paths)
    shows = "note(f\"{name} {os.environ.get('CUDA_VISIBLE_DEVICES')}\"); " + SERVER
    joined, refused = Session(run, [ADD, ADD])(server_0=shows)
    assert in_order(joined, "server-1")
    assert refused.code == "launch.request_refused"
    assert run.notes()[1:] == ["server-1 0"]


def test_a_replica_starts_when_its_machine_is_there(run):
    """As with a separate job of Slurm for each server, which waits in the queue."""

    class Waits(LocalBackend):
        looks, forgotten = 0, ()

        def new_host(self, name):
            return Host()

        def is_prepared(self, planned):
            self.looks += planned.name == "server-1"
            return planned.name != "server-1" or self.looks > 2

        def forget(self, name):
            self.forgotten += (name,)

    run.backend = Waits(run.paths)
    joined, _ = Session(run, [ADD, ["--remove-replica", "server-1"]])()
    assert in_order(joined, "server-1")
    assert run.backend.looks == 3
    assert run.backend.forgotten == ("server-1",)


def test_a_replica_takes_as_many_gpus_as_the_others_have(run):
    run.gpus = {"server-0": ("0", "1")}
    run.spare_gpus = ((Host(), ("4", "6", "7")),)
    shows = "note(f\"{name} {os.environ.get('CUDA_VISIBLE_DEVICES')}\"); " + SERVER
    joined, refused = Session(run, [ADD, ADD])(server_0=shows)
    assert in_order(joined, "server-1")
    assert refused.code == "launch.request_refused"
    assert in_order(str(refused), 2, 1)
    assert run.notes()[1:] == ["server-1 4,6"]


def test_a_replica_of_two_parts_takes_two_machines(run):
    run.gpus = {"server-0": ("0", "1"), "server-0-part-1": ("0", "1")}
    run.spare_gpus = tuple(
        (Host(node=node), tuple(gpus)) for node, gpus in zip("abcd", ("5", "67", "34", "8"), strict=True)
    )
    shows = "note(f\"{name} {context['host']['node']} {os.environ.get('CUDA_VISIBLE_DEVICES')}\"); " + SERVER
    session = Session(run, [ADD, ADD, ["--remove-replica", "server-1"], ADD])
    joined, refused, _, again = session(server_0=shows, server_0_part_1=shows)
    assert in_order(joined, "server-1")
    assert in_order(again, "server-1")
    assert refused.code == "launch.request_refused"
    assert in_order(str(refused), 2, 2, 1, 1)
    added = ["server-1 b 6,7", "server-1-part-1 c 3,4"]
    assert sorted(run.notes()[2:]) == sorted(added * 2)


def test_a_failed_added_replica_does_not_end_the_run(run):
    fails = "if name == 'server-1': print('areal: error: no memory'); sys.exit(2)\n"
    session = Session(run, [ADD])
    (refusal,) = session(server_0=fails + SERVER)
    assert refusal.code == "launch.request_refused"
    assert in_order(str(refusal), "server-1", 2, "no memory")
    assert session.outcome.status == "completed"
    assert session.outcome.exit_codes["server-1"] == 2


def test_a_restarted_controller_gets_the_current_number_of_replicas(run):
    controller = (
        "note(str(context['num_servers'])); ready()\n"
        "if first('started'): wait_for('ready/server-1.json'); die()\n"
        "write(names / 'back', ''); wait_for('done')"
    )
    Session(run, [ADD, lambda: run.until((run.names / "back").exists)])(controller=controller)
    assert run.notes() == ["1", "2"]


def test_a_request_without_a_launcher_fails_at_once(run, tmp_path):
    with raises_code("launch.no_run_folder"):
        attach.read_command_line(["--attach", str(tmp_path / "none"), "--add-replica"])
    run.paths.lock.touch()
    paths, request = attach.read_command_line(["--attach", str(run.folder), "--add-replica"])
    with raises_code("launch.no_answer"):
        attach.ask(paths, request, StatusLine(run.screen))


def test_a_request_without_an_answer_ends_after_its_limit(run, monkeypatch):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(attach, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with run_lock(run.paths), pytest.raises(LaunchError) as error:
        attach.ask(run.paths, Request(action="add-replica"), StatusLine(run.screen), taken_limit_s=0.3)
    assert error.value.code == "launch.no_answer"
    assert list(run.paths.requests.iterdir()) == []
    assert "waiting 0 s" in run.screen.getvalue()


def test_help_needs_no_run_folder(capsys):
    with pytest.raises(SystemExit) as end:
        attach.read_command_line(["--attach", "--help"])
    assert end.value.code == 0
    assert "--attach RUN (--add-replica | --remove-replica NAME)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--help"], 0, "--remove-replica NAME"),
        (["--add-replica"], 2, "[launch.no_run_folder]"),
        ([], 2, "one of the arguments --add-replica --remove-replica is required"),
    ],
)
def test_command_line(tmp_path, words, code, says):
    argv = [sys.executable, "-m", "areal.launcher.local", "--attach", str(tmp_path), *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
