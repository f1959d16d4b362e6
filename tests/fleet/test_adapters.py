"""Policy versions as LoRA adapters alone: a new name for each, requests that keep theirs, and the canary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from areal.api.data import WeightUpdate
from areal.api.errors import WeightSyncError
from tests.fleet.fake_server import FakeServer, FleetKit, until
from tests.fleet.fake_sglang import FakeSGLang
from tests.fleet.fake_vllm import FakeVLLM
from tests.fleet.test_fleet import a_request, assert_whole, serving


@pytest.fixture(params=[FakeSGLang, FakeVLLM], ids=lambda fake: fake.dialect)
async def kit(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FleetKit]:
    made = FleetKit(tmp_path, request.param)
    yield made
    await made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def adapter(folder: Path, version: int, suffix: str = "0a1b2c3d") -> WeightUpdate:
    path = folder / f"adapter-v{version:06d}-{suffix}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    return WeightUpdate(version=version, kind="adapter", path=str(path))


def name_of(server: FakeServer) -> str:
    body = server.requests[-1].body
    return body.get("lora_path") or body.get("model") or ""


async def test_requests_name_the_adapter_of_their_version(kit: FleetKit, folder: Path) -> None:
    server = await kit.server(0)
    fleet = await kit.fleet(1)
    for version in (1, 2):
        await fleet.update_weights(adapter(folder, version))
        answer = await fleet.agenerate(a_request(f"r{version}"))
        assert_whole(answer)
        assert answer.output_versions == [version] * 100
        assert name_of(server) == f"adapter-v{version:06d}-0a1b2c3d"
        assert list(server.adapters) == [name_of(server)], "the one before is unloaded"
    await fleet.update_weights(adapter(folder, 2, "ffffffff"))  # the same version, published again
    await until(lambda: list(server.adapters) == ["adapter-v000002-ffffffff"])


async def test_a_running_request_keeps_its_adapter_until_it_ends(kit: FleetKit, folder: Path) -> None:
    server = await kit.server(0, hold_at=5)
    fleet = await kit.fleet(1, weight_update="keep")
    await fleet.update_weights(adapter(folder, 1))
    running = asyncio.create_task(fleet.agenerate(a_request("old")))
    await until(lambda: server.num_held == 1)
    await fleet.update_weights(adapter(folder, 2))
    assert len(server.adapters) == 2
    server.release()
    old = await running
    assert_whole(old)
    assert old.output_versions == [1] * 100
    await until(lambda: list(server.adapters) == ["adapter-v000002-0a1b2c3d"])
    assert (await fleet.agenerate(a_request("new"))).output_versions == [2] * 100


async def test_an_interrupted_request_continues_with_the_new_adapter(kit: FleetKit, folder: Path) -> None:
    server = await kit.server(0, hold_at=5)
    fleet = await kit.fleet(1)
    await fleet.update_weights(adapter(folder, 1))
    running = asyncio.create_task(fleet.agenerate(a_request("old")))
    await until(lambda: server.num_held == 1)
    server.hold_at = None
    await fleet.update_weights(adapter(folder, 2))
    answer = await running
    assert_whole(answer)
    assert set(answer.output_versions) == {1, 2}
    assert list(server.adapters) == ["adapter-v000002-0a1b2c3d"]


async def test_the_canary_finds_a_replica_that_serves_an_old_adapter(kit: FleetKit, folder: Path) -> None:
    servers = [await kit.server(index) for index in range(3)]
    fleet = await kit.fleet(3)
    await fleet.update_weights(adapter(folder, 1))
    servers[1].lag = 1
    report = await fleet.update_weights(adapter(folder, 2))
    assert report is not None
    assert report.differing == ["server-1"]
    assert report.difference == pytest.approx(0.01, rel=1e-4)  # log-probabilities are float32
    await serving(fleet, "server-0", "server-1", "server-2")
    assert list(servers[1].adapters) == ["adapter-v000002-0a1b2c3d-1"], "loaded again, under another name"


async def test_a_new_process_gets_the_adapter(kit: FleetKit, folder: Path) -> None:
    first = await kit.server(0)
    fleet = await kit.fleet(1)
    await fleet.update_weights(adapter(folder, 1))
    await first.die()
    again = await kit.server(0)
    await until(lambda: bool(again.adapters))
    await serving(fleet, "server-0")
    assert (await fleet.agenerate(a_request())).output_versions == [1] * 100


async def test_native_servers_refuse_an_adapter(native_kit: FleetKit, folder: Path) -> None:
    await native_kit.server(0)
    fleet = await native_kit.fleet(1)
    with pytest.raises(WeightSyncError):
        await fleet.update_weights(adapter(folder, 1))
