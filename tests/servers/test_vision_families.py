"""vLLM and SGLang answer to the images of every family that they take as the trainer does, over new weights too.

Qwen3-VL, in all ways of new weights: `test_vision.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from areal.fleet.sglang_server import SGLANG
from areal.fleet.vllm_server import VLLM
from areal.system.run_images import RunImages
from tests.engine.vision_cases import written_ids
from tests.run_token import TOKEN
from tests.servers.real_server import Backend, RealServer
from tests.servers.server_kit import Kit, largest_gap
from tests.servers.vision_families import write_served
from tests.servers.vision_kit import (
    EXACT,
    SIZES,
    TORCHVISION,
    Ask,
    VisionTrainer,
    answers,
    ask,
    exact_logprobs,
    expect_update_in_mid_answer,
    images_of,
)

pytestmark = pytest.mark.timeout(900)
SERVED = [(server.name, family) for server in (VLLM, SGLANG) for family in server.image_families]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, family), marks=getattr(pytest.mark, name), id=f"{name}-{family}")
        for name, family in SERVED
        if family != "qwen3_vl"
    ],
)
def served(request: pytest.FixtureRequest) -> tuple[Backend, str]:
    if not TORCHVISION:
        pytest.skip("AREAL_TEST_TORCHVISION names no folder with torchvision")
    return request.param


@pytest.fixture(scope="module")
def backend(served: tuple[Backend, str]) -> Backend:
    return served[0]


@pytest.fixture(scope="module")
def models(served: tuple[Backend, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp(served[1])
    return {name: write_served(folder / name, served[1], seed) for seed, name in enumerate(("old", "new"))}


@pytest.fixture(scope="module")
def images(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> RunImages:
    return images_of(models["old"], tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def asks(images: RunImages, models: dict[str, Path]) -> Ask:
    return partial(ask, images, written_ids(images.layout, AutoTokenizer.from_pretrained(models["old"])))


@pytest.fixture(scope="module")
def server(backend: Backend, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREAL_SERVER_TOKEN", TOKEN)
        folder = tmp_path_factory.mktemp("vision")
        server = RealServer(backend, models["old"], folder, name="vision", libraries=TORCHVISION)
        try:
            yield server.wait_ready(limit_s=800)
        finally:
            server.kill_all()


@pytest.fixture(scope="module")
def trainer(models: dict[str, Path], images: RunImages) -> VisionTrainer:
    return VisionTrainer(models, images)


async def test_prompts_with_0_to_3_images(
    server: RealServer, kit: Kit, asks: Ask, trainer: VisionTrainer, models: dict[str, Path], images: RunImages
) -> None:
    fleet = await kit.fleet(server, vision=images)
    trainer.use("old")
    await asyncio.to_thread(kit.disk(fleet, trainer).publish, 1)
    for greedy in (False, True):
        pairs = await answers(fleet, [asks(f"{greedy} {len(one)}", *one, greedy=greedy) for one in SIZES], images)
        for pair, trained in zip(pairs, trainer.logprobs("old", pairs), strict=True):
            expected, likeliest = exact_logprobs(models["old"], pair, images)
            assert largest_gap(list(pair[1].output_logprobs), expected) < EXACT
            assert largest_gap(trained, expected) < EXACT
            assert not greedy or list(pair[1].output_ids) == likeliest


@pytest.mark.parametrize("channel", ["disk", "collective"])
async def test_an_update_in_mid_answer(
    server: RealServer, kit: Kit, asks: Ask, trainer: VisionTrainer, images: RunImages, channel: str
) -> None:
    fleet = await kit.fleet(server, vision=images, weight_update="keep")
    await expect_update_in_mid_answer(fleet, getattr(kit, channel)(fleet, trainer), trainer, asks, images)
