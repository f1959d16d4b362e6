"""Makes the scripted run importable by the tests of this folder, and checks that each leaves no process behind."""

import psutil
import pytest

from areal.launcher.preloaded import PRELOAD
from tests.launcher.fake_run import Run


@pytest.fixture(autouse=True)
def _no_preloaded_parent(monkeypatch):
    """The scripts of these tests import no torch, so they would wait for its import."""
    monkeypatch.setenv(PRELOAD, "0")


@pytest.fixture
def make_run(tmp_path):
    """Makes a Run with settings of its own."""
    before = set(psutil.Process().children(recursive=True))
    yield lambda **settings: Run(tmp_path / "run", **settings)
    assert set(psutil.Process().children(recursive=True)) <= before, "processes were left behind"


@pytest.fixture
def run(make_run):
    return make_run()


@pytest.fixture
def set_clock():
    """Lets a clock of the test be that of a run's supervisor and of its children."""

    def set_clock(run, clock):
        run.clock = clock

    return set_clock
