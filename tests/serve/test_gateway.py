"""The routes over HTTP with a real trainer rank and a fleet without servers: results, keys, refusals, long waits."""

import asyncio
import contextlib
import gc
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from aiohttp import ClientSession, web

from areal.api.data import GenerationResponse, PromptScores
from areal.observe.http_log import HttpLogger
from areal.rollout.client import RolloutClient
from areal.serve import gateway as gateway_module
from areal.serve import sampling as sampling_module
from areal.serve.gateway import SAMPLES_AHEAD, Gateway, Keys, make_app
from areal.serve.sampling import AdapterPool, Sampling
from areal.serve.service import ServedModel, Service, failure
from areal.serve.tenants import MAX_AHEAD
from areal.serve.wire import PROTOBUF, FuturesBody, LoadBody, LossRequest, SampleBody, SaveBody, parsed, parsed_message
from areal.serve.worker import Executor, GatewayClient
from areal.system.network import Host, http_address, listen
from tests.run_token import TOKEN
from tests.serve.adapters import MAX_RANK, make_slots, random_data, write_model
from tests.serve.messages import decode_loss_output, decode_sample, encode_loss_request

KEYS = {"ann": "tml-ann", "bob": "tml-bob"}


def scores_of(request):
    """The likeliest tokens at each place: the token there, and as many others as were asked for."""
    if request.scoring is None:
        return None
    top = [[(token + rank, -0.5 * rank) for rank in range(request.scoring.top_k)] for token in request.input_ids]
    first = request.scoring.first
    return PromptScores(logprobs=[0.0] * len(top), top=[[]] * first + top[first:])


class FakeFleet:
    """Answers every prompt with its last token; adapters are only counted."""

    class limits:
        context_length = 64

    def __init__(self):
        self.requests, self.loaded = [], []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def agenerate(self, request):
        self.requests.append(request)
        await self.may_answer.wait()
        count = min(request.gconfig.max_new_tokens, 3)
        last = request.input_ids[-1]
        return GenerationResponse(
            request_id=request.request_id, input_ids=request.input_ids, output_ids=[last] * count,
            output_logprobs=[-0.5] * count, output_versions=[0] * count, stop_reason="length",
            prompt_scores=scores_of(request),
        )  # fmt: skip

    async def load_adapter(self, name, folder):
        assert name not in self.loaded
        self.loaded.append(name)

    async def unload_adapter(self, name):
        self.loaded.remove(name)


class Api:
    """Requests with a key."""

    def __init__(self, session, address, gateway, key="tml-ann"):
        self._session, self._address, self.gateway, self.key = session, address, gateway, key

    async def call(self, path, body=None, method="POST", headers=None):
        data = body if isinstance(body, bytes) else json.dumps(body or {})
        headers = {"X-API-Key": self.key, "Content-Type": "application/json"} | (headers or {})
        async with self._session.request(
            method, f"{self._address}/api/v1/{path}", data=data, headers=headers
        ) as answer:
            data = await answer.read()
            return answer.status, (data if answer.content_type == PROTOBUF else json.loads(data or b"null"))

    async def ok(self, path, body=None, **options):
        status, result = await self.call(path, body, **options)
        assert status in (200, 204), (path, status, result)
        return result

    async def new_model(self, number=0, **lora):
        session = (await self.ok("create_session", {}))["session_id"]
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 4} | lora}
        return (await self.result((await self.ok("create_model", body))["request_id"]))["model_id"]

    async def result(self, request_id):
        return await self.ok("retrieve_future", {"request_id": request_id})

    async def loss(self, model, seq, data=None, **options):
        request = LossRequest(data=data or random_data(1, [5]), **({"loss_fn": "importance_sampling"} | options))
        body = encode_loss_request(request, model, seq)
        return (await self.ok("forward_backward", body))["request_id"]


@pytest.fixture(scope="module")
def slots(tmp_path_factory):
    return make_slots(write_model(tmp_path_factory.mktemp("model") / "tiny"))


