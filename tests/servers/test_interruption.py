"""New weights in the middle of answers: interrupted and continued, or kept and recomputed; exact in both cases."""

from __future__ import annotations

import asyncio

import pytest

from areal.api.data import GenerationResponse, WeightUpdate
from tests.expect import serve
from tests.servers.checkpoints import Scorer, build_model
from tests.servers.real_server import RealServer
from tests.servers.server_kit import (
    PROMPT,
    TOLERANCE,
    VLLM_ONLY,
    FixedTrainer,
    Kit,
    a_request,
    largest_gap,
    tokens_made,
)

NUM_TOKENS = 950
ATTEMPTS = 5
"""On a busy machine an update may come after the last token; that proves nothing."""


def check_split(response: GenerationResponse, version: int, old: Scorer, new: Scorer) -> bool:
    """Versions rise once, to `version`; each token has its policy's log-probability. Whether both made some."""
    split = response.output_versions.count(version - 1)
    assert response.output_versions == [version - 1] * split + [version] * (NUM_TOKENS - split)
    by_old = old.logprobs(response.input_ids, response.output_ids)
    by_new = new.logprobs(response.input_ids, response.output_ids)
    assert largest_gap(response.output_logprobs, by_old[:split] + by_new[split:]) < TOLERANCE
    return 0 < split < NUM_TOKENS


@pytest.mark.parametrize("channel", ["disk", "collective"])
@pytest.mark.parametrize("mode", ["interrupt", "keep"])
async def test_a_switch_in_mid_answer_splits_it_exactly(
    server: RealServer, kit: Kit, old: Scorer, new: Scorer, mode: str, channel: str
) -> None:
    fleet = await kit.fleet(server, weight_update=mode)
    trainer = FixedTrainer(build_model(1))
    collective = kit.collective(fleet, trainer)
    for version in range(2, 2 + 2 * ATTEMPTS, 2):
        trainer.model = build_model(1)
        await asyncio.to_thread(serve, collective, version - 1)
        trainer.model = build_model(2)
        made = fleet.status()["generated_tokens"]
        requests = [a_request(NUM_TOKENS, prompt=PROMPT[i:]) for i in range(4)]
        running = [asyncio.create_task(fleet.agenerate(request)) for request in requests]
        await tokens_made(fleet, made + 4 * 8)
        if channel == "disk":
            await fleet.update_weights(WeightUpdate(version=version, kind="disk", path=str(kit.models["new"])))
        else:
            await asyncio.to_thread(serve, collective, version)
        responses = await asyncio.gather(*running)
        were_split = [check_split(response, version, old, new) for response in responses]
        for response, was_split in zip(responses, were_split, strict=True):
            most = int(mode == "interrupt")  # one that is not split may have had all of its tokens, or none
            assert (most if was_split else 0) <= response.num_interruptions <= most
        assert {response.stop_reason for response in responses} == {"length"}
        after = await fleet.agenerate(a_request(20))  # no cache of the old weights is left
        assert after.output_versions == [version] * 20
        assert largest_gap(after.output_logprobs, new.logprobs(PROMPT, after.output_ids)) < TOLERANCE
        if all(were_split):
            return
    pytest.fail(f"the update came after the last token {ATTEMPTS} times")


async def test_a_request_sent_during_a_pause_waits_for_its_end(server: RealServer, kit: Kit, old: Scorer) -> None:
    fleet = await kit.fleet(server)
    replica = kit.replica(server)
    await replica.info()
    await replica.pause("abort")
    waiting = asyncio.create_task(fleet.agenerate(a_request(20)))
    info = await replica.info()  # a paused server is well; and by now it has the request
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
    for version in range(1, 1 + ATTEMPTS):
        made = fleet.status()["generated_tokens"]
        running = asyncio.create_task(fleet.agenerate(a_request(NUM_TOKENS, **penalised)))
        await tokens_made(fleet, made + 8)
        await fleet.update_weights(WeightUpdate(version=version, kind="disk", path=str(kit.models["old"])))
        broken = await running
        assert broken.output_ids == whole.output_ids
        if broken.num_interruptions == 1:
            return
    pytest.fail(f"the update came after the last token {ATTEMPTS} times")
