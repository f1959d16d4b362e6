"""A replica that keeps its version for an evaluation, while the fleet gets newer ones; every dialect."""

from __future__ import annotations

import asyncio

import pytest

from areal.api.errors import ServerUnavailable
from tests.fleet.fake_server import FleetKit, until
from tests.fleet.test_fleet import a_request, assert_whole, serving


async def test_a_pinned_replica_keeps_its_version_until_it_is_released(kit: FleetKit) -> None:
    await kit.server(0)
    await kit.server(1)
    fleet = await kit.fleet(2)
    pinned = fleet.pin()
    assert pinned is not None
    assert fleet.pin() is None  # one replica stays
    for version in (1, 2):
        await fleet.update_weights(kit.disk(version))
        assert fleet.version == version
        answers = await asyncio.gather(
            pinned.agenerate(a_request(f"e{version}")), fleet.agenerate(a_request(f"t{version}"))
        )
        assert [set(answer.output_versions) for answer in answers] == [{0}, {version}]
        assert answers[0].replicas != answers[1].replicas
        assert_whole(answers[0])
        assert fleet.live_replicas(version + 1) == [fleet.status()["replicas"][int(answers[1].replicas[0][-1])]["id"]]
    assert not pinned.is_lost
    pinned.release()
    await serving(fleet, "server-0", "server-1")
    assert {replica["version"] for replica in fleet.status()["replicas"]} == {2}


async def test_a_pinned_replica_whose_server_is_replaced_is_lost(native_kit: FleetKit) -> None:
    await native_kit.server(0)
    await native_kit.server(1)
    fleet = await native_kit.fleet(2)
    pinned = fleet.pin()
    assert pinned is not None
    name = next(replica["name"] for replica in fleet.status()["replicas"] if replica["state"] == "stale")
    await native_kit.server(int(name[-1]), version=7)
    await until(lambda: pinned.is_lost)
    with pytest.raises(ServerUnavailable):
        await pinned.agenerate(a_request())
    pinned.release()  # changes nothing
