"""A vLLM server whose weights are new, while its version could not be told to it, serves under neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal.api.data import WeightSpec, WeightUpdate
from areal.api.errors import WeightSyncError
from areal.fleet.fleet import Fleet
from tests.fleet.fake_server import FleetKit, until
from tests.fleet.fake_vllm import FakeVLLM

BUCKETS = [[WeightSpec(name="w", shape=[2], dtype="float32")]]


def collective(fleet: Fleet, version: int) -> WeightUpdate:
    replicas = fleet.live_replicas(version)
    return WeightUpdate(version=version, kind="collective", buckets=BUCKETS, group_name="g", replicas=replicas)


@pytest.fixture
async def kit(tmp_path: Path) -> Any:
    made = FleetKit(tmp_path, FakeVLLM)
    yield made
    await made.close()


async def test_weights_without_their_version_do_not_serve_as_the_version_before(kit: FleetKit) -> None:
    server = await kit.server(0, version=3)
    fleet = await kit.fleet(1)
    server.fail_cache_reset = True
    with pytest.raises(WeightSyncError):
        await fleet.update_weights(collective(fleet, 4))
    for who in (fleet, await kit.fleet(1)):  # the controller that saw it, and one that comes after
        await until(lambda who=who: who.status()["needs_weights"])
        assert [replica["state"] for replica in who.status()["replicas"]] == ["stale"]
    server.fail_cache_reset = False
    await fleet.update_weights(collective(fleet, 4))
    assert [replica["state"] for replica in fleet.status()["replicas"]] == ["serving"]
    assert server.version == 4
