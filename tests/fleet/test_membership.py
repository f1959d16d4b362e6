"""Replicas join, leave, come back and lag behind, and the others do not notice."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from areal.api.errors import ServerUnavailable, WeightSyncError
from areal.fleet import weight_updater
from areal.fleet.fleet import Fleet
from areal.fleet.replica import AnswerForm, Replica
from tests.fleet.fake_native import FakeNative
from tests.fleet.fake_server import FakeServer, FleetKit, until
from tests.fleet.fake_sglang import FakeSGLang
from tests.fleet.test_fleet import a_request, assert_whole, collective, serving


def replica(fleet: Fleet, name: str) -> dict:
    return next(replica for replica in fleet.status()["replicas"] if replica["name"] == name)


def lacking(fleet: Fleet, version: int) -> list[str]:
    return [name.partition("@")[0] for name in fleet.live_replicas(version)]


async def test_a_replica_that_joins_loads_the_current_folder_and_serves(kit: FleetKit) -> None:
    await kit.server(3)
    fleet = await kit.fleet(1)
    await fleet.update_weights(kit.disk(1))
    joined = await kit.server(1)
    await serving(fleet, "server-1", "server-3")
    assert joined.version == 1
    assert [item["name"] for item in fleet.status()["replicas"]] == ["server-1", "server-3"]
    assert not fleet.status()["needs_weights"]


async def test_requests_of_a_removed_replica_continue_elsewhere(kit: FleetKit) -> None:
    leaving = await kit.server(0, hold_at=40)
    await kit.server(1)
    fleet = await kit.fleet(2, schedule_policy="round_robin", request_retries=1, stream_interval=8)
    running = [asyncio.create_task(fleet.agenerate(a_request(f"r{i}"))) for i in range(4)]
    await until(lambda: leaving.num_held == 2)
    kit.registry.remove("servers/0")
    responses = await asyncio.gather(*running)
    for response in responses:
        assert_whole(response)
    assert sum(response.replicas == ["server-0", "server-1"] for response in responses) == 2
    assert [item["name"] for item in fleet.status()["replicas"]] == ["server-1"]
    await until(lambda: leaving.num_cancelled == 2)
    kit.registry.add("servers/0", leaving.registration())
    await serving(fleet, "server-0", "server-1")
    assert [item["name"] for item in fleet.status()["replicas"]] == ["server-0", "server-1"]


async def test_removing_a_replica_does_not_fail_its_requests(kit: FleetKit) -> None:
    """With one retry, an answer that is handed on twice would otherwise fail."""
    servers = [await kit.server(index, hold_at=10) for index in range(3)]
    fleet = await kit.fleet(3, request_retries=1)
    running = asyncio.create_task(fleet.agenerate(a_request()))

    def holding() -> list[int]:
        result = [int(item["name"][-1]) for item in fleet.status()["replicas"] if item["running"]]
        return [index for index in result if servers[index].num_held]

    for _ in range(2):
        await until(holding)
        (index,) = holding()
        kit.registry.remove(f"servers/{index}")
        await until(lambda index=index: index not in holding())  # it went on, and is held elsewhere at once
    for server in servers:
        server.release()
    response = await running
    assert_whole(response)
    assert len(response.replicas) == 3


async def test_only_replicas_that_lack_the_version_get_it_again(kit: FleetKit) -> None:
    first = await kit.server(0, hold_at=5)
    await kit.server(1)
    fleet = await kit.fleet(2)
    await fleet.update_weights(collective(1, fleet.live_replicas(1), "g1"))
    await kit.servers[1].die()
    await serving(fleet, "server-0")
    running = asyncio.create_task(fleet.agenerate(a_request()))
    await until(lambda: first.num_held == 1)
    calls = len(first.calls)
    again = await kit.server(1)
    await until(lambda: replica(fleet, "server-1")["state"] == "stale")
    assert fleet.status()["needs_weights"]
    assert lacking(fleet, 1) == ["server-1"]
    assert lacking(fleet, 2) == ["server-0", "server-1"]
    await fleet.update_weights(collective(1, fleet.live_replicas(1), "g2"))
    await serving(fleet, "server-0", "server-1")
    assert again.version == 1
    assert len(first.calls) == calls, "a replica that serves was disturbed"
    assert not running.done()
    assert not fleet.status()["needs_weights"]
    first.release()
    assert (await running).num_interruptions == 0
    await fleet.update_weights(collective(2, fleet.live_replicas(2), "g3"))
    assert (first.version, again.version) == (2, 2)
    assert [(joined["group_name"], joined["world_size"]) for joined in again.details("join")] == [("g2", 2), ("g3", 3)]


async def test_a_request_is_answered_while_others_install_the_version(kit: FleetKit) -> None:
    await kit.server(0)
    fleet = await kit.fleet(1)
    await fleet.update_weights(collective(1, fleet.live_replicas(1), "g1"))
    slow = await kit.server(1)
    slow.fail_update = "hang"
    await until(lambda: lacking(fleet, 1) == ["server-1"])
    publication = asyncio.create_task(fleet.update_weights(collective(1, fleet.live_replicas(1), "g2")))
    await until(lambda: "receive" in slow.acts())
    assert fleet.status()["updating_to"] == 1
    assert not fleet.status()["needs_weights"]
    assert_whole(await fleet.agenerate(a_request()))
    assert not publication.done()
    slow.hang()
    await publication  # the health check found it: no error, since the version is served
    assert fleet.status()["updating_to"] is None
    slow.fail_update = ""
    slow.wake()
    await until(lambda: replica(fleet, "server-1")["state"] == "stale")
    assert not fleet.status()["needs_weights"], "the trainer would send it again and again"
    await fleet.update_weights(collective(2, fleet.live_replicas(2), "g3"))
    await serving(fleet, "server-0", "server-1")


async def test_a_version_that_all_replicas_serve_needs_no_update(kit: FleetKit) -> None:
    server = await kit.server(0)
    fleet = await kit.fleet(1)
    await fleet.update_weights(collective(1, fleet.live_replicas(1), "g1"))
    calls = len(server.calls)
    await fleet.update_weights(collective(1, [], ""))
    await fleet.update_weights(kit.disk(1))
    assert len(server.calls) == calls
    # from now on there is a folder: whoever joins needs no trainer
    await kit.server(1)
    await serving(fleet, "server-0", "server-1")


async def test_a_server_without_weights_waits_for_its_first(kit: FleetKit) -> None:
    first = await kit.server(0, version=-1)
    await kit.server(1, version=-1)
    fleet = await kit.fleet(2)
    assert fleet.version == -1
    running = asyncio.create_task(fleet.agenerate(a_request()))
    await until(lambda: fleet.status()["waiting_requests"] == 1)
    assert (replica(fleet, "server-0")["state"], replica(fleet, "server-0")["version"]) == ("stale", -1)
    await fleet.update_weights(collective(0, fleet.live_replicas(0), "g1"))
    assert (await running).output_versions == [0] * 100
    await first.die()
    await kit.server(0, version=-1)
    await until(lambda: replica(fleet, "server-0")["state"] == "stale")
    assert fleet.status()["needs_weights"]
    assert lacking(fleet, 0) == ["server-0"]


async def test_an_answer_waits_for_the_version_of_its_newest_token(kit: FleetKit) -> None:
    server = await kit.server(0, version=5, hold_at=40)
    fleet = await kit.fleet(1, request_timeout=0.2, stream_interval=8)
    begun = asyncio.create_task(fleet.agenerate(a_request("r0")))
    await until(lambda: server.num_held == 1)
    await fleet.update_weights(kit.disk(3))  # the trainer has gone back
    server.release()
    fresh = await fleet.agenerate(a_request("r1"))
    assert fresh.output_versions == [3] * 100  # one without tokens is not held
    await until(lambda: fleet.status()["waiting_requests"] == 1)
    assert fleet.status()["waiting_for"] == "version 5, for 1 unfinished answers; 3 is served"
    await fleet.update_weights(kit.disk(4))
    await asyncio.sleep(0.3)  # longer than request_timeout: this wait has no limit
    assert not begun.done()
    await fleet.update_weights(kit.disk(5))
    response = await begun
    assert_whole(response)
    assert response.output_versions == [5] * 100


@pytest.mark.parametrize("mode", ["interrupt", "keep", "keep_cache"])
async def test_no_token_of_an_older_policy_follows_a_newer_one(kit: FleetKit, mode: str) -> None:
    """Also where the server itself goes on with what it has."""
    server = await kit.server(0, version=5, hold_at=40)
    fleet = await kit.fleet(1, weight_update=mode, stream_interval=8, request_retries=1)
    begun = asyncio.create_task(fleet.agenerate(a_request("r0")))
    await until(lambda: server.num_held == 1)
    await fleet.update_weights(kit.disk(3))
    server.release()
    await until(lambda: fleet.status()["waiting_requests"] == 1)
    assert replica(fleet, "server-0")["failures"] == 0
    await fleet.update_weights(kit.disk(5))
    response = await begun
    assert_whole(response)
    assert response.output_versions == [5] * 100
    assert response.num_interruptions == 1


async def test_an_answer_that_waits_for_its_version_ends_with_the_fleet(kit: FleetKit) -> None:
    server = await kit.server(0, version=5, hold_at=40)
    fleet = await kit.fleet(1)
    begun = asyncio.create_task(fleet.agenerate(a_request("r0")))
    await until(lambda: server.num_held == 1)
    await fleet.update_weights(kit.disk(3))
    await until(lambda: fleet.status()["waiting_requests"] == 1)
    await fleet.close()
    with pytest.raises(ServerUnavailable) as error:
        await begun
    assert error.value.code == "fleet.closed"


async def test_weights_from_before_the_trainer_went_back_never_serve(kit: FleetKit) -> None:
    """A version number comes again, but a hung replica holds what it stood for the first time."""
    first = await kit.server(0, version=5)
    second = await kit.server(1, version=5)
    fleet = await kit.fleet(2)
    second.hang()
    await serving(fleet, "server-0")
    for version in (3, 4, 5):
        await fleet.update_weights(collective(version, fleet.live_replicas(version), f"g{version}"))
    second.wake()
    await until(lambda: replica(fleet, "server-1")["state"] == "stale")
    assert replica(fleet, "server-1")["weights"] == "abandoned"
    assert lacking(fleet, 5) == ["server-1"]
    await fleet.update_weights(collective(5, fleet.live_replicas(5), "g"))
    await serving(fleet, "server-0", "server-1")
    assert first.version == second.version == 5


async def test_a_fleet_started_during_recovery_trusts_no_abandoned_version(
    kit: FleetKit,
) -> None:
    """What the controller before knew of the servers is lost with it; the ledger knows which versions come again."""
    await kit.server(0, version=3)
    second = await kit.server(1, version=5)
    hung = await kit.server(2, version=5)
    hung.hang()
    fleet = await kit.fleet(2, abandoned=range(4, 6))
    assert fleet.version == 3
    await serving(fleet, "server-0")
    assert replica(fleet, "server-1")["weights"] == "abandoned"
    assert lacking(fleet, 3) == ["server-1"]
    for version in (4, 5):
        await fleet.update_weights(collective(version, fleet.live_replicas(version), f"g{version}"))
    await serving(fleet, "server-0", "server-1")
    hung.wake()
    await until(lambda: replica(fleet, "server-2")["state"] == "stale")
    assert replica(fleet, "server-2")["weights"] == "abandoned"
    await second.die()
    await kit.server(1, version=0)
    await fleet.update_weights(kit.disk(5))
    await serving(fleet, "server-0", "server-1", "server-2")


async def test_a_new_server_with_an_abandoned_version_does_not_serve(
    kit: FleetKit,
) -> None:
    await kit.server(0, version=5)
    hung = await kit.server(1, version=5)
    hung.hang()
    fleet = await kit.fleet(1)
    assert fleet.version == 5
    for version in (3, 4, 5):
        await fleet.update_weights(collective(version, fleet.live_replicas(version), f"g{version}"))
    hung.wake()
    await until(lambda: replica(fleet, "server-1")["state"] == "stale")
    assert replica(fleet, "server-1")["weights"] == "abandoned"


async def test_a_version_that_timed_out_generates_no_token(kit: FleetKit) -> None:
    """The trainer was told that it failed and may go back: an answer with a token of it could wait for it for ever."""
    first = await kit.server(0)
    fleet = await kit.fleet(1, weight_update_timeout_s=0.3)
    await fleet.update_weights(kit.disk(1))
    first.fail_update = "die"
    with pytest.raises(WeightSyncError, match=r"\b2\b") as error:
        await fleet.update_weights(kit.disk(2))
    assert error.value.code == "fleet.update_failed"
    assert fleet.version == 1
    again = await kit.server(0)
    await serving(fleet, "server-0")
    assert again.version == 1
    assert (await fleet.agenerate(a_request())).output_versions == [1] * 100


async def test_a_hung_replica_in_a_group_does_not_delay_the_others(kit: FleetKit) -> None:
    """The healthy one cannot complete without it: it is told to stop waiting, and the next attempt has no hole."""
    first, second = await kit.server(0), await kit.server(1)
    fleet = await kit.fleet(2, weight_update_timeout_s=1e6)
    replicas = fleet.live_replicas(1)
    first.fail_update = second.fail_update = "hang"
    attempt = asyncio.create_task(fleet.update_weights(collective(1, replicas, "g1")))
    await until(lambda: "receive" in first.acts())
    second.hang()
    with pytest.raises(WeightSyncError, match=r"\b1\b") as error:
        await asyncio.wait_for(attempt, 200)
    assert error.value.code == "fleet.update_failed"
    assert "leave" in first.acts() or not first.can_abandon  # else its engine would wait for the peer
    first.fail_update = ""
    await until(lambda: lacking(fleet, 1) == ["server-0"])
    await fleet.update_weights(collective(1, fleet.live_replicas(1), "g2"))
    assert (await fleet.agenerate(a_request())).output_versions == [1] * 100


class WrongDifferences(FakeNative):
    """The copy in its memory is no version of the trainer."""

    def error(self, status: int, message: str) -> web.Response:
        return web.json_response({"error": {"message": message}, "code": "weights.bad_delta"}, status=status)


async def test_a_replica_that_needs_longer_than_one_with_wrong_differences_stays_in_the_group(
    native_kit: FleetKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who knows that differences are wrong has received all of them, so no other waits for it."""
    monkeypatch.setattr(weight_updater, "GROUP_GRACE_S", 0.0)
    native_kit.server_class = WrongDifferences
    first, second = await native_kit.server(0), await native_kit.server(1)
    fleet = await native_kit.fleet(2)
    first.fail_update, copied, receive = "refuse", asyncio.Event(), second.receive

    async def copies() -> None:
        await receive()
        await copied.wait()

    second.receive = copies  # type: ignore[method-assign]
    update = asyncio.create_task(fleet.update_weights(collective(1, fleet.live_replicas(1), "g")))
    await until(lambda: "receive" in first.acts() and "receive" in second.acts())
    await until(lambda: "update server-0" not in {task.get_name() for task in asyncio.all_tasks()})
    copied.set()
    await update
    assert "leave" not in second.acts()
    assert (first.version, second.version) == (0, 1)
    assert lacking(fleet, 1) == ["server-0"]


