"""What is sent, where it is sent, and what is told of the servers it is sent to."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.data import GenerationRequest
from areal.api.errors import RequestError
from tests.fleet.fake_server import FleetKit, until
from tests.fleet.test_fleet import a_request, assert_whole, serving

UNKNOWN_TOKEN = GenerationRequest(request_id="r", input_ids=[1, 5000], gconfig=GenerationHyperparameters())


@pytest.mark.parametrize(
    ("request_", "code", "value"),
    [
        (
            GenerationRequest(request_id="r", input_ids=[1, 5000], gconfig=GenerationHyperparameters()),
            "request.token_id",
            "5000",
        ),
        (a_request(num_tokens=4094), "request.too_long", "4093"),
    ],
    ids=["vocabulary", "length"],
)
async def test_requests_that_a_server_cannot_serve_are_not_sent(
    kit: FleetKit, request_: GenerationRequest, code: str, value: str
) -> None:
    server = await kit.server(0)
    fleet = await kit.fleet(1)
    with pytest.raises(RequestError, match=value) as error:
        await fleet.agenerate(request_)
    assert error.value.code == code
    assert server.requests == []


async def test_every_replica_must_be_able_to_take_a_request(kit: FleetKit) -> None:
    """Also one that does not serve now: the answer may have to go on there."""
    await kit.server(0)
    fleet = await kit.fleet(1)
    small = fleet._replicas.slots[0]
    await kit.server(1)
    await serving(fleet, "server-0", "server-1")
    assert small.info is not None
    small.info = dataclasses.replace(small.info, context_length=50)
    fleet._replicas.request_failed(small, small.replica, "for the test")
    with pytest.raises(RequestError, match="50") as error:
        await fleet.agenerate(a_request())
    assert error.value.code == "request.too_long"


async def test_prompts_go_to_the_replica_that_has_their_prefix_cached(kit: FleetKit) -> None:
    servers = [await kit.server(index) for index in range(2)]
    fleet = await kit.fleet(2, schedule_policy="prefix_affinity", health_check_interval_s=0.5)
    prompt = [7] * 300

    async def ask(number: int) -> str:
        gconfig = GenerationHyperparameters(max_new_tokens=1)
        request = GenerationRequest(request_id=f"r{number}", input_ids=prompt, gconfig=gconfig)
        return (await fleet.agenerate(request)).replicas[0]

    assert len({await ask(number) for number in range(5)}) == 1

    known = fleet._replicas.router.prefixes.num_blocks

    def num_known() -> list[int]:
        return sorted(known(slot.name) for slot in fleet._replicas.slots)

    assert num_known() == [0, 4]
    await fleet.update_weights(kit.disk(1))
    assert num_known() == [0, 0]
    name = await ask(6)
    assert num_known() == [0, 4]
    index = int(name[-1])
    servers[index].version = 9  # as if another hand had given it other weights
    await until(lambda: known(f"server-{index}") == 0)
    await until(lambda: servers[index].version == 1)
    await serving(fleet, "server-0", "server-1")
    name = await ask(7)
    assert known(name) == 4
    await kit.server(int(name[-1]))  # a new process under its name
    await until(lambda: known(name) == 0)


async def test_the_status_contains_the_loads_that_servers_report(kit: FleetKit) -> None:
    server = await kit.server(0, hold_at=5)
    fleet = await kit.fleet(1)

    def load() -> dict[str, float] | None:
        return fleet.status()["replicas"][0]["load"]

    await until(load)
    assert load() == {"running": 0, "queued": 0, "cache_usage": 0.25, "generated_tokens": 0}
    running = asyncio.create_task(fleet.agenerate(a_request()))
    await until(lambda: (load() or {}).get("running") == 1)
    await until(lambda: (load() or {}).get("generated_tokens") == 5)
    server.fail_load = True
    await until(lambda: load() is None)
    assert fleet.status()["replicas"][0]["state"] == "serving", "what it does not tell is no failure"
    assert fleet.status()["replicas"][0]["failures"] == 0
    server.fail_load = False
    await until(load)
    server.release()
    assert_whole(await running)