@contextlib.asynccontextmanager
async def opened(folder, *, hold_s=5.0):
    """(client of ann, client of bob, fleet, service, address)."""
    served = ServedModel(name="tiny", tokenizer="t", context_length=64, max_rank=MAX_RANK, max_resident=4)
    service = Service(folder, served, world_size=1)
    fleet = FakeFleet()
    sampling = Sampling(fleet, AdapterPool(fleet, 2), context_length=64)
    sampling.has_started.set()
    keys = Keys(KEYS)
    gateway = Gateway(service, sampling, keys, hold_s=hold_s)
    app = make_app(gateway, keys, token=TOKEN, host=Host())
    runner = web.AppRunner(app, access_log=None, logger=HttpLogger(), auto_decompress=False, shutdown_timeout=0.1)
    await runner.setup()
    bound = listen(Host(), TOKEN)
    await web.SockSite(runner, bound).start()
    journal = asyncio.create_task(service.journal.run())
    try:
        async with ClientSession() as session:
            address = http_address(bound)
            yield Api(session, address, gateway), Api(session, address, gateway, "tml-bob"), fleet, service, address
    finally:
        await sampling.close()
        await runner.cleanup()
        journal.cancel()
        await asyncio.gather(journal, return_exceptions=True)
        service.journal.close()


@contextlib.asynccontextmanager
async def trainer(slots, folder, address):
    """A trainer rank in a thread, as `run_worker` is one."""
    slots.clear()
    executor, over = Executor(slots, folder, max_rank=MAX_RANK, context_length=64), threading.Event()
    client = GatewayClient(RolloutClient(address, token=TOKEN, reconnect_s=0.0), rank=0, run_id=0)

    def run():
        with contextlib.suppress(Exception):  # the gateway ends first
            while not over.is_set():
                command = client.next_command()
                try:
                    result, failed = executor.execute(command), False
                except Exception as error:  # noqa: BLE001 - as the result of the command
                    result, failed = failure(str(error)), True
                if command.kind != "reset":
                    client.report(result, failed=failed)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


@pytest.mark.filterwarnings("error::aiohttp.web.NotAppKeyWarning")
async def test_a_client_trains_saves_samples_and_loads(tmp_path, slots):
    async with opened(tmp_path) as (api, _, fleet, _service, address), trainer(slots, tmp_path, address):
        model = await api.new_model()
        info = await api.ok("get_info", {"model_id": model})
        assert (info["lora_rank"], info["model_data"]["tokenizer_id"]) == (4, "t")
        first = await api.loss(model, 1)
        step = await api.ok("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.01}})
        logprobs, metrics = decode_loss_output(await api.result(first))
        assert len(logprobs[0]) == 5
        assert list(metrics) == ["loss:sum"]
        assert (await api.result(step["request_id"]))["metrics"]["lr:mean"] == pytest.approx(0.01)
        saved = await api.ok("save_weights", {"model_id": model, "seq_id": 3, "path": "one"})
        path = (await api.result(saved["request_id"]))["path"]
        assert path == f"tinker://{model}/weights/one"
        body = {"session_id": model.partition(":")[0], "model_seq_id": 5, "path": path, "optimizer": True}
        loaded = (await api.result((await api.ok("load_weights", body))["request_id"]))["model_id"]
        results = [
            await api.result(await api.loss(item, seq, forward_only=True)) for item, seq in ((model, 4), (loaded, 1))
        ]
        assert results[0] == results[1]
        body = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 1, "model_path": path}
        sampler = (await api.ok("create_sampling_session", body))["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [4, 5]}]}
        body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 2, "prompt": prompt}
        asked = await api.ok("asample", body | {"sampling_params": {"max_tokens": 9, "stop": [3]}})
        assert len(asked["sample_sequence_ids"]) == 2
        answers = decode_sample(await api.result(asked["request_id"]))
        assert [(answer.token_ids, answer.is_cut) for answer in answers] == [([5, 5, 5], True)] * 2
        request = fleet.requests[0]
        assert request.adapter == fleet.loaded[0]
        assert request.raw_logprobs
        assert request.only_stops
        assert (
            tmp_path / "weights" / model.replace(":", "-") / "one" / "00000003" / "adapter" / "adapter_config.json"
        ).exists()


