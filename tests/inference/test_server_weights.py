"""New weights over HTTP: from disk in mid-answer, over a broadcast in buckets, refused, given up."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from concurrent.futures import Future

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal.api.data import WeightSpec
from areal.api.errors import InputError
from areal.inference.server import WeightRoutes
from areal.system.folders import FolderPuller
from areal.system.network import Host
from areal.weights.update_group import UpdateGroup, bucket_bytes, bucket_views, serve_store
from tests.expect import raises_code

PROMPT = [3, 4, 5, 6, 7]


@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_weights_from_disk_switch_in_mid_answer(served, mode, checkpoint, build_model, reference_logprobs):
    engine, step, go_on = served.engine, served.engine.step, threading.Event()

    def step_and_wait() -> None:
        step()
        if engine.counters.steps == 5:
            go_on.wait(200)

    engine.step = step_and_wait
    stream = served.events(sampling_params={"max_new_tokens": 120, "temperature": 1.0})
    parts = [orjson.loads(await anext(stream))]
    await served.until(lambda: engine.counters.steps == 5)
    pause = asyncio.create_task(served.post("/pause_generation", {"mode": mode}))
    await served.until(lambda: engine._commands.qsize() > 0)
    go_on.set()
    await pause
    update = {"model_path": str(checkpoint(1)), "weight_version": "1", "flush_cache": True}
    await served.post("/update_weights_from_disk", {**update, "abort_all_requests": False})
    await served.post("/continue_generation")
    parts += [orjson.loads(event) async for event in stream if event != b"[DONE]"]
    tokens = [token for part in parts for token in part["output_ids"]]
    logprobs = [e[0] for part in parts for e in part["meta_info"]["output_token_logprobs"]]
    versions = [
        span["version"]
        for part in parts
        for span in part["meta_info"]["weight_versions"]
        for _ in range(span["start"], span["end"])
    ]
    finish = parts[-1]["meta_info"]["finish_reason"]["type"]
    switch = versions.index("1") if "1" in versions else len(versions)
    assert versions == ["0"] * switch + ["1"] * (len(tokens) - switch)
    assert switch == 5
    if mode == "abort":
        assert finish == "abort"
        assert len(tokens) == 5
    else:
        assert finish == "length"
        assert len(tokens) == 120
    old = reference_logprobs(build_model("qwen3-gqa", 0), PROMPT + tokens)
    new = reference_logprobs(build_model("qwen3-gqa", 1), PROMPT + tokens)
    for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        reference = old if place < switch else new
        assert logprob == pytest.approx(reference[4 + place, token].item(), abs=1e-5)
    assert (await served.get("/get_model_info"))["weight_version"] == "1"
    fresh = await served.generate()
    assert fresh["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 6}]


def test_a_version_that_is_not_in_memory_any_more_must_be_pulled_again(tmp_path):
    routes = WeightRoutes(None, None, FolderPuller("secret", {}, in_memory=True))
    with raises_code("weights.bad_folder", "/pull_weights"):
        routes._receive_held(tmp_path / "v1")


async def test_an_update_that_fails_after_its_client_has_left_is_logged(caplog):
    unhandled = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context["message"]))
    work = Future()
    routes = WeightRoutes(None, None, None)
    handler = asyncio.create_task(routes._one_at_a_time(lambda command: work, lambda: None))
    await asyncio.sleep(0)
    (update,) = routes._running
    handler.cancel()  # as aiohttp does when the client leaves
    await asyncio.gather(handler, return_exceptions=True)
    work.set_exception(InputError("no such folder", code="weights.no_folder"))
    await asyncio.wait([update])
    del update, handler
    gc.collect()
    assert (unhandled, "no such folder" in caplog.text) == ([], True)


async def test_a_bad_update_is_refused_and_changes_nothing(served, tmp_path, checkpoint):
    body = {"model_path": str(tmp_path / "none"), "weight_version": "1"}
    fifo, closed = tmp_path / "fifo", tmp_path / "closed"
    for folder in (fifo, closed):
        folder.mkdir()
    os.mkfifo(fifo / "model.safetensors")
    closed.chmod(0)
    damaged = checkpoint(1)
    weights = load_file(damaged / "model.safetensors")
    save_file({**weights, "model.norm.weight": torch.full_like(weights["model.norm.weight"], torch.nan)}, damaged / "x")
    (damaged / "x").rename(damaged / "model.safetensors")
    expected = await served.generate()
    for path, code in [
        (body["model_path"], "weights.bad_folder"),
        ("x" * 5000, "weights.bad_folder"),
        (str(fifo), "weights.bad_folder"),
        (str(closed), "weights.bad_folder"),
        ("bad\0name", "weights.bad_folder"),
        (str(damaged), "weights.not_finite"),
    ]:
        assert (await served.post("/update_weights_from_disk", {**body, "model_path": path}, 400))["code"] == code
    closed.chmod(0o700)
    install = {"weight_version": "1", "mode": "abort", "update_id": ""}
    assert (await served.post("/install_weights", install, 400))["code"] == "weights.incomplete"
    assert (await served.post("/install_weights", {**install, "mode": "x"}, 400))["code"] == "request.invalid_field"
    assert (await served.get("/get_model_info"))["weight_version"] == "0"
    answer = await served.generate()
    assert (answer["output_ids"], answer["meta_info"]["weight_version"]) == (expected["output_ids"], "0")
    await served.get("/health")


async def test_weights_arrive_over_a_collective_in_buckets(served, build_model, reference_logprobs):
    new = build_model("qwen3-gqa", 1)
    weights = {name: value.detach() for name, value in new.named_parameters()}
    names = list(weights)
    buckets = [names[:5], names[5:]]
    store = serve_store(Host(), "secret", timeout_s=200)

    def send() -> None:
        group = UpdateGroup(store, rank=0, world_size=2, group_name="g", backend="gloo", timeout_s=200)
        for bucket in buckets:
            specs = [spec(name) for name in bucket]
            buffer = torch.empty(bucket_bytes(specs), dtype=torch.uint8)
            for name, view in bucket_views(buffer, specs).items():
                view.copy_(weights[name])
            group.broadcast(buffer)

    def spec(name: str) -> WeightSpec:
        return WeightSpec(name=name, shape=list(weights[name].shape), dtype="float32")

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    await served.post(
        "/init_weights_update_group",
        {
            "master_address": "127.0.0.1",
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": "g",
            "backend": "gloo",
        },
    )
    for index, bucket in enumerate(buckets):
        specs = [spec(name) for name in bucket]
        await served.post(
            "/update_weights_from_distributed",
            {
                "names": bucket,
                "dtypes": [each.dtype for each in specs],
                "shapes": [each.shape for each in specs],
                "group_name": "g",
                "flush_cache": index == 1,
                "weight_version": "5" if index == 1 else None,
                "load_format": "flattened_bucket",
            },
        )
        if index == 0:
            assert (await served.generate())["meta_info"]["weight_version"] == "0"
    sender.join(200)
    answer = await served.generate()
    assert answer["meta_info"]["weight_version"] == "5"
    reference = reference_logprobs(new, PROMPT + answer["output_ids"])
    for place, (logprob, token, _) in enumerate(answer["meta_info"]["output_token_logprobs"]):
        assert logprob == pytest.approx(reference[4 + place, token].item(), abs=1e-5)
    answer = await served.post("/destroy_weights_update_group", {"group_name": "x"}, 400)
    assert answer["code"] == "weights.no_group"
    await served.post("/destroy_weights_update_group", {"group_name": "g"})


async def test_leaving_the_group_ends_a_waiting_receive(served, build_model):
    store = serve_store(Host(), "secret", timeout_s=200)
    groups: list[UpdateGroup] = []

    def join() -> None:
        groups.append(UpdateGroup(store, rank=0, world_size=2, group_name="g", backend="gloo", timeout_s=200))

    joining = threading.Thread(target=join, daemon=True)
    joining.start()
    group = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
    await served.post("/init_weights_update_group", {**group, "group_name": "g", "backend": "gloo"})
    joining.join(200)
    name, value = next(iter(build_model("qwen3-gqa").named_parameters()))
    update = {"names": [name], "dtypes": ["float32"], "shapes": [list(value.shape)], "group_name": "g"}
    update |= {"flush_cache": True, "weight_version": "2", "load_format": "flattened_bucket"}
    waiting = asyncio.create_task(served.post("/update_weights_from_distributed", update, 500))
    await served.until(lambda: any(thread.name == "weight-update" for thread in threading.enumerate()))
    assert (await served.generate())["meta_info"]["weight_version"] == "0", "it generates while it waits"
    await served.post("/destroy_weights_update_group", {"group_name": "g"})
    assert (await asyncio.wait_for(waiting, 200))["code"] == "weights.transfer_failed"
    await served.get("/health")
    assert (await served.generate())["meta_info"]["weight_version"] == "0"
