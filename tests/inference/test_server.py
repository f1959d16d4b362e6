"""The server over HTTP, in this process: dialect, streaming, refusals, disconnects, updates, failure."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal.api.config import TeacherConfig, TeacherServersConfig
from areal.inference import engine, server
from areal.inference.generate_route import _BYTES_PER_ID, _FIXED_BODY_BYTES
from areal.inference.server import serve
from areal.observe.spans import tracing
from areal.observe.trace import ChromeTracer
from areal.planner.measured import traced_answers
from areal.system import heartbeat
from areal.system.network import TEACHER_TOKEN, Host
from areal.trainer.teacher_servers import TeacherServers
from tests.attack.requests import REFUSED_HEADERS, status_of
from tests.run_token import TOKEN

PROMPT = [3, 4, 5, 6, 7]


async def test_an_answer_carries_tokens_logprobs_and_versions(served, build_model, reference_logprobs):
    answer = await served.generate(rid="mine")
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 6
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 6, 0)
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    reference = reference_logprobs(build_model("qwen3-gqa"), PROMPT + answer["output_ids"])
    for place, (logprob, token, text) in enumerate(meta["output_token_logprobs"]):
        assert token == answer["output_ids"][place]
        assert logprob == pytest.approx(reference[4 + place, token].item(), abs=1e-5)
        assert text is None
    assert "output_token_logprobs" not in (await served.generate(return_logprob=False))["meta_info"]


async def test_a_teacher_on_this_server_has_the_log_probabilities_of_the_model(
    served, build_model, reference_logprobs, monkeypatch
):
    monkeypatch.setenv(TEACHER_TOKEN, TOKEN)
    options = TeacherServersConfig(server_addrs=[served.address])
    teacher = TeacherServers(options, TeacherConfig(servers=[options], top_k=3))
    ids = [*PROMPT, 9, 11, 2]
    scores = await teacher.scores(ids, 5)
    reference = reference_logprobs(build_model("qwen3-gqa"), ids)
    assert scores.logprobs == pytest.approx(
        [reference[4 + place, ids[5 + place]].item() for place in range(3)], abs=1e-5
    )
    for place, top in enumerate(scores.top):
        values, tokens = reference[4 + place].topk(3)
        assert [token for token, _ in top] == tokens.tolist()
        assert [logprob for _, logprob in top] == pytest.approx(values.tolist(), abs=1e-5)
    teacher.close()


async def test_a_scored_prompt_is_no_answer_in_the_trace(options, serve_with, tmp_path):
    with tracing(ChromeTracer(tmp_path / "server-0.jsonl", "server-0")):
        async for item in serve_with(options):
            await item.generate(rid="score", logprob_start_len=0, sampling_params={"max_new_tokens": 1})
            await item.generate(rid="answer")
    assert [(answer.prompt, answer.tokens) for answer in traced_answers(tmp_path)] == [(5, 6)]


async def test_a_stream_is_incremental_and_equals_the_plain_answer(served):
    whole = await served.generate(sampling_params={"max_new_tokens": 40})
    *parts, last = [event async for event in served.events(sampling_params={"max_new_tokens": 40})]
    assert last == b"[DONE]"
    parsed = [orjson.loads(part) for part in parts]
    assert [part["meta_info"]["finish_reason"] is None for part in parsed] == [True] * (len(parsed) - 1) + [False]
    assert [token for part in parsed for token in part["output_ids"]] == whole["output_ids"]
    assert [entry[0] for part in parsed for entry in part["meta_info"]["output_token_logprobs"]] == pytest.approx(
        [entry[0] for entry in whole["meta_info"]["output_token_logprobs"]], abs=1e-5
    )
    for part in parsed:
        length = len(part["output_ids"])
        assert part["meta_info"]["weight_versions"] == ([{"version": "0", "start": 0, "end": length}] if length else [])


async def test_number_of_stream_events(served):
    async def sizes(num_tokens: int, interval: int) -> list[int]:
        sampling = {"max_new_tokens": num_tokens, "stream_interval": interval}
        events = [event async for event in served.events(sampling_params=sampling)]
        return [len(orjson.loads(event)["output_ids"]) for event in events[:-1]]

    result = await sizes(100, 32)
    assert sum(result) == 100
    assert 1 < len(result) <= 4  # fewer when the reader was slow
    assert result[0] >= 32
    assert await sizes(20, 32) == await sizes(20, 20) == [20]


async def test_a_stuck_engine_is_not_healthy(served, monkeypatch):
    await served.get("/health")
    step, go_on = served.engine.step, threading.Event()
    served.engine.step = lambda: (go_on.wait(200), step())
    running = asyncio.create_task(served.generate())
    await served.until(lambda: served.engine.stuck_s > 0.05)
    await served.get("/health")
    monkeypatch.setattr(engine, "STUCK_S", 0.05)
    await served.get("/health", 500)
    go_on.set()
    await running
    assert served.engine.stuck_s == 0.0  # idle
    await served.post("/pause_generation", {"mode": "retract"})
    waiting = asyncio.create_task(served.generate())
    await served.until(lambda: len(served.engine.scheduler.waiting) == 1)
    assert served.engine.stuck_s == 0.0  # paused
    await served.get("/health")
    await served.post("/continue_generation")
    await waiting


async def test_a_stuck_engine_sends_no_heartbeat(options, serve_with, monkeypatch):
    node, reported, activity = heartbeat.NodeBeats(), [], server._activity
    ours = heartbeat.Heartbeat(node.slot("server-0")[heartbeat.HEARTBEAT])
    monkeypatch.setattr(server, "launched_heartbeat", lambda: ours)
    monkeypatch.setattr(server, "_activity", lambda engine: reported.append(activity(engine)) or reported[-1])
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    monkeypatch.setattr(engine, "STUCK_S", 0.2)

    async def check(item) -> None:
        step, go_on = item.engine.step, threading.Event()
        item.engine.step = lambda: (go_on.wait(200), step())
        running = asyncio.create_task(item.generate())
        await item.until(lambda: reported[-2:] == [None, None])
        before, num_reported = node.read()["server-0"].beats, len(reported)
        await item.until(lambda: len(reported) >= num_reported + 5)
        assert reported[num_reported:] == [None] * (len(reported) - num_reported)
        assert node.read()["server-0"].beats == before
        go_on.set()
        await running
        await item.until(lambda: node.read()["server-0"].beats > before)

    async for each in serve_with(options):
        await check(each)


async def test_a_server_from_scratch_has_no_version_until_weights_come(options, serve_with, checkpoint, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((checkpoint(0) / "config.json").read_bytes())
    scratch = replace(options, native=replace(options.native, model_path=str(bare)), from_scratch=True)
    async for item in serve_with(scratch):
        assert (await item.get("/get_model_info"))["weight_version"] == "-1"
        update = {"model_path": str(checkpoint(0)), "weight_version": "0"}
        await item.post("/update_weights_from_disk", update)
        assert (await item.get("/get_model_info"))["weight_version"] == "0"
        assert (await item.generate())["meta_info"]["weight_version"] == "0"


async def test_siblings_over_http_share_their_prefill(served):
    await served.post("/pause_generation", {"mode": "abort"})
    tasks = [
        asyncio.create_task(served.generate(group_id="g", sampling_params={"temperature": 1, "sampling_seed": n}))
        for n in range(8)
    ]
    await served.until(lambda: len(served.engine.scheduler.waiting) == 8)
    await served.post("/continue_generation")
    answers = await asyncio.gather(*tasks)
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0] + [5] * 7
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1


async def test_seeds_are_reproducible(served):
    sampling = {"temperature": 1.0, "sampling_seed": 11}
    first, second = await asyncio.gather(*[served.generate(sampling_params=sampling) for _ in range(2)])
    other = await served.generate(sampling_params={"temperature": 1.0, "sampling_seed": 12, "max_new_tokens": 30})
    rest = await served.generate(
        input_ids=PROMPT + first["output_ids"][:2],
        sampling_params={**sampling, "max_new_tokens": 4, "num_prior_output_tokens": 2},
    )
    assert rest["output_ids"] == first["output_ids"][2:]
    assert first["output_ids"] == second["output_ids"]
    assert other["output_ids"][:6] != first["output_ids"]
    free = [await served.generate(sampling_params={"temperature": 1.0, "max_new_tokens": 20}) for _ in range(2)]
    assert free[0]["output_ids"] != free[1]["output_ids"]


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"foo": 1}, "foo"),
    ({"sampling_params": {"beam": 2}}, "beam"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": "abc"}, "input_ids"),
    ({"input_ids": [1, True]}, "input_ids"),
    ({"input_ids": [1, 50]}, "50, which is outside the vocabulary (0 to 49)"),
    ({"input_ids": [-1]}, "-1, which is outside the vocabulary"),
    ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    ({"sampling_params": {"min_new_tokens": 7}}, "min_new_tokens (7) exceeds max_new_tokens (6)"),
    ({"sampling_params": {"temperature": -1}}, "temperature"),
    ({"sampling_params": {"temperature": "hot"}}, "temperature"),
    ({"sampling_params": {"temperature": 1e-38}}, "temperature"),
    ({"sampling_params": {"temperature": 1e38}}, "temperature"),
    ({"sampling_params": {"repetition_penalty": 1e-38}}, "repetition_penalty"),
    ({"sampling_params": {"repetition_penalty": 1e38}}, "repetition_penalty"),
    ({"sampling_params": {"min_new_tokens": 1, "stop_token_ids": [*range(50)]}}, "stop_token_ids"),
    ({"sampling_params": {"stop": ["x" * 257]}}, "256"),
    ({"sampling_params": {"top_p": 0}}, "top_p"),
    ({"sampling_params": {"top_k": 0}}, "top_k"),
    ({"sampling_params": {"stop": [""]}}, "stop"),
    ({"sampling_params": {"stop_token_ids": [99]}}, "stop_token_ids has 99"),
    ({"sampling_params": {"frequency_penalty": 3}}, "frequency_penalty"),
    ({"sampling_params": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"sampling_params": {"ignore_eos": 1}}, "ignore_eos"),
    ({"sampling_params": {"sampling_seed": -1}}, "sampling_seed"),
    ({"stream": True, "sampling_params": {"stream_interval": 0}}, "stream_interval"),
    ({"sampling_params": {"stream_interval": 4}}, "stream_interval=4"),
    ({"stream": "yes"}, "stream"),
    ({"rid": 4}, "rid"),
]


async def refused(answer: Any) -> tuple[str, str]:
    """Code and message of an error; the message is one line."""
    body = await answer
    assert "\n" not in body["error"]["message"]
    return body["code"], body["error"]["message"]


async def test_bad_requests_are_refused_with_one_line(served):
    for body, value in BAD_REQUESTS:
        code, message = await refused(served.generate(400, **body))
        assert code == "request.invalid_field"
        assert value in message
    for body, expected, value in [
        ({"input_ids": [1] * 240}, "request.too_long", "240"),
        ({"input_ids": ["x"] * 2000}, "request.invalid_field", "input_ids"),
        ({"sampling_params": {"max_new_tokens": 236}}, "request.too_long", "at most 235 new tokens"),
        ({"sampling_params": {"stop": ["x"]}}, "request.no_tokenizer", "stop_token_ids"),
        ({"return_text": True}, "request.no_tokenizer", "return_text"),
    ]:
        code, message = await refused(served.generate(400, **body))
        assert code == expected
        assert value in message
    assert not served.engine.scheduler.waiting
    assert served.engine.counters.steps == 0


async def test_deeply_nested_values_are_refused(served):
    nested = b"[" * 100 + b"]" * 100
    for field in ("input_ids", "rid", "stream", "sampling_params", "group_id"):
        body = b'{"input_ids":[1],"%s":%s}' % (field.encode(), nested)
        assert (await refused(served.post("/generate", body, 400)))[0] == "request.invalid_field"
    for field in ("stop", "stop_token_ids", "temperature", "max_new_tokens", "ignore_eos", "sampling_seed", "top_k"):
        body = b'{"input_ids":[1],"sampling_params":{"%s":%s}}' % (field.encode(), nested)
        assert (await refused(served.post("/generate", body, 400)))[0] == "request.invalid_field"
    assert (await refused(served.post("/generate", b"[" * 2000 + b"]" * 2000, 400)))[0] == "request.not_json"


async def test_a_body_may_not_be_longer_than_a_request_can_be(served):
    limit = _FIXED_BODY_BYTES + _BYTES_PER_ID * (240 + 50)
    for path, length in [("/generate", limit), ("/pause_generation", 1 << 24)]:
        assert (await refused(served.post(path, b" " * length, 400)))[0] == "request.not_json"
        assert (await refused(served.post(path, b" " * (length + 1), 413)))[0] == "request.too_large"

    async def pieces():
        for _ in range(40):
            yield b" " * (limit // 20)

    async with served.session.post(served.address + "/generate", data=pieces()) as response:
        assert response.status == 413
    await served.generate()


async def test_a_request_whose_probabilities_are_not_finite_is_an_error_and_the_engine_continues(served):
    weight = served.engine.runner.model.get_input_embeddings().weight
    with torch.no_grad():
        weight[45] = torch.nan
    for stream in (False, True):
        assert (await refused(served.generate(500, input_ids=[3, 45], stream=stream)))[0] == "request.not_finite"
    step, go_on, first = served.engine.step, threading.Event(), served.engine.counters.steps

    def damage_after_the_first_token() -> None:
        if served.engine.counters.steps > first:
            go_on.wait(200)
            with torch.no_grad():
                weight[:] = torch.nan
        step()

    served.engine.step = damage_after_the_first_token
    stream = served.events(sampling_params={"max_new_tokens": 100, "ignore_eos": True})
    assert orjson.loads(await anext(stream))["meta_info"]["finish_reason"] is None
    go_on.set()
    failure, last = [event async for event in stream]
    assert (orjson.loads(failure)["code"], last) == ("request.not_finite", b"[DONE]")
    await served.get("/health")
    assert served.engine.scheduler.num_used_tokens == 0


async def test_bodies_that_are_not_json_objects_are_refused(served):
    assert (await refused(served.post("/generate", b"{", 400)))[0] == "request.not_json"
    assert (await refused(served.post("/generate", b"[]", 400)))[0] == "request.invalid_field"
    code, message = await refused(served.post("/pause_generation", {"mode": "nap"}, 400))
    assert code == "request.invalid_field"
    assert "'nap'" in message
    assert (await refused(served.post("/abort_request", {}, 400)))[0] == "request.invalid_field"


async def test_a_disconnected_client_aborts_its_request(served):
    await served.post("/pause_generation", {"mode": "in_place"})
    for stream in (False, True):
        task = asyncio.create_task(served.generate(stream=stream, sampling_params={"max_new_tokens": 100}))
        await served.until(lambda: len(served.engine.scheduler.waiting) == 1)
        task.cancel()
        await served.until(lambda: not served.engine.scheduler.waiting)
    await served.post("/continue_generation")
    stream = served.events(sampling_params={"max_new_tokens": 200})
    await anext(stream)
    await stream.aclose()
    await served.until(lambda: not served.engine.scheduler.running)
    assert served.engine.scheduler.num_used_tokens == 0
    assert served.engine.counters.aborted == 3


async def test_requests_can_be_aborted_by_id_and_all_together(served):
    await served.post("/pause_generation", {"mode": "in_place"})
    tasks = [asyncio.create_task(served.generate(rid=f"r{n}")) for n in range(3)]
    await served.until(lambda: len(served.engine.scheduler.waiting) == 3)
    assert (await refused(served.generate(400, rid="r0")))[0] == "request.duplicate_id"
    await served.post("/abort_request", {"rid": "r1"})
    first = await tasks[1]
    assert first["meta_info"]["finish_reason"]["type"] == "abort"
    assert first["output_ids"] == []
    assert first["meta_info"]["weight_versions"] == []
    await served.post("/abort_request", {"rid": "not there"})
    await served.post("/abort_request", {"abort_all": True})
    rest = await asyncio.gather(tasks[0], tasks[2])
    assert [item["meta_info"]["finish_reason"]["type"] for item in rest] == ["abort", "abort"]
    await served.get("/health")  # paused is healthy


async def test_the_server_describes_itself(served):
    await served.generate()
    info = await served.get("/get_model_info")
    assert (info["vocab_size"], info["context_length"], info["is_generation"]) == (50, 240, True)
    assert info["max_group_samples"] == 8  # native.max_running_requests
    figures = await served.get("/server_info")
    assert (figures["generated_tokens_total"], figures["running_requests"], figures["is_paused"]) == (6, 0, False)
    await served.post("/flush_cache")
    async with served.session.get(served.address + "/metrics") as response:
        text = await response.text()
    assert "# TYPE areal_generated_tokens_total counter\nareal_generated_tokens_total 6\n" in text


async def test_a_tokenizer_in_the_folder_makes_text_and_stop_strings(options, serve_with, checkpoint):
    folder = checkpoint(0)
    vocabulary = {chr(65 + number): number for number in range(50)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="A"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=chr(65 + 49)).save_pretrained(folder)
    async for item in serve_with(options):
        answer = await item.generate(return_text=True, sampling_params={"ignore_eos": True})
        assert answer["text"] == "".join(chr(65 + token) for token in answer["output_ids"])
        stop = answer["text"][1:3]
        end = answer["text"].index(stop) + 2
        stopped = await item.generate(return_text=True, sampling_params={"stop": [stop], "ignore_eos": True})
        assert stopped["text"] == answer["text"][:end]
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


@pytest.mark.parametrize(("headers", "status"), REFUSED_HEADERS)
async def test_requests_without_token_of_web_pages_or_without_json_are_refused(served, headers, status):
    for path in ("/pause_generation", "/no_such_route"):
        assert await asyncio.to_thread(status_of, served.address, path, headers) == status
    assert not served.engine.is_paused


async def test_the_token_is_required(options, serve_with):
    everywhere = Host(bind="0.0.0.0", advertise="127.0.0.2")
    secured = replace(options, token="secret", host=everywhere)
    async for item in serve_with(secured, {"Authorization": "Bearer other"}):
        assert item.address.startswith("http://127.0.0.2:")
        assert (await refused(item.generate(401)))[0] == "request.unauthorized"
        await item.get("/health", 401)
    async for item in serve_with(secured, {"Authorization": "Bearer secret"}):
        await item.generate()


async def test_a_failing_engine_ends_the_server_with_the_cause(options, serve_with):
    def broken(plan: Any) -> None:
        raise MemoryError("out of memory, on purpose")

    async for item in serve_with(options):
        item.engine.runner.forward = broken
        code, message = await refused(item.generate(500))
        assert code == "request.engine_failed"
        assert "out of memory, on purpose" in message
        assert "on purpose" in str(await asyncio.wait_for(item.task, 200))


def test_options_are_checked_before_anything_starts(monkeypatch, tmp_path: Path):
    monkeypatch.delenv("AREAL_PROCESS", raising=False)
    monkeypatch.delenv(server.TOKEN_VARIABLE, raising=False)
    for argv, code, value in [
        ([], "config.required", "--model-path"),
        (["--model-path", "x"], "launch.token_missing", server.TOKEN_VARIABLE),
        (["--model-path", "x", "--max-total-tokens", "100", "--context-length", "200"], "config.conflict", "100"),
    ]:
        with pytest.raises(server.ConfigError, match=value) as error:
            server.parse_options(argv)
        assert error.value.code == code
    monkeypatch.setenv(server.TOKEN_VARIABLE, "secret")
    options = server.parse_options(["--model-path", "m", "--dtype", "float32", "--device", "cpu", "--num-threads", "2"])
    assert (options.native.model_path, options.native.dtype, options.num_threads) == ("m", "float32", 2)
    assert (options.registry, options.token) == (None, "secret")


def test_a_missing_model_is_a_config_error(options):
    missing = replace(options, native=replace(options.native, model_path="/nowhere/model"))

    async def run() -> None:
        await serve(missing, asyncio.Event(), lambda address: None)

    with pytest.raises(server.ConfigError, match="/nowhere/model") as error:
        asyncio.run(run())
    assert error.value.code == "model.not_found"