async def test_objects_of_another_key_do_not_exist(tmp_path, slots):
    async with opened(tmp_path) as (api, other, _, _service, address), trainer(slots, tmp_path, address):
        model = await api.new_model()
        session = model.partition(":")[0]
        saved = await api.ok("save_weights", {"model_id": model, "seq_id": 1, "path": "one"})
        path = (await api.result(saved["request_id"]))["path"]
        sampler = {"session_id": session, "sampling_session_seq_id": 1, "model_path": path}
        name = (await api.ok("create_sampling_session", sampler))["sampling_session_id"]
        ours = (await other.ok("create_session", {}))["session_id"]
        prompt = {"chunks": [{"tokens": [4]}]}
        refused = [
            ("get_info", {"model_id": model}), ("retrieve_future", saved),
            ("create_model", {"session_id": session, "model_seq_id": 9, "base_model": "tiny"}),
            ("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}),
            ("create_sampling_session", {"session_id": ours, "sampling_session_seq_id": 1, "model_path": path}),
            ("load_weights", {"session_id": ours, "model_seq_id": 1, "path": path, "optimizer": False}),
            ("weights_info", {"tinker_path": path}),
            ("asample", {"sampling_session_id": name, "seq_id": 1, "prompt": prompt}),
            ("session_heartbeat", {"session_id": session}),
        ]  # fmt: skip
        for where, body in refused:
            assert (await other.call(where, body))[0] == 404, where
        assert (await other.call(f"training_runs/{model}", method="GET"))[0] == 404
        assert (await other.ok("training_runs", method="GET"))["training_runs"] == []
        checkpoint = f"training_runs/{model}/checkpoints/weights/one"
        assert (await other.call(checkpoint, method="DELETE"))[0] == 404
        await api.ok(f"{checkpoint}/publish")
        assert (await other.ok("weights_info", {"tinker_path": path}))["lora_rank"] == 4
        await api.ok(checkpoint, method="DELETE")
        assert (await api.call("weights_info", {"tinker_path": path}))[0] == 404
        assert [item["path"] for item in (await api.ok("checkpoints", method="GET"))["checkpoints"]] == []


@pytest.mark.parametrize("key", ["", "tml-none", "tml-an", "ä"])
async def test_an_unknown_key_is_refused(tmp_path, key):
    async with opened(tmp_path) as (api, *_):
        api.key = key.encode().decode("latin-1")
        assert (await api.call("client/config"))[0] == 401


async def test_trainer_routes_need_the_token_of_the_run(tmp_path):
    async with opened(tmp_path) as (api, _, _, _, address):
        async with api._session.post(f"{address}/trainer/command", json={}) as answer:
            assert answer.status == 401
        assert (await api.call("client/config", headers={"Origin": "http://evil"}))[0] == 403


async def test_a_wrong_request_uses_its_number_and_fails(tmp_path, slots):
    async with opened(tmp_path) as (api, _, _, _, address), trainer(slots, tmp_path, address):
        model = await api.new_model()
        wrong = [
            ("optim_step", {"adam_params": {"learning_rate": "x"}}, "learning_rate"),
            ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "adam_params"),
            ("save_weights", {"path": "../x"}, "is not a name"),
            ("save_weights_for_sampler", {"path": "a/b"}, "is not a name"),
        ]
        for seq, (path, fields, text) in enumerate(wrong, start=1):
            asked = await api.ok(path, {"model_id": model, "seq_id": seq} | fields)
            actual = await api.result(asked["request_id"])
            assert text in actual["error"]
            assert actual["category"] == "user"
        request = await api.loss(model, 5, loss_fn="stable_reinforce")
        assert "loss_fn=cispo" in (await api.result(request))["error"]
        step = await api.ok("optim_step", {"model_id": model, "seq_id": 6, "adam_params": {}})
        assert (await api.result(step["request_id"]))[
            "error"
        ] == "the gradients of request 5 failed: nothing was updated"
        decode_loss_output(await api.result(await api.loss(model, 7)))


