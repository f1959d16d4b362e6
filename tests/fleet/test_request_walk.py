"""How many functions of areal one request, and one weight version over the disk, enter in one process.

Counted are functions, not comprehensions, and changes of file in the order in which functions are entered first. A
change that needs more raises the bar here and says why in its commit.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

import areal
from areal.weights.disk import DiskChannel
from tests.expect import serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FixedTrainer, FleetControl
from tests.fleet.fake_server import FleetKit
from tests.fleet.test_fleet_native import NativeKit, a_request, make_model

ROOT = str(Path(areal.__file__).parent)
TIMER = {"LoopLateness._wait", "LoopLateness._tick", "LoopLateness.total_s"}
"""What the timer of the fleet's loop enters, which belongs to no request and no version. It is due on slow machines."""


class Walk:
    """What all threads that start after it enter while it counts."""

    def __init__(self) -> None:
        self._codes: dict[CodeType, None] = {}
        self.is_counting = False

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if self.is_counting and event == "call" and code.co_filename.startswith(ROOT):
            self._codes[code] = None

    def counts(self) -> tuple[int, int, int]:
        """Functions, files, changes of file."""
        codes = [code for code in self._codes if code.co_qualname not in TIMER]
        functions = [code for code in codes if not code.co_name.endswith("comp>") and code.co_name != "<genexpr>"]
        files = [code.co_filename for code in codes]
        changes = sum(item != other for item, other in itertools.pairwise(files))
        return len(functions), len(set(files)), changes

    def __enter__(self) -> None:
        self._codes.clear()
        self.is_counting = True

    def __exit__(self, *error: object) -> None:
        self.is_counting = False


@pytest.fixture
def walk():
    made, before = Walk(), sys.getprofile()
    threading.setprofile(made.note)
    sys.setprofile(made.note)
    yield made
    sys.setprofile(before)
    threading.setprofile(None)  # type: ignore[arg-type]


@pytest.fixture
async def native(walk: Walk, native_kit: FleetKit, tmp_path: Path) -> AsyncIterator[NativeKit]:
    make_model(0).save_pretrained(tmp_path / "model")
    made = NativeKit(native_kit, tmp_path / "model")
    yield made
    for fleet in native_kit.fleets:
        await fleet.close()
    for server in made.servers:
        await server.die()


async def test_a_request_and_a_weight_version_enter_few_functions(
    walk: Walk, native: NativeKit, tmp_path: Path
) -> None:
    fleet = await native.fleet(1, health_check_interval_s=3600.0)
    await fleet.agenerate(a_request("first", 1))
    with walk:
        await fleet.agenerate(a_request("second", 1))
    functions, files, changes = walk.counts()
    assert functions <= 184, functions
    assert files <= 20, files
    assert changes <= 86, changes
    channel = DiskChannel(FixedTrainer(make_model(1)), FakeRanks(), FleetControl(fleet), tmp_path)  # type: ignore[arg-type]
    await asyncio.to_thread(serve, channel, 1)
    with walk:
        await asyncio.to_thread(serve, channel, 2)
    functions, files, _ = walk.counts()
    assert functions <= 285, functions
    assert files <= 30, files
