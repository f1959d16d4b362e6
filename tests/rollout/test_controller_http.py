"""Controller, app and client over real loopback HTTP, with a fake fleet behind."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import orjson
import pytest
from aiohttp import ClientSession

from areal.api.data import ProbeTokens, WeightSpec, WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable, WeightSyncError
from areal.api.images import ImageRef
from areal.ledger.ledger import Ledger
from areal.rollout.client import RolloutClient, WeightsNeeded
from areal.rollout.control_requests import PublishRequest, parse_request
from areal.rollout.controller_process import run_serving, serve, serve_made
from areal.rollout.executor import ProducerStopped
from areal.rollout.share_codec import decode_share
from areal.system.discovery import FileRegistry
from areal.system.network import TOKEN_VARIABLE, Host, bind_socket, http_address, listen
from areal.system.run_paths import RunPaths
from tests.attack.requests import BROKEN_BODIES, REFUSED_HEADERS, send_broken, status_of
from tests.expect import raises_code
from tests.rollout import rollout_kit
from tests.rollout.http_kit import running
from tests.run_token import BEARER, TOKEN

RUN = RunPaths.of(rollout_kit.make_config())


def collective(version, group_name):
    buckets = [[WeightSpec(name="w", shape=[2], dtype="float32")]]
    where = {"master_address": "127.0.0.1", "master_port": 1, "backend": "gloo", "group_name": group_name}
    return WeightUpdate(version=version, kind="collective", replicas=["server-0"], buckets=buckets, **where)


def update(version):
    return WeightUpdate(version=version, kind="disk", path=str(RUN.weights / f"v{version}"))


async def test_a_whole_run_through_the_client(tmp_path):
    workflow, fleet = rollout_kit.ScriptedWorkflow(), rollout_kit.FakeFleet()
    controller = rollout_kit.make_controller(
        Ledger.open(tmp_path),
        workflow=workflow,
        fleet=fleet,
        total_steps=3,
        eval_sets={"": [{"index": 2}, {"index": 4}]},
        eval_workflows={"greedy": workflow},
    )

    def train(address):
        client = RolloutClient(address, token=TOKEN)
        client.attach(rank=0, world_size=1, dp_rank=0, dp_size=1, step=0, version=0)
        result = client.evaluate(0, "greedy")
        assert (result["reward"], result["num"], result["failed"]) == (3.0, 2.0, 0.0)
        assert client.live_replicas(1) == ["server-0"]
        assert client.probe_tokens(1) is None
        fleet.probe = ProbeTokens(prompt_ids=[1, 2], answer_ids=[3], images=[ImageRef("0a" * 32, (1, 4, 6))])
        assert client.probe_tokens(1) == fleet.probe
        for step in range(3):
            share = client.next_batch(step)
            assert (share.step, share.version) == (step, step)
            assert len(share.table.lengths) == 4
            assert share.table.token_ids.dtype == share.table.output_versions.dtype == np.int32
            assert share.stats["reward"] == pytest.approx(float(share.table.rewards.mean()))
            client.publish(update(step + 1))
            client.consumed(step, step + 1, f"{step:08x}")
        client.committed(3, RUN.recover / "step-000003")
        with pytest.raises(RequestError) as error:
            client.next_batch(3)
        assert error.value.code == "rollout.past_the_end", "the code crosses HTTP"
        status = client.status()
        client.finish(3)
        return status

    async with running(controller) as address:
        status = await asyncio.to_thread(train, address)
        await controller.ended()
    assert (status["step"], status["version"], status["consumed"]) == (3, 3, 12)
    assert (status["running"], status["waiting"]) == (0, 0)
    assert status["staleness_max"] <= 1
    assert status["gate_closed_because"] == "the run needs no more than its 12 accepted and 0 running episodes"


async def test_reward_calls_that_bound_the_run_are_named(tmp_path):
    class Workflow(rollout_kit.ScriptedWorkflow):
        def waits_for(self):
            return "9 reward calls wait"

    controller = rollout_kit.make_controller(Ledger.open(tmp_path), workflow=Workflow())
    async with running(controller):
        assert controller.status()["rewards"] == "9 reward calls wait"
        assert controller.waiting_for().endswith("; 9 reward calls wait")


async def test_a_repeated_request_gets_the_same_bytes_also_after_a_restart(tmp_path):
    body = {"run_id": 0, "step": 0, "dp_rank": 1, "dp_size": 2}
    blobs = []
    for start in range(2):
        controller = rollout_kit.make_controller(Ledger.open(tmp_path), config=rollout_kit.make_config(dp_size=2))
        async with running(controller) as address, ClientSession(headers=BEARER) as session:
            if start == 0:
                attach = {"run_id": 0, "rank": 0, "world_size": 2, "dp_size": 2, "step": 0, "version": 0}
                assert (await session.post(address + "/attach", json=attach)).status == 200
            for _ in range(2):
                answer = await session.post(address + "/batch", json=body)
                assert answer.status == 200
                blobs.append(await answer.read())
    assert len(set(blobs)) == 1
    assert list(decode_share(blobs[0]).group_index) != []


async def test_ranks_of_one_data_parallel_rank_get_the_same_share(tmp_path):
    """Two data-parallel ranks of two ranks each: every rank asks, at its own time."""
    controller = rollout_kit.make_controller(Ledger.open(tmp_path))
    controller.shape = dataclasses.replace(controller.shape, world_size=4, dp_size=2)

    def ask(address: str, rank: int):
        client = RolloutClient(address, token=TOKEN)
        client.attach(rank=rank, world_size=4, dp_rank=rank // 2, dp_size=2, step=0, version=0)
        return client.next_batch(0)

    async with running(controller) as address:
        first, second, third = await asyncio.gather(*[asyncio.to_thread(ask, address, rank) for rank in (0, 2, 3)])
        late = await asyncio.to_thread(ask, address, 1)
    groups = [share.group_index.tolist() for share in (first, late, second, third)]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert first.table.token_ids.tolist() == late.table.token_ids.tolist()
    assert second.table.token_ids.tolist() == third.table.token_ids.tolist()
    assert not set(groups[0]) & set(groups[2])


async def test_shares_of_all_ranks_make_the_batch(tmp_path):
    sizes = {index: 1 + index % 7 for index in range(40)}
    workflow = rollout_kit.ScriptedWorkflow(
        lambda index: rollout_kit.Script(num_tokens=sizes[index], num_trajectories=3)
    )
    ledger = Ledger.open(tmp_path)
    controller = rollout_kit.make_controller(ledger, workflow=workflow, config=rollout_kit.make_config(batch_size=10))
    async with running(controller):
        await controller.attach(rank=0, world_size=4, dp_size=4, step=0, version=0)
        blobs = [await rollout_kit.answer(controller, 0, rank, 4) for rank in range(4)]
    shares = [decode_share(blob) for blob in blobs]
    groups = [set(share.group_index.tolist()) for share in shares]
    assert set.union(*groups) == set(range(10))
    assert sum(len(group) for group in groups) == 10, "a group lies on one rank"
    loads = [len(share.table.token_ids) for share in shares]
    assert max(loads) - min(loads) <= 3 * 8, "balanced within one group"
    assert all(share.stats == shares[0].stats for share in shares)
    for share in shares:
        assert share.table.lengths.sum() == len(share.table.token_ids) == len(share.table.loss_mask)
        assert share.group_index.tolist() == sorted(share.group_index.tolist())


async def test_not_ready_is_204_and_the_client_repeats_the_call(tmp_path):
    gate = asyncio.Event()

    class Workflow(rollout_kit.ScriptedWorkflow):
        async def arun_episode(self, engine, data):
            await gate.wait()
            return await super().arun_episode(engine, data)

    controller = rollout_kit.make_controller(Ledger.open(tmp_path), workflow=Workflow())
    async with running(controller, poll_s=0.01) as address, ClientSession(headers=BEARER) as session:
        await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
        answer = await session.post(address + "/batch", json={"run_id": 0, "step": 0, "dp_rank": 0, "dp_size": 1})
        assert (answer.status, await answer.read()) == (204, b"")
        assert "batch 0: 0 of 4 episodes accepted, 8 running" in controller.waiting_for()
        waiting = asyncio.create_task(asyncio.to_thread(RolloutClient(address, token=TOKEN).next_batch, 0))
        gate.set()
        assert (await waiting).step == 0


async def test_the_token_is_required(tmp_path):
    controller = rollout_kit.make_controller(Ledger.open(tmp_path))
    async with running(controller, token="secret") as address:
        with raises_code("request.unauthorized"):
            await asyncio.to_thread(RolloutClient(address, token=TOKEN).status)
        status = await asyncio.to_thread(RolloutClient(address, token="secret").status)
        assert status["waiting_for"] == "a trainer to attach"


@pytest.mark.parametrize(("headers", "status"), REFUSED_HEADERS)
async def test_requests_without_token_of_web_pages_or_without_json_are_refused(tmp_path, headers, status):
    controller = rollout_kit.make_controller(Ledger.open(tmp_path))
    async with running(controller) as address:
        assert await asyncio.to_thread(status_of, address, "/finish", headers) == status
        assert controller.status()["waiting_for"] == "a trainer to attach"


@pytest.mark.parametrize(("rest", "status"), BROKEN_BODIES)
async def test_a_broken_body_is_refused_without_a_traceback(tmp_path, caplog, rest, status):
    controller = rollout_kit.make_controller(Ledger.open(tmp_path))
    async with running(controller) as address:
        result = await send_broken(address, "/finish", rest, is_cut=not status)
        assert status in result
        assert b" 500 " not in result
        assert controller.status()["waiting_for"] == "a trainer to attach"
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("outcome", ["fail", "reject"])
async def test_a_run_whose_episodes_all_fail_stops_with_the_reason(tmp_path, outcome):
    workflow = rollout_kit.ScriptedWorkflow(lambda index: rollout_kit.Script(outcome=outcome, token_s=0.0))
    controller = rollout_kit.make_controller(Ledger.open(tmp_path), workflow=workflow)
    async with running(controller) as address:
        client = RolloutClient(address, token=TOKEN)
        await asyncio.to_thread(client.attach, rank=0, world_size=1, dp_rank=0, dp_size=1, step=0, version=0)
        cause = {"fail": r" 3 .*ValueError: row \d+ is broken", "reject": " 400 "}[outcome]
        code = {"fail": "rollout.first_failed", "reject": "rollout.all_rejected"}[outcome]
        with pytest.raises(RequestError, match=cause) as received:
            await asyncio.to_thread(client.next_batch, 0)
        with pytest.raises(ProducerStopped, match=cause) as stopped:
            await controller.ended()
        assert (received.value.code, stopped.value.code) == (code, code)


async def test_a_failed_publication_is_an_error_and_may_be_tried_again(tmp_path):
    class Fleet(rollout_kit.FakeFleet):
        async def update_weights(self, update):
            if not self.updates:
                self.updates.append(update)
                raise WeightSyncError("no replica took it", code="weights.none")
            await super().update_weights(update)

    fleet = Fleet()
    controller = rollout_kit.make_controller(Ledger.open(tmp_path), fleet=fleet)
    async with running(controller) as address:
        client = RolloutClient(address, token=TOKEN)
        with raises_code("weights.none", "no replica took it"):
            await asyncio.to_thread(client.publish, update(1))
        await asyncio.to_thread(client.publish, update(1))
        assert fleet.version == 1
        await asyncio.to_thread(client.publish, update(1))
        assert len(fleet.updates) == 2, "a repeated publication is not done again"


async def test_a_publication_that_fails_after_its_trainer_died_is_logged(tmp_path, caplog):
    died = asyncio.Event()

    class Fleet(rollout_kit.FakeFleet):
        async def update_weights(self, update):
            if update.version == 2:
                await died.wait()
                raise WeightSyncError("no replica took it", code="weights.none")
            await super().update_weights(update)

    controller = rollout_kit.make_controller(Ledger.open(tmp_path), fleet=Fleet())
    async with running(controller):
        assert not await controller.weights.publish(update(2), timeout_s=0.01)
        died.set()
        assert not await controller.weights.publish(update(1), timeout_s=60.0)  # repeated: checked again
        assert await controller.weights.publish(update(1), timeout_s=60.0)
    assert "version 2 failed: no replica took it" in caplog.text


async def test_the_client_finds_a_controller_that_moved(tmp_path):
    controller = rollout_kit.make_controller(Ledger.open(tmp_path))
    with bind_socket() as dead:
        async with running(controller) as address:
            addresses = iter([http_address(dead), address, address])
            status = await asyncio.to_thread(RolloutClient(lambda: next(addresses), token=TOKEN).status)
            assert status["step"] == 0
        unreachable = RolloutClient(http_address(dead), token=TOKEN, reconnect_s=0.0)
        with raises_code("rollout.controller_unreachable", "7"):
            await asyncio.to_thread(unreachable.next_batch, 7)


async def test_serving_registers_and_sigterm_closes_cleanly(tmp_path):
    registry = FileRegistry(tmp_path / "names")
    controller = rollout_kit.make_controller(
        Ledger.open(tmp_path / "ledger"),
        workflow=rollout_kit.ScriptedWorkflow(lambda index: rollout_kit.Script(token_s=3600.0)),
    )
    serving = asyncio.create_task(serve(controller, listen(Host(), TOKEN), registry, host=Host(), token=TOKEN))
    await asyncio.to_thread(registry.wait, "ready/controller", 200.0)
    assert orjson.loads(registry.get("controller") or "")["pid"] == os.getpid()
    client = RolloutClient.from_registry(registry, rollout_kit.make_config().rollout)
    await asyncio.to_thread(client.attach, rank=0, world_size=1, dp_rank=0, dp_size=1, step=0, version=0)
    assert (await asyncio.to_thread(client.status))["running"] == 8
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(serving, 200.0) == signal.SIGTERM
    assert len(Ledger.open(tmp_path / "ledger").state.running) == 8, "a later start runs them again"


def test_a_process_whose_controller_was_stopped_ends_by_the_signal():
    """With exit code 0 the launcher would wait a minute for the end of the trainers."""
    script = """