async def test_requests_behind_a_missing_number_have_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("areal.serve.tenants.MAX_WAITING_BYTES", 1000)
    async with opened(tmp_path) as (api, _, _, service, address):
        session = (await api.ok("create_session", {}))["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        model = (await api.ok("create_model", body))["model_id"]
        step = {"model_id": model, "adam_params": {}}
        await api.ok("optim_step", step | {"seq_id": MAX_AHEAD - 1})  # request 0 has no result
        status, answer = await api.call("optim_step", step | {"seq_id": MAX_AHEAD})
        assert (status, answer["code"]) == (429, "request.too_many")
        assert "its request 0 has no result" in answer["error"]
        async with api._session.post(
            f"{address}/api/v1/optim_step", json=step | {"seq_id": 2**62}, headers={"X-API-Key": api.key}
        ) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        await api.loss(model, 5, random_data(1, [60]))  # more than the limit of bytes
        assert (await api.call("optim_step", step | {"seq_id": 6}))[0] == 429
        service.tenants.apply({"event": "result", "model": model, "seq": 0, "ok": True, "body": [1, 0, 0, 0]})
        await api.ok("optim_step", step | {"seq_id": 1})  # what the others wait for


async def test_a_result_that_is_not_kept_is_a_clear_error(tmp_path, slots):
    async with opened(tmp_path) as (api, other, _, service, address), trainer(slots, tmp_path, address):
        model = await api.new_model()
        step = {"model_id": model, "seq_id": 1, "adam_params": {}}
        asked = await api.ok("optim_step", step)
        await api.result(asked["request_id"])
        actual = service.tenants.models[model]
        del actual.operations[1]
        answer = await api.result(asked["request_id"])
        assert answer == {"error": f"request 1 of {model} was computed once, long before request 2: its result is not "
                          "kept any more, use the next seq_id", "category": "user"}  # fmt: skip
        assert (await api.call("optim_step", step))[0] == 422
        assert (await other.call("retrieve_future", asked))[0] == 404


async def test_a_number_with_another_content_is_refused(tmp_path):
    async with opened(tmp_path) as (api, *_):
        session = (await api.ok("create_session", {}))["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        first = await api.ok("create_model", body)
        assert await api.ok("create_model", body) == first
        assert (await api.call("create_model", body | {"lora_config": {"rank": 2}}))[0] == 422
        assert (await api.call("create_model", body | {"base_model": "other"}))[0] == 404


async def test_a_result_is_waited_for_and_then_asked_again(tmp_path):
    async with opened(tmp_path, hold_s=0.01) as (api, _, fleet, *_):
        session = (await api.ok("create_session", {}))["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny"}
        sampler = (await api.ok("create_sampling_session", body))["sampling_session_id"]
        fleet.may_answer.clear()
        body = {"sampling_session_id": sampler, "seq_id": 3, "prompt": {"chunks": [{"tokens": [7]}]}}
        asked = await api.ok("asample", body)
        assert await api.ok("asample", body) == asked  # once
        status, result = await api.call("retrieve_future", asked)
        assert (status, result["type"]) == (408, "try_again")
        fleet.may_answer.set()
        while (result := await api.call("retrieve_future", asked))[0] == 408:
            pass
        assert decode_sample(result[1])[0].token_ids == [7, 7, 7]
        assert len(fleet.requests) == 1
        assert (await api.call("retrieve_future", {"request_id": f"{sampler}:99"}))[0] == 410


def test_a_failed_sample_whose_result_nobody_reads_leaves_no_traceback(tmp_path, caplog):
    async def scenario():
        async with opened(tmp_path) as (api, *_):
            prompt = {"chunks": [{"tokens": [7]}]}
            body = {"sampling_session_id": await base_sampler(api), "seq_id": 1, "prompt": prompt}
            asked = await api.ok("asample", body | {"target_prompt_logprobs": {}})
            body = {"target": {"sampling_session_id": body["sampling_session_id"]}, "timeout": 0}
            await api.ok("retrieve_futures", body | {"retrieved_request_ids": [asked["request_id"]]})

    asyncio.run(scenario())
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def base_sampler(api):
    session = (await api.ok("create_session", {}))["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny"}
    return (await api.ok("create_sampling_session", body))["sampling_session_id"]


def prompt_of(*tokens):
    return {"chunks": [{"type": "encoded_text", "tokens": tokens}]}


async def test_a_client_waits_for_all_samples_in_one_request(tmp_path):
    async with opened(tmp_path) as (api, other, fleet, *_):
        sampler = await base_sampler(api)
        fleet.may_answer.clear()
        for seq in (0, 1, 10**9):  # the last is that of a clone
            await api.ok("asample", {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt_of(7)})
        wrong = await api.ok("asample", {"sampling_session_id": sampler, "seq_id": 2, "prompt": prompt_of(*[7] * 64)})
        poll = {"target": {"sampling_session_id": sampler}, "prev_cursor": 0}
        actual = await api.ok("retrieve_futures", poll)
        assert actual["completions"] == [
            {"state": "failed", "request_id": wrong["request_id"], "response_payload_uncompressed_size": None}
        ]
        waiting = asyncio.create_task(api.ok("retrieve_futures", poll | {"prev_cursor": actual["cursor"]}))
        fleet.may_answer.set()
        actual = await waiting
        names = [completion["request_id"] for completion in actual["completions"]]
        if len(names) == 1:
            actual = await api.ok("retrieve_futures", poll | {"prev_cursor": actual["cursor"]})
            names += [completion["request_id"] for completion in actual["completions"]]
        assert names == [f"{sampler}:0", f"{sampler}:1"]
        (size,) = {completion["response_payload_uncompressed_size"] for completion in actual["completions"]}
        assert size == len(await api.result(names[0]))
        last = poll | {"prev_cursor": actual["cursor"], "timeout": 0, "retrieved_request_ids": names[:1]}
        assert (await api.ok("retrieve_futures", last))["completions"] == []
        assert (await api.call("retrieve_future", {"request_id": names[0]}))[0] == 410
        assert (await api.call("retrieve_future", {"request_id": names[1]}))[0] == 200
        assert (await other.call("retrieve_futures", last))[0] == 404


async def test_a_clone_without_samples_has_no_queue(tmp_path):
    async with opened(tmp_path) as (api, _, _, service, _):
        sampler = await base_sampler(api)
        poll = {"target": {"sampling_session_id": sampler, "cloned_sampler_id": 3}, "prev_cursor": 0}
        result = await api.ok("retrieve_futures", poll | {"timeout": 0})
        assert result == {"completions": [], "cursor": 0}
        assert api.gateway._sampling._queues == {}
        waits, wait = asyncio.Event(), service.wait

        def noted(*arguments):
            waits.set()
            return wait(*arguments)

        service.wait = noted
        waiting = asyncio.create_task(api.ok("retrieve_futures", poll | {"timeout": 60}))
        await waits.wait()
        await api.ok("asample", {"sampling_session_id": sampler, "seq_id": 3 * 10**9, "prompt": prompt_of(7)})
        assert (await waiting)["completions"] == []  # it asks again at once
        (first,) = (await api.ok("retrieve_futures", poll))["completions"]
        assert first["request_id"] == f"{sampler}:{3 * 10**9}"


async def test_a_client_learns_which_samples_an_earlier_gateway_has_lost(tmp_path):
    async with opened(tmp_path) as (api, _, fleet, *_):
        sampler = await base_sampler(api)
        fleet.may_answer.clear()
        for seq in (0, 1):
            await api.ok("asample", {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt_of(7)})
        poll = {"target": {"sampling_session_id": sampler}, "prev_cursor": 0, "timeout": 0}
        cursor = (await api.ok("retrieve_futures", poll))["cursor"]
    async with opened(tmp_path) as (api, *_):
        await api.ok("asample", {"sampling_session_id": sampler, "seq_id": 2, "prompt": prompt_of(7)})
        result = await api.ok("retrieve_futures", poll | {"prev_cursor": cursor, "timeout": 5})
        failed = {completion["request_id"] for completion in result["completions"] if completion["state"] == "failed"}
        assert failed == {f"{sampler}:{seq}" for seq in range(SAMPLES_AHEAD) if seq != 2}
        assert (await api.call("retrieve_future", {"request_id": f"{sampler}:0"}))[0] == 410
        result = await api.ok("retrieve_futures", poll | {"prev_cursor": result["cursor"]})
        assert all(completion["state"] == "finished" for completion in result["completions"])


async def test_the_likeliest_tokens_of_an_answer(tmp_path):
    async with opened(tmp_path) as (api, _, fleet, *_):
        body = {"sampling_session_id": await base_sampler(api), "seq_id": 0, "prompt": prompt_of(4, 5)}
        body |= {"num_samples": 2, "topk_sample_logprobs": 3, "sampling_params": {"max_tokens": 2}}
        data = await api.result((await api.ok("asample", body))["request_id"])
        top = parsed_message("SampleResponse", data).sequences[1].topk_sampled_logprobs
        assert np.frombuffer(top.token_ids, "<i4").reshape(top.length, top.k).tolist() == [[5, 6, 7]] * 2
        assert np.frombuffer(top.logprobs, "<f4").reshape(top.length, top.k).tolist() == [[0, -0.5, -1]] * 2
        last = fleet.requests[-1]
        assert list(last.input_ids) == [4, 5, 5, 5]
        assert last.scoring.first == 2


async def test_a_session_ends_and_its_model_stays(tmp_path, slots, monkeypatch):
    monkeypatch.setattr(gateway_module, "SESSION_S", 0.0)
    async with opened(tmp_path) as (api, _, _, service, address), trainer(slots, tmp_path, address):
        model, sampler = await api.new_model(), await base_sampler(api)
        body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt_of(7)}
        asked = await api.ok("asample", body)
        await api.gateway.end_silent_sessions()
        session = model.partition(":")[0]
        assert (await api.call("session_heartbeat", {"session_id": session}))[0] == 410
        assert (await api.call("retrieve_future", asked))[0] == 404
        assert (await api.call("asample", body))[0] == 404
        assert (await api.ok("sessions", method="GET"))["sessions"] == []
        decode_loss_output(await api.result(await api.loss(model, 1)))
        assert service.tenants.samplers == service.tenants.numbers == {}
    async with opened(tmp_path) as (api, *_):
        assert (await api.call("session_heartbeat", {"session_id": session}))[0] == 410
        assert session not in api.gateway._heard  # else it would end again


async def test_a_repeated_request_for_a_session_that_has_ended_does_not_open_it(tmp_path):
    async with opened(tmp_path) as (api, *_):
        again = {"headers": {"X-Idempotency-Key": "k"}}
        session = (await api.ok("create_session", {}, **again))["session_id"]
        await api.ok(f"sessions/{session}/finish")
        assert (await api.ok("create_session", {}, **again))["session_id"] == session
        assert session not in api.gateway._heard  # else it would end again


async def test_inflight_samplers_follow_later_saves(tmp_path, slots):
    async with opened(tmp_path) as (api, _, fleet, _service, address), trainer(slots, tmp_path, address):
        model = await api.new_model()
        samplers = []
        for seq in (1, 2, 3):
            body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq, "kind": "inflight"}
            actual = await api.result((await api.ok("save_weights_for_sampler", body))["request_id"])
            samplers.append(actual["sampling_session_id"])
            for sampler in samplers:
                body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt_of(7)}
                await api.result((await api.ok("asample", body))["request_id"])
        names = [request.adapter for request in fleet.requests]
        assert [len(set(part)) for part in (names, names[1:3], names[3:])] == [3, 1, 1]
        assert len(fleet.loaded) == 2  # the first left the servers after the third save
        body = {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 4, "kind": "inflight"}
        await api.result((await api.ok("save_weights_for_sampler", body))["request_id"])
        saves = (tmp_path / "sampler_weights" / model.replace(":", "-") / ".inflight").iterdir()
        assert sorted(save.name for save in saves) == ["00000002", "00000003", "00000004"]


