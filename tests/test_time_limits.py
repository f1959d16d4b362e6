"""The clock and the time limits of all other tests."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(params=["blocked", "stopped"])
def stand_still(request):
    """Two ways in which this process makes no progress for half a second."""
    if request.param == "blocked":
        return lambda: time.sleep(0.5)
    code = "import os, sys, time, signal; time.sleep(.5); os.kill(int(sys.argv[1]), signal.SIGCONT)"

    def stop():
        with subprocess.Popen([sys.executable, "-S", "-c", code, str(os.getpid())]):
            os.kill(os.getpid(), signal.SIGSTOP)

    return stop


async def test_a_pause_of_the_test_process_ends_no_wait(stand_still):
    answer = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(0.3):
        stand_still()
        asyncio.get_running_loop().call_later(0.01, answer.set_result, None)
        await answer


async def test_time_passes_while_nothing_happens():
    began = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await asyncio.Event().wait()
    assert asyncio.get_running_loop().time() - began >= 0.1


HANGS = """
import asyncio, pytest, time
async def test_in_the_loop():
    await asyncio.Event().wait()
async def test_in_callbacks():
    def again():
        time.sleep(0.2)
        asyncio.get_running_loop().call_soon(again)
    again()
    await asyncio.Event().wait()
def test_in_the_main_thread():
    import threading
    threading.Event().wait()
@pytest.mark.slow
def test_heavy(request):
    assert request.node.get_closest_marker("timeout").args == (1800,)
"""


def test_a_test_that_hangs_fails_and_the_others_run(tmp_path):
    (tmp_path / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (tmp_path / "test_hangs.py").write_text(HANGS)
    argv = [sys.executable, "-X", "no_debug_ranges", "-m", "pytest", "-p", "no:cacheprovider", "--timeout=1"]
    argv += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert "3 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("Timeout (>1.0s)") >= 2
    assert "still runs after its time limit" in done.stdout
    assert "threading.Event().wait()" in done.stdout, "the output shows where it hangs"
