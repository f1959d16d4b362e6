"""Records what a real vLLM answers, for the fake server of the default test run.

    python -m tests.servers.record_vllm            starts a server on the CPU, asks it everything that areal asks,
                                                   and writes tests/fleet/recordings/vllm-VERSION.json

Needs `make .venv-vllm/.installed`; takes a minute or two. Answers are kept word for word, but for folders, times and
the figures of /metrics that nobody reads.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
from safetensors.torch import load_file, save_file

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.data import GenerationRequest
from areal.fleet.replica import AnswerForm
from areal.fleet.vllm import generate_body
from areal.server_side.areal_transfer import group, layout
from areal.system.network import Host
from areal.weights.update_group import serve_store
from tests.servers.checkpoints import build_model, build_tokenizer
from tests.servers.real_server import Backend, RealServer

FOLDER = Path(__file__).parents[1] / "fleet" / "recordings"
PROMPT = [5, 9, 11, 30]
_LIMIT_S = 120.0
_KEPT_METRICS = (
    "vllm:num_requests_running{",
    "vllm:num_requests_waiting{",
    "vllm:kv_cache_usage_perc{",
    "vllm:generation_tokens_total{",
)


def a_part(num_tokens: int, **changes: Any) -> GenerationRequest:
    gconfig = GenerationHyperparameters(max_new_tokens=num_tokens, ignore_eos=True)
    part = GenerationRequest(request_id="recorded-001", input_ids=PROMPT, gconfig=gconfig, seed=7)
    return dataclasses.replace(part, **changes)


def a_form(interval: int) -> AnswerForm:
    return AnswerForm(stream_interval=interval)


class Recorder:
    """Asks and keeps. An entry: the request, the status, and the body as JSON, events or text."""

    def __init__(self, address: str, session: aiohttp.ClientSession, hidden: dict[str, str]) -> None:
        self._address = address
        self.session = session
        self._hidden = hidden
        """Text -> what stands for it in the recording."""
        self.entries: dict[str, dict[str, Any]] = {}

    async def ask(self, name: str, method: str, path: str, body: Any = None) -> Any:
        """Its body, unchanged."""
        async with self.session.request(method, self._address + path, json=body) as answer:
            text = await answer.text()
            kind = answer.content_type
        result: Any = text
        if kind == "application/json":
            result = json.loads(text)
        elif kind == "text/event-stream":
            result = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        elif path == "/metrics":
            result = "".join(line + "\n" for line in text.splitlines() if line.startswith(_KEPT_METRICS))
        request = {"method": method, "path": path, "body": body}
        entry = {"request": request, "status": answer.status, "content_type": kind, "body": result}
        self.entries[name] = json.loads(self._masked(json.dumps(entry)))
        return result

    def _masked(self, text: str) -> str:
        for hidden, shown in self._hidden.items():
            text = text.replace(hidden, shown)
        return text


async def record_generation(recorder: Recorder) -> None:
    path = "/inference/v1/generate"
    await recorder.ask("generate", "POST", path, generate_body(a_part(3), a_form(16)))
    while len(await recorder.ask("generate_stream", "POST", path, generate_body(a_part(5), a_form(2)))) < 3:
        pass  # a busy server puts what it could not send in time into one event
    stopping = dataclasses.replace(a_part(60).gconfig, ignore_eos=False, stop_token_ids=list(range(3, 60)))
    await recorder.ask("generate_stop", "POST", path, generate_body(a_part(60, gconfig=stopping), a_form(100)))
    odd = a_part(3, input_ids=[10_000])
    await recorder.ask("generate_refused", "POST", path, generate_body(odd, stream=False))
    await recorder.ask("generate_unknown_model", "POST", path, generate_body(a_part(3, adapter="x"), a_form(16)))
    running = asyncio.create_task(
        recorder.ask("generate_stream_aborted", "POST", path, generate_body(a_part(800), a_form(4)))
    )
    while True:  # until it runs
        metrics = await recorder.ask("metrics", "GET", "/metrics")
        if any(line.startswith(_KEPT_METRICS[0]) and not line.endswith(" 0.0") for line in metrics.splitlines()):
            break
        assert not running.done(), "the answer was complete before it could be aborted"
    await recorder.ask("pause_abort", "POST", "/pause?mode=abort&clear_cache=true", {})
    events = await running
    # Of hundreds of events the last one tells how an aborted stream ends.
    recorder.entries["generate_stream_aborted"]["body"] = events[-1:]
    await recorder.ask("resume", "POST", "/resume", {})
    await recorder.ask("pause_keep", "POST", "/pause?mode=keep&clear_cache=true", {})
    await recorder.ask("resume", "POST", "/resume", {})
    await recorder.ask("detokenize", "POST", "/detokenize", {"tokens": PROMPT})
    await recorder.ask("metrics", "GET", "/metrics")


def _rpc(method: str, *args: Any) -> dict[str, Any]:
    return {"method": method, "args": list(args)}


async def record_disk_updates(recorder: Recorder, model: Path) -> None:
    rpc = "/collective_rpc"
    await recorder.ask("state", "POST", rpc, _rpc("areal_state"))
    await recorder.ask("weight_info_default", "GET", "/weight_info")
    await recorder.ask("load_folder", "POST", rpc, _rpc("areal_load_folder", str(model)))
    await recorder.ask("reset_cache", "POST", "/reset_prefix_cache?reset_running_requests=true", {})
    await recorder.ask("set_version", "POST", "/update_weight_version", {"new_version": "3"})
    await recorder.ask("weight_info", "GET", "/weight_info")
    await recorder.ask("load_folder_failed", "POST", rpc, _rpc("areal_load_folder", str(model.parent / "nothing")))
    await recorder.ask("load_folder", "POST", rpc, _rpc("areal_load_folder", str(model)))
    await recorder.ask("no_such_method", "POST", rpc, _rpc("areal_nothing"))


async def record_collective_update(recorder: Recorder, model: Path) -> None:
    weights = {name: value.contiguous() for name, value in load_file(model / "model.safetensors").items()}
    store = serve_store(Host(), "secret", timeout_s=_LIMIT_S)
    names = list(weights)
    dtypes = [str(weights[name].dtype).removeprefix("torch.") for name in names]
    shapes = [list(weights[name].shape) for name in names]
    bucket = {"names": names, "dtype_names": dtypes, "shapes": shapes}
    rpc = "/collective_rpc"
    info = {
        "master_address": "127.0.0.1",
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "recorded",
        "backend": "gloo",
        "timeout_s": _LIMIT_S,
    }
    joining = asyncio.create_task(recorder.ask("join", "POST", rpc, _rpc("areal_join", info)))
    meeting = {"rank": 0, "world_size": 2, "group_name": "recorded", "backend": "gloo", "timeout_s": _LIMIT_S}
    ours = await asyncio.to_thread(lambda: group.meet(store, **meeting))
    await joining
    await recorder.ask("start_update", "POST", rpc, _rpc("areal_start_update"))
    taking = asyncio.create_task(recorder.ask("receive", "POST", rpc, _rpc("areal_receive", bucket)))
    buffer = torch.empty(layout.bucket_bytes(dtypes, shapes), dtype=torch.uint8)
    for view, name in zip(layout.views(buffer, dtypes, shapes), names, strict=True):
        view.copy_(weights[name])
    await asyncio.to_thread(group.broadcast, ours, buffer, _LIMIT_S)
    await taking
    await recorder.ask("finish", "POST", rpc, _rpc("areal_finish_update"))
    await recorder.ask("start_update", "POST", rpc, _rpc("areal_start_update"))
    taking = asyncio.create_task(recorder.ask("receive_failed", "POST", rpc, _rpc("areal_receive", bucket)))
    await asyncio.to_thread(group.leave, ours)
    await taking
    await recorder.ask("state_torn", "POST", rpc, _rpc("areal_state"))
    await recorder.ask("load_folder", "POST", rpc, _rpc("areal_load_folder", str(model)))
    recorder.entries["join"]["request"]["body"]["args"][0]["master_port"] = 0
    for name in ("receive", "receive_failed"):  # which weights the model has is nothing of the dialect
        told = recorder.entries[name]["request"]["body"]["args"][0]
        for field in told:
            told[field] = told[field][:2]


async def record_adapters(recorder: Recorder, adapter: Path, root: str = "") -> None:
    """`root`: of the paths."""
    load, unload = f"{root}/load_lora_adapter", f"{root}/unload_lora_adapter"
    body = {"lora_name": "policy-1", "lora_path": str(adapter)}
    await recorder.ask("load_adapter", "POST", load, body)
    await recorder.ask("load_adapter_again", "POST", load, body)
    missing = {"lora_name": "policy-2", "lora_path": str(adapter / "nothing")}
    await recorder.ask("load_adapter_missing", "POST", load, missing)
    await recorder.ask("unload_adapter", "POST", unload, {"lora_name": "policy-1"})
    await recorder.ask("unload_adapter_again", "POST", unload, {"lora_name": "policy-1"})


def write_adapter(folder: Path, hidden_size: int, sizes: Mapping[str, int], num_layers: int) -> Path:
    """A LoRA adapter in PEFT's format for projections of the first layers, by the sizes of what they give."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(num_layers):
        for name, size in sizes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.ones(8, hidden_size)
            tensors[f"{place}.lora_B.weight"] = torch.ones(size, 8)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": [*sizes], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@asynccontextmanager