async def test_inflight_weights_stay_while_a_sample_waits_for_them(tmp_path, slots):
    async with opened(tmp_path) as (api, _, fleet, _, address), trainer(slots, tmp_path, address):
        model = await api.new_model()
        pool = api.gateway._sampling._weights
        api.gateway._sampling.has_started.clear()  # the fleet starts: samples wait

        async def save(seq):
            body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq, "kind": "inflight"}
            return await api.result((await api.ok("save_weights_for_sampler", body))["request_id"])

        body = {**await save(1), "seq_id": 0, "prompt": prompt_of(7)}
        asked = await api.ok("asample", body)
        for seq in (2, 3, 4):
            await save(seq)
        saves = tmp_path / "sampler_weights" / model.replace(":", "-") / ".inflight"
        assert sorted(item.name for item in saves.iterdir()) == ["00000001", "00000003", "00000004"]
        api.gateway._sampling.has_started.set()
        assert decode_sample(await api.result(asked["request_id"]))[0].token_ids == [7, 7, 7]
        await save(5)  # a server that starts again loads what the others have
        assert sorted(item.name for item in saves.iterdir()) == ["00000001", "00000004", "00000005"]
        assert len(fleet.loaded) == 1
        for turn in pool._begun:  # all leave the servers
            turn.is_leaving = True
            turn.may_leave.set()
        while pool._begun:
            await asyncio.sleep(0)
        await save(6)
        assert sorted(item.name for item in saves.iterdir()) == ["00000005", "00000006"]


