"""A replica that comes back finds the folder of the current version gone, or refuses one that is there."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from areal.fleet.fleet import Fleet
from tests.fleet.fake_server import FleetKit, Refused, until
from tests.fleet.test_fleet import serving


def state_of(fleet: Fleet, name: str) -> str:
    """Empty while nobody is known by this name."""
    return next((replica["state"] for replica in fleet.status()["replicas"] if replica["name"] == name), "")


async def test_a_deleted_weight_folder_is_requested_again(kit: FleetKit) -> None:
    await kit.server(0)
    fleet = await kit.fleet(1)
    update = kit.disk(1)
    await fleet.update_weights(update)
    shutil.rmtree(update.path)
    again = await kit.server(1)
    await until(lambda: state_of(fleet, "server-1") == "stale" and fleet.status()["needs_weights"])
    await fleet.update_weights(kit.disk(1))
    await serving(fleet, "server-0", "server-1")
    assert again.version == 1
    assert not fleet.status()["needs_weights"]


async def test_a_replica_whose_folder_is_gone_gets_the_newest_version_at_once(
    kit: FleetKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next health check is an hour away."""
    await kit.server(0)
    fleet = await kit.fleet(1)
    await fleet.update_weights(kit.disk(1))
    slow, gone, loads = await kit.server(1), asyncio.Event(), list[int]()
    take_in = slow._take_in

    async def take_late() -> None:
        loads.append(slow.version)
        if len(loads) == 1:
            await gone.wait()
            raise Refused(400, "this folder is not served any more")
        await take_in()

    monkeypatch.setattr(slow, "_take_in", take_late)
    await until(lambda: loads)
    rare = replace(fleet._replicas._config, health_check_interval_s=3600.0)
    monkeypatch.setattr(fleet._replicas, "_config", rare)
    await fleet.update_weights(kit.disk(2))
    assert (len(loads), state_of(fleet, "server-1")) == (1, "updating")
    gone.set()
    await serving(fleet, "server-0", "server-1")
    assert (slow.version, len(loads)) == (2, 2)


async def test_weights_are_requested_when_no_replica_serves(kit: FleetKit) -> None:
    """It waits for rollouts, and would never publish by itself."""
    first = await kit.server(0)
    fleet = await kit.fleet(1)
    update = kit.disk(1)
    await fleet.update_weights(update)
    shutil.rmtree(update.path)
    await first.die()
    again = await kit.server(0)
    await until(lambda: state_of(fleet, "server-0") == "stale" and fleet.status()["needs_weights"])
    await fleet.update_weights(kit.disk(1))
    await serving(fleet, "server-0")
    assert again.version == 1


async def test_a_whole_folder_that_a_replica_cannot_read_yet_is_tried_again(kit: FleetKit) -> None:
    """On a shared file system it may take a while until every machine sees what one has written."""
    await kit.server(0)
    fleet = await kit.fleet(1)
    update = kit.disk(1)
    await fleet.update_weights(update)
    slow = await kit.server(1)
    slow.fail_update = "refuse"
    await until(lambda: "load" in slow.acts() or Path(update.path).name in str(fleet.status()["replicas"]))
    assert not fleet.status()["needs_weights"]
    slow.fail_update = ""
    await serving(fleet, "server-0", "server-1")
    assert slow.version == 1
