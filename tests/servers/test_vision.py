"""Real servers answer to images as transformers does, before and after new weights for the tower too.

They need torchvision: AREAL_TEST_TORCHVISION names a folder with version 0.28.0, whose _meta_registrations.py must be
empty: the wheel of the package index does not fit to a torch for the CPU.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from areal.api.columns import to_array
from areal.api.config.inference import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse, WeightUpdate
from areal.api.images import ImageRef, expanded
from areal.data.tiny_model import IMAGE_TOKENS, character_tokenizer, tiny_vision_model, write_image_processor
from areal.system.image_codec import encode_image, png_of
from areal.system.image_files import ImageFiles
from areal.system.image_pixels import decode_png, patches_of
from areal.system.run_images import RunImages
from areal.system.vision_layout import read_vision_layout
from tests.servers.checkpoints import CHARACTERS
from tests.servers.real_server import Backend, RealServer
from tests.servers.server_kit import TOLERANCE, Kit, largest_gap, tokens_made

TORCHVISION = os.environ.get("AREAL_TEST_TORCHVISION", "")
pytestmark = pytest.mark.skipif(not TORCHVISION, reason="AREAL_TEST_TORCHVISION names no folder with torchvision")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
NUM_TOKENS = 300
VERSIONS = {"old": 0, "new": 1}


@pytest.fixture(scope="module")
def vision_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tokens = ["<pad>", "<eos>", "<unk>", *IMAGE_TOKENS, *CHARACTERS]
    tokenizer = character_tokenizer(tokens, context_length=1024, chat_template=TEMPLATE)
    folders: dict[str, Path] = {}
    for seed, name in enumerate(VERSIONS):
        folder = folders[name] = tmp_path_factory.mktemp(name)
        tiny_vision_model(tokenizer, seed, initializer_range=0.2).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_image_processor(folder)
    return folders


@pytest.fixture(scope="module")
def vision_server(
    backend: Backend, vision_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("vision")
    server = RealServer(backend, vision_models["old"], folder, name="vision", libraries=TORCHVISION)
    try:
        yield server.wait_ready()
    finally:
        server.kill_all()


@pytest.fixture
def images(vision_models: dict[str, Path], tmp_path: Path) -> RunImages:
    layout = read_vision_layout(str(vision_models["old"]))
    assert layout is not None
    return RunImages(layout, ImageFiles(tmp_path / "images"))


@pytest.fixture
def ask(images: RunImages) -> Callable[..., GenerationRequest]:
    """`ask(sizes, num_tokens)`: a prompt with an image of each size; equal sizes at one place are equal images."""

    def make(name: str, *sizes: tuple[int, int], num_tokens: int = 24) -> GenerationRequest:
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
            gconfig=GenerationHyperparameters(max_new_tokens=num_tokens, ignore_eos=True),
        )

    return make


@pytest.fixture
def score(vision_models: dict[str, Path], images: RunImages) -> Callable[..., list[float]]:
    """Log-probabilities of transformers for an answer, over the tokens that may be sampled."""
    from transformers import Qwen3VLForConditionalGeneration

    models = {
        name: Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        for name, folder in vision_models.items()
    }

    def logprobs(name: str, request: GenerationRequest, response: GenerationResponse) -> list[float]:
        ids = torch.tensor([[*request.input_ids, *response.output_ids]])
        options: dict[str, Any] = {}
        if request.images:
            files = [images.store.read(image.sha256) for image in request.images]
            patches = [patches_of(decode_png(file, images.layout), images.layout) for file in files]
            options["pixel_values"] = torch.from_numpy(np.concatenate(patches))
            options["image_grid_thw"] = torch.tensor([image.grid for image in request.images])
            options["mm_token_type_ids"] = (ids == images.layout.image_token_id).int()
        with torch.no_grad():
            logits = models[name](ids, **options).logits[0].float()
        logits[:, list(images.layout.banned_ids)] = -torch.inf
        first = len(request.input_ids)
        found = logits.log_softmax(-1)[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0]
        return found.tolist()

    return logprobs


SIZES = [(), ((56, 56),), ((28, 56), (56, 28)), ((56, 56), (28, 28), (28, 56))]


async def test_answers_to_images_are_those_of_transformers_before_and_after_an_update(
    vision_server: RealServer,
    vision_models: dict[str, Path],
    kit: Kit,
    ask: Callable[..., GenerationRequest],
    score: Callable[..., list[float]],
    images: RunImages,
) -> None:
    for mode in ("interrupt", "keep"):
        fleet = await kit.fleet(vision_server, weight_update=mode, vision=images)
        for version, name in enumerate(("old", "new") * 2, start=1):
            update = WeightUpdate(version=fleet.version + 1, kind="disk", path=str(vision_models[name]))
            long = ask("long", *SIZES[2], num_tokens=NUM_TOKENS)
            made = fleet.status()["generated_tokens"]
            running = asyncio.create_task(fleet.agenerate(long))
            await tokens_made(fleet, made + 8)
            await fleet.update_weights(update)
            requests = [ask(f"r{version}{number}", *sizes) for number, sizes in enumerate(SIZES)]
            for request, response in zip(requests, await asyncio.gather(*map(fleet.agenerate, requests)), strict=True):
                assert not set(images.layout.banned_ids).intersection(to_array("i", response.output_ids))
                assert largest_gap(list(response.output_logprobs), score(name, request, response)) < TOLERANCE
            whole = await running
            if version == 1:
                continue  # the weights before are those that the mode before left
            split = list(whole.output_versions).count(whole.output_versions[0])
            by_old = score("new" if name == "old" else "old", long, whole)
            expected = by_old[:split] + score(name, long, whole)[split:]
            if whole.output_versions[0] == whole.output_versions[-1]:
                expected = score(name, long, whole) if whole.output_versions[0] == update.version else by_old
            assert largest_gap(list(whole.output_logprobs), expected) < TOLERANCE
        await fleet.close()
