"""Requests of short answers to one prompt: one call of one replica, then each answer for itself."""

from __future__ import annotations

import asyncio

import pytest

from areal.api.data import GenerationRequest
from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.fleet import Fleet
from tests.fleet.fake_native import FakeNative
from tests.fleet.fake_server import FleetKit, until
from tests.fleet.test_fleet import a_request, assert_whole
from tests.fleet.test_fleet_requests import UNKNOWN_TOKEN

SHORT = 8


def requests(names: str, num_tokens: int = SHORT) -> list[GenerationRequest]:
    return [a_request(name, group_id="g", num_tokens=num_tokens) for name in names]


def num_running(fleet: Fleet) -> list[int]:
    return [replica["running"] for replica in fleet.status()["replicas"]]


@pytest.mark.parametrize("num_tokens", [SHORT, 100])  # short, and streamed
async def test_answers_have_the_order_of_their_requests(kit: FleetKit, num_tokens: int) -> None:
    await kit.server(0, version=3)
    fleet = await kit.fleet(1)
    result = await fleet.agenerate_group(requests("abc", num_tokens))
    assert [item.request_id for item in result] == ["a", "b", "c"]
    for each in result:
        assert_whole(each, num_tokens)
        assert (each.replicas, each.num_interruptions, each.latency_s > 0) == (["server-0"], 0, True)
    assert num_running(fleet) == [0]


async def test_a_group_is_one_request_of_a_native_server(native_kit: FleetKit) -> None:
    server = await native_kit.server(0)
    fleet = await native_kit.fleet(1)
    await asyncio.gather(fleet.agenerate_group(requests("abc")), fleet.agenerate_group(requests("xy")))
    assert isinstance(server, FakeNative)
    assert [[name[0] for name in group] for group in server.groups] == [["a", "b", "c", "x", "y"]]
    assert await fleet.agenerate_group([]) == []


async def test_interrupted_answers_continue_under_new_weights(kit: FleetKit) -> None:
    server = await kit.server(0, hold_at=3)
    fleet = await kit.fleet(1)
    group = asyncio.create_task(fleet.agenerate_group(requests("abc")))
    await until(lambda: server.num_held == 3)
    assert num_running(fleet) == [3]
    server.hold_at = None
    await fleet.update_weights(kit.disk(1))
    for item in await group:
        assert_whole(item, SHORT)
        assert item.output_versions[-1] == 1


async def test_a_group_of_a_dead_server_continues_on_another(kit: FleetKit) -> None:
    servers = [await kit.server(index, hold_at=3) for index in range(2)]
    fleet = await kit.fleet(2)
    group = asyncio.create_task(fleet.agenerate_group(requests("abc")))
    await until(lambda: sum(server.num_held for server in servers) == 3)
    first, other = sorted(servers, key=lambda server: -server.num_held)
    other.hold_at = None
    await first.die()
    for item in await group:
        assert_whole(item, SHORT)
        assert len(item.replicas) == 2
    assert {replica["running"] for replica in fleet.status()["replicas"]} == {0}


async def test_a_group_fails_when_an_answer_has_no_retries_left(kit: FleetKit) -> None:
    server = await kit.server(0)
    fleet = await kit.fleet(1, request_retries=0, health_check_interval_s=0.1)
    server.fail_generate = 500
    with pytest.raises(ServerUnavailable) as error:
        await fleet.agenerate_group(requests("abc"))
    assert error.value.code == "fleet.too_many_retries"
    assert fleet.status()["waiting_requests"] == 0


async def test_one_bad_request_fails_the_group_and_nothing_is_sent(kit: FleetKit) -> None:
    server = await kit.server(0)
    fleet = await kit.fleet(1)
    with pytest.raises(RequestError) as error:
        await fleet.agenerate_group([*requests("ab"), UNKNOWN_TOKEN])
    assert error.value.code == "request.token_id"
    assert server.requests == []


async def test_a_cancelled_group_ends_on_the_server(kit: FleetKit) -> None:
    server = await kit.server(0, hold_at=3)
    fleet = await kit.fleet(1)
    group = asyncio.create_task(fleet.agenerate_group(requests("abc")))
    await until(lambda: server.num_held == 3)
    group.cancel()
    await until(lambda: server.num_cancelled == 3)
    with pytest.raises(asyncio.CancelledError):
        await group
    assert num_running(fleet) == [0]
