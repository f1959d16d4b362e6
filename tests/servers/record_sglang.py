"""Records what a real SGLang answers, for the fake server of the default test run.

    python -m tests.servers.record_sglang          starts a server on the CPU, asks it everything that areal asks,
                                                   and writes tests/engine/fleet/recordings/sglang-VERSION.json

Needs `make .venv-sglang/.installed`; takes a minute or two. Answers are kept word for word, but for folders, times, the
figures of /metrics that nobody reads and the hundreds of settings in /server_info that nobody reads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from areal.api.data import GenerationRequest, WeightSpec
from areal.fleet.sglang import ServerFacts, bucket_body, generate_body, parse_facts, vocabulary_probe
from areal.server_side.areal_transfer import group, layout
from areal.system.network import Host
from areal.weights.update_group import serve_store
from tests.servers.record_vllm import PROMPT, Recorder, a_form, a_part, record_adapters, recording, write_recording

_LIMIT_S = 120.0
_KEPT_METRICS = ("sglang:generation_tokens_total{", "sglang:num_running_reqs{")
_KEPT_SETTINGS = (
    "version",
    "model_path",
    "load_format",
    "weight_version",
    "context_length",
    "max_req_input_len",
    "max_total_num_tokens",
    "incremental_streaming_output",
    "enable_deterministic_inference",
    "enable_lora",
)
_TIMES = ("_ts", "_time", "_latency", "_wait", "_throughput", "timestamp", "_us", "created")
GENERATE = "/generate"


def calm(result: Any) -> Any:
    """Without what differs from one recording to the next for no reason."""
    if isinstance(result, list):
        return [calm(entry) for entry in result]
    if not isinstance(result, dict):
        return result
    return {key: 0.0 if key.endswith(_TIMES) and value is not None else calm(value) for key, value in result.items()}


def body_of(facts: ServerFacts, part: GenerationRequest, interval: int = 1000) -> dict[str, Any]:
    return generate_body(dataclasses.replace(part, seed=None), a_form(interval), facts)


async def record_description(recorder: Recorder) -> ServerFacts:
    info = await recorder.ask("server_info", "GET", "/server_info")
    kept = {key: info[key] for key in _KEPT_SETTINGS}
    states = [{key: state[key] for key in _KEPT_SETTINGS if key in state} for state in info["internal_states"]]
    recorder.entries["server_info"]["body"] = kept | {"model_path": "MODEL", "internal_states": calm(states)}
    for state in recorder.entries["server_info"]["body"]["internal_states"]:
        state["model_path"] = "MODEL"
    await recorder.ask("model_info", "GET", "/model_info")
    await recorder.ask("vocabulary", "POST", GENERATE, vocabulary_probe())
    return parse_facts(info)


async def record_load(recorder: Recorder, address: str) -> None:
    await recorder.ask("loads", "GET", "/v1/loads")
    await recorder.ask("metrics", "GET", "/metrics")
    async with recorder.session.get(address + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    kept = [line.replace(str(_folder_in(line)), "MODEL") for line in lines if line.startswith(_KEPT_METRICS)]
    recorder.entries["metrics"]["body"] = "".join(line + "\n" for line in kept)


def _folder_in(line: str) -> str:
    return line.partition('model_name="')[2].partition('"')[0] or "MODEL"


async def record_generation(recorder: Recorder, facts: ServerFacts) -> None:
    await recorder.ask("generate", "POST", GENERATE, body_of(facts, a_part(3)))
    await recorder.ask("generate_stream", "POST", GENERATE, body_of(facts, a_part(5), 2))
    ending = dataclasses.replace(a_part(60).gconfig, ignore_eos=False, stop_token_ids=list(range(3, 60)))
    await recorder.ask("generate_stop", "POST", GENERATE, body_of(facts, a_part(60, gconfig=ending)))
    too_long = a_part(3, input_ids=[5] * 3000)
    await recorder.ask("generate_refused", "POST", GENERATE, body_of(facts, too_long))
    await recorder.ask("generate_stream_refused", "POST", GENERATE, body_of(facts, too_long, 2))
    for name in ("generate_refused", "generate_stream_refused"):
        recorder.entries[name]["request"]["body"]["input_ids"] = ["..."]
    await recorder.ask("generate_unknown_adapter", "POST", GENERATE, body_of(facts, a_part(3, adapter="x")))
    await recorder.ask("detokenize", "POST", "/detokenize", {"tokens": [PROMPT], "skip_special_tokens": False})


async def record_pauses(recorder: Recorder, facts: ServerFacts) -> None:
    """The server takes one request at a time, so that the second is in its queue."""
    running = asyncio.create_task(
        recorder.ask("generate_stream_aborted", "POST", GENERATE, body_of(facts, a_part(900), 4))
    )
    queued = asyncio.create_task(
        recorder.ask("generate_queued", "POST", GENERATE, body_of(facts, a_part(3, request_id="recorded-002")))
    )
    while True:
        loads = await recorder.ask("loads", "GET", "/v1/loads")
        if loads["loads"][0]["num_running_reqs"] and loads["loads"][0]["num_waiting_reqs"]:
            break
        assert not running.done(), "the answer was complete before it could be aborted"
    await recorder.ask("abort_request", "POST", "/abort_request", {"abort_all": True})
    await recorder.ask("pause_abort", "POST", "/pause_generation", {"mode": "abort"})
    events = await running
    await queued
    # Of hundreds of events the last one tells how an aborted stream ends.
    recorder.entries["generate_stream_aborted"]["body"] = [events[-1]]
    await recorder.ask("continue", "POST", "/continue_generation", {})
    await recorder.ask("pause_retract", "POST", "/pause_generation", {"mode": "retract"})
    await recorder.ask("continue", "POST", "/continue_generation", {})


async def record_disk_updates(recorder: Recorder, model: Path) -> None:
    path = "/update_weights_from_disk"
    body = {"model_path": str(model), "load_format": "auto", "flush_cache": True, "abort_all_requests": False}
    await recorder.ask("load_folder", "POST", path, body | {"weight_version": "3"})
    missing = body | {"model_path": str(model.parent / "nothing")}
    await recorder.ask("load_folder_failed", "POST", path, missing | {"weight_version": "4"})
    await recorder.ask("model_info_numbered", "GET", "/model_info")


async def record_collective_update(recorder: Recorder, model: Path) -> None:
    weights = {name: value.contiguous() for name, value in load_file(model / "model.safetensors").items()}
    dtypes = [str(value.dtype).removeprefix("torch.") for value in weights.values()]
    shapes = [list(value.shape) for value in weights.values()]
    specs = [WeightSpec(name=n, dtype=d, shape=s) for n, d, s in zip(weights, dtypes, shapes, strict=True)]
    store = serve_store(Host(), "secret", timeout_s=_LIMIT_S)
    info = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
    info |= {"group_name": "recorded", "backend": "gloo"}
    joining = asyncio.create_task(recorder.ask("join", "POST", "/init_weights_update_group", info))
    meeting = {"rank": 0, "world_size": 2, "group_name": "recorded", "backend": "gloo", "timeout_s": _LIMIT_S}
    ours = await asyncio.to_thread(lambda: group.meet(store, **meeting))
    await joining
    begin, receive, end = "/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"
    await recorder.ask("begin", "POST", begin, {"selector": "all"})
    await recorder.ask("begin_again", "POST", begin, {"selector": "all"})
    taking = asyncio.create_task(recorder.ask("receive", "POST", receive, bucket_body(specs, "recorded", 4)))
    buffer = torch.empty(layout.bucket_bytes(dtypes, shapes), dtype=torch.uint8)
    for view, value in zip(layout.views(buffer, dtypes, shapes), weights.values(), strict=True):
        view.copy_(value)
    await asyncio.to_thread(group.broadcast, ours, buffer, _LIMIT_S)
    await taking
    await recorder.ask("end", "POST", end, {})
    await recorder.ask("begin", "POST", begin, {"selector": "all"})
    taking = asyncio.create_task(recorder.ask("receive_failed", "POST", receive, bucket_body(specs, "recorded", 5)))
    await asyncio.to_thread(group.leave, ours)
    await taking
    await recorder.ask("end", "POST", end, {})
    await recorder.ask("destroy", "POST", "/destroy_weights_update_group", {"group_name": "recorded"})
    await recorder.ask("destroy_again", "POST", "/destroy_weights_update_group", {"group_name": "recorded"})
    recorder.entries["join"]["request"]["body"]["master_port"] = 0
    for name in ("receive", "receive_failed"):  # which weights the model has is nothing of the dialect
        told = recorder.entries[name]["request"]["body"]
        told |= {field: told[field][:2] for field in ("names", "dtypes", "shapes")}


async def record(address: str, model: Path, adapter: Path) -> dict[str, dict[str, Any]]:
    async with recording(address, model, adapter) as recorder:
        facts = await record_description(recorder)
        await record_generation(recorder, facts)
        await record_pauses(recorder, facts)
        await record_disk_updates(recorder, model)
        await record_collective_update(recorder, model)
        await record_adapters(recorder, adapter)
        await record_load(recorder, address)
        # A server on CPU does nothing here, but says what one on GPU says.
    return calm(recorder.entries)


if __name__ == "__main__":
    sizes = {"q_proj": 64, "v_proj": 32}  # SGLang takes no adapter that has queries but no values
    lora = {"max_running_requests": 1, "lora_target_modules": [*sizes]}
    sys.exit(
        write_recording(sys.argv[1:], "sglang", record, version_in="server_info", sizes=sizes, num_layers=2, **lora)
    )
