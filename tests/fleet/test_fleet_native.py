"""The fleet over real native servers with a tiny random model: exact answers, exact weights, exact versions."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from torch import nn
from transformers import DynamicCache

from areal.api.config.rollout import GenerationHyperparameters, NativeServerConfig
from areal.api.data import (
    GenerationRequest,
    GenerationResponse,
    PromptScoring,
    ScoredRow,
    WeightSpec,
    WeightUpdate,
)
from areal.api.errors import RequestError
from areal.fleet.fleet import Fleet
from areal.fleet.native import NativeReplica
from areal.inference.engine import build_engine, request_limits
from areal.inference.request_parser import seed_source
from areal.inference.server import ServerApp
from areal.system.folders import FolderPuller
from areal.system.http_guard import RequestGuard
from areal.system.network import Host, bind_socket, http_address
from areal.weights.collective import CollectiveChannel, DeltaCollectiveChannel
from areal.weights.disk import DiskChannel, DiskDeltaChannel, HttpChannel
from tests.expect import raises_code, serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FixedTrainer, FleetControl
from tests.fleet.fake_server import FleetKit, until
from tests.run_token import TOKEN

PROMPT = [5, 9, 11, 30]


def make_model(seed: int, vocab_size: int = 64) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.3,  # sharp enough that greedy choices differ between models
        eos_token_id=1,
    )
    return Qwen3ForCausalLM(config)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(folder)
    return folder


class NativeServer:
    """A native server inside the test's process; `die` resets its connections as a kill would."""

    async def start(self, folder: Path) -> NativeServer:
        native = NativeServerConfig(
            model_path=str(folder), dtype="float32", device="cpu", max_total_tokens=4096, context_length=1024
        )
        self._puller = FolderPuller(TOKEN, {})
        guard = RequestGuard(TOKEN, Host())
        app = ServerApp(model_path=str(folder), draw_seed=seed_source(1), guard=guard, puller=self._puller)
        self.engine = build_engine(
            native, folder, "cpu", deliver=app.generate.deliver, on_failure=print, detokenizer=None
        )
        app.attach(self.engine, request_limits(native, self.engine.runner, None), None)
        self._runner = web.AppRunner(app.application(), handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        bound = bind_socket()
        await web.SockSite(self._runner, bound).start()
        self.engine.start()
        self.address = http_address(bound)
        self.dead = self.is_cut_off = False
        return self

    def hold(self, num_tokens: int, *, while_true: Callable[[], bool]) -> None:
        """Make no more than so many further tokens for as long as `while_true` says; orders are taken."""
        engine, step = self.engine, self.engine.step
        limit = engine.counters.generated_tokens + num_tokens

        def hold_or_step() -> None:
            if engine.counters.generated_tokens >= limit and while_true():
                time.sleep(0.001)
            else:
                step()

        engine.step = hold_or_step  # type: ignore[method-assign]

    async def die(self) -> None:
        if self.dead:
            return
        self.dead = True
        for site in list(self._runner.sites):
            await site.stop()
        for protocol in list(self._runner.server.connections):
            if protocol.transport is not None:
                protocol.transport.abort()
        self.is_cut_off = True
        await self._runner.cleanup()
        self._puller.close()
        await asyncio.to_thread(self.engine.stop)


class NativeKit:
    """Native servers and a fleet over them."""

    def __init__(self, kit: FleetKit, folder: Path) -> None:
        self._kit = kit
        self._folder = folder
        self.servers: list[NativeServer] = []

    async def fleet(self, num_servers: int, **config: Any) -> Fleet:
        for _ in range(num_servers):
            await self.server(len(self.servers))
        return await self._kit.fleet(num_servers, **({"health_check_interval_s": 0.2} | config))

    async def server(self, index: int) -> NativeServer:
        server = await NativeServer().start(self._folder)
        self._kit.registry.add(f"servers/{index}", json.dumps({"address": server.address}), replace=True)
        self.servers.append(server)
        return server


@pytest.fixture
async def native(native_kit: FleetKit, model_folder: Path) -> AsyncIterator[NativeKit]:
    made = NativeKit(native_kit, model_folder)
    yield made
    for fleet in native_kit.fleets:
        await fleet.close()
    for server in made.servers:
        await server.die()


def a_request(name: str, num_tokens: int, **changes: Any) -> GenerationRequest:
    gconfig = GenerationHyperparameters(max_new_tokens=num_tokens, ignore_eos=True)
    gconfig = dataclasses.replace(gconfig, **{k: v for k, v in changes.items() if k not in ("seed", "group_id")})
    return GenerationRequest(
        request_id=name,
        input_ids=PROMPT,
        gconfig=gconfig,
        seed=changes.get("seed", 7),
        group_id=changes.get("group_id", ""),
    )


async def tokens_made(fleet: Fleet, num_tokens: int) -> None:
    await until(lambda: fleet.status()["generated_tokens"] >= num_tokens)


@pytest.mark.parametrize("changes", [{}, {"greedy": True}, {"frequency_penalty": 1.5}], ids=str)
async def test_an_answer_broken_by_a_death_is_the_unbroken_one(native: NativeKit, changes: dict[str, Any]) -> None:
    fleet = await native.fleet(2)
    whole = await fleet.agenerate(a_request("whole", 160, **changes))
    assert len(whole.output_ids) == 160
    start = fleet.status()["generated_tokens"]
    for server in native.servers:
        server.hold(40, while_true=lambda: not any(item.is_cut_off for item in native.servers))
    running = asyncio.create_task(fleet.agenerate(a_request("broken", 160, **changes)))
    await tokens_made(fleet, start + 10)
    busy = next(i for i, r in enumerate(fleet.status()["replicas"]) if r["running"])
    await native.servers[busy].die()
    broken = await running
    assert broken.replicas == [f"server-{busy}", f"server-{1 - busy}"]
    assert broken.output_ids == whole.output_ids
    assert broken.output_logprobs == pytest.approx(whole.output_logprobs, abs=2e-5)
    assert broken.stop_reason == "length"


async def check_scores(fleet: Fleet, model: nn.Module, version: int) -> list[GenerationResponse]:
    """What each replica generates now has the log-probabilities of `model`."""
    responses = await asyncio.gather(*(fleet.agenerate(a_request(f"c{i}", 20)) for i in range(4)))
    for response in responses:
        assert response.output_versions == [version] * 20
        ids = torch.tensor([PROMPT + response.output_ids])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0].float(), -1)
        expected = [scores[3 + i, token].item() for i, token in enumerate(response.output_ids)]
        assert response.output_logprobs == pytest.approx(expected, abs=1e-5)
    assert {name for response in responses for name in response.replicas} == {"server-0", "server-1"}
    return responses


