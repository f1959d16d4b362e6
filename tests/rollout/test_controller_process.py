"""The garbage collection of the controller process."""

import asyncio
import gc

import pytest

from areal.rollout import controller_process
from areal.rollout.controller_process import (
    GROWTH_BYTES,
    MAX_YOUNG_S,
    SHORT_PASS_S,
    YOUNG_S,
    collecting_cycles,
    next_pause_s,
)


@pytest.fixture
def passes(monkeypatch):
    """Passes follow each other at once. The list gets the generation of each, and how many objects are young."""
    result = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            result.append((info["generation"], len(gc.get_objects(0))))

    monkeypatch.setattr(controller_process, "YOUNG_S", 0.0)
    gc.callbacks.append(note)
    yield result
    gc.callbacks.remove(note)


async def test_cycles_are_collected_each_time_the_process_has_grown(passes, monkeypatch):
    monkeypatch.setattr(controller_process, "YOUNG_PASSES", 1)
    sizes, full = [5, 5, 5 + GROWTH_BYTES, 6 + GROWTH_BYTES, 9, 9, 10 + GROWTH_BYTES, 7, 7], []
    looked = asyncio.Event()

    def size() -> int:
        if len(sizes) == 1:
            looked.set()
            return sizes[0]
        full.append(sum(generation == 2 for generation, _ in passes))
        return sizes.pop(0)

    await collecting_cycles(looked.wait(), size)
    # the memory after a pass is the start of the next growth
    assert full == [0, 0, 0, 0, 1, 1, 1, 2]


async def test_a_pass_looks_at_the_objects_since_the_pass_before_under_a_steady_load(passes):
    per_turn, kept = 2_000, [[[number] for number in range(2_000)] for _ in range(40)]

    async def load() -> None:
        for turn in range(400):  # objects that end balance those that are new
            kept[turn % len(kept)] = [[number] for number in range(per_turn)]
            await asyncio.sleep(0)

    passes.clear()  # those of the interpreter, by its own rule
    await collecting_cycles(load())
    young = [count for generation, count in passes if generation == 0]
    assert len(young) > 100
    assert max(young[1:]) < 5 * per_turn


async def test_the_interpreter_collects_by_its_own_rule_before_and_after():
    assert gc.isenabled()

    async def work() -> bool:
        return gc.isenabled()

    assert not await collecting_cycles(work())
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("pause_s", "pass_s", "expected"),
    [
        (YOUNG_S, SHORT_PASS_S / 2, 2 * YOUNG_S),
        (MAX_YOUNG_S, SHORT_PASS_S / 2, MAX_YOUNG_S),
        (MAX_YOUNG_S, SHORT_PASS_S, MAX_YOUNG_S / 2),
        (YOUNG_S, 1.0, YOUNG_S),
    ],
)
def test_passes_are_further_apart_while_they_are_short(pause_s, pass_s, expected):
    assert next_pause_s(pause_s, pass_s) == expected