async def test_external_weights_are_downloaded(tmp_path, slots):
    async with opened(tmp_path) as (api, other, _, _, address), trainer(slots, tmp_path, address):
        model = await api.new_model()
        body = {"model_id": model, "seq_id": 1, "path": "one"}
        actual = await api.result((await api.ok("save_weights_external", body))["request_id"])
        assert actual == {"path": f"tinker://{model}/external_weights/one"}
        where = f"training_runs/{model}/checkpoints/external_weights/one/external_weights_urls"
        urls = (await api.ok(where, method="GET"))["urls"]
        assert urls.keys() == {"adapter_config.json", "adapter_model.safetensors"}
        folder = tmp_path / "external_weights" / model.replace(":", "-") / "one" / "00000001" / "adapter"
        for name, url in urls.items():
            async with api._session.get(url) as answer:
                assert await answer.read() == (folder / name).read_bytes()
            for wrong in (url.replace("/ann/", "/bob/"), url.replace("/ann/", "/eve/"), url.replace("/one/", "/two/")):
                async with api._session.get(wrong) as answer:
                    assert answer.status == 404
        assert (await other.call(where, method="GET"))[0] == 404
        body |= {"seq_id": 2, "path": "two", "age_encryption_recipients": ["age1"]}
        actual = await api.result((await api.ok("save_weights_external", body))["request_id"])
        assert "not encrypted" in actual["error"]


