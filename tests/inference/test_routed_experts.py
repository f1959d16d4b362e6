"""The experts that the native server records are those that transformers chooses for the same tokens."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import orjson
import pytest
import torch

from areal.api.columns import ExpertShape
from areal.fleet.native import parse_chunk
from areal.models.output_head import routers_of
from tests.expect import raises_code
from tests.inference.conftest import PROMPT

SHAPE = ExpertShape(2, 2, 4)


def chosen_by(model, token_ids: list[int]) -> np.ndarray:
    """[tokens, layers, 2]; 0 for the dense layer, which no router fills."""
    result = np.zeros((len(token_ids), SHAPE.layers, SHAPE.choices), np.uint8)

    def note(_, __, outputs, layer):
        result[:, layer] = outputs[2]

    hooks = [
        gate.register_forward_hook(lambda *actual, layer=layer: note(*actual, layer))
        for layer, gate in routers_of(model).items()
    ]
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return result


def sets_of(records: list[bytes]) -> list[list[int]]:
    """The experts of the layer that has some; their order has no meaning."""
    return [sorted(record[2:]) for record in records]


def expected(model, sequence, start: int = 0) -> list[list[int]]:
    return [sorted(row[1].tolist()) for row in chosen_by(model, sequence.token_ids[:-1])[start:]]


@pytest.mark.parametrize("max_prefill_tokens", [512, 16])
def test_chosen_experts_of_prompts_and_answers(build_model, drive, prompts, max_prefill_tokens):
    model = build_model("deepseek_v3")
    driver = drive(model, max_running=4, max_prefill_tokens=max_prefill_tokens, experts=SHAPE)
    sequences = [driver.add(prompt, max_new_tokens=12, group_id=str(len(prompt))) for prompt in prompts]
    for sequence in sequences:
        sequence.experts_start = 3 if sequence.num_prompt > 30 else 0
    sequences.append(driver.add(prompts[0]))
    driver.run()
    assert not sequences.pop().experts
    for sequence in sequences:
        assert len(sequence.experts) == len(sequence.token_ids) - 1 - sequence.experts_start
        assert sets_of(sequence.experts) == expected(model, sequence, sequence.experts_start)


def test_an_aborted_request_has_those_of_its_computed_tokens(build_model, drive, prompts):
    model = build_model("deepseek_v3")
    driver = drive(model, experts=SHAPE)
    sequence = driver.add(prompts[3], max_new_tokens=20)
    sequence.experts_start = 0
    driver.steps(4)
    driver.engine.abort_all()
    assert sets_of(sequence.experts) == expected(model, sequence)


def test_tokens_keep_the_experts_of_the_weights_that_generated_them(build_model, drive, prompts):
    """A retracted request computes its tokens again, with other weights."""
    model, other = build_model("deepseek_v3"), build_model("deepseek_v3", seed=1)
    driver = drive(model, experts=SHAPE)
    sequence = driver.add(prompts[3], max_new_tokens=20)
    sequence.experts_start = 0
    driver.steps(6)
    done = len(sequence.token_ids) - 1
    driver.engine.pause("retract")
    driver.engine.flush_cache()
    driver.engine.runner.model.load_state_dict(copy.deepcopy(other.state_dict()))
    driver.engine.resume()
    driver.run()
    actual = sets_of(sequence.experts)
    assert actual[:done] == expected(model, sequence)[:done]
    assert actual[done:] == expected(other, sequence)[done:]
    assert actual[:done] != expected(other, sequence)[:done]


async def test_a_request_gets_its_record_over_http(build_model, options, serve_with, tmp_path):
    build_model("deepseek_v3").save_pretrained(tmp_path / "sparse")
    native = replace(options.native, model_path=str(tmp_path / "sparse"))
    async for item in serve_with(replace(options, native=native, records_experts=True)):
        answer = await item.generate(return_routed_experts=True, routed_experts_start_len=2)
        chunk = parse_chunk(answer, SHAPE)
        assert len(chunk.routed_experts) == len(PROMPT) + len(chunk.token_ids) - 1 - 2
        assert "routed_experts" not in (await item.generate())["meta_info"]
        *_, last, _ = [event async for event in item.events(return_routed_experts=True)]
        assert len(parse_chunk(orjson.loads(last), SHAPE).routed_experts) == len(PROMPT) + 5


async def test_a_server_without_records_refuses(served, options, serve_with):
    answer = await served.generate(400, return_routed_experts=True)
    assert answer["code"] == "request.invalid_field"
    with raises_code("model.no_router"):
        async for _ in serve_with(replace(options, records_experts=True)):
            pass
