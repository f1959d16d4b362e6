"""Every kind of server answers to images as the trainer does, before and after new weights for the tower too.

vLLM and SGLang need torchvision: AREAL_TEST_TORCHVISION names a folder with version 0.28.0, whose
_meta_registrations.py must be empty: the wheel of the package index does not fit to a torch for the CPU.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen3VLForConditionalGeneration

from areal.api.columns import to_array
from areal.api.config import TrainEngineConfig
from areal.api.config.inference import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse
from areal.api.images import ImageRef, expanded
from areal.data.pack import rows_to_train_batch
from areal.data.tiny_model import IMAGE_TOKENS, character_tokenizer, tiny_vision_model, write_image_processor
from areal.engine.fsdp_builder import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.fleet.fleet import Fleet
from areal.fleet.server_gateway import gateway
from areal.system.image_codec import encode_image, png_of
from areal.system.image_files import ImageFiles
from areal.system.image_pixels import decode_png, patches_of
from areal.system.network import Host
from areal.system.run_images import RunImages
from areal.system.vision_layout import read_vision_layout
from tests.run_token import TOKEN
from tests.servers.checkpoints import CHARACTERS
from tests.servers.real_server import Backend, RealServer
from tests.servers.server_kit import FixedTrainer, Kit, largest_gap, tokens_made

pytestmark = pytest.mark.timeout(900)
TORCHVISION = os.environ.get("AREAL_TEST_TORCHVISION", "")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
EXACT = 5e-6
"""Largest distance of each implementation in float32 from float64, so that two differ by 1e-5 at most."""
NUM_TOKENS, ATTEMPTS = 600, 5
"""Of an answer that is to see an update; on a busy machine an update may come after the last token."""
SIZES = [(), ((56, 56),), ((28, 56), (56, 28)), ((56, 56), (28, 28), (28, 56))]


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
    tokens = ["<pad>", "<eos>", "<unk>", *IMAGE_TOKENS, *CHARACTERS]
    tokenizer = character_tokenizer(tokens, context_length=1024, chat_template=TEMPLATE)
    folders: dict[str, Path] = {}
    for seed, name in enumerate(("old", "new")):
        folder = folders[name] = tmp_path_factory.mktemp(name)
        tiny_vision_model(tokenizer, seed, initializer_range=0.1).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_image_processor(folder)
    return folders


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
    layout = read_vision_layout(str(models["old"]))
    assert layout is not None
    return RunImages(layout, ImageFiles(tmp_path_factory.mktemp("files")))


@pytest.fixture
def ask(images: RunImages) -> Callable[..., GenerationRequest]:
    """`ask(name, *sizes)`: a prompt with an image of each size; equal sizes at one place are equal images."""

    def make(name: str, *sizes: tuple[int, int], num_tokens: int = 24, greedy: bool = False) -> GenerationRequest:
        start, end, pad, _ = (3, 4, 5, 6)
        ids, refs = [10, 11], []
        for number, (height, width) in enumerate(sizes):
            colours = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
            source = png_of(Image.fromarray(colours))
            assert source is not None
            file, grid = encode_image(source, images.layout)
            refs.append(ImageRef(images.store.put(file), grid))
            ids += [12 + number, start, pad, end]
        return GenerationRequest(
            request_id=f"{name:>12}",
            input_ids=expanded([*ids, 20], refs, images.layout),
            images=refs,
            gconfig=GenerationHyperparameters(max_new_tokens=num_tokens, ignore_eos=True, greedy=greedy),
        )

    return make


class VisionTrainer(FixedTrainer):
    """Train engines of two policies; publishes the weights of the one that `use` chose last."""

    def __init__(self, models: dict[str, Path], images: RunImages) -> None:
        self.engines = {
            name: build_fsdp_engine(
                TrainEngineConfig(path=str(folder), dtype="float32"),
                role="ref",
                total_steps=1,
                mesh=TrainerMesh.open(None),
                seed=0,
                images=images.store,
            )
            for name, folder in models.items()
        }
        self.use("old")

    def use(self, name: str) -> None:
        self.named_weights = self.engines[name].named_weights
        self.weight_specs = self.engines[name].weight_specs

    def logprobs(self, name: str, pairs: list[tuple[GenerationRequest, GenerationResponse]]) -> list[list[float]]:
        """Of the answers, computed in one packed row."""
        rows = [[*request.input_ids, *response.output_ids] for request, response in pairs]
        masks = [[0] * len(request.input_ids) + [1] * len(response.output_ids) for request, response in pairs]
        batch = rows_to_train_batch(rows, masks, [request.images for request, _ in pairs])
        found = self.engines[name].forward(batch).logprobs
        assert found is not None
        return [part.tolist() for part in found[batch.loss_mask].split([len(r.output_ids) for _, r in pairs])]


@pytest.fixture(scope="module")
def trainer(models: dict[str, Path], images: RunImages) -> VisionTrainer:
    return VisionTrainer(models, images)


def exact_logprobs(folder: Path, request: GenerationRequest, response: GenerationResponse, images: RunImages):
    """Of transformers in float64, over the tokens that may be sampled: those of the answer, and the likeliest ids."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()
    ids = torch.tensor([[*request.input_ids, *response.output_ids]])
    options: dict[str, Any] = {}
    if request.images:
        files = [images.store.read(image.sha256) for image in request.images]
        patches = [patches_of(decode_png(file, images.layout), images.layout) for file in files]
        options["pixel_values"] = torch.from_numpy(np.concatenate(patches)).double()
        options["image_grid_thw"] = torch.tensor([image.grid for image in request.images])
        options["mm_token_type_ids"] = (ids == images.layout.image_token_id).int()
    with torch.no_grad():
        logits = model(ids, **options).logits[0]
    logits[:, list(images.layout.banned_ids)] = -torch.inf
    first = len(request.input_ids)
    found = logits.log_softmax(-1)[first - 1 : -1]
    return found.gather(1, ids[0, first:, None])[:, 0].tolist(), found.argmax(-1).tolist()


