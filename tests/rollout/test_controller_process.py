"""The garbage collection of the controller process."""

import asyncio

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