class NativeOrSGLang(FakeNative):
    """The client of server-1 is that of SGLang."""

    @staticmethod
    def client(name: str, address: str, form: AnswerForm | None = None) -> Replica:
        return (FakeSGLang if name == "server-1" else FakeNative).client(name, address, form)


def receives_with(peers: asyncio.Barrier, server: FakeServer) -> None:
    """A bucket arrives once every member of the group asks for it."""
    receive = server.receive

    async def with_peers() -> None:
        await peers.wait()
        await receive()

    server.receive = with_peers  # type: ignore[method-assign]


async def test_servers_with_and_without_a_second_copy_receive_a_collective_at_the_same_time(
    native_kit: FleetKit,
) -> None:
    peers, servers = asyncio.Barrier(2), list[FakeServer]()
    for index, native_kit.server_class in enumerate((FakeNative, FakeSGLang)):
        servers.append(await native_kit.server(index))
        receives_with(peers, servers[-1])
    native_kit.server_class = NativeOrSGLang
    fleet = await native_kit.fleet(2, weight_update_timeout_s=5.0)
    await fleet.update_weights(collective(1, fleet.live_replicas(1), "g1"))
    assert [(server.version, "pause" in server.acts()) for server in servers] == [(1, False), (1, True)]
    assert [item["state"] for item in fleet.status()["replicas"]] == ["serving", "serving"]


