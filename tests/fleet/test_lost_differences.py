"""Servers that cannot apply a difference of `delta_disk` get whole weights from the trainer, which continues."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from safetensors.torch import load_file

from areal.api.errors import ArealError
from areal.system.folders import FolderPuller, LocalFolder
from areal.system.network import Host
from areal.weights.disk import DiskDeltaChannel
from tests.expect import serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FixedTrainer, FleetControl
from tests.fleet.fake_native import FakeNative
from tests.fleet.fake_server import FleetKit, until
from tests.run_token import TOKEN
from tests.weights.test_delta_channel import large_model, step


class PullingServer(FakeNative):
    """It copies the weights of updates."""

    def __init__(self) -> None:
        super().__init__()
        self.puller = FolderPuller(TOKEN, {})
        self.puller._local = LocalFolder("copies")
        self.problems: list[str] = []

    async def _control(self, request: web.Request) -> web.Response:
        if request.path == "/pull_weights":
            body = await request.json()
            try:
                copy = await asyncio.to_thread(self.puller.pull, body["url"], body["mirrors"], body["deltas"])
            except ArealError as error:
                return web.json_response({"error": {"message": str(error)}, "code": error.code}, status=400)
            self.pulled = {"path": str(copy.path), "problem": copy.problem, "num_bytes": copy.num_bytes}
            self.problems.append(copy.problem)
        return await super()._control(request)

    @property
    def file(self) -> Path:
        return Path(self.pulled["path"]) / "model.safetensors"

    def damage(self) -> None:
        """Change the last byte of the weights."""
        content = self.file.read_bytes()
        self.file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[FleetKit]:
    made = FleetKit(tmp_path, PullingServer)
    yield made
    await made.close()
    for server in made.servers:
        server.puller.close()


@pytest.mark.parametrize("num_servers", [1, 2])
async def test_a_server_with_a_damaged_copy_gets_the_weights_without_it(
    kit: FleetKit, num_servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another server the update succeeds, and the damaged copy is made again from the shared whole version."""
    for index in range(num_servers):  # each on another machine
        (folder := tmp_path / f"machine-{index}").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        await kit.server(index)
    fleet, engine = await kit.fleet(num_servers), FixedTrainer(large_model())
    channel = DiskDeltaChannel(engine, FakeRanks(), FleetControl(fleet), tmp_path / "shared", host=Host())
    await asyncio.to_thread(serve, channel, 1)
    server = kit.servers[0]
    server.damage()
    step(engine.model)
    await asyncio.to_thread(serve, channel, 2)
    if num_servers == 2:
        assert kit.servers[1].version == 2
    await until(lambda: server.version == 2)
    for each in kit.servers:
        assert {name: weight.tolist() for name, weight in load_file(each.file).items()} == {
            name: weight.tolist() for name, weight in engine.named_weights()
        }
    assert server.problems == ["", ""], "after the repair there is no second attempt with the damaged copy"
    assert [replica["failed_deltas"] for replica in fleet.status()["replicas"]] == [1, 0][:num_servers]
    whole = {file.parent.name.partition("-")[0] for file in (tmp_path / "shared").glob("v*/model.safetensors")}
    assert whole == ({"v000001"} if num_servers == 2 else {"v000001", "v000002"})
    step(engine.model)
    await asyncio.to_thread(serve, channel, 3)
    assert [item.version for item in kit.servers] == [3] * num_servers
    assert server.problems[2:] == [""]
