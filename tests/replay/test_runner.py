"""The processes of a replay: they end together, and none is left behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from areal.launcher.job import PlannedProcess
from areal.replay.__main__ import plan_ranks, run_ranks
from areal.system.network import Host
from tests.expect import raises_code

SLEEPS = "import time; time.sleep(600)"


def rank_of(folder, index, code):
    return PlannedProcess(
        name=f"trainer-{index}",
        role="trainer",
        index=index,
        host=Host(),
        argv=(sys.executable, "-c", code),
        env={"AREAL_TEST_MARK": str(folder)},
        log_path=str(folder / "logs" / f"{index}.log"),
        device="cpu",
        gpus=(),
        num_threads=1,
        memory_bytes=None,
    )


def ranks_of(tmp_path, *codes):
    return [rank_of(tmp_path, index, code) for index, code in enumerate(codes)]


def left(mark):
    result = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("AREAL_TEST_MARK") == str(mark) and process.status() != psutil.STATUS_ZOMBIE:
                result.append(process)
        except psutil.Error:
            continue
    return result


def test_it_returns_when_all_have_ended_and_looks_once_more_then(tmp_path):
    looks = []
    code = "open('done.txt', 'w').close()"
    ranks = ranks_of(tmp_path, f"import os; os.chdir({str(tmp_path)!r}); {code}")
    run_ranks(ranks, lambda: looks.append((tmp_path / "done.txt").exists()))
    assert looks[-1]


def test_a_rank_that_fails_ends_the_others_and_says_why(tmp_path):
    explains = "import sys, time; time.sleep(0.3); print('areal: error: the ledger is gone'); sys.exit(2)"
    with raises_code("replay.rank_failed", "the ledger is gone", "1.log"):
        run_ranks(ranks_of(tmp_path, SLEEPS, explains), lambda: None)
    assert left(tmp_path) == []


def test_a_rank_that_is_killed_is_named(tmp_path):
    with raises_code("replay.rank_failed", "trainer-0", "-9", "it said this"):
        run_ranks(
            ranks_of(tmp_path, "import os; print('it said this', flush=True); os.kill(os.getpid(), 9)", SLEEPS),
            lambda: None,
        )
    assert left(tmp_path) == []


def test_an_interruption_ends_all(tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ranks(ranks_of(tmp_path, SLEEPS, SLEEPS), interrupt)
    assert left(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_die_with_the_command(tmp_path, number):
    code = (
        "import sys; from pathlib import Path; from tests.replay.test_runner import SLEEPS, rank_of, run_ranks\n"
        f"run_ranks([rank_of(Path({str(tmp_path)!r}), 0, SLEEPS)], lambda: print('looks', flush=True))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"looks\n"
    children = left(tmp_path)
    assert len(children) == 1
    os.kill(parent.pid, number)
    parent.wait(200)
    parent.stdout.close()
    deadline = time.monotonic() + 200
    while left(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left(tmp_path) == []


def test_ranks_have_the_recorded_environment_and_work_in_their_own_folder(recorded, tmp_path):
    from areal.replay.recorded import RecordedRun
    from areal.system.process import ProcessContext

    result = RecordedRun.read(recorded.folder).ranks()
    on_node = Host(bind="10.255.0.1", advertise="10.255.0.1", node="node1")
    changed = [(replace(context, host=on_node), env | {"OMP_NUM_THREADS": "7"}) for context, env in result]
    [rank] = plan_ranks(changed, tmp_path)
    context = ProcessContext.from_env(rank.env)
    assert context is not None
    assert context.run_dir == str(tmp_path)
    assert rank.host == context.host == Host(), "a replay runs here, also of a run on other machines"
    assert (context.num_threads, context.world_size, context.device) == (1, 1, "cpu")
    assert rank.env["OMP_NUM_THREADS"] == "7"
    assert Path(rank.log_path).parent == tmp_path / "logs"