async def test_a_replica_that_is_checked_in_a_pause_stays_paused(kit: FleetKit) -> None:
    """Its other requests would go on while weights change under them."""
    server = await kit.server(0)
    fleet = await kit.fleet(1, weight_update="keep", pause_grace_period=0.05)
    slot = fleet._replicas.slots[0]
    publication = asyncio.create_task(fleet.update_weights(kit.disk(1)))
    await until(lambda: "pause" in server.acts())
    assert slot.replica is not None
    fleet._replicas.request_failed(slot, slot.replica, "one of its requests failed")
    await publication
    first = ["load", "pause"] if kit.dialect == "native" else ["pause", "load"]
    assert server.acts()[-4:] == [*first, "commit", "resume"]


async def test_an_attached_server_serves_after_its_first_update(kit: FleetKit) -> None:
    """It says version 0, as one that began with the policy of the run would; who knows what it began with."""
    server = await kit.server(0)
    kit.registry.add("servers/0", json.dumps({"address": server.address, "pid": None}), replace=True)
    fleet = await kit.fleet(1)
    assert fleet.version == -1
    assert replica(fleet, "server-0")["weights"] == "unknown"
    assert fleet.status()["needs_weights"]
    assert lacking(fleet, 0) == ["server-0"]
    await fleet.update_weights(kit.disk(0))
    assert_whole(await fleet.agenerate(a_request()))
    assert (fleet.version, [item["name"] for item in fleet.status()["replicas"] if item["state"] == "serving"]) == (
        0,
        ["server-0"],
    )
    await server.die()  # and begins anew, with whatever weights it is started with
    await until(lambda: replica(fleet, "server-0")["state"] == "absent")
    await server.start(int(server.address.rpartition(":")[2]))
    server.version = 0
    await serving(fleet, "server-0")
    assert server.acts().count("load") == 2, "it was brought to version 0 again"
