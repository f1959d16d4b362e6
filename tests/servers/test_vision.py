"""Every kind of server answers to images as the trainer does, before and after new weights for the tower too.

`vision_kit.py` says what vLLM and SGLang need for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal.fleet.server_gateway import gateway
from areal.system.network import Host
from areal.system.run_images import RunImages
from tests.run_token import TOKEN
from tests.servers.real_server import Backend, RealServer
from tests.servers.server_kit import Kit, largest_gap
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
    write_model,
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("native", marks=pytest.mark.slow),
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param != "native" and not TORCHVISION:
        pytest.skip("AREAL_TEST_TORCHVISION names no folder with torchvision")
    return request.param


@pytest.fixture(scope="module", autouse=True)
def _token() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREAL_SERVER_TOKEN", TOKEN)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_model(tmp_path_factory.mktemp(name), seed) for seed, name in enumerate(("old", "new"))}


@pytest.fixture(scope="module")
def server(backend: Backend, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("vision")
    server = RealServer(backend, models["old"], folder, name="vision", libraries=TORCHVISION)
    try:
        yield server.wait_ready(limit_s=800)
    finally:
        server.kill_all()


@pytest.fixture(scope="module")
def images(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> RunImages:
    return images_of(models["old"], tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def asks(images: RunImages) -> Ask:
    return partial(ask, images, [3, 5, 4])


@pytest.fixture(scope="module")
def trainer(models: dict[str, Path], images: RunImages) -> VisionTrainer:
    return VisionTrainer(models, images)


async def test_prompts_with_0_to_3_images_have_the_same_log_probabilities_everywhere(
    server: RealServer,
    kit: Kit,
    asks: Ask,
    trainer: VisionTrainer,
    models: dict[str, Path],
    images: RunImages,
) -> None:
    fleet = await kit.fleet(server, vision=images)
    trainer.use("old")
    await asyncio.to_thread(kit.disk(fleet, trainer).publish, 1)
    for greedy in (False, True):
        requests = [asks(f"{greedy} {len(sizes)}", *sizes, greedy=greedy) for sizes in SIZES]
        pairs = await answers(fleet, requests, images)
        for pair, trained in zip(pairs, trainer.logprobs("old", pairs), strict=True):
            expected, likeliest = exact_logprobs(models["old"], pair, images)
            assert largest_gap(list(pair[1].output_logprobs), expected) < EXACT
            assert largest_gap(trained, expected) < EXACT
            assert not greedy or list(pair[1].output_ids) == likeliest


@pytest.mark.parametrize("channel", ["disk", "http", "collective"])
@pytest.mark.parametrize("mode", ["interrupt", "keep"])
async def test_an_update_in_mid_answer_changes_the_tower_and_the_text(
    server: RealServer,
    kit: Kit,
    asks: Ask,
    trainer: VisionTrainer,
    images: RunImages,
    mode: str,
    channel: str,
) -> None:
    """The same images are asked for before and after each update."""
    async with AsyncExitStack() as stack:
        if channel == "http" and server.backend != "native":
            address = await stack.enter_async_context(gateway(Host(), TOKEN, server.address))
            server = SimpleNamespace(address=address, process=server.process)  # type: ignore[assignment]
        fleet = await kit.fleet(server, vision=images, weight_update=mode)
        weights = getattr(kit, channel)(fleet, trainer)
        await expect_update_in_mid_answer(fleet, weights, trainer, asks, images)
