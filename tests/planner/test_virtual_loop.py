"""The virtual loop: order of timers, no waiting, calls of threads at once, a deadlock is an error."""

import asyncio
import threading
import time

import pytest

from areal.planner.virtual_loop import NothingHappens, run_virtual


def test_a_year_passes_at_once_and_timers_fire_in_order():
    fired: list[tuple[float, str]] = []

    async def wait(seconds: float, name: str) -> None:
        await asyncio.sleep(seconds)
        fired.append((asyncio.get_running_loop().time(), name))

    async def main() -> None:
        await asyncio.gather(wait(365 * 86400.0, "year"), wait(0.25, "first"), wait(0.25, "second"), wait(0.0, "now"))

    began_s = time.monotonic()
    run_virtual(main())
    assert [name for _, name in fired] == ["now", "first", "second", "year"]
    assert [at_s for at_s, _ in fired] == pytest.approx([0.0, 0.25, 0.25, 365 * 86400.0], abs=1e-6)
    assert time.monotonic() - began_s < 60


def test_time_limits_are_virtual():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 50.0


def test_calls_for_threads_run_in_the_loop_and_take_no_time():
    async def main() -> tuple[int, float]:
        return await asyncio.to_thread(threading.get_ident), asyncio.get_running_loop().time()

    assert run_virtual(main()) == (threading.get_ident(), 0.0)


def test_an_error_of_such_a_call_reaches_the_caller():
    async def main() -> None:
        await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        run_virtual(main())


def test_a_program_that_would_wait_forever_is_an_error():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingHappens, match="no timer is set"):
        run_virtual(main())
