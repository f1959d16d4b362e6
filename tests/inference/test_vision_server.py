"""`image_data` over HTTP: answers, refusals, and weights that arrive between two requests with one image."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import replace

import pytest

from tests.inference.test_server import refused
from tests.inference.vision_models import IMAGE, pictured, png, prompt, qwen3_vl, reference, save

ONE, OTHER = png(1), png(2)


def url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def body(*parts: int | bytes, **more) -> dict:
    return {"input_ids": prompt(*parts), "image_data": [url(part) for part in parts if isinstance(part, bytes)], **more}


@pytest.fixture
async def served(options, serve_with, tmp_path):
    native = replace(options.native, model_path=str(save(qwen3_vl(), tmp_path / "vision")), chunked_prefill_size=16)
    async for item in serve_with(replace(options, native=native)):
        yield item


def expect_answer(answer, parts, model) -> None:
    ids, images = pictured(*parts)
    expected = reference(model, ids + answer["output_ids"], images)
    assert answer["meta_info"]["prompt_tokens"] == len(ids)
    for place, (logprob, token, _) in enumerate(answer["meta_info"]["output_token_logprobs"]):
        assert logprob == pytest.approx(expected[len(ids) - 1 + place, token].item(), abs=1e-5)


async def test_answers_continue_and_follow_new_weights_of_the_tower(served, tmp_path):
    parts = (3, ONE, 5, OTHER, 6)
    old, new = qwen3_vl(0), qwen3_vl(1)
    whole = await served.generate(**body(*parts), sampling_params={"max_new_tokens": 9, "sampling_seed": 5})
    expect_answer(whole, parts, old)
    start = whole["output_ids"][:4]
    rest = await served.generate(
        **body(*parts, *start), sampling_params={"max_new_tokens": 5, "num_prior_output_tokens": 4}
    )
    assert rest["output_ids"] == whole["output_ids"][4:]
    folder = save(new, tmp_path / "new")
    await served.post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "1"})
    expect_answer(await served.generate(**body(*parts)), parts, new)
    text = await served.generate(input_ids=[3, 4])
    expect_answer(text, (3, 4), new)


async def test_images_that_do_not_fit_are_refused_with_one_line(served):
    start, end = ONE.index(b"IDAT") + 4, len(ONE) - 16
    broken = ONE[:start] + bytes(end - start) + ONE[end:]
    huge = png(1, 8, 8)
    head = b"IHDR" + struct.pack(">II", 2**16, 2**16) + huge[24:29]
    bomb = huge[:12] + head + struct.pack(">I", zlib.crc32(head)) + huge[33:]
    for wrong, code in [
        (body(3, ONE) | {"image_data": []}, "data.image_tokens"),
        (body(3, ONE) | {"image_data": [url(ONE), url(OTHER)]}, "data.image_tokens"),
        ({"input_ids": [3, IMAGE, 4]}, "data.image_tokens"),
        (body(3, ONE) | {"image_data": url(ONE)}, "request.invalid_field"),
        (body(3, ONE) | {"image_data": ["http://127.0.0.1/one.png"]}, "request.invalid_field"),
        (body(3, ONE) | {"image_data": ["data:image/png;base64,???"]}, "request.invalid_field"),
        (body(3, b"GIF89a"), "data.image_broken"),
        (body(3, broken), "data.image_broken"),
        (body(3, ONE[:-30]), "data.image_broken"),
        (body(3, bomb), "data.image_size"),
        (body(3, png(1, 10, 16)), "data.image_size"),
        (body(3, png(1, 72, 64)), "data.image_size"),
        (body(*[png(n, 64, 64) for n in range(4)]), "request.too_long"),
    ]:
        assert (await refused(served.post("/generate", wrong, 400)))[0] == code
    assert served.engine.counters.steps == 0
    await served.generate(**body(3, ONE))


async def test_a_model_without_a_tower_takes_no_images(options, serve_with):
    async for served in serve_with(options):
        assert (await refused(served.generate(400, **body(3, ONE))))[0] == "request.no_images"
