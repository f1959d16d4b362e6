"""Code that blocks the loop of the controller: no replica fails because of it. On a virtual clock."""

import asyncio
import json
from collections import Counter

import pytest

from areal.api.config.rollout import GenerationHyperparameters, InferenceEngineConfig
from areal.api.data import GenerationRequest, WeightUpdate
from areal.fleet.fleet import Fleet
from areal.fleet.replica import PartChunk, Replica, ReplicaInfo, ReplicaLoad
from areal.fleet.replica_set import RELEASED_PER_TURN, ReplicaSet, Slot
from areal.fleet.server_client import ServerClient
from areal.system.discovery import FileRegistry
from areal.system.network import bind_socket, http_address
from tests.rollout.rollout_kit import VirtualLoop

BLOCKED_S = 10_000.0
"""Longer than each limit of the fleet."""
CONFIG = InferenceEngineConfig(health_check_interval_s=5.0, weight_update_timeout_s=100.0, request_timeout=100.0)


class LoopWithoutThreads(VirtualLoop):
    def run_in_executor(self, executor, func, *args):
        done = self.create_future()
        done.set_result(func(*args))
        return done


def run(main):
    with asyncio.Runner(loop_factory=LoopWithoutThreads) as runner:
        return runner.run(main)


def block(seconds=BLOCKED_S):
    """As a callback that computes for `seconds`."""
    asyncio.get_running_loop()._advance(seconds)


class SlowReplica(Replica):
    """Answers each call after two seconds. During the call `blocked_in` something blocks the loop."""

    blocked_in = ""
    has_second_copy = False
    version = 0
    num_closed = 0

    async def _answer(self, call):
        loop = asyncio.get_running_loop()
        if call == self.blocked_in:
            loop.call_later(1.0, block)
        answered = loop.create_future()
        loop.call_later(2.0, answered.set_result, None)
        await answered

    async def generate(self, requests):
        await self._answer("generate")
        count = requests[0].gconfig.max_new_tokens
        yield 0, PartChunk([7] * count, [-1.0] * count, [self.version] * 4, "length")

    async def abort(self, request_id):
        raise NotImplementedError

    async def pause(self, mode):
        await self._answer("pause")

    async def resume(self):
        await self._answer("resume")

    async def prepare_weights(self, update, *, rank):
        await self._answer("prepare_weights")

    async def update_weights(self, update, *, rank, mode):
        await self._answer("update_weights")
        self.version = update.version

    async def abandon_update(self):
        await self._answer("abandon_update")

    async def info(self):
        await self._answer("info")
        return ReplicaInfo(version=self.version, vocab_size=100, context_length=100, weights_whole=True)

    async def load(self):
        await self._answer("load")
        return ReplicaLoad(running=0, queued=0, cache_usage=0.0, generated_tokens=0)

    async def close(self):
        self.num_closed += 1


REQUEST = GenerationRequest(
    request_id="r", input_ids=[1, 2], gconfig=GenerationHyperparameters(max_new_tokens=4), group_id="g"
)


@pytest.mark.parametrize("call", ["info", "prepare_weights", "pause", "update_weights", "resume", "generate"])
def test_a_replica_that_answers_in_time_keeps_its_place(tmp_path, call):
    registry, replica = FileRegistry(tmp_path), SlowReplica()
    registry.add("servers/0", json.dumps({"address": "http://fake:1", "pid": 1}))

    async def main():
        fleet = Fleet(registry, 1, CONFIG, lambda name, address, form: replica)
        await fleet.start()
        replica.blocked_in = call
        if call == "generate":
            answer = await fleet.agenerate(REQUEST)
            assert answer.output_ids == [7] * 4
        else:
            await fleet.update_weights(WeightUpdate(version=1, kind="disk", path="/weights"))
            assert fleet.version == 1
        await asyncio.sleep(2 * CONFIG.health_check_interval_s)
        (status,) = fleet.status()["replicas"]
        assert (status["state"], status["version"], status["failures"]) == ("serving", replica.version, 0)
        assert replica.num_closed == 0
        await fleet.close()

    run(main())


async def test_a_connection_that_is_made_meanwhile_counts():
    bound = bind_socket()
    bound.listen()
    address = http_address(bound)

    def main():
        async def connect():
            loop = asyncio.get_running_loop()
            client = ServerClient("server-0", address)
            loop.call_soon(block)
            ticking = asyncio.create_task(asyncio.sleep(2 * BLOCKED_S))  # a virtual loop needs a timer
            assert await client._connect("/") in client.connections
            client.close()
            ticking.cancel()

        run(connect())

    await asyncio.to_thread(main)
    bound.close()


async def test_a_turn_of_the_loop_sends_few_of_the_requests_that_waited(tmp_path):
    """Thousands wait for the end of a weight update: they are sent in their order, and the loop stays responsive."""
    replicas = ReplicaSet(FileRegistry(tmp_path), 1, CONFIG, lambda name, address: SlowReplica(), range(0))
    sent, count, turn = [], 3 * RELEASED_PER_TURN + 5, 0

    async def send(number):
        await replicas.wait_to_send(100.0)
        sent.append((turn, number))

    replicas.is_switching = True
    waiting = [asyncio.create_task(send(number)) for number in range(count)]
    await asyncio.sleep(0)
    waiting[3].cancel()
    replicas.announce()
    await asyncio.sleep(0)
    assert sent == []
    replicas.is_switching = False
    replicas.router.serving.add(Slot(0))
    replicas.announce()
    while len(sent) < count - 1:
        turn += 1
        await asyncio.sleep(0)
        replicas.announce()  # of other changes meanwhile
    by_turn = Counter(number for number, _ in sent)
    assert max(by_turn.values()) <= RELEASED_PER_TURN
    assert len(by_turn) == 4
    assert [number for _, number in sent] == [number for number in range(count) if number != 3]
    replicas.is_switching = True
    late = asyncio.create_task(replicas.wait_to_send(0.001))
    await late
    assert not replicas._may_send