async def test_disk_http_and_collective_bring_the_same_weights(
    native: NativeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fleet = await native.fleet(2, schedule_policy="round_robin")
    control = FleetControl(fleet)
    engine = FixedTrainer(make_model(1))
    disk = DiskChannel(engine, FakeRanks(), control, tmp_path)  # type: ignore[arg-type]
    http = HttpChannel(engine, FakeRanks(), control, host=Host(), model_folder=None)  # type: ignore[arg-type]
    collective = CollectiveChannel(  # type: ignore[arg-type]
        engine, FakeRanks(), control, bucket_bytes=4096, backend="gloo", timeout_s=200
    )
    await asyncio.to_thread(serve, disk, 1)
    over_disk = await check_scores(fleet, engine.model, 1)
    engine.model = make_model(2)
    await asyncio.to_thread(serve, collective, 2)
    await check_scores(fleet, engine.model, 2)
    engine.model = make_model(1)
    await asyncio.to_thread(serve, collective, 3)
    again = await check_scores(fleet, engine.model, 3)
    assert [r.output_ids for r in again] == [r.output_ids for r in over_disk]
    for server in native.servers:
        held = server.engine.runner.model.state_dict()
        assert all(torch.equal(held[name], value) for name, value in engine.model.state_dict().items())
    await native.servers[0].die()
    new_server = await native.server(0)
    first = fleet._replicas.slots[0]
    await until(lambda: first.address == new_server.address and first.state == "stale")
    engine.model = make_model(4)
    await asyncio.to_thread(serve, collective, 4)  # over a new group, with the new server in it
    await check_scores(fleet, engine.model, 4)
    collective.close()
    engine.model = make_model(5)
    received: list[Path] = []
    for server in native.servers:
        receive = server.engine.weights.receive_folder
        noted = lambda path, receive=receive: (received.append(path), receive(path))  # noqa: E731
        monkeypatch.setattr(server.engine.weights, "receive_folder", noted)
    await asyncio.to_thread(serve, http, 5)
    assert len(received) == 2, "once by each server"
    await check_scores(fleet, engine.model, 5)
    http.close()
    assert not [path for path in tmp_path.glob("areal-*/*") if path.name.startswith("published")]
    (tmp_path / "late").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "late"))  # a machine without a copy
    await native.servers[1].die()
    late = await native.server(1)
    second = fleet._replicas.slots[1]
    await until(lambda: second.address == late.address and second.state == "serving")  # from the other server
    await check_scores(fleet, engine.model, 5)
    assert all(torch.equal(late.engine.runner.model.state_dict()[n], v) for n, v in engine.model.state_dict().items())
    assert list(tmp_path.glob("late/areal-*/*/v000005-*"))


