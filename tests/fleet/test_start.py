"""A fleet starts: it finds its servers and waits until they are healthy."""

from __future__ import annotations

import asyncio
import time

import pytest

from areal.api.errors import ServerUnavailable
from tests.fleet.fake_server import FleetKit, until


async def test_a_start_without_healthy_servers_names_them(kit: FleetKit) -> None:
    await kit.server(0)
    await (await kit.server(1)).die()
    with pytest.raises(ServerUnavailable, match=r"\b0\.1 .* 2 .* 1 .*server-1") as error:
        await kit.fleet(2, setup_timeout=0.1)
    assert error.value.code == "fleet.not_ready"


@pytest.fixture
def readings(kit: FleetKit, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times at which the fleet read the registry."""
    result: list[float] = []
    list_names = kit.registry.list

    def listed(prefix: str) -> dict[str, str]:
        names = list_names(prefix)
        result.append(time.monotonic())
        return names

    monkeypatch.setattr(kit.registry, "list", listed)
    return result


async def test_the_time_limit_of_a_start_does_not_include_the_loading_of_servers(
    kit: FleetKit, readings: list[float]
) -> None:
    await kit.server(0)
    starting = asyncio.create_task(kit.fleet(2, setup_timeout=0.2))
    await until(lambda: bool(readings) and readings[-1] - readings[0] > 0.4)
    assert not starting.done()
    await kit.server(1)
    await starting


async def test_the_first_server_is_found_without_waiting_for_a_health_interval(
    kit: FleetKit, readings: list[float]
) -> None:
    starting = asyncio.create_task(kit.fleet(1, health_check_interval_s=1e6))
    await until(lambda: bool(readings))
    await kit.server(0)
    await asyncio.wait_for(starting, 60.0)
