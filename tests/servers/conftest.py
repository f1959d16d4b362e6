"""Real servers for the tests of this folder. One is shared by all tests that do not kill it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from areal.api.data import WeightUpdate
from tests.servers.checkpoints import Scorer, write_checkpoint
from tests.servers.real_server import Backend, RealServer
from tests.servers.server_kit import Kit, SpareServer


@pytest.fixture(
    scope="session",
    params=[pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one shape with different weights."""
    folder = tmp_path_factory.mktemp("models")
    return {name: write_checkpoint(folder / name, seed) for seed, name in enumerate(("old", "new"), start=1)}


@pytest.fixture(scope="session")
def old(models: dict[str, Path]) -> Scorer:
    return Scorer(models["old"])


@pytest.fixture(scope="session")
def new(models: dict[str, Path]) -> Scorer:
    return Scorer(models["new"])


@pytest.fixture(scope="session")
def shared_server(
    backend: Backend, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    server = RealServer(backend, models["old"], tmp_path_factory.mktemp("shared"), name="shared")
    try:
        yield server.wait_ready()
    finally:
        server.kill_all()


@pytest.fixture(scope="session")
def spare(backend: Backend, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpareServer]:
    made = SpareServer(backend, models["old"], tmp_path_factory.mktemp("spare"))
    yield made
    made.kill_all()


@pytest.fixture
async def kit(backend: Backend, tmp_path: Path, models: dict[str, Path]) -> AsyncIterator[Kit]:
    made = Kit(backend, tmp_path, models)
    yield made
    await made.close()


@pytest.fixture
async def server(shared_server: RealServer, kit: Kit) -> RealServer:
    """The shared server with the old weights at version 0, whatever the test before did."""
    return await with_old_weights(shared_server, kit)


async def with_old_weights(server: RealServer, kit: Kit) -> RealServer:
    assert server.is_alive, f"a test before has killed the server: {server.last_words()}"
    replica = kit.replica(server)
    await replica.info()
    await replica.pause("abort")
    await replica.update_weights(
        WeightUpdate(version=0, kind="disk", path=str(kit.models["old"])), rank=1, mode="abort"
    )
    await replica.resume()
    return server
