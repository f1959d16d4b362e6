"""Servers answer to the images of every family that they take as the trainer and transformers do, over new weights too.

The native server is started with Qwen3-VL; tests/inference/test_vision_families.py has its other families.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal.data.image_files import RunImages
from areal.fleet.server_host import gateway
from areal.fleet.sglang import SGLANG
from areal.fleet.vllm import VLLM
from areal.system.network import Host
from tests.expect import serve
from tests.run_token import TOKEN
from tests.servers.real_server import RealServer
from tests.servers.server_kit import Kit, largest_gap
from tests.servers.vision.kit import (
    EXACT,
    SIZES,
    Ask,
    VisionTrainer,
    answers,
    exact_logprobs,
    expect_update_in_mid_answer,
    serves,
)

pytestmark = pytest.mark.timeout(900)
SERVED = [("native", "qwen3_vl"), *((item.name, family) for item in (VLLM, SGLANG) for family in item.image_families)]
UPDATES = list(product(("keep", "interrupt"), ("disk", "collective", "http")))
"""Of Qwen3-VL; the first two also of the other families."""


@serves(*SERVED)
async def test_prompts_with_0_to_3_images_have_the_same_log_probabilities_everywhere(
    server: RealServer, kit: Kit, asks: Ask, trainer: VisionTrainer, models: dict[str, Path], images: RunImages
) -> None:
    fleet = await kit.fleet(server, vision=images)
    trainer.use("old")
    await asyncio.to_thread(serve, kit.disk(fleet, trainer), 1)
    for greedy in (False, True):
        pairs = await answers(fleet, [asks(f"{greedy} {len(item)}", *item, greedy=greedy) for item in SIZES], images)
        for pair, trained in zip(pairs, trainer.logprobs("old", pairs), strict=True):
            expected, likeliest = exact_logprobs(models["old"], pair, images)
            assert largest_gap(list(pair[1].output_logprobs), expected) < EXACT
            assert largest_gap(trained, expected) < EXACT
            assert not greedy or list(pair[1].output_ids) == likeliest


@serves(
    *((name, family, *way) for name, family in SERVED for way in UPDATES[: None if family == "qwen3_vl" else 2]),
    more=("mode", "channel"),
)
async def test_an_update_in_mid_answer_changes_the_tower_and_the_text(
    server: RealServer, kit: Kit, asks: Ask, trainer: VisionTrainer, images: RunImages, mode: str, channel: str
) -> None:
    """The same images are asked for before and after each update."""
    async with AsyncExitStack() as stack:
        if channel == "http" and server.backend != "native":
            address = await stack.enter_async_context(gateway(Host(), TOKEN, server.address))
            server = SimpleNamespace(address=address, process=server.process)  # type: ignore[assignment]
        fleet = await kit.fleet(server, vision=images, weight_update=mode)
        await expect_update_in_mid_answer(fleet, getattr(kit, channel)(fleet, trainer), trainer, asks, images)
