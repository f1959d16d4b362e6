"""Requests with images: what servers get, in which part, and what is refused before it is sent."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.data import GenerationRequest
from areal.api.errors import InputError, RequestError
from areal.api.images import ImageRef, VisionLayout, expanded
from areal.data.image_files import ImageFiles, RunImages
from areal.fleet.weight_updater import probe
from tests.fleet.fake_server import FleetKit, until

IMAGE, START, END = 54, 55, 56
LAYOUT = VisionLayout(
    family="qwen3_vl", image_token_id=IMAGE, vision_start_id=START, vision_end_id=END, banned_ids=(IMAGE, START, END),
    patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=4096, mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5), has_3d_positions=True,
)  # fmt: skip
FILES = [b"png one", b"png two"]
GRIDS = [(1, 4, 6), (1, 2, 2)]
PROMPT = [3, START, *[IMAGE] * 6, END, 4, START, IMAGE, END, 5]
COLLAPSED = [3, START, IMAGE, END, 4, START, IMAGE, END, 5]


@pytest.fixture
def vision(tmp_path: Path) -> RunImages:
    return RunImages(LAYOUT, ImageFiles(tmp_path / "images"))


@pytest.fixture
def request_(vision: RunImages) -> GenerationRequest:
    images = [ImageRef(vision.store.put(file), grid) for file, grid in zip(FILES, GRIDS, strict=True)]
    gconfig = GenerationHyperparameters(max_new_tokens=100)
    return GenerationRequest(request_id="r0", input_ids=PROMPT, images=images, gconfig=gconfig)


def sent_ids(dialect: str, body: dict[str, Any]) -> list[int]:
    return body["token_ids" if dialect == "vllm" else "input_ids"]


def sent_images(dialect: str, body: dict[str, Any]) -> list[str]:
    if dialect != "vllm":
        return body["image_data"]
    assert [(part["type"], len(part["uuid"])) for part in body["content_parts"]] == [("image_url", 64)] * 2
    return [part["url"] for part in body["content_parts"]]


async def test_every_part_of_an_answer_has_the_images_and_one_placeholder_for_each(
    kit: FleetKit, vision: RunImages, request_: GenerationRequest
) -> None:
    first = await kit.server(0, hold_at=40)
    second = await kit.server(1)
    fleet = await kit.fleet(2, vision=vision, schedule_policy="round_robin")
    answer = asyncio.create_task(fleet.agenerate(request_))
    await until(lambda: first.num_held or second.requests)
    if not first.num_held:  # the first turn was the other's
        await answer
        answer = asyncio.create_task(fleet.agenerate(dataclasses.replace(request_, request_id="r1")))
        second.requests.clear()
        await until(lambda: first.num_held)
    await first.die()
    response = await answer
    assert (response.input_ids, len(response.output_ids)) == (PROMPT, 100)
    start = list(response.output_ids[: len(sent_ids(kit.dialect, second.requests[0].body)) - len(COLLAPSED)])
    urls = ["data:image/png;base64," + base64.b64encode(file).decode() for file in FILES]
    assert start
    for server, prior in ((first, []), (second, start)):
        body = server.requests[-1].body
        assert sent_ids(kit.dialect, body) == COLLAPSED + prior
        assert sent_images(kit.dialect, body) == urls
        bans = body["sampling_params"].get("logit_bias")
        assert bans == (None if kit.dialect == "native" else {str(token): -100.0 for token in LAYOUT.banned_ids})


async def test_prompts_without_images_have_the_bans_too(kit: FleetKit, vision: RunImages) -> None:
    server = await kit.server(0)
    fleet = await kit.fleet(1, vision=vision)
    gconfig = GenerationHyperparameters(max_new_tokens=2)
    await fleet.agenerate(GenerationRequest(request_id="r", input_ids=[3, 4], gconfig=gconfig))
    body = server.requests[0].body
    assert sent_ids(kit.dialect, body) == [3, 4]
    assert not body.keys() & {"image_data", "content_parts"}
    assert ("logit_bias" in body["sampling_params"]) == (kit.dialect != "native")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"images": []}, "data.image_tokens"),
        ({"input_ids": COLLAPSED}, "data.image_tokens"),
        ({"input_ids": [3, 4]}, "data.image_tokens"),
        ({"input_ids": [*PROMPT, IMAGE]}, "data.image_tokens"),
    ],
)
async def test_placeholders_that_do_not_belong_to_the_images_are_not_sent(
    change: dict[str, Any], code: str, native_kit: FleetKit, vision: RunImages, request_: GenerationRequest
) -> None:
    server = await native_kit.server(0)
    fleet = await native_kit.fleet(1, vision=vision)
    with pytest.raises(RequestError) as error:
        await fleet.agenerate(dataclasses.replace(request_, **change))
    assert error.value.code == code
    assert server.requests == []


def test_a_server_that_writes_the_tokens_around_images_gets_none_of_them(vision: RunImages) -> None:
    images = [ImageRef(vision.store.put(file), grid) for file, grid in zip(FILES, GRIDS, strict=True)]
    bare = dataclasses.replace(vision, around=((7, 8), (9,)))
    ids = expanded([3, 7, 8, IMAGE, 9, 7, 8, IMAGE, 9, 4, 7], images, LAYOUT)
    assert bare.bare(ids, images) == [3, IMAGE, IMAGE, 4, 7]
    assert vision.bare(ids, images) == bare.collapsed(ids, images) == [3, 7, 8, IMAGE, 9, 7, 8, IMAGE, 9, 4, 7]
    for wrong in ([7, 8, IMAGE, 9, 7, 8, IMAGE], [7, 8, IMAGE, 7, 8, IMAGE, 9], [8, IMAGE, 9, 7, 8, IMAGE, 9]):
        with pytest.raises(RequestError) as error:
            bare.bare(expanded(wrong, images, LAYOUT), images)
        assert error.value.code == "data.image_tokens"


async def test_a_missing_image_ends_its_request_only(
    native_kit: FleetKit, vision: RunImages, request_: GenerationRequest, tmp_path: Path
) -> None:
    server = await native_kit.server(0)
    fleet = await native_kit.fleet(1, vision=vision)
    ImageFiles(tmp_path / "images").path(request_.images[1].sha256).unlink()
    with pytest.raises(InputError) as error:
        await fleet.agenerate(request_)
    assert (error.value.code, server.requests) == ("data.image_missing", [])
    vision.store.put(FILES[1])
    assert (await fleet.agenerate(request_)).stop_reason == "length"
    assert fleet.status()["replicas"][0]["state"] == "serving"


async def test_a_model_without_images_gets_none(native_kit: FleetKit, request_: GenerationRequest) -> None:
    server = await native_kit.server(0)
    fleet = await native_kit.fleet(1)
    with pytest.raises(RequestError) as error:
        await fleet.agenerate(request_)
    assert (error.value.code, server.requests) == ("request.no_images", [])


def test_the_probe_has_no_token_of_an_image(vision: RunImages) -> None:
    prompts = [probe(seed, 60, "a", vision).input_ids for seed in range(20)]
    assert not {token for prompt in prompts for token in prompt}.intersection(LAYOUT.banned_ids)
    assert len({len(prompt) for prompt in prompts}) == 1
    assert any(token in LAYOUT.banned_ids for seed in range(20) for token in probe(seed, 60, "a").input_ids)
