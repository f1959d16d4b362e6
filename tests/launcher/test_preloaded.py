"""Processes that the preloaded parent forks behave as if the launcher had started them."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from areal.launcher.backend import LocalBackend
from areal.launcher.job import at_import
from areal.launcher.local import LocalCluster, find_orphans
from areal.launcher.placement import Machine
from areal.launcher.preloaded import PreloadedParent
from areal.system.run_paths import RunPaths
from tests.launcher.fake_backend import context_of, planned_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the preloaded parent needs Linux")
LIMIT_S = 200.0
AT_IMPORT = at_import()
FACTS = (sys.executable, "-m", "tests.launcher.child_facts")


@pytest.fixture(scope="module")
def parent():
    made = PreloadedParent(AT_IMPORT)
    yield made
    made.close()


def fork(parent, log, *words, end, descriptors=(), **more):
    env = {**os.environ, **AT_IMPORT, "AREAL_TEST_END": end, **more}
    made = parent.fork((*FACTS, *words), env, log, descriptors)
    assert made is not None
    return made


def facts_in(log):
    deadline = time.monotonic() + LIMIT_S
    while not (log.exists() and (text := log.read_text()).count("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return json.loads(text.partition("\n")[0])


def test_a_forked_process_has_its_own_arguments_variables_log_group_and_descriptors(parent, tmp_path):
    reading, writing = os.pipe()
    log = tmp_path / "logs" / "server-0.log"
    made = fork(
        parent, log, "--x", "two words", end="0", descriptors=(writing,), AREAL_TEST_DESCRIPTOR=str(writing), RANK="3"
    )
    assert made.wait() == 0
    assert os.read(reading, 10) == b"beat"
    os.close(reading)
    os.close(writing)
    facts = facts_in(log)
    assert facts["argv"] == ["--x", "two words"]
    assert (facts["pid"], facts["ppid"], facts["group"]) == (made.pid, os.getpid(), made.pid)
    assert facts["has_torch"]
    assert facts["environ"] == sorted({*os.environ, *AT_IMPORT, "AREAL_TEST_END", "AREAL_TEST_DESCRIPTOR", "RANK"})
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("end", "code"), [("0", 0), ("75", 75), ("fail", 1)])
def test_the_exit_code_of_a_forked_process_is_known(parent, tmp_path, end, code):
    made = fork(parent, tmp_path / "log", end=end)
    assert made.wait() == code
    assert made.poll() == code
    assert ("RuntimeError: a defect" in (tmp_path / "log").read_text()) == (end == "fail")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_forked_process(parent, tmp_path, number):
    made = fork(parent, tmp_path / "log", end="wait")
    facts_in(tmp_path / "log")
    assert made.poll() is None
    made.send_signal(number)
    assert made.wait() == -number
    made.send_signal(number)  # no error once it has ended


def test_the_system_shows_the_arguments_and_variables_of_a_forked_process(parent, tmp_path):
    context = context_of("trainer-1", run_dir=tmp_path, world_size=2, num_servers=0)
    made = fork(parent, tmp_path / "log", "areal.trainer", end="wait", **context.to_env())
    facts_in(tmp_path / "log")
    shown = psutil.Process(made.pid)
    assert [word for word in shown.cmdline() if word] == [*FACTS, "areal.trainer"]
    assert shown.environ()["AREAL_PROCESS"] == context.to_env()["AREAL_PROCESS"]
    made.send_signal(signal.SIGKILL)
    made.wait()


def test_forked_processes_end_with_their_launcher(tmp_path):
    log = tmp_path / "log"
    code = f"""
