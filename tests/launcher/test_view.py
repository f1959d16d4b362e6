"""What the user sees of a running run."""

import sys

from areal.launcher.children import Child
from areal.launcher.job import PlannedProcess
from areal.launcher.view import awaited_text
from areal.system.network import Host


def test_one_that_died_after_a_long_life_is_awaited_since_its_restart(tmp_path):
    planned = PlannedProcess(
        name="controller",
        role="controller",
        index=0,
        host=Host(),
        argv=(sys.executable, "-S", "-c", "import time; time.sleep(600)"),
        env={},
        log_path=str(tmp_path / "controller.log"),
        device="cpu",
        gpus=(),
        num_threads=1,
        memory_bytes=None,
    )
    child = Child(planned, {})
    try:
        child.start()
        child.kill()
        child.wait()
        assert awaited_text([child], child.started_s + 500.0) == "waiting 0 s for controller to get ready"
        child.start()
        assert awaited_text([child], child.started_s + 7.0) == "waiting 7 s for controller to get ready"
    finally:
        child.kill()
        child.wait()