def test_optional_fields_may_be_null():
    for kind, data in (
        (FuturesBody, b'{"target": {"sampling_session_id": "s"}, "timeout": null}'),
        (SaveBody, b'{"model_id": "m", "seq_id": 1, "age_encryption_recipients": null}'),
        (LoadBody, b'{"path": "p", "optimizer": true, "seq_id": null}'),
    ):
        parsed(kind, data)


async def test_unused_adapters_leave_the_servers(tmp_path, slots):
    async with opened(tmp_path) as (api, _, fleet, _, address), trainer(slots, tmp_path, address):
        model = await api.new_model()
        for seq in range(1, 5):
            body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq}
            actual = await api.result((await api.ok("save_weights_for_sampler", body))["request_id"])
            prompt = {"chunks": [{"tokens": [7]}]}
            asked = await api.ok("asample", {**actual, "seq_id": 0, "prompt": prompt})
            await api.result(asked["request_id"])
        assert len(fleet.loaded) == 2
        assert len({request.adapter for request in fleet.requests}) == 4


async def test_a_new_adapter_has_its_turn_while_others_are_always_in_use():
    fleet = FakeFleet()
    pool, order, ends = AdapterPool(fleet, 3), [], []

    async def sample(name, may_end):
        async with pool.used(Path(name) / "1/adapter"):
            order.append(name)
            await may_end.wait()

    async def settled():
        for _ in range(20):
            await asyncio.sleep(0)
        return "".join(order)

    tasks = []
    for name in "abcdae":
        ends.append(asyncio.Event())
        tasks.append(asyncio.create_task(sample(name, ends[-1])))
    assert await settled() == "abc"  # the second sample of a would keep d away
    ends[1].set()
    assert await settled() == "abcd"
    ends[2].set()
    assert await settled() == "abcde"  # a leaves before it is loaded again
    for end in ends:
        end.set()
    await asyncio.gather(*tasks)
    assert "".join(order) == "abcdea"
    await pool.close()