import os, pathlib, signal
from areal.launcher.preloaded import PreloadedParent
parent = PreloadedParent({{}})
parent.fork({FACTS!r}, {{**os.environ, "AREAL_TEST_END": "wait"}}, pathlib.Path({str(log)!r}), ())
print(parent.pid, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        of_parent = psutil.Process(int(launcher.stdout.readline()))
        forked = psutil.Process(facts_in(log)["pid"])
        launcher.kill()
    assert psutil.wait_procs([of_parent, forked], timeout=LIMIT_S)[1] == []


def test_a_parent_that_died_is_replaced_by_a_usual_start(tmp_path):
    parent = PreloadedParent(AT_IMPORT)
    os.kill(parent.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(parent.pid)], timeout=LIMIT_S)
    assert parent.fork(FACTS, os.environ, tmp_path / "log", ()) is None
    backend = LocalBackend(RunPaths(tmp_path), {"AREAL_TEST_END": "0"}, parent)
    planned = planned_process("trainer-0", run_dir=tmp_path)
    argv = (sys.executable, "-m", "areal.trainer", "--help")
    backend.start(dataclasses.replace(planned, argv=argv, env=planned.env | AT_IMPORT))
    assert backend._processes["trainer-0"].wait() == 2
    parent.close()


def test_a_parent_that_does_not_answer_starts_nothing_later(tmp_path, monkeypatch):
    parent = PreloadedParent(AT_IMPORT)
    fork(parent, tmp_path / "first", end="0").wait()  # its imports are done
    monkeypatch.setattr("areal.launcher.preloaded._LIMIT_S", 0.1)
    os.kill(parent.pid, signal.SIGSTOP)
    assert parent.fork(FACTS, os.environ, tmp_path / "log", ()) is None
    psutil.wait_procs([psutil.Process(parent.pid)], timeout=LIMIT_S)
    assert parent.fork(FACTS, os.environ, tmp_path / "log", ()) is None
    assert (tmp_path / "log").read_text() == ""
    parent.close()


def test_a_forked_process_of_the_run_is_an_orphan_for_the_next_launcher(parent, tmp_path):
    (tmp_path / "wait.py").write_text("import time\nprint('{}', flush=True)\ntime.sleep(600)\n")
    context = context_of("trainer-0", run_dir=tmp_path / "run", world_size=1, num_servers=0)
    argv = (sys.executable, "-m", "areal.trainer", str(tmp_path / "wait.py"))
    made = parent.fork(argv, {**os.environ, **AT_IMPORT, **context.to_env()}, tmp_path / "log", ())
    assert made is not None
    facts_in(tmp_path / "log")
    assert [(orphan.pid, orphan.name) for orphan in find_orphans(RunPaths(tmp_path / "run"))] == [
        (made.pid, "trainer-0")
    ]
    made.send_signal(signal.SIGKILL)
    assert made.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("module", "env", "can_fork"),
    [
        ("areal.trainer", {"RANK": "1", "OMP_NUM_THREADS": "4", "AREAL_PROCESS": "{}"}, True),
        ("areal.inference.server", {"PATH": "/other"}, True),
        ("areal.fleet.server_host", {}, False),  # it starts a server of another library
        ("areal.trainer", {"CUDA_VISIBLE_DEVICES": "0"}, False),
        ("areal.trainer", {"OMP_WAIT_POLICY": "other"}, False),  # a variable of the user
    ],
)
def test_only_processes_of_areal_with_the_variables_of_the_imports_are_forked(parent, module, env, can_fork):
    argv = (sys.executable, "-m", module)
    assert parent.can_fork(argv, {**parent._env, **env}) is can_fork


def test_a_machine_with_gpus_and_a_user_who_says_so_get_no_parent(monkeypatch):
    monkeypatch.setattr("areal.launcher.local.PreloadedParent", lambda env: env)
    for gpus, value, expected in (((), "1", AT_IMPORT), ((), "0", None), (("0",), "1", None)):
        monkeypatch.setenv("AREAL_PRELOAD", value)
        assert LocalCluster(Machine(cores=2, gpus=gpus), preloads=True)._preloaded == expected
    assert LocalCluster(Machine(cores=2))._preloaded is None
