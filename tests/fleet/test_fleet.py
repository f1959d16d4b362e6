"""Answers are whole and exact whatever happens to replicas, and only replicas at the current version serve."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse, WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable, WeightSyncError
from areal.fleet.fleet import Fleet
from tests.expect import raises_code
from tests.fleet.fake_server import FleetKit, until
from tests.fleet.fake_vllm import FakeVLLM

PROMPT = [1, 2, 3]


def a_request(name: str = "r0", *, group_id: str = "", num_tokens: int = 100, **gconfig: object) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        input_ids=PROMPT,
        gconfig=GenerationHyperparameters(max_new_tokens=num_tokens, **gconfig),  # type: ignore[arg-type]
        group_id=group_id,
    )


def assert_whole(response: GenerationResponse, num_tokens: int = 100) -> None:
    """Every token is the one its position demands, and no token is missing or doubled."""
    assert response.output_ids == [1003 + i for i in range(num_tokens)]
    expected = [-(3 + i + v / 100) for i, v in enumerate(response.output_versions)]
    assert response.output_logprobs == pytest.approx(expected)
    assert len(response.output_versions) == num_tokens


async def serving(fleet: Fleet, *names: str) -> None:
    await until(lambda: {r["name"] for r in fleet.status()["replicas"] if r["state"] == "serving"} == set(names))


@pytest.mark.parametrize("num_tokens", [32, 33])  # in one piece, and streamed
async def test_an_answer_is_complete(kit: FleetKit, num_tokens: int) -> None:
    server = await kit.server(0, version=3)
    fleet = await kit.fleet(1)
    assert fleet.version == 3
    response = await fleet.agenerate(a_request(num_tokens=num_tokens))
    assert_whole(response, num_tokens)
    assert response.stop_reason == "length"
    assert response.output_versions == [3] * num_tokens
    assert response.replicas == ["server-0"]
    assert response.num_interruptions == 0
    assert 0 < response.ttft_s <= response.latency_s
    assert response.num_cached_tokens == (0 if kit.dialect == "vllm" else 3)
    assert server.requests[0].stream == (num_tokens == 33)


@pytest.mark.parametrize("mode", ["interrupt", "keep", "keep_cache"])
@pytest.mark.parametrize("num_tokens", [50, 100])
async def test_new_weights_during_an_answer(kit: FleetKit, mode: str, num_tokens: int) -> None:
    server = await kit.server(0, hold_at=40)
    fleet = await kit.fleet(1, weight_update=mode)
    minimum = 45 if kit.server_class.takes_min_new_tokens else 0
    request = a_request(num_tokens=num_tokens, min_new_tokens=minimum, max_tokens=num_tokens + 3)
    running = asyncio.create_task(fleet.agenerate(request))
    await until(lambda: server.num_held == 1)
    await fleet.update_weights(kit.disk(1))
    server.release()
    response = await running
    assert_whole(response, num_tokens)
    assert response.output_versions == [0] * 40 + [1] * (num_tokens - 40)
    assert fleet.version == 1
    if mode != "interrupt":
        assert len(server.requests) == 1
    else:
        asked = server.requests[1]
        assert asked.max_new_tokens == num_tokens - 40
        assert asked.min_new_tokens == (5 if minimum else 0)
        assert asked.input_ids == PROMPT + response.output_ids[:40]
        assert response.num_interruptions == 1
    expected = ["load", "commit"] if kit.dialect == "native" else ["pause", "load", "commit", "resume"]
    assert server.acts()[-len(expected) :] == expected
    assert server.keeps_cache == (mode == "keep_cache")


async def test_kept_keys_and_values_have_a_maximum_age(kit: FleetKit) -> None:
    server, kept = await kit.server(0), []
    fleet = await kit.fleet(1, weight_update="keep_cache", max_cache_age=2)
    for version in (1, 2, 3, 4, 5, 6, 9, 10):
        await fleet.update_weights(kit.disk(version))
        kept.append(server.keeps_cache)
    assert kept == [True, True, False, True, True, False, False, True]


async def test_a_new_controller_does_not_know_how_old_keys_and_values_are(kit: FleetKit) -> None:
    server, kept = await kit.server(0, version=7), []
    fleet = await kit.fleet(1, weight_update="keep_cache", max_cache_age=2)
    for version in (8, 9, 10, 11):
        await fleet.update_weights(kit.disk(version))
        kept.append(server.keeps_cache)
    assert kept == [False, True, True, False]


async def test_an_answer_may_end_before_the_server_reports_that_it_has_the_version(native_kit: FleetKit) -> None:
    kit = native_kit
    server = await kit.server(0, hold_at=3)
    fleet = await kit.fleet(1, weight_update="keep")
    running = asyncio.create_task(fleet.agenerate(a_request(num_tokens=6)))
    await until(lambda: server.num_held == 1)
    server.reports_install.clear()
    update = asyncio.create_task(fleet.update_weights(kit.disk(1)))
    await until(lambda: server.version == 1)
    server.release()
    await until(lambda: fleet.status()["replicas"][0]["running"] == 0)
    server.reports_install.set()
    await update
    response = await running
    assert_whole(response, 6)
    assert response.output_versions == [0] * 3 + [1] * 3
    assert fleet.status()["replicas"][0]["invalid_answers"] == 0


async def test_an_answer_with_a_version_that_was_not_published_is_generated_elsewhere(kit: FleetKit) -> None:
    wrong, _ = await kit.server(0), await kit.server(1)
    fleet = await kit.fleet(2, schedule_policy="round_robin", health_check_interval_s=3600.0)
    wrong.version_of = lambda asked: 7
    for response in [await fleet.agenerate(a_request(f"r{number}", num_tokens=4)) for number in range(2)]:
        assert_whole(response, 4)
        assert response.output_versions == [0] * 4
    invalid = {replica["name"]: replica["invalid_answers"] for replica in fleet.status()["replicas"]}
    assert invalid == {"server-0": 1, "server-1": 0}


async def test_what_servers_copy_over_http_is_counted_over_all_connections(native_kit: FleetKit) -> None:
    kit = native_kit
    server, other = await kit.server(0), await kit.server(1)
    fleet = await kit.fleet(2)
    for version in (1, 2):
        folder = kit.disk(version).path
        server.pulled = {"path": folder, "problem": "other weights" if version == 2 else "", "num_bytes": 70 * version}
        other.pulled = {"path": folder, "problem": "", "num_bytes": 0}
        await fleet.update_weights(WeightUpdate(version=version, kind="http", path=f"http://127.0.0.1:1/v{version}"))
    await server.die()
    await until(lambda: fleet.status()["replicas"][0]["state"] == "absent")
    result = [(replica["pulled_bytes"], replica["failed_deltas"]) for replica in fleet.status()["replicas"]]
    assert result == [(210, 1), (0, 0)]


async def test_answers_that_are_always_invalid_fail_with_a_code_of_their_own(kit: FleetKit) -> None:
    wrong = await kit.server(0)
    fleet = await kit.fleet(1, request_retries=1)
    wrong.version_of = lambda asked: 7
    with raises_code("server.invalid_answer", "server-0", "7"):
        await fleet.agenerate(a_request(num_tokens=4))


@pytest.mark.parametrize("interval", [1, 8, 30, 32])
async def test_a_dead_replica_costs_at_most_the_interval_of_its_stream(kit: FleetKit, interval: int) -> None:
    first = await kit.server(0, hold_at=30)
    second = await kit.server(1, hold_at=0)
    fleet = await kit.fleet(2, schedule_policy="round_robin", stream_interval=interval)
    running = [asyncio.create_task(fleet.agenerate(a_request(f"r{i}"))) for i in range(4)]
    await until(lambda: first.num_held == second.num_held == 2)
    second.release()
    await first.die()
    responses = await asyncio.gather(*running)
    for response in responses:
        assert_whole(response)
    moved = [r for r in responses if r.replicas == ["server-0", "server-1"]]
    assert len(moved) == 2
    of_first = {request.request_id.partition("-")[0] for request in first.requests}
    resent = [r for r in second.requests if r.request_id.partition("-")[0] in of_first]
    received = [len(request.input_ids) - 3 for request in resent]
    assert len(received) == 2
    assert all(30 - interval < count <= 30 for count in received)
    if kit.dialect == "native":
        assert received == [30 - 30 % interval] * 2
    await serving(fleet, "server-1")


async def test_a_restarted_replica_serves_once_it_holds_the_current_version(kit: FleetKit) -> None:
    first = await kit.server(0)
    await kit.server(1)
    fleet = await kit.fleet(2)
    await first.die()
    await serving(fleet, "server-1")
    await fleet.update_weights(kit.disk(1))
    again = await kit.server(0)
    await serving(fleet, "server-0", "server-1")
    assert again.version == 1
    assert again.details("load") == [{"path": kit.disk(1).path}]


async def test_a_replica_without_a_folder_to_load_waits_for_the_next_publication(kit: FleetKit) -> None:
    first = await kit.server(0)
    fleet = await kit.fleet(1)
    assert not fleet.status()["needs_weights"]
    await fleet.update_weights(collective(1, fleet.live_replicas(1), "g1"))
    assert first.version == 1
    await first.die()
    await kit.server(0)
    await until(lambda: fleet.status()["replicas"][0]["state"] == "stale")
    waiting = asyncio.create_task(fleet.agenerate(a_request()))
    await until(lambda: fleet.status()["waiting_requests"] == 1)
    assert "version 0 while 1" in fleet.status()["waiting_for"]
    assert fleet.status()["needs_weights"]  # the trainer may be waiting for what this request belongs to
    await fleet.update_weights(collective(2, fleet.live_replicas(2), "g2"))
    assert not fleet.status()["needs_weights"]
    assert (await waiting).output_versions == [2] * 100


def collective(version: int, replicas: list[str], group_name: str) -> WeightUpdate:
    return WeightUpdate(
        version=version,
        kind="collective",
        master_address="127.0.0.1",
        master_port=1,
        backend="gloo",
        buckets=[[], []],
        group_name=group_name,
        replicas=replicas,
    )


async def test_a_group_is_joined_once_and_ranks_follow_the_order(kit: FleetKit) -> None:
    servers = [await kit.server(i) for i in range(2)]
    fleet = await kit.fleet(2)
    replicas = fleet.live_replicas(1)[::-1]
    await fleet.update_weights(collective(1, replicas, "g1"))
    await fleet.update_weights(collective(2, replicas, "g1"))
    await fleet.update_weights(collective(3, replicas, "g2"))
    for server, rank in zip(servers, [2, 1], strict=True):
        joins = server.details("join")
        assert [(j["group_name"], j["rank"], j["world_size"]) for j in joins] == [("g1", rank, 3), ("g2", rank, 3)]
        assert [left["group_name"] for left in server.details("leave")] == ["g1"]
        received = [act for act in server.acts() if act in ("receive", "commit")]
        assert received == ["receive", "receive", "commit"] * 3
        assert [committed["version"] for committed in server.details("commit")] == [1, 2, 3]
    assert fleet.version == 3


async def test_a_group_with_a_replica_that_is_gone_is_refused(kit: FleetKit) -> None:
    first = await kit.server(0)
    await kit.server(1)
    fleet = await kit.fleet(2)
    replicas = fleet.live_replicas(1)
    await first.die()
    await serving(fleet, "server-1")
    with pytest.raises(WeightSyncError, match="server-0") as error:
        await fleet.update_weights(collective(1, replicas, "g"))
    assert error.value.code == "fleet.replica_lost"
    assert fleet.version == 0
    assert_whole(await fleet.agenerate(a_request()))


@pytest.mark.parametrize("kit", [FakeVLLM], indirect=True, ids=lambda fake: fake.dialect)
async def test_a_restarted_controller_learns_from_the_server_that_weights_are_incomplete(kit: FleetKit) -> None:
    """SGLang cannot tell; while buckets come its version is none (test_sglang_midway)."""
    server = await kit.server(0, version=4)
    server.torn = True
    fleet = await kit.fleet(1)
    assert fleet.version == 4
    assert fleet.status()["replicas"][0]["weights"] == "incomplete"
    await fleet.update_weights(kit.disk(4))
    assert_whole(await fleet.agenerate(a_request()))


async def test_a_health_check_finds_a_replica_that_hangs_in_an_update(kit: FleetKit) -> None:
    first = await kit.server(0)
    second = await kit.server(1)
    fleet = await kit.fleet(2, weight_update_timeout_s=1e6, health_check_interval_s=0.02, pause_grace_period=0.05)
    publication = asyncio.create_task(fleet.update_weights(kit.disk(1)))
    await until(lambda: "pause" in first.acts() and "pause" in second.acts())
    first.hang()
    async with asyncio.timeout(200):
        await publication
    assert (await fleet.agenerate(a_request())).replicas == ["server-1"]


@pytest.mark.parametrize("failure", ["midway", "hang", "die"])
async def test_one_replica_that_fails_an_update_does_not_delay_the_others(kit: FleetKit, failure: str) -> None:
    first = await kit.server(0)
    await kit.server(1)
    fleet = await kit.fleet(2, weight_update_timeout_s=0.2)
    first.fail_update = failure
    await fleet.update_weights(kit.disk(1))
    assert fleet.version == 1
    response = await fleet.agenerate(a_request())
    assert response.replicas == ["server-1"]
    if failure != "die":
        first.fail_update = ""
        await serving(fleet, "server-0", "server-1")
        assert first.version == 1


async def test_a_refused_checkpoint_leaves_the_old_version_serving(kit: FleetKit) -> None:
    await kit.server(0)
    fleet = await kit.fleet(1)
    update = kit.disk(1)
    (Path(update.path) / "model.safetensors").unlink()
    with pytest.raises(WeightSyncError, match=r"\b1\b.*v000001") as error:
        await fleet.update_weights(update)
    assert error.value.code == "fleet.update_failed"
    assert fleet.version == 0
    assert (await fleet.agenerate(a_request())).output_versions == [0] * 100


async def test_a_publication_waits_for_a_replica_that_comes_back(kit: FleetKit) -> None:
    first = await kit.server(0)
    fleet = await kit.fleet(1, weight_update_timeout_s=200.0)
    first.fail_update = "die"
    publication = asyncio.create_task(fleet.update_weights(kit.disk(1)))
    await until(lambda: first.address and fleet.status()["replicas"][0]["state"] == "absent")
    again = await kit.server(0)
    await publication
    assert again.version == 1


async def test_a_repeated_publication_is_done_once(kit: FleetKit) -> None:
    server = await kit.server(0)
    fleet = await kit.fleet(1)
    await fleet.update_weights(kit.disk(1))
    await fleet.update_weights(kit.disk(1))
    assert server.acts().count("load") == 1
    await fleet.update_weights(kit.disk(0))  # after a recovery the version goes back
    assert fleet.version == server.version == 0


async def test_a_hung_replica_is_disconnected_and_serves_again(kit: FleetKit) -> None:
    first = await kit.server(0, hold_at=10)
    await kit.server(1)
    fleet = await kit.fleet(2, schedule_policy="round_robin", health_check_interval_s=0.01)
    running = [asyncio.create_task(fleet.agenerate(a_request(f"r{i}"))) for i in range(2)]
    await until(lambda: first.num_held == 1)
    first.hang()
    for response in await asyncio.gather(*running):
        assert_whole(response)
    await serving(fleet, "server-1")
    first.wake()
    await serving(fleet, "server-0", "server-1")


async def test_a_slow_request_continues_on_another_replica(kit: FleetKit) -> None:
    slow = await kit.server(0, hold_at=70)
    await kit.server(1)
    fleet = await kit.fleet(2, request_timeout=0.2, schedule_policy="round_robin")
    responses = await asyncio.gather(*(fleet.agenerate(a_request(f"r{i}")) for i in range(2)))
    for response in responses:
        assert_whole(response)
    assert ["server-0", "server-1"] in [r.replicas for r in responses]
    await until(lambda: slow.num_cancelled == 1)  # its place there is free again


async def test_refused_requests_are_not_retried(kit: FleetKit) -> None:
    server = await kit.server(0)
    fleet = await kit.fleet(1)
    server.fail_generate = 400
    with pytest.raises(RequestError, match="cannot generate this") as error:
        await fleet.agenerate(a_request())
    assert error.value.code == "server.request_refused"
    assert len(server.requests) == 1
    with pytest.raises(RequestError) as error:
        await fleet.agenerate(a_request(max_tokens=3))
    assert error.value.code == "request.too_long"
    with pytest.raises(RequestError) as error:
        await fleet.agenerate(GenerationRequest(request_id="r", input_ids=[], gconfig=GenerationHyperparameters()))
    assert error.value.code == "request.invalid_field"


async def test_server_failures_are_retried_up_to_the_limit(kit: FleetKit) -> None:
    server = await kit.server(0)
    fleet = await kit.fleet(1, request_retries=2)
    server.fail_generate = 500
    with pytest.raises(ServerUnavailable, match=r"3 .*cannot generate this") as error:
        await fleet.agenerate(a_request())
    assert error.value.code == "fleet.too_many_retries"
    assert len(server.requests) == 3


async def test_repeated_aborts_end_the_request(kit: FleetKit) -> None:
    server = await kit.server(0)
    server.empty_aborts = True
    fleet = await kit.fleet(1, request_retries=2)
    with pytest.raises(ServerUnavailable, match="server-0") as error:
        await fleet.agenerate(a_request())
    assert error.value.code == "fleet.too_many_retries"


async def test_a_request_without_a_replica_fails_with_the_state_of_each(kit: FleetKit) -> None:
    server = await kit.server(0)
    fleet = await kit.fleet(1, request_timeout=0.15)
    await server.die()
    await serving(fleet)
    with pytest.raises(ServerUnavailable, match=r"\b0\.15 .*server-0") as error:
        await fleet.agenerate(a_request())
    assert error.value.code == "fleet.no_live_replica"


async def test_a_cancelled_request_frees_its_place(kit: FleetKit) -> None:
    server = await kit.server(0, hold_at=5)
    fleet = await kit.fleet(1)
    running = asyncio.create_task(fleet.agenerate(a_request()))
    await until(lambda: server.num_held == 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: server.num_cancelled == 1)
    assert fleet.status()["replicas"][0]["running"] == 0


async def test_groups_stay_together_and_load_is_shared(kit: FleetKit) -> None:
    servers = [await kit.server(i, hold_at=0) for i in range(2)]
    fleet = await kit.fleet(2)
    running = [
        asyncio.create_task(fleet.agenerate(a_request(f"g{g}{i}", group_id=f"g{g}")))
        for g in range(4)
        for i in range(3)
    ]
    await until(lambda: sum(len(s.requests) for s in servers) == 12)
    groups = [{request.request_id[:2] for request in server.requests} for server in servers]
    assert groups[0].isdisjoint(groups[1])
    assert [len(s.requests) for s in servers] == [6, 6]
    for server in servers:
        server.release()
    await asyncio.gather(*running)


async def test_requests_wait_while_weights_are_published(kit: FleetKit) -> None:
    server = await kit.server(0)
    fleet = await kit.fleet(1, pause_grace_period=0.1)
    publication = asyncio.create_task(fleet.update_weights(kit.disk(1)))
    await until(lambda: "pause" in server.acts())
    running = asyncio.create_task(fleet.agenerate(a_request()))
    await until(lambda: fleet.status()["waiting_requests"] == 1)
    assert fleet.status()["updating_to"] == 1
    assert "version 1" in fleet.status()["waiting_for"]
    await publication
    assert (await running).output_versions == [1] * 100
    assert fleet.status()["generated_tokens"] == 100


async def test_close_ends_running_requests(kit: FleetKit) -> None:
    server = await kit.server(0, hold_at=5)
    fleet = await kit.fleet(1, request_timeout=0.1)
    running = asyncio.create_task(fleet.agenerate(a_request()))
    await until(lambda: server.num_held == 1)
    await fleet.close()
    with pytest.raises(ServerUnavailable):
        await running
