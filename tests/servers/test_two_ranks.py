"""A real server whose model is cut over two ranks takes in weights over either channel."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.expect import serve
from tests.fixed_trainer import FixedTrainer
from tests.servers.checkpoints import Scorer, build_model
from tests.servers.real_server import Backend, RealServer
from tests.servers.server_kit import TOLERANCE, Kit, a_request, gap


@pytest.mark.timeout(600)
async def test_both_ranks_get_the_weights(
    backend: Backend, kit: Kit, models: dict[str, Path], old: Scorer, new: Scorer, tmp_path: Path
) -> None:
    server = RealServer(backend, models["old"], tmp_path, size=2, name="two ranks")
    try:
        await asyncio.to_thread(server.wait_ready)
        fleet = await kit.fleet(server)
        trainer = FixedTrainer(build_model(2))
        collective, disk = kit.collective(fleet, trainer, ranks_per_replica=2), kit.disk(fleet, trainer)
        for version, channel, seed in ((0, None, 1), (1, collective, 2), (2, collective, 1), (3, disk, 2)):
            if channel is not None:
                trainer.model = build_model(seed)
                await asyncio.to_thread(serve, channel, version)
            response = await fleet.agenerate(a_request(40))
            assert response.output_versions == [version] * 40
            assert gap(response, old if seed == 1 else new) < TOLERANCE
    finally:
        server.kill_all()