async def test_differences_over_a_disk_and_a_collective_bring_the_same_weights(
    native: NativeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fleet = await native.fleet(2, schedule_policy="round_robin")
    engine = FixedTrainer(make_model(1))
    common: tuple[Any, ...] = engine, FakeRanks(), FleetControl(fleet)
    disk = DiskDeltaChannel(*common, tmp_path / "shared", host=Host())
    collective = DeltaCollectiveChannel(*common, bucket_bytes=0, backend="gloo", timeout_s=200)
    shares: list[float] = []
    for version, channel in enumerate((disk, disk, collective, collective), start=1):
        with torch.no_grad():
            next(engine.model.parameters())[version] += 0.1
        await asyncio.to_thread(serve, channel, version)
        await check_scores(fleet, engine.model, version)
        for server in native.servers:
            held = server.engine.runner.model.state_dict()
            assert all(torch.equal(held[name], value) for name, value in engine.model.state_dict().items())
        shares.append(channel.metrics()["update_weights/share_of_full"].value)
    assert shares[0] == shares[2] == 1.0
    assert max(shares[1], shares[3]) < 0.1
    assert [replica["failed_deltas"] for replica in fleet.status()["replicas"]] == [0, 0]
    collective.close()


@pytest.mark.parametrize("mode", ["interrupt", "keep", "keep_cache"])
async def test_a_switch_in_mid_answer_splits_it_exactly(native: NativeKit, tmp_path: Path, mode: str) -> None:
    fleet = await native.fleet(1, weight_update=mode)
    old, new = make_model(0), make_model(1)
    channel = DiskChannel(
        FixedTrainer(new),  # type: ignore[arg-type]
        FakeRanks(),
        FleetControl(fleet),
        tmp_path,
    )
    (server,) = native.servers
    server.hold(40, while_true=lambda: server.engine.version == "0")
    running = asyncio.create_task(fleet.agenerate(a_request("r", 160)))
    await tokens_made(fleet, 10)
    await asyncio.to_thread(serve, channel, 1)
    response = await running
    split = response.output_versions.count(0)
    assert 10 <= split <= 40
    assert response.output_versions == [0] * split + [1] * (160 - split)
    ids = torch.tensor([PROMPT + response.output_ids])
    with torch.no_grad():
        logits = [model(ids).logits for model in (old, new)]
        if mode == "keep_cache":  # the last token of the old version is computed by the new one
            cache, num_old = DynamicCache(config=old.config), len(PROMPT) + split - 1
            old(ids[:, :num_old], past_key_values=cache)
            logits[1][:, num_old:] = new(ids[:, num_old:], past_key_values=cache).logits
    by_old, by_new = (torch.log_softmax(logit[0].float(), -1) for logit in logits)
    scores = [(by_old if i < split else by_new)[3 + i, token].item() for i, token in enumerate(response.output_ids)]
    assert response.output_logprobs == pytest.approx(scores, abs=2e-5)
    assert response.num_interruptions == (1 if mode == "interrupt" else 0)


@pytest.fixture
def adapter_folders(model_folder: Path, tmp_path: Path) -> list[str]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folders: list[str] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config)
        folders.append(str(tmp_path / f"adapter-{seed}"))
        model.save_pretrained(folders[-1])
    return folders


