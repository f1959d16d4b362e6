"""/generate_group: several samples of one prompt, or of several, in one request."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.inference.conftest import PROMPT
from tests.inference.test_server import refused


async def test_a_group_answers_as_its_samples_alone(served):
    common = {"return_logprob": True}
    samples = [{"rid": f"g{n}", "sampling_seed": n} for n in range(5)]
    sampling = {"temperature": 1.0, "max_new_tokens": 40}
    alone = [
        await served.generate(sampling_params={**sampling, "sampling_seed": sample["sampling_seed"]})
        for sample in samples
    ]
    prompt = {"input_ids": PROMPT, "group_id": "g", "samples": samples}
    body = {**common, "sampling_params": sampling, "prompts": [prompt]}
    whole = await served.post("/generate_group", body)
    assert [item["meta_info"]["id"] for item in whole] == [sample["rid"] for sample in samples]
    columns: list[list[Any]] = [[] for _ in samples]
    ends = [0] * len(samples)
    body |= {"stream": True, "sampling_params": {**sampling, "stream_interval": 16}}
    async for event in served.events_of("/generate_group", body):
        for number, part in [] if event == b"[DONE]" else orjson.loads(event):
            assert not ends[number]
            columns[number] += part["meta_info"]["output_token_logprobs"]
            ends[number] += part["meta_info"]["finish_reason"] is not None
    assert ends == [1] * len(samples)
    for each, actual, column in zip(alone, whole, columns, strict=True):
        expected = each["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in column] == each["output_ids"] == actual["output_ids"]
        for logprobs in (column, actual["meta_info"]["output_token_logprobs"]):
            assert [logprob[0] for logprob in logprobs] == pytest.approx([item[0] for item in expected], abs=1e-5)
    assert not served.engine.scheduler.running


async def test_the_seed_of_a_sample_replaces_that_of_the_request_also_when_it_is_0(served):
    sampling = {"temperature": 1.0, "max_new_tokens": 20}
    alone = [await served.generate(sampling_params={**sampling, "sampling_seed": seed}) for seed in (0, 7)]
    samples = [{"rid": "a", "sampling_seed": 0}, {"rid": "b"}]
    prompt = {"input_ids": PROMPT, "samples": samples}
    body = {"sampling_params": {**sampling, "sampling_seed": 7}, "prompts": [prompt]}
    whole = await served.post("/generate_group", body)
    assert [item["output_ids"] for item in whole] == [item["output_ids"] for item in alone]
    assert whole[0]["output_ids"] != whole[1]["output_ids"]


async def test_several_prompts_answer_as_each_alone(served):
    common = {"return_logprob": True, "sampling_params": {"temperature": 1.0, "max_new_tokens": 12}}
    prompts = [
        {"input_ids": PROMPT, "group_id": "g", "samples": [{"rid": "a", "sampling_seed": 1}, {"rid": "b"}]},
        {"input_ids": PROMPT[:3], "samples": [{"rid": "c", "sampling_seed": 2}]},
    ]
    alone = [await served.post("/generate_group", {**common, "prompts": [prompt]}) for prompt in prompts]
    whole = await served.post("/generate_group", {**common, "prompts": prompts})
    assert [item["meta_info"]["id"] for item in whole] == ["a", "b", "c"]
    assert [item["meta_info"]["prompt_tokens"] for item in whole] == [len(PROMPT)] * 2 + [3]
    for number, expected in ((0, alone[0][0]), (2, alone[1][0])):
        assert whole[number]["output_ids"] == expected["output_ids"]
    wrong = [
        [], "x", [1], [{"samples": [{"rid": "a"}]}], [{**prompts[0], "rid": "a"}], [*prompts, {**prompts[0]}],
        [prompts[0], {**prompts[1], "input_ids": [-1]}], [prompts[1]] * 300,
        [{**prompts[1], "samples": [{"rid": "a"}] * 3000}] * 2,
    ]  # fmt: skip
    for each in wrong:
        code = "request.duplicate_id" if each == wrong[5] else "request.invalid_field"
        assert (await refused(served.post("/generate_group", {**common, "prompts": each}, 400)))[0] == code
    for more in ({"input_ids": PROMPT}, {"samples": [{"rid": "a"}]}, {"group_id": "g"}, {"image_data": ["x"]}):
        body = {**common, "prompts": prompts, **more}
        assert (await refused(served.post("/generate_group", body, 400)))[0] == "request.invalid_field"
    assert not served.engine.scheduler.running


async def test_a_group_of_a_lost_client_is_aborted_and_a_bad_one_leaves_nothing(served):
    common = {"sampling_params": {"max_new_tokens": 100}}
    for samples in ([], "x", [{}], [{"rid": "a", "seed": 1}], [{"rid": "a", "sampling_seed": -1}], [{"rid": "a"}] * 2):
        code = "request.duplicate_id" if samples == [{"rid": "a"}] * 2 else "request.invalid_field"
        body = {**common, "prompts": [{"input_ids": PROMPT, "samples": samples}]}
        assert (await refused(served.post("/generate_group", body, 400)))[0] == code
    await served.post("/pause_generation", {"mode": "in_place"})
    for stream in (False, True):
        prompt = {"input_ids": PROMPT, "samples": [{"rid": name} for name in "abc"]}
        body = {**common, "stream": stream, "prompts": [prompt]}
        task = asyncio.create_task(served.post("/generate_group", body))
        await served.until(lambda: len(served.engine.scheduler.waiting) == 3)
        task.cancel()
        await served.until(lambda: not served.engine.scheduler.waiting)
    await served.post("/continue_generation")
