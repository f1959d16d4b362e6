"""A replica that comes back finds the folder of the current version gone, or refuses one that is there."""

from __future__ import annotations

import shutil
from pathlib import Path

from areal.fleet.fleet import Fleet
from tests.fleet.fake_server import FleetKit, until
from tests.fleet.test_fleet import serving


def state_of(fleet: Fleet, name: str) -> str:
    """Empty while nobody is known by this name."""
    return next((one["state"] for one in fleet.status()["replicas"] if one["name"] == name), "")


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
