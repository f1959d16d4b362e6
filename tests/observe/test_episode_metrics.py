import asyncio

import pytest

from areal.api.errors import InputError
from areal.observe.step_files import LoggedMetrics, log_metric


async def test_values_of_one_episode_are_averaged_also_from_its_tasks_and_threads():
    async def turn(value):
        log_metric("turns", value)
        await asyncio.to_thread(log_metric, "calls", 2 * value)

    with LoggedMetrics() as logged:
        await asyncio.gather(turn(1), turn(3))
    assert logged.means() == {"turns": 2.0, "calls": 4.0}


async def test_episodes_at_the_same_time_do_not_mix():
    async def episode(value):
        with LoggedMetrics() as logged:
            await asyncio.sleep(0)
            log_metric("value", value)
            await asyncio.sleep(0)
            return logged.means()

    assert await asyncio.gather(episode(1), episode(2)) == [{"value": 1.0}, {"value": 2.0}]


def test_outside_of_an_episode_nothing_is_collected():
    log_metric("value", 1.0)
    with LoggedMetrics() as logged:
        pass
    assert logged.means() == {}


@pytest.mark.parametrize("value", [float("nan"), None, "1"])
def test_only_finite_numbers_are_accepted(value):
    with pytest.raises(InputError) as error:
        log_metric("value", value)
    assert error.value.code == "workflow.not_finite"