async def answers(
    fleet: Fleet, requests: list[GenerationRequest], images: RunImages
) -> list[tuple[GenerationRequest, GenerationResponse]]:
    found = await asyncio.gather(*map(fleet.agenerate, requests))
    for response in found:
        assert not set(images.layout.banned_ids).intersection(to_array("i", response.output_ids))
    return list(zip(requests, found, strict=True))


async def test_prompts_with_0_to_3_images_have_the_same_log_probabilities_everywhere(
    server: RealServer,
    kit: Kit,
    ask: Callable[..., GenerationRequest],
    trainer: VisionTrainer,
    models: dict[str, Path],
    images: RunImages,
) -> None:
    fleet = await kit.fleet(server, vision=images)
    trainer.use("old")
    await asyncio.to_thread(kit.disk(fleet, trainer).publish, 1)
    for greedy in (False, True):
        requests = [ask(f"{greedy} {len(sizes)}", *sizes, greedy=greedy) for sizes in SIZES]
        pairs = await answers(fleet, requests, images)
        for pair, trained in zip(pairs, trainer.logprobs("old", pairs), strict=True):
            expected, likeliest = exact_logprobs(models["old"], *pair, images)
            assert largest_gap(list(pair[1].output_logprobs), expected) < EXACT
            assert largest_gap(trained, expected) < EXACT
            assert not greedy or list(pair[1].output_ids) == likeliest


@pytest.mark.parametrize("channel", ["disk", "http", "collective"])
@pytest.mark.parametrize("mode", ["interrupt", "keep"])
async def test_an_update_in_mid_answer_changes_the_tower_and_the_text(
    server: RealServer,
    kit: Kit,
    ask: Callable[..., GenerationRequest],
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
        trainer.use("old")
        await asyncio.to_thread(weights.publish, fleet.version + 1)
        for attempt in range(ATTEMPTS):
            before, after = ("old", "new") if attempt % 2 == 0 else ("new", "old")
            version = fleet.version
            long = ask(f"long {attempt}", *SIZES[2], num_tokens=NUM_TOKENS)
            made = fleet.status()["generated_tokens"]
            running = asyncio.create_task(fleet.agenerate(long))
            await tokens_made(fleet, made + 8)
            trainer.use(after)
            await asyncio.to_thread(weights.publish, version + 1)
            pairs = await answers(fleet, [ask(f"{attempt} {len(sizes)}", *sizes) for sizes in SIZES], images)
            for (_, response), trained in zip(pairs, trainer.logprobs(after, pairs), strict=True):
                assert list(response.output_versions) == [version + 1] * len(response.output_ids)
                assert largest_gap(list(response.output_logprobs), trained) < 2 * EXACT
            whole = await running
            split = list(whole.output_versions).count(version)
            assert list(whole.output_versions) == [version] * split + [version + 1] * (NUM_TOKENS - split)
            by_before, by_after = (trainer.logprobs(name, [(long, whole)])[0] for name in (before, after))
            assert largest_gap(list(whole.output_logprobs), by_before[:split] + by_after[split:]) < 2 * EXACT
            assert largest_gap(by_before, by_after) > 1000 * EXACT
            if 0 < split < NUM_TOKENS:
                return
    pytest.fail(f"the update came after the last token {ATTEMPTS} times")
