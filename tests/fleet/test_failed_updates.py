"""After an update that fails midway a native server continues with its second copy unused; others must not serve."""

from __future__ import annotations

import asyncio

import pytest

from areal.api.errors import WeightSyncError
from tests.fleet.fake_server import FleetKit, until
from tests.fleet.fake_sglang import FakeSGLang
from tests.fleet.fake_vllm import FakeVLLM
from tests.fleet.test_fleet import a_request, collective


async def test_an_update_that_fails_midway_leaves_the_old_weights_of_a_native_server_serving(
    native_kit: FleetKit,
) -> None:
    server = await native_kit.server(0, hold_at=5)
    fleet = await native_kit.fleet(1)
    running = asyncio.create_task(fleet.agenerate(a_request()))
    await until(lambda: server.num_held == 1)
    server.fail_update = "midway"
    with pytest.raises(WeightSyncError) as error:
        await fleet.update_weights(collective(1, fleet.live_replicas(1), "g"))
    assert error.value.code == "fleet.update_failed"
    assert fleet.status()["replicas"][0]["state"] == "serving"
    assert "pause" not in server.acts()
    server.release()
    response = await running
    assert (response.output_versions, response.num_interruptions) == ([0] * 100, 0)


@pytest.mark.parametrize("kit", [FakeSGLang, FakeVLLM], indirect=True, ids=lambda fake: fake.dialect)
async def test_incomplete_weights_never_serve(kit: FleetKit) -> None:
    server = await kit.server(0)
    fleet = await kit.fleet(1)
    server.fail_update = "midway"
    with pytest.raises(WeightSyncError, match="cannot load these weights") as error:
        await fleet.update_weights(collective(1, fleet.live_replicas(1), "g"))
    assert error.value.code == "fleet.update_failed"

    def is_stale() -> bool:
        [replica] = fleet.status()["replicas"]
        return (replica["state"], replica["weights"]) == ("stale", "incomplete")

    await until(is_stale)
    server.fail_update = ""
    await fleet.update_weights(collective(1, fleet.live_replicas(1), "h"))
    assert (await fleet.agenerate(a_request())).output_versions == [1] * 100
