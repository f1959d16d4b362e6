"""A controller that meets an SGLang server whose update stopped midway learns of it from the version alone."""

from __future__ import annotations

from typing import Any

import pytest

from areal.api.data import WeightSpec, WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable, WeightSyncError
from areal.fleet.fleet import Fleet
from tests.fleet.fake_server import FleetKit, Refused, until
from tests.fleet.fake_sglang import FakeSGLang

BUCKETS = [[WeightSpec(name=name, shape=[2], dtype="float32")] for name in ("a", "b", "c")]


class StopsMidway(FakeSGLang):
    stops_at = 2

    async def receive(self) -> None:
        await super().receive()
        if self.acts().count("receive") == self.stops_at:
            raise Refused(400, "Failed to receive weights: Connection closed by peer")


class BeginsNothing(FakeSGLang):
    async def _begin(self, body: Any) -> Any:
        raise Refused(500, "out of memory")


def update_of(fleet: Fleet, version: int) -> WeightUpdate:
    replicas = fleet.live_replicas(version)
    return WeightUpdate(version=version, kind="collective", buckets=BUCKETS, group_name="g", replicas=replicas)


@pytest.mark.parametrize("stops_at", [1, 2, 3])
async def test_weights_of_two_versions_have_no_known_version(tmp_path, stops_at: int) -> None:  # type: ignore[no-untyped-def]
    kit = FleetKit(tmp_path, StopsMidway)
    server = await kit.server(0, version=3)
    server.stops_at = stops_at
    replica = server.client("server-0", server.address)
    update = WeightUpdate(version=4, kind="collective", buckets=BUCKETS, group_name="g", replicas=["server-0"])
    with pytest.raises((RequestError, ServerUnavailable)):
        await replica.update_weights(update, rank=1, mode="abort")
    await replica.close()
    successor = server.client("server-0", server.address)
    assert (await successor.info()).version == (3 if stops_at == 1 else -1)
    await successor.update_weights(update, rank=1, mode="abort")
    assert (await successor.info()).version == 4
    await successor.close()
    await kit.close()


async def test_an_update_fails_when_its_session_cannot_start(tmp_path) -> None:  # type: ignore[no-untyped-def]
    kit = FleetKit(tmp_path, BeginsNothing)
    server = await kit.server(0)
    replica = server.client("server-0", server.address)
    update = WeightUpdate(version=1, kind="collective", buckets=BUCKETS, group_name="g", replicas=["server-0"])
    with pytest.raises(ServerUnavailable, match=r"/begin_weight_update .*500") as error:
        await replica.update_weights(update, rank=1, mode="abort")
    assert error.value.code == "server.request_failed"
    assert "receive" not in server.acts()
    await replica.close()
    await kit.close()


async def test_a_new_fleet_does_not_use_a_server_with_mixed_weights(tmp_path) -> None:  # type: ignore[no-untyped-def]
    kit = FleetKit(tmp_path, StopsMidway)
    server = await kit.server(0, version=3)
    first = await kit.fleet(1)
    with pytest.raises(WeightSyncError, match=r"\b4\b") as error:
        await first.update_weights(update_of(first, 4))
    assert error.value.code == "fleet.update_failed"
    await first.close()
    second = await kit.fleet(1)
    await until(lambda: second.status()["needs_weights"])
    assert [replica["state"] for replica in second.status()["replicas"]] == ["stale"]
    await second.update_weights(update_of(second, 4))
    assert second.version == server.version == 4
    await kit.close()
