"""Two trainers on one run folder must be impossible, also when a launcher died and not all of its children did."""

import os
import subprocess
import sys

import pytest

from areal.api.errors import LaunchError
from areal.launcher.local import find_orphans, wait_for_orphans
from areal.system.run_paths import RunPaths
from tests.launcher.fake_backend import context_of

SLEEP = "import sys, time; print('up', flush=True); time.sleep(600)"


@pytest.fixture
def start(tmp_path):
    """Start what a launcher of `run_dir` could have left behind."""
    started = []

    def make(run_dir, *, module="areal.trainer"):
        context = context_of("trainer-1", run_dir=run_dir, world_size=2, num_servers=0)
        (tmp_path / "sleep.py").write_text(SLEEP)
        argv = [sys.executable, "-m", module, str(tmp_path / "sleep.py")]
        if not module.startswith("areal."):
            argv = [sys.executable, "-c", SLEEP]
        process = subprocess.Popen(argv, env=os.environ | context.to_env(), stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"up\n"
        return process

    yield make
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_process_of_the_run_is_waited_for(tmp_path, start):
    paths, told = RunPaths(tmp_path / "run"), []
    process = start(paths.root)
    assert [(orphan.pid, orphan.name) for orphan in find_orphans(paths)] == [(process.pid, "trainer-1")]

    def tell(text):
        told.append(text)
        process.kill()

    wait_for_orphans(paths, limit_s=200.0, say=tell)
    assert find_orphans(paths) == []
    assert len(told) == 1
    assert f"trainer-1 (pid {process.pid})" in told[0]


def test_an_orphan_that_stays_is_reported_with_its_pid(tmp_path, start):
    paths = RunPaths(tmp_path / "run")
    process = start(paths.root)
    with pytest.raises(LaunchError, match=rf"trainer-1 \(pid {process.pid}\).*kill -9 {process.pid}") as error:
        wait_for_orphans(paths, limit_s=0.2, say=print)
    assert error.value.code == "launch.run_in_use"


def test_other_runs_and_what_user_code_started_do_not_count(tmp_path, start):
    start(tmp_path / "other")
    start(tmp_path / "run", module="user")
    assert find_orphans(RunPaths(tmp_path / "run")) == []