import areal.rollout.controller_process as process, signal
async def stopped(*_):
    return signal.SIGTERM
process.serve_made = stopped
process.run_serving(None, None, None)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGTERM


async def test_a_controller_process_requires_the_token_of_its_environment(tmp_path, monkeypatch):
    registry, everywhere = FileRegistry(tmp_path / "names"), Host(bind="0.0.0.0", advertise="127.0.0.2")
    controller = rollout_kit.make_controller(Ledger.open(tmp_path / "ledger"))
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    for host in (everywhere, Host()):
        with raises_code("launch.token_missing"):
            await asyncio.to_thread(run_serving, lambda: controller, host, registry)

    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    serving = asyncio.create_task(serve_made(lambda: controller, everywhere, registry))
    address = orjson.loads(await asyncio.to_thread(registry.wait, "controller", 200.0))["address"]
    assert address.startswith("http://127.0.0.2:")
    async with ClientSession() as session:
        for path in ("/health", "/status"):
            assert (await session.get(address + path)).status == 401
            assert (await session.get(address + path, headers={"Authorization": "Bearer secret"})).status == 200
    client = RolloutClient.from_registry(registry, rollout_kit.make_config().rollout)
    assert (await asyncio.to_thread(client.status))["step"] == 0
    controller.finish()
    assert await asyncio.wait_for(serving, 200.0) is None


