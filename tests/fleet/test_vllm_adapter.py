"""The client of a vLLM server: what it asks, what it makes of the answers, and what it never passes on."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from areal.api.data import WeightSpec, WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.server_host import gateway
from areal.fleet.vllm import VLLMReplica
from areal.system.folders import FolderServer
from areal.system.network import Host
from tests.fleet.fake_server import FleetKit, until
from tests.fleet.fake_vllm import RECORDING, FakeVLLM
from tests.fleet.generation_parts import FORM, PROMPT, Chunks, a_part
from tests.run_token import TOKEN


@pytest.fixture
async def server() -> AsyncIterator[FakeVLLM]:
    made = FakeVLLM()
    await made.start()
    yield made
    await made.die()


@pytest.fixture
async def replica(server: FakeVLLM) -> AsyncIterator[VLLMReplica]:
    made = VLLMReplica("server-0", server.address, form=FORM)
    yield made
    await made.close()


@pytest.fixture
async def disk(tmp_path: Path) -> Callable[[int], WeightUpdate]:
    return FleetKit(tmp_path, FakeVLLM).disk


def collective(version: int, group: str = "g1") -> WeightUpdate:
    buckets = [[WeightSpec(name=f"w{i}", shape=[2], dtype="float32")] for i in range(2)]
    return WeightUpdate(
        version=version,
        kind="collective",
        master_address="127.0.0.1",
        master_port=1,
        backend="gloo",
        buckets=buckets,
        group_name=group,
        replicas=["a", "b"],
        ranks_per_replica=2,
    )


def same_keys(made: Any, model: Any, where: str = "") -> None:
    """Objects have equal keys at every level; lists are compared by their first entries."""
    assert isinstance(made, dict) == isinstance(model, dict), where
    if isinstance(made, dict):
        assert made.keys() == model.keys(), where
        for key in made:
            same_keys(made[key], model[key], f"{where}.{key}")
    elif isinstance(made, list) and isinstance(model, list) and made and model:
        same_keys(made[0], model[0], f"{where}[0]")


@pytest.mark.parametrize(
    "name",
    [
        "generate",
        "generate_unknown_model",
        "metrics",
        "pause_abort",
        "resume",
        "pause_keep",
        "detokenize",
        "state",
        "reset_cache",
        "set_version",
        "weight_info",
        "no_such_method",
        "join",
        "start_update",
        "receive",
        "finish",
        "load_adapter_missing",
        "unload_adapter_again",
        "health",
    ],
)
async def test_the_fake_answers_as_was_recorded(server: FakeVLLM, replica: VLLMReplica, name: str) -> None:
    entry = RECORDING[name]
    request = entry["request"]
    status, answer = await replica._client.exchange(request["method"], request["path"], request["body"])
    assert status == entry["status"]
    if entry["content_type"] == "application/json":
        same_keys(orjson.loads(answer), entry["body"])


# Generation


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7])
async def test_tokens_come_with_versions_and_one_reason(
    server: FakeVLLM, replica: VLLMReplica, num_tokens: int
) -> None:
    server.version = 4
    await replica.info()
    chunks = Chunks()
    await chunks.collect(replica, a_part(num_tokens))
    assert chunks.ids == [1004 + i for i in range(num_tokens)]
    assert chunks.versions == [4] * num_tokens
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1].part_versions == [4] * num_tokens
    assert server.requests[0].stream == (num_tokens > 2)


async def test_tokens_of_an_uncertain_version_wait_for_the_end(
    server: FakeVLLM, replica: VLLMReplica, disk: Callable[[int], WeightUpdate]
) -> None:
    """A server sends tokens of before and after an update in one event, and only its last tells which is which."""
    server.hold_at = 3
    await replica.info()
    chunks = Chunks()
    running = asyncio.create_task(chunks.collect(replica, a_part(9)))
    await until(lambda: server.num_held == 1)
    await until(lambda: len(chunks.ids) == 3)
    await replica.update_weights(disk(1), rank=1, mode="abort")
    num_sure = len(chunks)
    server.release()
    await running
    assert len(chunks) == num_sure + 1
    assert chunks.versions == [0] * 3 + [1] * 6
    assert chunks[-1].part_versions == chunks.versions


async def test_a_stream_that_ends_with_an_error_fails(server: FakeVLLM, replica: VLLMReplica) -> None:
    server.error_in_stream = True
    with pytest.raises(ServerUnavailable, match="500") as error:
        await Chunks().collect(replica, a_part())
    assert error.value.code == "server.request_failed"


async def test_a_cancelled_call_ends_the_request(server: FakeVLLM, replica: VLLMReplica) -> None:
    server.hold_at = 1
    for num_tokens in (2, 9):  # in one piece, and streamed
        running = asyncio.create_task(Chunks().collect(replica, a_part(num_tokens)))
        await until(lambda: server.num_held == 1)
        running.cancel()
        await until(lambda: server.num_running == 0)


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("interval", [1, 2, 50])
async def test_a_stop_string_may_span_an_interruption(
    server: FakeVLLM, replica: VLLMReplica, cut: int, interval: int
) -> None:
    """Token 1004 is "e", and so on; the fake finds no stop string, as vLLM finds none that began before."""
    prior = [1004 + i for i in range(cut)]
    part = a_part(20, input_ids=PROMPT + prior, num_prior_output_tokens=cut, stop=["efgh"])
    chunks = await Chunks().collect(replica, part, interval)
    assert prior + chunks.ids == [1004, 1005, 1006, 1007]
    assert chunks[-1].finish_reason == "stop"
    assert chunks.versions == [0] * (4 - cut)
    await until(lambda: server.num_running == 0)  # it does not go on for nobody


async def test_without_a_stop_string_across_it_an_interruption_changes_nothing(
    server: FakeVLLM, replica: VLLMReplica
) -> None:
    part = a_part(8, input_ids=[*PROMPT, 1004, 1005], num_prior_output_tokens=2, stop=["efx"])
    chunks = Chunks()
    await chunks.collect(replica, part)
    assert chunks.ids == [1006 + i for i in range(8)]
    assert chunks[-1].finish_reason == "length"


# Weights


async def test_a_disk_update_drops_the_cache_before_its_version_counts(
    server: FakeVLLM, replica: VLLMReplica, disk: Callable[[int], WeightUpdate]
) -> None:
    await replica.update_weights(disk(1), rank=1, mode="abort")
    assert server.acts() == ["load", "commit"]
    server.fail_cache_reset = True
    with pytest.raises(ServerUnavailable) as error:
        await replica.update_weights(disk(2), rank=1, mode="abort")
    assert error.value.code == "server.request_failed"
    with pytest.raises(ServerUnavailable) as error:
        await replica.update_weights(collective(3), rank=1, mode="abort")
    assert error.value.code == "server.request_failed"
    assert server.version == -1


async def test_a_bad_folder_is_not_sent_to_the_server(server: FakeVLLM, replica: VLLMReplica, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as error:
        await replica.update_weights(
            WeightUpdate(version=1, kind="disk", path=str(tmp_path / "none")), rank=1, mode="abort"
        )
    assert error.value.code == "weights.bad_folder"
    assert server.acts() == []


async def test_a_group_is_joined_once_with_the_rank_of_the_first_worker(server: FakeVLLM, replica: VLLMReplica) -> None:
    await replica.update_weights(collective(1), rank=3, mode="abort")
    await replica.update_weights(collective(2), rank=3, mode="abort")
    assert server.acts() == ["join", *["receive"] * 2, "commit", *["receive"] * 2, "commit"]
    assert server.details("join") == [{"group_name": "g1", "rank": 3, "world_size": 5}]
    await replica.abandon_update()
    await replica.update_weights(collective(3), rank=3, mode="abort")
    assert server.acts().count("join") == 2


async def test_a_health_check_during_an_update_asks_only_whether_the_server_lives(
    server: FakeVLLM, replica: VLLMReplica
) -> None:
    before = await replica.info()
    server.fail_update = "hang"
    updating = asyncio.create_task(replica.update_weights(collective(1), rank=1, mode="abort"))
    await until(lambda: "receive" in server.acts())
    server.extension_missing = True  # the workers would not answer now
    assert await replica.info() == before
    updating.cancel()


async def test_weights_are_incomplete_after_a_failed_update_until_one_succeeds(
    server: FakeVLLM, replica: VLLMReplica
) -> None:
    server.fail_update = "midway"
    with pytest.raises(ServerUnavailable, match="areal_receive") as error:
        await replica.update_weights(collective(1), rank=1, mode="abort")
    assert error.value.code == "server.request_failed"
    assert server.version == -1
    assert (await replica.info()).weights_whole is False
    server.fail_update = ""
    await replica.update_weights(collective(2), rank=1, mode="abort")
    result = await replica.info()
    assert (result.weights_whole, result.version) == (True, 2)


async def test_an_error_names_the_extension_that_a_server_lacks(server: FakeVLLM, replica: VLLMReplica) -> None:
    server.extension_missing = True
    with pytest.raises(ServerUnavailable, match=r"areal_vllm.extension.WorkerExtension") as error:
        await replica.info()
    assert error.value.code == "server.no_extension"


# Adapters and memory


async def test_an_adapter_is_loaded_used_and_unloaded_by_name(
    server: FakeVLLM, replica: VLLMReplica, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=r"adapter_config\.json") as error:
        await replica.load_adapter("policy-1", str(tmp_path))
    assert error.value.code == "server.adapter_folder"
    (tmp_path / "adapter_config.json").write_text("{}")
    await replica.load_adapter("policy-1", str(tmp_path))
    chunks = Chunks()
    await chunks.collect(replica, a_part(adapter="policy-1"))
    assert server.requests[-1].body["model"] == "policy-1"
    with pytest.raises(RequestError) as error:
        await replica.load_adapter("policy-1", str(tmp_path))
    assert error.value.code == "server.request_refused"
    await replica.unload_adapter("policy-1")
    with pytest.raises(RequestError) as error:
        await chunks.collect(replica, a_part(adapter="policy-1"))
    assert error.value.code == "server.request_refused"
    await chunks.collect(replica, a_part())
    assert "model" not in server.requests[-1].body


async def test_weights_over_http_are_copied_by_the_gateway_and_loaded_from_the_copy(
    server: FakeVLLM, disk: Callable[[int], WeightUpdate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = FolderServer(Host(), TOKEN)
    url = source.offer(Path(disk(4).path))
    async with gateway(Host(), TOKEN, server.address) as address:
        replica = VLLMReplica("server-0", address, TOKEN)
        await replica.update_weights(WeightUpdate(version=4, kind="http", path=url), rank=0, mode="abort")
        assert server.version == 4
        source.close()
        again = VLLMReplica("server-0", address, TOKEN)  # of a controller that restarted: the copy is there
        await again.update_weights(WeightUpdate(version=4, kind="http", path=url), rank=0, mode="abort")
        for item in (replica, again):
            await item.close()
