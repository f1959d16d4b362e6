"""No process of a guarded group survives the leader of the group, however the leader ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

# A child that lives on when its parent dies, has a child itself, and heeds nothing but SIGKILL.
STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
argv = [sys.executable, "-I", "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]
grandchild = subprocess.Popen(argv, stdout=subprocess.PIPE)
grandchild.stdout.readline()
print(grandchild.pid, flush=True)
time.sleep(600)
"""
LEADER = """
import json, subprocess, sys, time
from areal.system.group_guard import start_guard
from areal.system.process import kill_rest_of_group
STUBBORN = TEXT
guard = GUARD
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", STUBBORN], stdout=subprocess.PIPE)
print(json.dumps({"guard": guard, "child": child.pid, "grandchild": int(child.stdout.readline())}), flush=True)
"""
GUARDED = LEADER.replace("GUARD", "start_guard()")
ALONE = LEADER.replace("GUARD", "None")


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pids, seconds=200.0):
    deadline = time.monotonic() + seconds
    while left := {name: pid for name, pid in pids.items() if alive(pid)}:
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.01)


@pytest.fixture
def lead():
    """Starts the leader of a group, which continues with `code`. Returns it and the pids of the others."""
    started = []

    def start(code, prelude=GUARDED):
        script = prelude.replace("TEXT", repr(STUBBORN)) + code
        leader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, process_group=0)
        started.append(leader)
        return leader, json.loads(leader.stdout.readline())

    yield start
    for leader in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
        leader.stdout.close()


def test_kill_9_of_the_leader_leaves_nothing(lead):
    leader, others = lead("time.sleep(600)")
    assert all(os.getpgid(pid) == leader.pid for pid in others.values())
    leader.kill()
    wait_for_end(others)


def test_a_regular_end_leaves_nothing_and_keeps_its_exit_code(lead):
    """The blow comes when the leader's exit code is settled."""
    for code in (0, 3):
        leader, others = lead(f"sys.exit({code})")
        assert leader.wait(timeout=200) == code
        wait_for_end(others)


def test_the_guard_ignores_all_signals_but_sigkill(lead):
    leader, others = lead("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('+'); time.sleep(600)")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(others["guard"], number)
    assert all(map(alive, others.values()))
    leader.kill()
    wait_for_end(others)


def test_the_guard_ends_with_its_group(lead):
    """As when the launcher kills the group of a child."""
    leader, others = lead("time.sleep(600)")
    os.killpg(leader.pid, signal.SIGKILL)
    wait_for_end(others)


def test_children_of_the_leader_do_not_hide_its_end_from_the_guard(lead):
    """A child that survives the leader must not hold the pipe."""
    code = "two = subprocess.Popen([sys.executable, '-c', STUBBORN], close_fds=False, stdout=subprocess.PIPE)\n"
    leader, others = lead(code + "print(two.pid, int(two.stdout.readline()), flush=True); time.sleep(600)")
    second, grandchild = map(int, leader.stdout.readline().split())
    leader.kill()
    wait_for_end(others | {"second child": second, "its child": grandchild})


def test_a_guard_starts_only_for_a_group_leader():
    code = "from areal.system.group_guard import start_guard; start_guard()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert "only the leader of a process group can start its guard" in done.stderr


def test_the_rest_of_a_group_can_be_killed_by_its_leader(lead):
    leader, others = lead("kill_rest_of_group(); print('alone', flush=True); time.sleep(600)", prelude=ALONE)
    del others["guard"]
    assert leader.stdout.readline() == b"alone\n"
    assert not any(map(alive, others.values()))
    assert alive(leader.pid)
