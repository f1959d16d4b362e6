"""A real server is killed under load: its answers go on at another, or at its successor with the current weights."""

from __future__ import annotations

import asyncio

import pytest

from tests.expect import serve
from tests.servers.checkpoints import Scorer, build_model
from tests.servers.real_server import RealServer
from tests.servers.server_kit import (
    PROMPT,
    TOLERANCE,
    FixedTrainer,
    Kit,
    SpareServer,
    a_request,
    eventually,
    largest_gap,
    tokens_made,
)

NUM_TOKENS = 900
pytestmark = pytest.mark.timeout(900)
"""A successor has to start."""


@pytest.fixture(scope="module")
def new_cool(models) -> Scorer:
    return Scorer(models["new"], SpareServer.temperature)


async def test_answers_go_on_after_restart_and_refit(kit: Kit, spare: SpareServer, new_cool: Scorer) -> None:
    """The only server dies. Its successor starts with the old weights, and serves once it has the current ones."""
    victim = await spare.running()
    fleet = await kit.fleet(victim)
    version = fleet.version + 1
    await asyncio.to_thread(serve, kit.disk(fleet, FixedTrainer(build_model(2))), version)
    requests = [a_request(NUM_TOKENS, prompt=PROMPT[i:], temperature=SpareServer.temperature) for i in range(10)]
    running = [asyncio.create_task(fleet.agenerate(request)) for request in requests]
    await tokens_made(fleet, len(requests) * 10)
    victim.process.kill()  # of its group, only the process that speaks HTTP
    await eventually(lambda: fleet.status()["replicas"][0]["state"] != "serving")
    spare.kill_all()
    kit.register(0, await spare.running())
    responses = await asyncio.gather(*running)
    assert {response.num_interruptions for response in responses} <= {0, 1}
    assert any(response.num_interruptions for response in responses), "the kill came after the last token"
    for response in responses:
        assert len(response.output_ids) == NUM_TOKENS
        assert response.output_versions == [version] * NUM_TOKENS
        expected = new_cool.logprobs(response.input_ids, response.output_ids)
        assert largest_gap(response.output_logprobs, expected) < TOLERANCE


async def test_answers_go_on_at_another_server(
    kit: Kit, server: RealServer, spare: SpareServer, new: Scorer, new_cool: Scorer
) -> None:
    """Weights reach both over one group; then one is killed. What its tokens were, the other goes on from."""
    victim = await spare.running()
    fleet = await kit.fleet(server, victim, schedule_policy="round_robin")
    version = fleet.version + 1
    channel = kit.collective(fleet, FixedTrainer(build_model(2)))
    await asyncio.to_thread(serve, channel, version)
    assert [replica["state"] for replica in fleet.status()["replicas"]] == ["serving"] * 2
    whole = await fleet.agenerate(a_request(NUM_TOKENS, greedy=True))
    made = fleet.status()["generated_tokens"]
    running = [asyncio.create_task(fleet.agenerate(a_request(NUM_TOKENS, greedy=True))) for _ in range(20)]
    await tokens_made(fleet, made + len(running) * 10)
    victim.kill_all()
    responses = await asyncio.gather(*running)
    ways = [response.replicas for response in responses]
    assert ways.count(["server-0"]) == 10
    assert ["server-1", "server-0"] in ways, "the kill came after the last token"
    for response in responses:
        assert response.output_ids == whole.output_ids
        assert response.output_versions == [version] * NUM_TOKENS
    await asyncio.to_thread(serve, channel, version + 1)  # a group without the dead one
    after = await fleet.agenerate(a_request(20))
    assert after.output_versions == [version + 1] * 20
    assert largest_gap(after.output_logprobs, new.logprobs(PROMPT, after.output_ids)) < TOLERANCE
