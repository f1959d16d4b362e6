"""What tests of images on real servers share: a policy's images and requests, a trainer of two policies, and what
transformers computes in float64."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from areal.api.columns import to_array
from areal.api.config import TrainEngineConfig
from areal.api.config.rollout import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse
from areal.api.images import ImageRef, expanded
from areal.data.image_files import ImageFiles, RunImages, encode_image, png_of
from areal.data.pack import rows_to_train_batch
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.fleet.fleet import Fleet
from areal.models.vision_layout import read_vision_layout, tokens_around
from areal.weights.collective import CollectiveChannel
from areal.weights.disk import DiskChannel, HttpChannel
from tests.engine.vision_cases import transformers_inputs
from tests.expect import serve
from tests.fixed_trainer import FixedTrainer
from tests.servers.server_kit import largest_gap, tokens_made

EXACT = 5e-6
"""Largest distance of each implementation in float32 from float64, so that two differ by 1e-5 at most."""
SIZES = [(), ((56, 56),), ((28, 56), (56, 28)), ((56, 56), (28, 28), (28, 56))]
"""Of the images of a prompt: height, width."""
NUM_TOKENS, ATTEMPTS = 600, 5
"""Of an answer that is to see an update; on a busy machine an update may come after the last token."""
Pair = tuple[GenerationRequest, GenerationResponse]
Ask = Callable[..., GenerationRequest]
"""(name, *sizes, **more) of `ask`."""


def serves(*cases: tuple[str, ...], more: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Run a test with each (kind of server, family, *more): one server for those of a module with the same two."""
    marks = {"native": pytest.mark.slow, "vllm": pytest.mark.vllm, "sglang": pytest.mark.sglang}
    result = [pytest.param(case[:2], *case[2:], marks=marks[case[0]], id="-".join(case)) for case in cases]
    return pytest.mark.parametrize(("served", *more), result, indirect=["served"], scope="module")


def images_of(model: Path, folder: Path) -> RunImages:
    layout = read_vision_layout(str(model))
    assert layout is not None
    return RunImages(layout, ImageFiles(folder), around=tokens_around(str(model), layout))


def ask(
    images: RunImages,
    mark: list[int],
    name: str,
    *sizes: tuple[int, int],
    num_tokens: int = 24,
    greedy: bool = False,
    text: tuple[int, ...] = (10, 11, 12),
) -> GenerationRequest:
    """A prompt with an image of each size; equal sizes at one place are equal images. `mark`: what stands for one,
    with one placeholder."""
    ids, refs = list(text), list[ImageRef]()
    for number, (height, width) in enumerate(sizes):
        colours = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
        source = png_of(Image.fromarray(colours))
        assert source is not None
        file, grid = encode_image(source, images.layout)
        refs.append(ImageRef(images.store.put(file), grid))
        ids += [text[0] + number, *mark]
    return GenerationRequest(
        # unique: SGLang aborts what has the id of an answer 2 s after its end
        request_id=f"{name:>12}-{uuid.uuid4().hex}",
        input_ids=expanded([*ids, text[-1]], refs, images.layout),
        images=refs,
        gconfig=GenerationHyperparameters(max_new_tokens=num_tokens, ignore_eos=True, greedy=greedy),
    )


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

    def logprobs(self, name: str, pairs: list[Pair]) -> list[list[float]]:
        """Of the answers, computed in one packed row."""
        rows = [[*request.input_ids, *response.output_ids] for request, response in pairs]
        masks = [[0] * len(request.input_ids) + [1] * len(response.output_ids) for request, response in pairs]
        batch = rows_to_train_batch(rows, masks, [request.images for request, _ in pairs])
        result = self.engines[name].forward(batch).logprobs
        assert result is not None
        return [part.tolist() for part in result[batch.loss_mask].split([len(r.output_ids) for _, r in pairs])]


def exact_logprobs(model: Path, pair: Pair, images: RunImages) -> tuple[list[float], list[int]]:
    """Of transformers in float64, over the tokens that may be sampled: those of the answer, and the likeliest ids."""
    request, response = pair
    loaded = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float64).eval()
    ids = torch.tensor([[*request.input_ids, *response.output_ids]])
    files = [images.store.read(image.sha256) for image in request.images]
    options = transformers_inputs(images.layout, ids, list(request.images), files)
    if files:
        options["pixel_values"] = options["pixel_values"].double()
    with torch.no_grad():
        logits = loaded(ids, **options).logits[0]
    logits[:, list(images.layout.banned_ids)] = -torch.inf
    first = len(request.input_ids)
    result = logits.log_softmax(-1)[first - 1 : -1]
    return result.gather(1, ids[0, first:, None])[:, 0].tolist(), result.argmax(-1).tolist()


async def answers(fleet: Fleet, requests: list[GenerationRequest], images: RunImages) -> list[Pair]:
    result = await asyncio.gather(*map(fleet.agenerate, requests))
    for response in result:
        assert not set(images.layout.banned_ids).intersection(to_array("i", response.output_ids))
    return list(zip(requests, result, strict=True))


async def expect_update_in_mid_answer(
    fleet: Fleet,
    weights: DiskChannel | HttpChannel | CollectiveChannel,
    trainer: VisionTrainer,
    asks: Ask,
    images: RunImages,
) -> None:
    """New weights of text and tower while an answer is made. The same images are asked for before and after each."""
    trainer.use("old")
    await asyncio.to_thread(serve, weights, fleet.version + 1)
    for attempt in range(ATTEMPTS):
        before, after = ("old", "new") if attempt % 2 == 0 else ("new", "old")
        version = fleet.version
        long = asks(f"long {attempt}", *SIZES[2], num_tokens=NUM_TOKENS)
        made = fleet.status()["generated_tokens"]
        running = asyncio.create_task(fleet.agenerate(long))
        await tokens_made(fleet, made + 8)
        trainer.use(after)
        await asyncio.to_thread(serve, weights, version + 1)
        pairs = await answers(fleet, [asks(f"{attempt} {len(sizes)}", *sizes) for sizes in SIZES], images)
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
