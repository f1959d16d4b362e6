"""The garbage collection of the controller process."""

import asyncio
import gc

from areal.rollout import controller_process
from areal.rollout.controller_process import GROWTH_BYTES


async def test_cycles_are_collected_each_time_the_process_has_grown(monkeypatch):
    sizes, collected = [5, 5, 5 + GROWTH_BYTES, 6 + GROWTH_BYTES, 9, 9, 10 + GROWTH_BYTES, 7, 7], []
    looked = asyncio.Event()
    monkeypatch.setattr(controller_process, "_LOOK_S", 0.0)
    monkeypatch.setattr(controller_process.gc, "collect", lambda: collected.append(len(sizes)))

    def size():
        if len(sizes) == 1:
            looked.set()
            return sizes[0]
        return sizes.pop(0)

    task = asyncio.create_task(controller_process.collect_after_growth(size))
    await looked.wait()
    task.cancel()
    assert collected == [5, 2]


def test_no_pass_of_the_cycle_collector_looks_at_more_than_the_new_objects(monkeypatch):
    monkeypatch.setattr(controller_process, "YOUNG_OBJECTS", 5_000)
    before, passes = gc.get_threshold(), []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            passes.append((info["generation"], gc.get_count()[0] < 5_500))

    gc.callbacks.append(note)
    try:
        controller_process.collect_rarely()
        kept = [[number] for number in range(60_000)]
        del kept
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
        gc.unfreeze()
    assert len(passes) >= 11
    assert set(passes) == {(0, True)}