async def test_weights_in_use_stay_when_others_are_idle():
    pool, order = AdapterPool(FakeFleet(), 2), asyncio.Queue()

    async def sample(name, may_end):
        async with pool.used(Path(name) / "1/adapter"):
            order.put_nowait(name)
            await may_end.wait()

    ends = {name: asyncio.Event() for name in "abc"}
    tasks = []
    for name in "abc":
        tasks.append(asyncio.create_task(sample(name, ends[name])))
        if name != "c":
            assert await order.get() == name
    await asyncio.sleep(0)  # c waits, and a is to leave
    ends["b"].set()
    assert await asyncio.wait_for(order.get(), 5.0) == "c"
    tasks.append(asyncio.create_task(sample("a", ends["a"])))
    assert await asyncio.wait_for(order.get(), 5.0) == "a"
    for end in ends.values():
        end.set()
    await asyncio.gather(*tasks)
    await pool.close()


async def test_a_sample_waits_for_the_start_of_the_fleet():
    fleet = FakeFleet()
    sampling = Sampling(fleet, AdapterPool(fleet, 2), context_length=64)
    body = parsed(SampleBody, b'{"sampling_session_id": "s", "seq_id": 1, "prompt": {"chunks": [{"tokens": [7]}]}}')
    sampling.start("s:1", body, None)
    assert await sampling.wait("s:1", 0.0) is None
    assert fleet.requests == []
    sampling.has_started.set()
    assert decode_sample((await sampling.wait("s:1", 5.0)).result())[0].token_ids == [7, 7, 7]


async def test_a_sample_that_is_cancelled_or_forgotten_leaves_nothing():
    fleet = FakeFleet()
    fleet.may_answer.clear()
    sampling = Sampling(fleet, AdapterPool(fleet, 1), context_length=64)
    body = parsed(SampleBody, b'{"sampling_session_id": "s", "seq_id": 1, "prompt": {"chunks": [{"tokens": [7]}]}}')
    sampling.has_started.set()
    for number in range(3):
        sampling.start(f"s:sample:0:{number}", body, None)
    sampling.cancel("s:sample:0:0")
    sampling.start("s:sample:0:0", body, None)  # the client sends it again
    await asyncio.sleep(0)
    assert "s:sample:0:0" in sampling
    assert (await sampling.completions("s:sample:0:0", 0, [], 0))[1] == []
    tasks = list(sampling._tasks.values())
    sampling.forget("s:sample:0")
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sampling._tasks == sampling._queues == {}


async def test_a_result_that_nobody_asks_for_is_dropped_after_a_time(monkeypatch):
    monkeypatch.setattr(sampling_module, "KEEP_S", 0.0)
    sampling = Sampling(FakeFleet(), AdapterPool(FakeFleet(), 1), context_length=64)
    body = parsed(SampleBody, b'{"sampling_session_id": "s", "seq_id": 1, "prompt": {"chunks": [{"tokens": [7]}]}}')
    sampling.has_started.set()
    for number in range(3):
        sampling.start(f"s:sample:0:{number}", body, None)
    while sampling._tasks:
        await asyncio.sleep(0)
    assert (await sampling.completions("s:sample:0:0", 0, [], 0))[1] == []


async def test_a_sample_that_is_sent_again_outlives_the_time_of_the_first(monkeypatch):
    monkeypatch.setattr(sampling_module, "KEEP_S", 3600.0)
    fleet, name = FakeFleet(), "s:sample:0:1"
    sampling = Sampling(fleet, AdapterPool(fleet, 1), context_length=64)
    body = parsed(SampleBody, b'{"sampling_session_id": "s", "seq_id": 1, "prompt": {"chunks": [{"tokens": [7]}]}}')
    sampling.has_started.set()
    sampling.start(name, body, None)
    first = await sampling.wait(name, 5.0)
    cursor, names = await sampling.completions("s:sample:0:0", 0, [], 5.0)
    assert names == [name]
    await sampling.completions("s:sample:0:0", cursor, [name], 0)
    sampling.start(name, body, None)
    await sampling.wait(name, 5.0)
    sampling._expire(first)
    assert name in sampling
    assert (await sampling.completions("s:sample:0:0", cursor, [], 5.0))[1] == [name]
