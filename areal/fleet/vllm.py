"""Owns the client of one vLLM server; with `vllm_wire`, the only file that knows its URLs and its JSON.

Written for vLLM 0.32 with --enable-scale-out, VLLM_SERVER_DEV_MODE=1 and areal's worker extension. The server tells the
policy versions of an answer only with its end, so tokens that came while weights changed are passed on no earlier.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson

from areal.api.data import WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.replica import (
    FinishReason,
    GenerationPart,
    MemoryTag,
    PartChunk,
    PauseMode,
    ReplicaInfo,
    ReplicaLoad,
)
from areal.fleet.server_client import ServerClient
from areal.fleet.slot import ANY_VERSION
from areal.fleet.stop_gate import generate_across_a_boundary
from areal.fleet.vllm_wire import (
    Piece,
    WorkerState,
    generate_body,
    parse_load,
    parse_piece,
    parse_worker_state,
    part_versions,
    version_number,
    worker_errors,
)
from areal.system.checkpoint_files import folder_problem

BUCKET_TIMEOUT_S = 120.0
"""Longest time that a server waits for one bucket of weights, or for the other ranks to join. It can do nothing else
meanwhile, so a trainer that hangs costs the server this long."""
_EXTENSION_HELP = (
    "start it with VLLM_SERVER_DEV_MODE=1, areal/server_side on PYTHONPATH, --worker-extension-cls "
    'areal_vllm.extension.WorkerExtension and --weight-transfer-config \'{"backend":"areal"}\''
)


OnChunk = Callable[[PartChunk], None]


class VLLMReplica:
    """Speaks to one server over kept-alive connections. See `areal.fleet.replica.Replica`."""

    def __init__(self, name: str, address: str, *, token: str = "") -> None:
        self.name = name
        self.address = address
        self._client = ServerClient(name, address, token=token)
        self._version = 0
        """As the server last said."""
        self._num_updates = 0
        """Begun so far."""
        self._is_updating = False
        self._info: ReplicaInfo | None = None
        """As of the last look."""
        self._group_name = ""

    async def generate(self, part: GenerationPart, on_chunk: OnChunk) -> None:
        """Run a part; see the protocol. A cancelled call drops its connection, on which the server aborts it."""
        if part.num_prior_output_tokens and part.gconfig.stop:
            await generate_across_a_boundary(
                part,
                functools.partial(self._generate, part),
                functools.partial(self._texts, stops=part.gconfig.stop or []),
                on_chunk,
            )
        else:
            await self._generate(part, on_chunk)

    async def _generate(self, part: GenerationPart, on_chunk: OnChunk) -> None:
        path = "/inference/v1/generate"
        collector = _PartCollector(self.name, on_chunk)
        if part.max_new_tokens <= part.stream_interval:
            answer = await self._client.post(path, generate_body(part, stream=False))
            collector.add(self._client.parsed(answer, parse_piece), None)
        else:
            await self._stream(path, part, collector)
        if collector.finish_reason is None:
            raise ServerUnavailable(f"{self.name} ended an answer without a finish reason")

    async def _stream(self, path: str, part: GenerationPart, collector: _PartCollector) -> None:
        version, num_updates = self._version, self._num_updates
        errors: list[bytes] = []

        def on_event(event: bytes) -> None:
            if event.startswith(b'{"error"'):  # a stream that began well may end so
                errors.append(event)
                return
            collector.add(
                self._client.parsed(event, parse_piece), version if self._num_updates == num_updates else None
            )

        await self._client.stream(path, generate_body(part, stream=True), on_event)
        if errors:
            status = self._client.parsed(errors[0], lambda found: int(found["error"]["code"]))
            raise self._client.refusal(path, status, errors[0])

    async def _texts(self, token_lists: list[list[int]], stops: list[str]) -> list[str]:
        """Of lists that each begin with the one before; when the last holds no stop string, the others need no text."""
        whole = await self._text(token_lists[-1])
        if not any(stop in whole for stop in stops):
            return [""] * (len(token_lists) - 1) + [whole]
        return list(await asyncio.gather(*(self._text(token_ids) for token_ids in token_lists)))

    async def _text(self, token_ids: list[int]) -> str:
        answer = await self._client.post("/detokenize", {"tokens": token_ids})
        return self._client.parsed(answer, lambda found: str(found["prompt"]))

    async def pause(self, mode: PauseMode) -> None:
        """Both leave no key or value of the old weights in the cache."""
        query = urlencode({"mode": "abort" if mode == "abort" else "keep", "clear_cache": "true"})
        await self._client.post(f"/pause?{query}", {})

    async def resume(self) -> None:
        await self._client.post("/resume", {})

    async def update_weights(self, update: WeightUpdate, *, rank: int) -> None:
        """Disk: load the folder. Collective: join the group if it is new, then receive bucket by bucket."""
        self._is_updating = True
        try:
            await (self._load_folder(update) if update.kind == "disk" else self._receive(update, rank))
        finally:
            self._is_updating = False
        self._version = update.version

    async def _load_folder(self, update: WeightUpdate) -> None:
        state = await self._worker_state()
        if problem := await asyncio.to_thread(folder_problem, Path(update.path), Path(state.first_folder)):
            raise RequestError(f"{self.name} is not given weights: {problem}")
        await self._begin_change()
        await self._call_workers("areal_load_folder", update.path)
        await self._use_weights(update.version)

    async def _receive(self, update: WeightUpdate, rank: int) -> None:
        if self._group_name != update.group_name:
            await self._join_group(update, rank)
        await self._begin_change()
        await self._call_workers("areal_start_update")
        for bucket in update.buckets:
            info = {
                "names": [spec.name for spec in bucket],
                "dtype_names": [spec.dtype for spec in bucket],
                "shapes": [spec.shape for spec in bucket],
            }
            await self._call_workers("areal_receive", info)
        await self._call_workers("areal_finish_update")
        await self._use_weights(update.version)

    async def _join_group(self, update: WeightUpdate, rank: int) -> None:
        self._group_name = ""
        info = {
            "master_address": update.master_address,
            "master_port": update.master_port,
            "rank_offset": rank,
            "world_size": update.world_size,
            "group_name": update.group_name,
            "backend": update.backend,
            "timeout_s": BUCKET_TIMEOUT_S,
        }
        await self._call_workers("areal_join", info)
        self._group_name = update.group_name

    async def _begin_change(self) -> None:
        """From here until its new version is told to it the server has none: whatever stops in between, its weights
        never count as those of the version before."""
        self._num_updates += 1
        await self._client.post("/update_weight_version", {"new_version": str(ANY_VERSION)})

    async def _use_weights(self, version: int) -> None:
        """No request may go on from keys and values of the weights before: they go first, then the version counts."""
        try:
            await self._drop_cache()
            await self._client.post("/update_weight_version", {"new_version": str(version)})
        except RequestError as error:  # which would mean that the weights are as before
            raise ServerUnavailable(str(error)) from error

    async def _drop_cache(self) -> None:
        answer = await self._client.post("/reset_prefix_cache?reset_running_requests=true", {})
        if not self._client.parsed(answer, lambda found: found["success"]):
            raise ServerUnavailable(f"{self.name} did not give up the KV cache of the weights before")

    async def abandon_update(self) -> None:
        """Nothing reaches a server that waits for a bucket: its wait ends with the trainer's connection, or after
        BUCKET_TIMEOUT_S. A later update joins anew."""
        self._group_name = ""

    async def info(self) -> ReplicaInfo:
        """While it takes in weights the process that computes answers nothing, so the HTTP server is asked."""
        if self._is_updating and self._info is not None:
            await self._client.get("/health")
            return self._info
        asked_at = None if self._is_updating else self._num_updates
        state = await self._worker_state()
        told = await self._client.get("/weight_info")
        version = self._client.parsed(
            told, lambda found: version_number(found["weight_version"], has_dummy_weights=state.has_dummy_weights)
        )
        if asked_at == self._num_updates:  # else an update has told, or will
            self._version = version
        self._info = ReplicaInfo(
            version=version,
            vocab_size=state.vocab_size,
            context_length=state.context_length,
            weights_whole=state.weights_whole,
        )
        return self._info

    async def _worker_state(self) -> WorkerState:
        return self._client.parsed(await self._call_workers("areal_state"), parse_worker_state)

    async def _call_workers(self, method: str, *args: Any) -> bytes:
        """Run a method of areal's extension in every worker. ServerUnavailable when it failed in one."""
        path = "/collective_rpc"
        status, answer = await self._client.exchange("POST", path, orjson.dumps({"method": method, "args": list(args)}))
        if status == 404 or b"has no attribute 'areal_" in answer:
            raise ServerUnavailable(f"{self.name} runs without areal's extension: {_EXTENSION_HELP}")
        if status != 200:
            raise self._client.refusal(path, status, answer)
        if errors := self._client.parsed(answer, worker_errors):
            raise ServerUnavailable(f"{self.name} failed {method}: {errors[0]}")
        return answer

    async def load(self) -> ReplicaLoad:
        """How busy it is; see the protocol."""
        answer = await self._client.get("/metrics")
        try:
            return parse_load(answer.decode())
        except (KeyError, ValueError) as error:
            raise ServerUnavailable(f"{self.name} told its load in a way that cannot be read: {error!r}") from error

    async def load_adapter(self, name: str, path: str) -> None:
        if not await asyncio.to_thread((Path(path) / "adapter_config.json").is_file):  # vLLM's workers would disagree
            raise RequestError(f"{self.name} is not given the LoRA adapter {path}: it has no adapter_config.json")
        await self._client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        await self._client.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def release_memory(self, tags: list[MemoryTag]) -> None:
        """Weights go to the host's memory and come back from there; the KV cache is given up. Aborts what runs."""
        if not (await self._worker_state()).has_sleep_mode:
            raise RequestError(f"{self.name} cannot give up its memory: start it with --enable-sleep-mode")
        if "weights" in tags:
            await self._client.post("/sleep?level=1", {})
            if "kv_cache" not in tags:  # vLLM lets go of both
                await self.resume_memory(["kv_cache"])
        elif "kv_cache" in tags:
            await self.pause("abort")
            await self._client.post("/release_kv_cache_memory", {})

    async def resume_memory(self, tags: list[MemoryTag]) -> None:
        """It generates again once it has all of its memory."""
        for tag in tags:  # of several at once vLLM resumes none when one of them is there already
            await self._client.post("/wake_up?" + urlencode({"tags": tag}), {})

    async def close(self) -> None:
        """Drop all connections: every running call fails with ServerUnavailable."""
        self._client.close()


@dataclass
class _PartCollector:
    """Passes on the tokens of one part once their versions are certain."""

    replica_name: str
    on_chunk: OnChunk
    finish_reason: FinishReason | None = None
    num_passed_on: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    """That wait for the end of the part, since an update began before they came."""
    logprobs: list[float] = field(default_factory=list[float])

    def add(self, piece: Piece, version: int | None) -> None:
        """`version` made the tokens of this piece; None when only the end of the part will tell."""
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason
        versions: list[int] | None = None
        if piece.finish_reason is not None:
            versions = self._told_versions(piece)
        elif version is None:
            return
        num_new = len(self.token_ids)
        told = [version or 0] * num_new if versions is None else versions[self.num_passed_on :]
        chunk = PartChunk(self.token_ids, self.logprobs, told, piece.finish_reason, versions)
        self.num_passed_on += num_new
        self.token_ids, self.logprobs = [], []
        self.on_chunk(chunk)

    def _told_versions(self, last: Piece) -> list[int]:
        try:
            return part_versions(last.spans, self.num_passed_on + len(self.token_ids))
        except ValueError as error:
            raise ServerUnavailable(f"{self.replica_name} did not tell the versions of an answer: {error}") from error
