"""Shared by all tests: time limits, and event loops whose clock does not run while the test process gets no CPU.

On a busy machine a process may get no CPU for seconds. A time-out of the tested code that expires in that time says
nothing about that code.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from areal.system.network import TOKEN_VARIABLE
from tests.run_token import TOKEN

settings.register_profile("areal", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("areal")
os.environ[TOKEN_VARIABLE] = TOKEN
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # else a launch with the name of a hub model waits for repeated requests
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job: its commands would print that they ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Before torch is imported. With two threads small products take up to eight times the CPU time, also in one process.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_ROOT = Path(__file__).parents[1]
_HEAVY = {"slow", "gpu", "cluster", "vllm", "sglang", "real"}
_HEAVY_LIMIT_S = 1800
_FIRST = (
    "test_end_to_end.py", "test_rows_split.py", "test_fsdp_two_ranks.py", "test_loss_two_ranks.py", "test_dp_layout.py",
    "test_resume.py", "test_math_symbolic.py", "test_server_process.py",
)  # fmt: skip
"""The longest tests run first: at the end of a parallel run the other processes would wait for them. Neighbours run in
the same process, so that those which start several ranks share the server of tests/rank_processes.py."""
_ITERATION_S = 0.002
"""Limit of the time that the callbacks of one round of a loop add to its clock."""
_SLICE_S = 0.02
"""Limit of the time that one wait adds."""
_LATE_S = 3.0
"""The loop ends a test this long after pytest-timeout should have: an exception that the signal raises in a callback or
a background task does not end the test."""


class _SteadySelector(selectors.DefaultSelector):
    """Reports the time that the loop waited for events, without the time in which the process got no CPU."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self._advance = advance
        self._returned_s = time.monotonic()
        self.gives_up_s = math.inf

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if time.monotonic() >= self.gives_up_s:
            pytest.fail("the loop of this test still runs after its time limit")
        self._advance(min(time.monotonic() - self._returned_s, _ITERATION_S))
        try:
            return super().select(self._rest()) if timeout is None else self._wait(timeout)
        finally:
            self._returned_s = time.monotonic()

    def _rest(self) -> float | None:
        return None if self.gives_up_s == math.inf else max(0.0, self.gives_up_s - time.monotonic())

    def _wait(self, left_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        while True:
            slice_s = min(max(left_s, 0.0), _SLICE_S)
            began_s = time.monotonic()
            events = super().select(slice_s)
            passed_s = min(time.monotonic() - began_s, slice_s)
            self._advance(passed_s)
            left_s -= passed_s
            if events or left_s <= 0.0:
                return events


class SteadyLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers stop while its process gets no CPU."""

    def __init__(self, limit_s: float = math.inf) -> None:
        """`limit_s`: time limit of each run."""
        self._now_s = 0.0
        self._limit_s = limit_s
        self._steady = _SteadySelector(self._advance)
        super().__init__(self._steady)

    def run_forever(self) -> None:
        self._steady.gives_up_s = time.monotonic() + self._limit_s + _LATE_S
        super().run_forever()

    def _advance(self, seconds: float) -> None:
        self._now_s += seconds

    def time(self) -> float:
        return self._now_s


gc.disable()  # until all test modules are imported: collections in between double the time of that


def pytest_collection_finish() -> None:
    """Collect garbage again, but not among the modules, which stay."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # with Python's, a third of the CPU time of many tests is the collector's


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import this process's share of the test modules first: the processes of a parallel run then compile each module
    once, and read the others from the cache."""
    workers = getattr(session.config, "workerinput", {"workerid": "gw0", "workercount": 1})
    index, count = int(workers["workerid"].removeprefix("gw")), workers["workercount"]
    folders = [Path(argument).absolute() for argument in session.config.args if Path(argument).is_dir()]
    files = sorted(file for folder in folders for file in folder.rglob("test_*.py") if _ROOT in file.parents)
    for file in files[index::count] if count > 1 else []:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # reported when pytest collects the module
            importlib.import_module(".".join(file.relative_to(_ROOT).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests, and give heavy ones a longer time limit than the one of pyproject.toml."""
    items.sort(key=lambda item: _FIRST.index(item.path.name) if item.path.name in _FIRST else len(_FIRST))
    for item in items:
        if any(mark.name in _HEAVY for mark in item.iter_markers()):
            item.add_marker(pytest.mark.timeout(_HEAVY_LIMIT_S))


@functools.cache
def _steady_loop(limit_s: float) -> Callable[[], SteadyLoop]:
    """Equal for equal limits: pytest makes the fixtures of a module again for a test with an unequal factory."""
    return functools.partial(SteadyLoop, limit_s)


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], Any]]:
    """The event loop of every async test."""
    mark = item.get_closest_marker("timeout")
    inputs = config.getoption("timeout")
    limit_s = float(mark.args[0] if mark else config.getini("timeout") if inputs is None else inputs)
    return {"steady": _steady_loop(limit_s or math.inf)}
