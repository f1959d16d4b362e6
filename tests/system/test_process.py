from __future__ import annotations

import dataclasses
import os
import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest

from areal.api.errors import LaunchError
from areal.system.process import AREAL_PROCESS, ProcessContext, kill_trees, raise_open_file_limit, run_to_its_end, spawn
from tests.process_context import a_context

CONTEXT = a_context(index=1, world_size=2, run_dir="/tmp/x")


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition, seconds=200.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("condition did not come true")


def read_pid(path):
    def read():
        return int(path.read_text()) if path.exists() and path.read_text().endswith("\n") else None

    return until(read)


def test_context_travels_through_the_environment():
    env = CONTEXT.to_env()
    assert ProcessContext.from_env(env) == CONTEXT
    assert (env["RANK"], env["WORLD_SIZE"]) == ("1", "2")
    assert CONTEXT.name == "trainer-1"
    assert ProcessContext.from_env({}) is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"role": "x"}'])
def test_bad_context_is_named(text):
    with pytest.raises(LaunchError, match=AREAL_PROCESS) as error:
        ProcessContext.from_env({AREAL_PROCESS: text})
    assert error.value.code == "process.bad_context"


RUN_MAIN = """
from areal.system.process import run_main
from areal.api.errors import ConfigError, ServerUnavailable, WeightSyncError
def main():
    {body}
run_main(main)
"""


@pytest.mark.parametrize(
    ("body", "code", "ends"),
    [
        ("pass", 0, ""),
        ("raise ConfigError('line 1\\n  line 2', code='config.x')", 2, "areal: error: line 1 line 2 [config.x]\n"),
        ("raise ServerUnavailable('nobody there')", 75, "areal: error: nobody there [areal.error]\n"),
        ("raise WeightSyncError('half of them')", 75, "areal: error: half of them [areal.error]\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise ValueError('a bug')", 1, "ValueError: a bug\n"),
        ("raise SystemExit(7)", 7, ""),
    ],
)
def test_run_main_exit_codes(body, code, ends):
    command = [sys.executable, "-c", RUN_MAIN.format(body=body)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | CONTEXT.to_env())
    assert done.returncode == code
    assert done.stderr.endswith(ends)
    assert ("Traceback" in done.stderr) == (code == 1)


COLLECTOR = """
import atexit, gc
from areal.system.process import run_main, start_is_over
rule, passes = gc.get_threshold(), []
def main():
    gc.callbacks.append(lambda phase, info: passes.append(phase))
    atexit.register(lambda: print(len(gc.get_objects())))
    kept = [[] for _ in range(50_000)]
    print(len(passes))
    start_is_over()
    print(gc.get_threshold() == rule)
run_main(main)
"""


def test_no_pass_of_the_cycle_collector_in_imports_and_at_the_exit():
    done = subprocess.run([sys.executable, "-c", COLLECTOR], capture_output=True, text=True, check=True)
    passes, is_rule, num_looked_at = done.stdout.split()
    assert (passes, is_rule) == ("0", "True")
    assert int(num_looked_at) < 1000


AT_THE_LAST_MOMENT = """
import os, signal, sys
from areal.system.process import run_main
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR1): kill(pid, number)
def main():
    sys.last = Last()  # goes when the interpreter ends
run_main(main)
"""


@pytest.mark.parametrize("role", ["controller", "trainer"])
def test_request_for_stacks_does_not_kill_a_process_that_is_ending(tmp_path, role):
    context = dataclasses.replace(CONTEXT, role=role, run_dir=str(tmp_path))
    command = [sys.executable, "-c", AT_THE_LAST_MOMENT]
    assert subprocess.run(command, env=os.environ | context.to_env(), timeout=250).returncode == 0


