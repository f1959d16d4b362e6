"""A vLLM server that quantizes the trainer's weights itself does so at each update, over either channel."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.expect import serve
from tests.fixed_trainer import FixedTrainer
from tests.servers.checkpoints import Scorer, build_model
from tests.servers.real_server import RealServer
from tests.servers.server_kit import VLLM_ONLY, Kit, a_request, gap, largest_gap

pytestmark = VLLM_ONLY


async def test_updates_of_quantized_weights(kit: Kit, tmp_path: Path, old: Scorer, new: Scorer) -> None:
    """In the kind that vLLM's CPU kernels take. The first update is over the disk, the second has the old weights."""
    flags = {"dtype": "bfloat16", "quantization": "fp8_per_channel"}
    server = RealServer("vllm", kit.models["old"], tmp_path, flags=flags)
    try:
        await asyncio.to_thread(server.wait_ready)
        fleet = await kit.fleet(server)
        trainer = FixedTrainer(build_model(2))
        disk, collective = kit.disk(fleet, trainer), kit.collective(fleet, trainer)
        answers = {}
        for version in range(1, 5):
            trainer.model = build_model(2 if version % 2 else 1)
            await asyncio.to_thread(serve, disk if version in (1, 4) else collective, version)
            response = await fleet.agenerate(a_request(60, greedy=True))
            assert response.output_versions == [version] * 60
            answers[version] = response
            held, other = (new, old) if version % 2 else (old, new)
            assert gap(response, held) < 3 < gap(response, other)
        for item, same in ((1, 3), (2, 4)):
            assert answers[item].output_ids == answers[same].output_ids
            assert largest_gap(answers[item].output_logprobs, answers[same].output_logprobs) < 1e-5
    finally:
        server.kill_all()