async def test_serving_ends_when_the_fleet_never_gets_healthy(tmp_path):
    class Fleet(rollout_kit.FakeFleet):
        async def start(self):
            raise ServerUnavailable("server-1 did not become healthy within 120 s")

    controller = rollout_kit.make_controller(Ledger.open(tmp_path / "ledger"), fleet=Fleet())
    with pytest.raises(ServerUnavailable, match="server-1"):
        await serve(controller, listen(Host(), TOKEN), FileRegistry(tmp_path / "names"), host=Host(), token=TOKEN)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ledger-writer")]


def test_a_weight_update_is_unchanged_by_encoding():
    sent = WeightUpdate(
        version=3,
        kind="collective",
        master_address="127.0.0.1",
        master_port=4711,
        backend="gloo",
        buckets=[[WeightSpec(name="w", shape=[2, 3], dtype="bfloat16")]],
        group_name="g1",
        replicas=["server-0"],
    )
    request = PublishRequest(run_id=2, update=sent)
    assert parse_request(PublishRequest, orjson.dumps(request)) == request


async def test_the_controller_requests_weights_that_only_the_trainer_has(tmp_path):
    """All servers died under collective publication: the batch waits for the trainer, which waits for the batch."""

    class Fleet(rollout_kit.FakeFleet):
        def status(self):
            return {"needs_weights": not self.updates}

        async def agenerate(self, request):
            while not self.updates:
                await asyncio.sleep(0.001)
            return await super().agenerate(request)

    controller = rollout_kit.make_controller(Ledger.open(tmp_path / "ledger"), fleet=Fleet(), total_steps=2)
    async with running(controller, poll_s=0.05) as address:
        client = RolloutClient(address, token=TOKEN)
        await asyncio.to_thread(client.attach, rank=0, world_size=1, dp_rank=0, dp_size=1, step=0, version=0)
        with pytest.raises(WeightsNeeded, match=r"\b0\b"):
            await asyncio.to_thread(client.next_batch, 0)
        again = collective(0, "again")
        await asyncio.to_thread(client.publish, again)
        assert (await asyncio.to_thread(client.next_batch, 0)).step == 0
