"""New weights in the middle of answers: interrupted and continued, or kept and recomputed; exact in both cases."""

from __future__ import annotations

import asyncio

import pytest
from checkpoints import Scorer, build_model
from real_server import RealServer
from server_kit import PROMPT, TOLERANCE, VLLM_ONLY, FixedTrainer, Kit, a_request, largest_gap, tokens_made

from areal.api.data import GenerationResponse

NUM_TOKENS = 400


def check_split(response: GenerationResponse, old: Scorer, new: Scorer) -> int:
    """Versions rise once, and each token has the log-probability of the policy that made it. Returns where."""
    split = response.output_versions.count(0)
    assert response.output_versions == [0] * split + [1] * (NUM_TOKENS - split)
    by_old = old.logprobs(response.input_ids, response.output_ids)
    by_new = new.logprobs(response.input_ids, response.output_ids)
    assert largest_gap(response.output_logprobs, by_old[:split] + by_new[split:]) < TOLERANCE
    return split


@pytest.mark.parametrize("channel", ["disk", "collective"])
@pytest.mark.parametrize("mode", ["interrupt", "keep"])
async def test_a_switch_in_mid_answer_splits_it_exactly(
    server: RealServer, kit: Kit, old: Scorer, new: Scorer, mode: str, channel: str
) -> None:
    fleet = await kit.fleet(server, weight_update=mode)
    trainer = FixedTrainer(build_model(2))
    publisher = kit.disk(fleet, trainer) if channel == "disk" else kit.collective(fleet, trainer)
    requests = [a_request(NUM_TOKENS, prompt=PROMPT[i:]) for i in range(4)]
    running = [asyncio.create_task(fleet.agenerate(request)) for request in requests]
    await tokens_made(fleet, 4 * 24)
    await asyncio.to_thread(publisher.publish, 1)
    for response in await asyncio.gather(*running):
        assert 8 <= check_split(response, old, new) < NUM_TOKENS
        assert response.num_interruptions == (1 if mode == "interrupt" else 0)
        assert response.stop_reason == "length"
    after = await fleet.agenerate(a_request(20))  # no cache of the old weights is left
    assert after.output_versions == [1] * 20
    assert largest_gap(after.output_logprobs, new.logprobs(PROMPT, after.output_ids)) < TOLERANCE


async def test_a_request_sent_during_a_pause_waits_for_its_end(server: RealServer, kit: Kit, old: Scorer) -> None:
    fleet = await kit.fleet(server)
    replica = kit.replica(server)
    await replica.pause("abort")
    waiting = asyncio.create_task(fleet.agenerate(a_request(20)))
    info = await replica.info()  # a paused server is well
    assert info.version == 0
    assert not waiting.done()
    await replica.resume()
    response = await waiting
    assert largest_gap(response.output_logprobs, old.logprobs(PROMPT, response.output_ids)) < TOLERANCE


@VLLM_ONLY
async def test_frequency_penalty_goes_on_over_an_interruption(server: RealServer, kit: Kit) -> None:
    """What the parts before had generated counts; the same weights come again, so the whole answer can be compared."""
    fleet = await kit.fleet(server)
    penalised = {"greedy": True, "frequency_penalty": 1.0}
    whole = await fleet.agenerate(a_request(NUM_TOKENS, **penalised))
    made = fleet.status()["generated_tokens"]
    running = asyncio.create_task(fleet.agenerate(a_request(NUM_TOKENS, **penalised)))
    await tokens_made(fleet, made + 24)
    await asyncio.to_thread(kit.disk(fleet, FixedTrainer(build_model(1))).publish, 1)
    broken = await running
    assert broken.num_interruptions == 1
    assert broken.output_ids == whole.output_ids
