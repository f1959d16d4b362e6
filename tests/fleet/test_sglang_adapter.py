"""The SGLang adapter against a fake that speaks as the real server was recorded."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from areal.api.data import GenerationRequest, WeightSpec, WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.replica import AnswerForm
from areal.fleet.server_host import gateway
from areal.fleet.sglang import PartReader, ServerFacts, SGLangReplica, generate_body
from areal.system.folder_delta import write_delta
from areal.system.folders import DELTA_FILE, FolderServer
from areal.system.network import Host
from tests.fleet.fake_server import FleetKit, until
from tests.fleet.fake_sglang import RECORDING, FakeSGLang
from tests.fleet.generation_parts import Chunks
from tests.fleet.generation_parts import a_part as kit_part
from tests.run_token import TOKEN
from tests.system.test_folder_delta import changes

PROMPT = [5, 9, 11, 30]
FACTS = ServerFacts(
    has_update_sessions=True, context_length=4096, is_deterministic=False, has_step_in_flight=True, first_folder=""
)


@pytest.fixture
async def server() -> AsyncIterator[FakeSGLang]:
    made = FakeSGLang()
    await made.start()
    yield made
    await made.die()


@pytest.fixture
async def replica(server: FakeSGLang) -> AsyncIterator[SGLangReplica]:
    made = SGLangReplica("server-0", server.address)
    yield made
    await made.close()


def a_part(num_tokens: int = 20, *, prior: int = 0, **changes: Any) -> GenerationRequest:
    ids = PROMPT + [1000 + len(PROMPT) + index for index in range(prior)]
    return kit_part(num_tokens, input_ids=ids, num_prior_output_tokens=prior, **({"seed": None} | changes))


async def chunks_of(replica: SGLangReplica, part: GenerationRequest, interval: int = 8) -> Chunks:
    return await Chunks().collect(replica, part, interval)


def update(version: int, group: str = "g1", num_buckets: int = 3) -> WeightUpdate:
    buckets = [[WeightSpec(name=f"w{index}", dtype="float32", shape=[2])] for index in range(num_buckets)]
    return WeightUpdate(
        version=version,
        kind="collective",
        master_address="127.0.0.1",
        master_port=1,
        backend="gloo",
        buckets=buckets,
        group_name=group,
        replicas=["server-0"],
    )


async def test_weights_over_http_are_copied_by_the_gateway_and_loaded_from_the_copy(
    server: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = FolderServer(Host(), TOKEN)
    url = source.offer(Path(FleetKit(tmp_path, FakeSGLang).disk(4).path))
    async with gateway(Host(), TOKEN, server.address) as address:
        replica = SGLangReplica("server-0", address, TOKEN)
        await replica.update_weights(WeightUpdate(version=4, kind="http", path=url), rank=0, mode="abort")
        (copied,) = tmp_path.glob("areal-*/*/v000004-*/model.safetensors")
        assert server.version == 4
        await replica.prepare_weights(WeightUpdate(version=4, kind="http", path=url), rank=0)
        old, new = (Path(FleetKit(tmp_path, FakeSGLang).disk(version).path) for version in (4, 5))
        (tmp_path / "delta").mkdir()
        size, before = write_delta(tmp_path / "delta" / DELTA_FILE, changes(old, new)), replica.pulled_bytes
        deltas = {url.rpartition("/")[2]: source.offer(tmp_path / "delta")}
        update = WeightUpdate(version=5, kind="http", path=source.offer(new), deltas=deltas)
        await replica.update_weights(update, rank=0, mode="abort")
        assert (server.version, replica.pulled_bytes - before, replica.failed_deltas) == (5, size, 0)
        (made,) = tmp_path.glob("areal-*/*/v000005-*/model.safetensors")
        assert made.read_bytes() == (new / "model.safetensors").read_bytes() != copied.read_bytes()
        with pytest.raises(RequestError) as error:
            await replica.prepare_weights(WeightUpdate(version=5, kind="http", path=url[:-1]), rank=0)
        assert error.value.code == "weights.unknown_trainer"
        await replica.close()
    assert not copied.exists()
    source.close()


# The fake against the recording


def shape(value: Any) -> Any:
    """What is the same in two answers that say different things: keys, and what kind of thing is where."""
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


@pytest.mark.parametrize(
    ("name", "method", "path"),
    [
        ("server_info", "GET", "/server_info"),
        ("model_info_numbered", "GET", "/model_info"),
        ("loads", "GET", "/v1/loads"),
        ("vocabulary", "POST", "/generate"),
        ("generate", "POST", "/generate"),
        ("generate_unknown_adapter", "POST", "/generate"),
        ("detokenize", "POST", "/detokenize"),
        ("abort_request", "POST", "/abort_request"),
        ("pause_abort", "POST", "/pause_generation"),
        ("pause_retract", "POST", "/pause_generation"),
        ("continue", "POST", "/continue_generation"),
        ("join", "POST", "/init_weights_update_group"),
        ("begin", "POST", "/begin_weight_update"),
        ("receive", "POST", "/update_weights_from_distributed"),
        ("end", "POST", "/end_weight_update"),
        ("destroy", "POST", "/destroy_weights_update_group"),
        ("load_adapter", "POST", "/load_lora_adapter"),
        ("unload_adapter_again", "POST", "/unload_lora_adapter"),
    ],
)
async def test_the_fake_answers_as_the_real_server_did(server: FakeSGLang, name: str, method: str, path: str) -> None:
    entry = RECORDING[name]
    assert (entry["request"]["method"], entry["request"]["path"]) == (method, path)
    body = entry["request"]["body"]
    async with aiohttp.ClientSession() as session, session.request(method, server.address + path, json=body) as answer:
        assert answer.status == entry["status"]
        if entry["content_type"] == "application/json":
            assert shape(await answer.json()) == shape(entry["body"])


# Generation


@pytest.mark.parametrize("incremental", [True, False])
async def test_incremental_and_cumulative_streams_bring_the_same_tokens(
    server: FakeSGLang, replica: SGLangReplica, incremental: bool
) -> None:
    server.settings["incremental_streaming_output"] = incremental
    chunks = await chunks_of(replica, a_part(20), 8)
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 8, 8, 3]
    assert chunks.ids == [1004 + index for index in range(20)]
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].part_versions == [0] * 20
    [plain] = await chunks_of(replica, a_part(20), 20)
    assert plain.token_ids == chunks.ids


async def test_versions_come_from_the_server_or_else_are_the_last_known(
    server: FakeSGLang, replica: SGLangReplica, tmp_path: Path
) -> None:
    server.tells_spans = False
    server.version = 3
    await replica.info()
    [before] = await chunks_of(replica, a_part(5))
    kit = FleetKit(tmp_path, FakeSGLang)
    server.settings["model_path"] = "org/model"
    await replica.update_weights(kit.disk(4), rank=0, mode="abort")
    [after] = await chunks_of(replica, a_part(5))
    assert (before.versions, before.part_versions) == ([3] * 5, None)
    assert (after.versions, after.part_versions) == ([4] * 5, None)


async def test_tokens_of_a_stream_never_get_a_newer_version_than_their_own(
    server: FakeSGLang, replica: SGLangReplica
) -> None:
    server.hold_at = 6
    chunks = Chunks()
    running = asyncio.create_task(chunks.collect(replica, a_part(20), 4))
    await until(lambda: server.num_held == 1)
    await replica.pause("retract")
    await replica.update_weights(update(1), rank=1, mode="abort")
    await replica.resume()
    server.release()
    await running
    tracked = [version for chunk in chunks[:-1] for version in chunk.versions]
    assert chunks[-1].part_versions == [0] * 6 + [1] * 14
    assert all(known <= true for known, true in zip(tracked, chunks[-1].part_versions, strict=False))
    assert tracked[-1] == 1  # all that a server without spans would tell


def an_answer(num_ids: int, entries: list[int], total: int, reason: dict[str, Any] | None) -> dict[str, Any]:
    logprobs = [[-1.0, token, None] for token in entries]
    meta = {"finish_reason": reason, "completion_tokens": total, "output_token_logprobs": logprobs}
    return {"output_ids": entries[-num_ids:] if num_ids else [], "meta_info": meta}


@pytest.mark.parametrize("waiting", [[], [13, 14]], ids=["", "with events not yet sent"])
def test_a_token_that_an_abort_in_the_queue_repeats_counts_once(waiting: list[int]) -> None:
    reader = PartReader(0)
    reader.read(an_answer(3, [10, 11, 12], 3, None), 0)
    everything = [10, 11, 12, *waiting]
    last = reader.read(
        an_answer(1 + len(waiting), waiting + everything, len(everything), {"type": "abort", "message": "gone"}), 0
    )
    assert last.token_ids == waiting
    assert last.finish_reason == "abort"


async def test_an_aborted_request_keeps_its_tokens_and_a_queued_one_has_none(
    server: FakeSGLang, replica: SGLangReplica
) -> None:
    server.hold_at = 10
    running = asyncio.create_task(chunks_of(replica, a_part(20), 4))
    await until(lambda: server.num_held == 1)
    await replica.pause("abort")
    chunks = await running
    assert (len(chunks.ids), chunks[-1].finish_reason) == (10, "abort")
    server.empty_aborts = True
    [queued] = await chunks_of(replica, a_part(5))
    assert (queued.token_ids, queued.finish_reason, queued.part_versions) == ([], "abort", None)


async def test_a_pause_waits_until_running_requests_have_returned(server: FakeSGLang, replica: SGLangReplica) -> None:
    server.hold_at = 3
    running = asyncio.create_task(chunks_of(replica, a_part(20), 4))
    await until(lambda: server.num_held == 1)
    pausing = asyncio.create_task(replica.pause("abort"))
    await until(lambda: "/pause_generation" in server.paths)
    assert running.done() or server.num_running == 0
    await asyncio.gather(pausing, running)
    assert server.paths[-2:] == ["/abort_request", "/pause_generation"]


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"greedy": True}, {"top_k": 1, "top_p": 1.0, "temperature": 1.0}),
        ({"greedy": True, "temperature": 0.5}, {"top_k": -1, "top_p": 1e-9, "temperature": 0.5}),
        ({"top_k": 1, "temperature": 0.5}, {"top_k": -1, "top_p": 1e-9, "temperature": 0.5}),
        ({"top_p": 0.9, "temperature": 0.5}, {"top_k": -1, "top_p": 0.9, "temperature": 0.5}),
    ],
    ids=str,
)
def test_greedy_answers_keep_the_temperature_of_their_log_probabilities(
    changes: dict[str, Any], asked: dict[str, Any]
) -> None:
    sampling = generate_body(a_part(**changes), AnswerForm(), FACTS)["sampling_params"]
    assert {name: sampling[name] for name in asked} == asked


async def test_unsupported_settings_are_not_sent(server: FakeSGLang, replica: SGLangReplica) -> None:
    with pytest.raises(RequestError, match=r"gconfig.frequency_penalty") as error:
        await chunks_of(replica, a_part(frequency_penalty=1.0))
    assert error.value.code == "server.unsupported_sampling"
    with pytest.raises(RequestError, match="enable_deterministic_inference") as error:
        await chunks_of(replica, a_part(seed=3))
    assert error.value.code == "server.unsupported_sampling"
    assert server.requests == []


def test_requests_to_a_deterministic_server_differ_in_their_seeds() -> None:
    facts = dataclasses.replace(FACTS, is_deterministic=True)
    parts = [a_part(seed=3), a_part(), dataclasses.replace(a_part(), request_id="r-002")]
    seeds = [generate_body(part, AnswerForm(), facts)["sampling_params"]["sampling_seed"] for part in parts]
    assert seeds[0] == 3
    assert len(set(seeds)) == 3


async def test_a_refusal_inside_a_stream_is_a_request_error(server: FakeSGLang, replica: SGLangReplica) -> None:
    server.error_in_stream = True
    with pytest.raises(RequestError) as error:
        await chunks_of(replica, a_part(20), 4)
    assert error.value.code == "server.request_refused"


@pytest.mark.parametrize("interval", [2, 8, 100])
@pytest.mark.parametrize(("stop", "num_tokens"), [("ghi", 1), ("hijk", 3), ("zzz", 20)])
async def test_a_stop_string_across_an_interruption_ends_the_answer(
    server: FakeSGLang, replica: SGLangReplica, interval: int, stop: str, num_tokens: int
) -> None:
    """Token 1004 is the letter e; four of them, efgh, were made before."""
    chunks = await chunks_of(replica, a_part(20, prior=4, stop=[stop]), interval)
    assert chunks.ids == [1008 + index for index in range(num_tokens)]
    assert chunks[-1].finish_reason == ("length" if num_tokens == 20 else "stop")
    assert chunks.versions == [0] * num_tokens


# Control


async def test_info_contains_version_vocabulary_and_context(server: FakeSGLang, replica: SGLangReplica) -> None:
    server.version = 7
    server.pause("abort")  # by somebody who is gone
    info = await asyncio.wait_for(replica.info(), 60)
    assert (info.version, info.vocab_size, info.context_length, info.weights_whole) == (7, 5000, 4096, None)
    server.model_settings = {"weight_version": "default"}
    assert (await replica.info()).version == 0
    server.model_settings = {"weight_version": "default", "load_format": "dummy"}
    assert (await replica.info()).version == -1
    assert server.paths.count("/continue_generation") == 1


@pytest.mark.parametrize(("version", "has_sessions"), [("0.5.20", False), ("0.5.21.post1", True), ("0.5.23", True)])
async def test_a_collective_update_is_a_session_from_0_5_21_on(
    server: FakeSGLang, replica: SGLangReplica, version: str, has_sessions: bool
) -> None:
    server.settings["version"] = version
    await replica.update_weights(update(1), rank=1, mode="abort")
    receives = ["/update_weights_from_distributed"] * 3
    around = (["/begin_weight_update"], ["/end_weight_update"]) if has_sessions else ([], [])
    assert server.paths == ["/init_weights_update_group", *around[0], *receives, *around[1]]
    buckets = [body for body in server.bodies if "names" in body]
    assert [body["flush_cache"] for body in buckets] == [False, False, True]
    assert [body["weight_version"] == "1" for body in buckets] == [False, False, True]
    assert server.version == 1
    await replica.update_weights(update(1), rank=1, mode="in_place")
    assert not any(body["flush_cache"] for body in [body for body in server.bodies if "names" in body][3:])
    server.paths.clear()
    await replica.update_weights(update(2, group="g2"), rank=1, mode="abort")
    assert server.paths[:2] == ["/destroy_weights_update_group", "/init_weights_update_group"]


async def test_a_session_left_open_is_closed_before_the_next(server: FakeSGLang, replica: SGLangReplica) -> None:
    server.fail_update = "midway"
    with pytest.raises(RequestError):
        await replica.update_weights(update(1), rank=1, mode="abort")
    server.fail_update = ""
    server.paths.clear()
    await replica.update_weights(update(2), rank=1, mode="abort")
    assert server.paths[:3] == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]
    assert server.version == 2
    assert not server.has_session


async def test_a_bad_folder_is_refused_and_a_failed_disk_update_is_a_failure(
    server: FakeSGLang, replica: SGLangReplica, tmp_path: Path
) -> None:
    server.settings["model_path"] = "org/model"
    good = FleetKit(tmp_path, FakeSGLang).disk(1)
    server.fail_update = "midway"
    with pytest.raises(ServerUnavailable) as error:
        await replica.update_weights(good, rank=0, mode="abort")
    assert error.value.code == "server.request_failed"
    num_asked = len(server.paths)
    (tmp_path / "bad").mkdir()
    with pytest.raises(RequestError, match="bad") as error:
        await replica.update_weights(dataclasses.replace(good, path=str(tmp_path / "bad")), rank=0, mode="abort")
    assert error.value.code == "weights.bad_folder"
    assert len(server.paths) == num_asked


async def test_a_health_check_during_an_update_asks_only_the_http_process(
    server: FakeSGLang, replica: SGLangReplica
) -> None:
    await replica.info()
    server.fail_update = "hang"
    updating = asyncio.create_task(replica.update_weights(update(1), rank=1, mode="abort"))
    await until(lambda: "receive" in server.acts())
    server.settings["internal_states"] = []  # as if the process that computes were not there
    await replica.info()
    updating.cancel()
    await asyncio.gather(updating, return_exceptions=True)
    with pytest.raises(ServerUnavailable):
        await replica.info()


async def test_load_adapters_and_memory(server: FakeSGLang, replica: SGLangReplica, tmp_path: Path) -> None:
    load = await replica.load()
    assert (load.running, load.queued, load.cache_usage, load.generated_tokens) == (0, 0, 0.25, 0)
    await chunks_of(replica, a_part(5))
    assert (await replica.load()).generated_tokens == 5
    await replica.load_adapter("policy-1", str(tmp_path))
    await chunks_of(replica, dataclasses.replace(a_part(5), adapter="policy-1"))
    assert server.requests[-1].body["lora_path"] == "policy-1"
    with pytest.raises(RequestError):
        await replica.load_adapter("policy-1", str(tmp_path))
    await replica.unload_adapter("policy-1")
    with pytest.raises(RequestError) as error:
        await chunks_of(replica, dataclasses.replace(a_part(5), adapter="policy-1"))
    assert error.value.code == "server.request_refused"