async def test_every_replica_serves_the_loaded_adapters(native: NativeKit, adapter_folders: list[str]) -> None:
    fleet = await native.fleet(2)
    await fleet.load_adapter("a-1", adapter_folders[0])
    await fleet.load_adapter("b-1", adapter_folders[1])
    with pytest.raises(RequestError) as refused:
        await fleet.load_adapter("c-1", adapter_folders[0] + "-none")
    assert refused.value.code == "adapter.not_readable"

    async def answers() -> list[list[float]]:
        asked = [dataclasses.replace(a_request(name or "base", 40), adapter=name) for name in ("", "a-1", "b-1")]
        result = await asyncio.gather(*map(fleet.agenerate, asked))
        assert [item.output_versions for item in result] == [[0] * 40] * 3
        return [list(item.output_logprobs) for item in result]

    first = await answers()
    assert len({tuple(each) for each in first}) == 3
    for server in native.servers:  # a new process gets the adapters before it serves
        await server.die()
    for index in range(2):
        await native.server(index)
    assert await answers() == first
    await fleet.unload_adapter("a-1")
    with pytest.raises(RequestError) as refused:
        await fleet.agenerate(dataclasses.replace(a_request("late", 4), adapter="a-1"))
    assert refused.value.code == "adapter.unknown"
    for server in native.servers[2:]:
        assert [group.rank for group in server.engine.runner.adapters.groups] == [16]


async def test_an_older_policy_answers_beside_the_current_one_and_after_a_kill(
    native: NativeKit, adapter_folders: list[str], model_folder: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    old, new = (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), folder).eval()
        for folder in adapter_folders
    )
    fleet = await native.fleet(2)
    with pytest.raises(RequestError) as refused:  # the servers have whole weights until an adapter is published
        await fleet.keep_policy(tmp_path / "kept")
    assert refused.value.code == "fleet.no_adapters"
    await fleet.update_weights(WeightUpdate(version=1, kind="adapter", path=adapter_folders[0]))
    kept = await fleet.keep_policy(tmp_path / "kept")
    assert kept.name.startswith("policy-v000001-")

    async def check(current: nn.Module) -> None:
        for adapter, model in (("", current), (kept.name, old)):
            asked = [dataclasses.replace(a_request(f"{adapter}{i}", 20), adapter=adapter) for i in range(4)]
            responses = await asyncio.gather(*map(fleet.agenerate, asked))
            assert {name for response in responses for name in response.replicas} == {"server-0", "server-1"}
            for response in responses:
                with torch.no_grad():
                    scores = torch.log_softmax(model(torch.tensor([PROMPT + response.output_ids])).logits[0], -1)
                expected = [scores[3 + i, token].item() for i, token in enumerate(response.output_ids)]
                assert response.output_logprobs == pytest.approx(expected, abs=2e-4)

    async with fleet.older_policy(kept):
        await check(old)
        await fleet.update_weights(WeightUpdate(version=2, kind="adapter", path=adapter_folders[1]))
        await check(new)
        for server in native.servers:
            await server.die()
        renewed = {(await native.server(index)).address for index in range(2)}
        await until(lambda: {r["address"] for r in fleet.status()["replicas"] if r["state"] == "serving"} == renewed)
        await check(new)
    newer = await fleet.keep_policy(tmp_path / "kept")
    async with fleet.older_policy(newer):  # nobody uses the older one
        assert [server.engine.runner.adapters.groups[0].rank for server in native.servers[2:]] == [16, 16]
    await fleet.update_weights(
        WeightUpdate(version=1, kind="adapter", path=adapter_folders[1])
    )  # of a trainer that recovered
    assert (await fleet.keep_policy(tmp_path / "kept")).name not in (kept.name, newer.name)