def test_run_main_keeps_the_lines_of_a_message_at_a_terminal():
    command = [
        sys.executable,
        "-c",
        RUN_MAIN.format(body="raise ConfigError('2 problems:\\n  a\\n  b', code='config.x')"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == "areal: error: 2 problems:\n  a\n  b [config.x]\n"


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(f"{child.pid}\\n")
time.sleep(600)
"""


def test_kill_tree_ends_a_stubborn_process_and_its_children(tmp_path):
    child = spawn([sys.executable, "-c", STUBBORN, str(tmp_path / "pid")], os.environ, tmp_path / "log")
    grandchild = read_pid(tmp_path / "pid")
    kill_trees([child.pid], 0.1)
    assert not alive(child.pid)
    assert not alive(grandchild)
    assert child.wait(200) == -signal.SIGKILL


def test_kill_trees_sends_sigterm_first_and_ends_stopped_processes(tmp_path):
    polite = (
        "import signal,sys,time; signal.signal(15, lambda *a: sys.exit(5)); print('up', flush=True); time.sleep(600)"
    )
    first = spawn([sys.executable, "-c", polite], os.environ, tmp_path / "first")
    second = spawn([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, tmp_path / "second")
    until(lambda: "up" in (tmp_path / "first").read_text())
    os.kill(second.pid, signal.SIGSTOP)
    # of two pending signals the lower number comes first: not stopped yet, it would die of the polite one
    until(lambda: psutil.Process(second.pid).status() == psutil.STATUS_STOPPED)
    kill_trees([first.pid, second.pid, 2**22 + 1], 1000.0, hurry=lambda: first.poll() is not None)
    assert first.wait(200) == 5
    assert second.wait(200) == -signal.SIGKILL


LAUNCHER = """
import os, sys, time
from pathlib import Path
from areal.system.process import spawn
child = spawn([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, Path(sys.argv[1] + ".log"))
open(sys.argv[1], "w").write(f"{child.pid}\\n")
time.sleep(600)
"""


def test_children_die_with_a_killed_launcher(tmp_path):
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path / "pid")])
    child = read_pid(tmp_path / "pid")
    assert alive(child)
    launcher.kill()
    launcher.wait(200)
    until(lambda: not alive(child))


def test_watch_parent_ends_an_orphan(tmp_path):
    orphan = (
        "import os,sys,time; from areal.system.process import watch_parent; watch_parent();"
        "open(sys.argv[1],'w').write(f'{os.getpid()}\\n'); time.sleep(600)"
    )
    middle = "import subprocess,sys; subprocess.Popen([sys.executable,'-c',sys.argv[1],sys.argv[2]]).wait()"
    parent = subprocess.Popen([sys.executable, "-c", middle, orphan, str(tmp_path / "pid")])
    pid = read_pid(tmp_path / "pid")
    parent.kill()
    parent.wait(200)
    until(lambda: not alive(pid))


def test_spawn_appends_to_the_log_and_names_a_missing_program(tmp_path):
    log = tmp_path / "logs" / "a.log"
    for text in ("one", "two"):
        code = f"import sys; print({text!r}); print('err', file=sys.stderr)"
        assert spawn([sys.executable, "-c", code], os.environ, log).wait(200) == 0
    assert sorted(log.read_text().split()) == ["err", "err", "one", "two"]
    with pytest.raises(LaunchError, match="/no/such") as error:
        spawn(["/no/such"], os.environ, log)
    assert error.value.code == "process.cannot_start"


SAVES = """
import signal, sys
from pathlib import Path
folder, count = Path(sys.argv[1]), 0
def note(number, frame):
    global count
    count += 1
    (folder / f"{signal.Signals(number).name}-{count}").touch()
    if number == signal.SIGTERM or count == 3:
        sys.exit(7)
signal.signal(signal.SIGINT, note)
signal.signal(signal.SIGTERM, note)
(folder / "ready").touch()
while True: signal.pause()
"""


@pytest.mark.parametrize("numbers", [[signal.SIGINT] * 3, [signal.SIGTERM]])
def test_a_command_that_saves_at_ctrl_c_is_waited_for(tmp_path, numbers):
    code = "import sys; from areal.system.process import run_to_its_end; sys.exit(run_to_its_end(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, sys.executable, "-c", SAVES, str(tmp_path)]
    parent = subprocess.Popen(argv, process_group=0)
    until((tmp_path / "ready").exists)
    for count, number in enumerate(numbers, start=1):
        if number == signal.SIGINT:
            os.killpg(parent.pid, number)  # as a terminal does
        else:
            parent.send_signal(number)
        until((tmp_path / f"{number.name}-{count}").exists)
    assert parent.wait(200) == 7


def test_the_status_of_a_killed_command_is_that_of_a_shell():
    assert run_to_its_end([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == 137


# --- The limit on open files is raised and never lowered


def test_the_soft_limit_is_raised_to_the_wanted_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        assert raise_open_file_limit(300) == 300
        assert raise_open_file_limit(250) == 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
