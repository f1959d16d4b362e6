"""Any body for any endpoint in any state of the native server: refused or answered, and the first weights stay."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from areal.api.data import WeightSpec
from areal.system.network import Host
from areal.weights.update_group import UpdateGroup, bucket_bytes, bucket_views, serve_store
from tests.attack.native import FIELDS, bodies, check_alive, send
from tests.inference.test_server import test_bad_requests_are_refused_with_one_line

__all__ = ["test_bad_requests_are_refused_with_one_line"]

STATES = ("generating", "paused with abort", "paused with retract", "in a group", "partial weights")
SPREAD = [0.0, 0.5, 1.0]
"""Places in a tensor."""


@contextlib.asynccontextmanager
async def in_group(served):
    """The server is in an update group. Gives a function that broadcasts {name: tensor} and returns (status, code)."""
    store = serve_store(Host(), "secret", timeout_s=200)
    join = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
    joining = asyncio.create_task(
        served.post("/init_weights_update_group", {**join, "group_name": "g", "backend": "gloo"})
    )
    group = await asyncio.to_thread(
        UpdateGroup, store, rank=0, world_size=2, group_name="g", backend="gloo", timeout_s=200
    )
    await joining

    async def broadcast(tensors, version=None):
        specs = [WeightSpec(name=name, shape=list(item.shape), dtype="float32") for name, item in tensors.items()]
        buffer = torch.empty(bucket_bytes(specs), dtype=torch.uint8)
        for name, view in bucket_views(buffer, specs).items():
            view.copy_(tensors[name])
        body = {"names": list(tensors), "dtypes": ["float32"] * len(specs), "shapes": [spec.shape for spec in specs]}
        body |= {"group_name": "g", "load_format": "flattened_bucket", "weight_version": version}
        sender = threading.Thread(target=broadcasting, args=(group, buffer), daemon=True)
        sender.start()
        answer = await asyncio.to_thread(
            send, served.address, "POST", "/update_weights_from_distributed", orjson.dumps(body)
        )
        await asyncio.to_thread(sender.join, 200)
        return answer[0], orjson.loads(answer[1]).get("code", "")

    try:
        yield broadcast
    finally:
        await asyncio.to_thread(send, served.address, "POST", "/destroy_weights_update_group", b'{"group_name":"g"}')
        await asyncio.to_thread(group.close)


def broadcasting(group, buffer):
    with contextlib.suppress(Exception):  # the receiver left
        group.broadcast(buffer)


def weights_of(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@contextlib.asynccontextmanager
async def server_in(state, served, weights):
    async with contextlib.AsyncExitStack() as stack:
        if state == "generating":
            stream = served.events(sampling_params={"max_new_tokens": 200, "ignore_eos": True})
            stack.push_async_callback(stream.aclose)
            await anext(stream)
        elif state.startswith("paused"):
            await served.post("/pause_generation", {"mode": state.removeprefix("paused with ")})
        else:
            broadcast = await stack.enter_async_context(in_group(served))
            if state == "partial weights":
                first = dict(list(weights.items())[:3])
                assert await broadcast(first) == (200, "")
        yield


@pytest.mark.parametrize("state", STATES)
async def test_no_sequence_of_requests_leaves_a_state_that_does_not_serve(served, build_model, state):
    weights = weights_of(build_model("qwen3-gqa", 1))
    any_request = st.sampled_from(sorted(FIELDS)).flatmap(lambda path: st.tuples(st.just(path), bodies(path)))
    loop = asyncio.get_running_loop()
    expected = (await served.generate())["output_ids"]

    async def attack(requests):
        async def answered(path, body):
            async with served.session.post(served.address + path, data=body) as answer:
                text = await answer.read()
                assert answer.status in (200, 400, 413, 503), (path, body[:200], text[:500])

        async with server_in(state, served, weights):
            generating = [asyncio.create_task(answered(*request)) for request in requests if request[0] == "/generate"]
            for item in requests:
                if item[0] != "/generate":
                    await answered(*item)
        # A paused server answers them now.
        await served.post("/continue_generation")
        await asyncio.gather(*generating)
        await asyncio.to_thread(check_alive, served.address)
        assert (await served.generate())["output_ids"] == expected

    @settings(max_examples=settings.default.max_examples // 6)
    @given(requests=st.lists(any_request, min_size=3, max_size=8))
    def attacked(requests):
        asyncio.run_coroutine_threadsafe(attack(requests), loop).result(100)

    await asyncio.to_thread(attacked)


@pytest.mark.parametrize("route", ["disk", "collective"])
async def test_one_number_that_is_not_finite_in_new_weights_is_refused(
    served, build_model, tmp_path, checkpoint, route
):
    weights = weights_of(build_model("qwen3-gqa", 1))
    loop = asyncio.get_running_loop()
    expected = (await served.generate())["output_ids"]
    folder = checkpoint(1)

    async def attack(name, place, bad):
        subject = weights[name].clone()
        subject.view(-1)[int(place * (subject.numel() - 1))] = bad
        changed = weights | {name: subject}
        if route == "disk":
            save_file(changed, folder / "new", metadata={"format": "pt"})
            (folder / "new").rename(folder / "model.safetensors")
            body = orjson.dumps({"model_path": str(folder), "weight_version": "1"})
            status, text = await asyncio.to_thread(send, served.address, "POST", "/update_weights_from_disk", body)
            actual = status, orjson.loads(text).get("code", "")
        else:
            async with in_group(served) as broadcast:
                names = list(weights)
                parts = [{name: changed[name] for name in names[:5]}, {name: changed[name] for name in names[5:]}]
                actual = await broadcast(parts[0])
                if actual[0] == 200:
                    actual = await broadcast(parts[1], "1")
        assert actual == (400, "weights.not_finite")
        await asyncio.to_thread(check_alive, served.address)
        assert (await served.generate())["output_ids"] == expected

    @settings(max_examples=settings.default.max_examples // 12)
    @given(
        st.sampled_from(sorted(weights)), st.sampled_from(SPREAD), st.sampled_from([torch.nan, torch.inf, -torch.inf])
    )
    def attacked(name, place, bad):
        asyncio.run_coroutine_threadsafe(attack(name, place, bad), loop).result(100)

    await asyncio.to_thread(attacked)


async def test_logits_that_are_not_finite_end_their_request_only(served):
    """One embedding is not finite: requests without its token are answered beside those with it."""
    with torch.no_grad():
        served.engine.runner.model.get_input_embeddings().weight[45] = torch.nan

    async def ask(ids):
        body = orjson.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 2}})
        status, text = await asyncio.to_thread(send, served.address, "POST", "/generate", body)
        return status, orjson.loads(text).get("code", "")

    prompts = [[3, 45], [3, 4], [45], [5, 6, 7], [45] * 30, [8]] * 4
    answers = await asyncio.gather(*map(ask, prompts))
    assert answers == [(500, "request.not_finite") if 45 in ids else (200, "") for ids in prompts]
    await served.get("/health")