async def test_an_unload_that_a_replica_missed_is_made_up_for(native: NativeKit, adapter_folders: list[str]) -> None:
    fleet = await native.fleet(1)
    [server], [slot] = native.servers, fleet._replicas.slots
    await fleet.load_adapter("a-1", adapter_folders[0])
    connected, slot.replica = slot.replica, None
    await fleet.unload_adapter("a-1")
    slot.replica = connected
    await until(lambda: not server.engine.runner.adapters.groups)


async def test_an_answer_brings_the_scores_of_its_prompt(native: NativeKit) -> None:
    fleet = await native.fleet(1)
    scoring = PromptScoring(top_k=2, targets=[[5, -1], [6, 7]], num_draws=1)
    changes: dict[str, Any] = {"scoring": scoring, "raw_logprobs": True, "only_stops": True}
    for num_tokens in (4, 80):  # whole, and streamed
        asked = dataclasses.replace(a_request(f"r{num_tokens}", num_tokens, temperature=0.5), **changes)
        scores = (await fleet.agenerate(asked)).prompt_scores
        assert scores is not None
        assert math.isnan(scores.logprobs[0])
        assert max(scores.logprobs[1:]) < 0
        assert [len(place) for place in scores.top] == [0, 2, 2, 2]
        assert [len(place) for place in scores.draws] == [0, 1, 1, 1]
        assert [[value < 0 for value in row] for row in scores.targets] == [[True, False], [True, True]]
    assert (await fleet.agenerate(a_request("plain", 4))).prompt_scores is None


async def test_the_fleet_scores_given_tokens_with_the_version_that_is_asked_for(native: NativeKit) -> None:
    fleet = await native.fleet(1)
    answer = await fleet.agenerate(a_request("row", 12))
    row = ScoredRow(token_ids=[*PROMPT, *answer.output_ids], first=len(PROMPT))
    result = await fleet.score([row, row], version=0, top_k=100, limit_s=60.0)
    assert result is not None
    for scores in result:
        assert scores.logprobs == pytest.approx(answer.output_logprobs, abs=2e-5)
        assert [len(place) for place in scores.top] == [64] * 12  # the whole vocabulary
        assert math.exp(sum(math.log(sum(math.exp(value) for _, value in place)) for place in scores.top)) == (
            pytest.approx(1.0, abs=1e-4)
        )
    assert await fleet.score([row], version=1, top_k=0, limit_s=60.0) is None


async def test_a_row_that_servers_refuse_has_no_scores(native: NativeKit) -> None:
    fleet = await native.fleet(1)
    row = ScoredRow(token_ids=[5, 4000], first=1)
    assert await fleet.score([row], version=0, top_k=0, limit_s=60.0) is None


async def test_a_row_that_fills_the_context_has_no_score_of_its_last_token(native: NativeKit) -> None:
    fleet = await native.fleet(1)
    ids = [5 + number % 50 for number in range(1024)]
    result = await fleet.score(
        [ScoredRow(token_ids=ids, first=1020), ScoredRow(token_ids=ids[:9], first=4)],
        version=0, top_k=0, limit_s=60.0,
    )  # fmt: skip
    assert result is not None
    assert [len(scores.logprobs) for scores in result] == [3, 5]


async def test_updates_whose_differences_fail_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = NativeReplica("server-0", "http://127.0.0.1:1")

    async def refuse(path: str, body: dict[str, Any]) -> bytes:
        if path == "/init_weights_update_group":
            return b"{}"
        raise RequestError("they made other weights", code="weights.bad_delta")

    monkeypatch.setattr(replica._client, "post", refuse)
    spec = WeightSpec(name="w", dtype="bfloat16", shape=[2])
    shared = WeightUpdate(version=2, kind="http", path="file:///w/v2", deltas={"v1": "file:///w/delta_v2"})
    sent = WeightUpdate(version=2, kind="collective", group_name="g", buckets=[[spec]], published="2-x")
    for count, update in enumerate((shared, sent), start=1):
        with raises_code("weights.bad_delta"):
            await replica.prepare_weights(update, rank=1)
        assert replica.failed_deltas == count