async def recording(address: str, model: Path, adapter: Path) -> AsyncIterator[Recorder]:
    timeout = aiohttp.ClientTimeout(total=_LIMIT_S)
    connector = aiohttp.TCPConnector(force_close=True)
    hidden = {str(adapter): "ADAPTER", str(model): "MODEL", str(model.parent): "ROOT"}
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield Recorder(address, session, hidden)


def write_recording(
    argv: list[str],
    backend: Backend,
    record: Callable[[str, Path, Path], Coroutine[Any, Any, dict[str, dict[str, Any]]]],
    *,
    version_in: str,
    sizes: Mapping[str, int],
    num_layers: int,
    **flags: Any,
) -> int:
    """Start a server, and write what `record` gets from its address, the model and an adapter.

    `version_in`: the entry with the version of the server. `sizes`, `num_layers`: of the adapter. `flags`: of the
    server.
    """
    parser = argparse.ArgumentParser(description=f"Records what a real {backend} answers.")
    parser.add_argument("--out", type=Path, help="file to write instead")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = build_model(seed=0)
        model.save_pretrained(root / "model")
        build_tokenizer().save_pretrained(root / "model")
        adapter = write_adapter(root / "adapter", model.config.hidden_size, sizes, num_layers)
        server = RealServer(backend, root / "model", root, flags={"enable_lora": True, "max_lora_rank": 8, **flags})
        try:
            entries = asyncio.run(record(server.wait_ready().address, root / "model", adapter))
        finally:
            server.kill_all()
    out = args.out or FOLDER / f"{backend}-{entries[version_in]['body']['version']}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(entries, indent=1) + "\n")
    sys.stdout.write(f"{len(entries)} answers -> {out}\n")
    return 0


async def record(address: str, model: Path, adapter: Path) -> dict[str, dict[str, Any]]:
    async with recording(address, model, adapter) as recorder:
        await recorder.ask("version", "GET", "/version")
        await record_generation(recorder)
        await record_disk_updates(recorder, model)
        await record_collective_update(recorder, model)
        await record_adapters(recorder, adapter, "/v1")
        await recorder.ask("health", "GET", "/health")
    return recorder.entries


if __name__ == "__main__":
    sys.exit(write_recording(sys.argv[1:], "vllm", record, version_in="version", sizes={"q_proj": 64}, num_layers=1))
