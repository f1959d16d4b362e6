"""An answer to images continues on its cache over new weights of text and tower, with exact versions, on SGLang."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, DynamicCache

from areal.data.image_files import RunImages, positions_3d
from tests.engine.vision_cases import transformers_inputs
from tests.expect import serve
from tests.servers.real_server import RealServer
from tests.servers.server_kit import Kit, largest_gap, tokens_made
from tests.servers.vision.kit import ATTEMPTS, EXACT, NUM_TOKENS, SIZES, Ask, Pair, VisionTrainer, serves

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def rollout() -> dict[str, Any]:
    return {"weight_update": "keep_cache"}


@torch.no_grad()
def mixed_logprobs(models: dict[str, Path], pair: Pair, images: RunImages, split: int) -> list[float]:
    """The old weights sampled the first `split` tokens, the new ones continue on their keys and values."""
    request, response = pair
    ids = torch.tensor([[*request.input_ids, *response.output_ids]])
    places = torch.from_numpy(positions_3d(np.array(ids[0]), list(request.images), images.layout))[:, None]
    num_old = len(request.input_ids) + split - 1  # the last token of the old weights is the first input of the new
    files = [images.store.read(image.sha256) for image in request.images]
    options = transformers_inputs(images.layout, ids[:, :num_old], list(request.images), files)
    cache, result = DynamicCache(), list[float]()
    for name, first, last in (("old", 0, num_old), ("new", num_old, ids.shape[1] - 1)):
        model = AutoModelForImageTextToText.from_pretrained(models[name], dtype=torch.float32).eval()
        part = {"input_ids": ids[:, first:last], "position_ids": places[:, :, first:last]}
        logits = model(**part, past_key_values=cache, use_cache=True, **options).logits[0]
        logits[:, list(images.layout.banned_ids)] = -torch.inf
        chosen = logits.log_softmax(-1).gather(1, ids[0, first + 1 : last + 1, None])[:, 0]
        result += chosen.tolist()
        options = {}
    return result[len(request.input_ids) - 1 :]


@serves(("sglang", "qwen3_vl"))
async def test_an_answer_to_images_continues_on_its_cache(
    server: RealServer, kit: Kit, asks: Ask, trainer: VisionTrainer, models: dict[str, Path], images: RunImages
) -> None:
    fleet = await kit.fleet(server, weight_update="keep_cache", vision=images)
    collective = kit.collective(fleet, trainer)
    for version in range(2, 2 + 2 * ATTEMPTS, 2):
        trainer.use("old")
        await asyncio.to_thread(serve, collective, version - 1)
        # A prompt that differs at once: a prefix that the server has cached may come from any older version.
        long = asks(f"{version}", *SIZES[2], num_tokens=NUM_TOKENS, text=(10 + version, 11, 12))
        made = fleet.status()["generated_tokens"]
        running = asyncio.create_task(fleet.agenerate(long))
        await tokens_made(fleet, made + 8)
        trainer.use("new")
        await asyncio.to_thread(serve, collective, version)
        response = await running
        split = list(response.output_versions).count(version - 1)
        assert list(response.output_versions) == [version - 1] * split + [version] * (NUM_TOKENS - split)
        assert response.num_interruptions == 0
        after = asks(f"after {version}", *SIZES[2], text=(30 + version, 11, 12))  # the same images
        pair = (after, await fleet.agenerate(after))
        assert largest_gap(list(pair[1].output_logprobs), trainer.logprobs("new", [pair])[0]) < 2 * EXACT
        if 0 < split < NUM_TOKENS:
            expected = mixed_logprobs(models, (long, response), images, split)
            assert largest_gap(list(response.output_logprobs), expected) < 2 * EXACT
            recomputed = trainer.logprobs("new", [(long, response)])[0]
            assert largest_gap(list(response.output_logprobs)[split:], recomputed[split:]) > 100 * EXACT
            return
    pytest.fail(f"the update came after the last token {ATTEMPTS} times")
