"""The client of one vLLM server. With `vllm_wire`, the only module that knows its URLs and its JSON.

Written for vLLM 0.32 with --enable-scale-out, VLLM_SERVER_DEV_MODE=1 and areal's worker extension. The server reports
the policy versions of an answer only at its end, so tokens that arrive during a weight update are held until then.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson

from areal.api.data import WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.replica import (
    NO_VERSION,
    FinishReason,
    GenerationPart,
    OnChunk,
    PartChunk,
    PauseMode,
    ReplicaInfo,
    ReplicaLoad,
)
from areal.fleet.server_client import ServerClient
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
"""Maximum time that a server waits for one bucket of weights, or for the other ranks to join. It answers nothing else
meanwhile: a trainer that hangs blocks the server this long."""
_EXTENSION_HELP = (
    "start it with VLLM_SERVER_DEV_MODE=1, areal/server_side on PYTHONPATH, --worker-extension-cls "
    'areal_vllm.extension.WorkerExtension and --weight-transfer-config \'{"backend":"areal"}\''
)


class VLLMReplica:
    """See `areal.fleet.replica.Replica`."""

    def __init__(self, name: str, address: str, *, token: str = "") -> None:
        self.name = name
        self.address = address
        self._client = ServerClient(name, address, token=token)
        self._version = 0
        """From the last report of the server."""
        self._num_updates = 0
        """Started so far."""
        self._is_updating = False
        self._info: ReplicaInfo | None = None
        """From the last health check."""
        self._group_name = ""

    async def generate(self, part: GenerationPart, on_chunk: OnChunk) -> None:
        """See the protocol. A cancelled call drops its connection, and the server then aborts the request."""
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
            raise ServerUnavailable(
                f"{self.name} ended an answer without a finish reason", code="server.unreadable_answer"
            )

    async def _stream(self, path: str, part: GenerationPart, collector: _PartCollector) -> None:
        version, num_updates = self._version, self._num_updates
        errors: list[bytes] = []

        def on_event(event: bytes) -> None:
            if event.startswith(b'{"error"'):  # a stream can end with an error
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
        """The texts of lists, each a prefix of the next. If the last has no stop string, the others stay empty."""
        whole = await self._text(token_lists[-1])
        if not any(stop in whole for stop in stops):
            return [""] * (len(token_lists) - 1) + [whole]
        return list(await asyncio.gather(*(self._text(token_ids) for token_ids in token_lists)))

    async def _text(self, token_ids: list[int]) -> str:
        answer = await self._client.post("/detokenize", {"tokens": token_ids})
        return self._client.parsed(answer, lambda found: str(found["prompt"]))

    async def pause(self, mode: PauseMode) -> None:
        """Both modes clear the cache of keys and values of the old weights."""
        query = urlencode({"mode": "abort" if mode == "abort" else "keep", "clear_cache": "true"})
        await self._client.post(f"/pause?{query}", {})

    async def resume(self) -> None:
        await self._client.post("/resume", {})

    async def update_weights(self, update: WeightUpdate, *, rank: int) -> None:
        """Disk: load the folder. Collective: join the group if it is new, then receive one bucket after another."""
        self._is_updating = True
        try:
            await (self._load_folder(update) if update.kind == "disk" else self._receive(update, rank))
        finally:
            self._is_updating = False
        self._version = update.version

    async def _load_folder(self, update: WeightUpdate) -> None:
        state = await self._worker_state()
        if problem := await asyncio.to_thread(folder_problem, Path(update.path), Path(state.first_folder)):
            raise RequestError(f"{self.name} cannot load these weights: {problem}", code="weights.bad_folder")
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
        """The server has no version until `_use_weights`: an update that fails in between never counts as the version
        before."""
        self._num_updates += 1
        await self._client.post("/update_weight_version", {"new_version": str(NO_VERSION)})

    async def _use_weights(self, version: int) -> None:
        """Clear the cache, then set the version: no request may continue with keys and values of the old weights."""
        try:
            await self._drop_cache()
            await self._client.post("/update_weight_version", {"new_version": str(version)})
        except RequestError as error:  # RequestError would mean that the weights are unchanged
            raise ServerUnavailable(str(error), code="server.request_failed") from error

    async def _drop_cache(self) -> None:
        answer = await self._client.post("/reset_prefix_cache?reset_running_requests=true", {})
        if not self._client.parsed(answer, lambda found: found["success"]):
            raise ServerUnavailable(
                f"{self.name} did not clear the KV cache of the old weights", code="server.request_failed"
            )

    async def abandon_update(self) -> None:
        """A server that waits for a bucket reads no call: its wait ends with the trainer's connection, or after
        BUCKET_TIMEOUT_S. The next update joins again."""
        self._group_name = ""

    async def info(self) -> ReplicaInfo:
        """During a weight update the process that computes does not answer, so the HTTP process is asked instead."""
        if self._is_updating and self._info is not None:
            await self._client.get("/health")
            return self._info
        asked_at = None if self._is_updating else self._num_updates
        state = await self._worker_state()
        weights = await self._client.get("/weight_info")
        version = self._client.parsed(
            weights, lambda found: version_number(found["weight_version"], has_dummy_weights=state.has_dummy_weights)
        )
        if asked_at == self._num_updates:  # otherwise an update has set it, or will
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
        """Run a method of areal's extension in every worker. ServerUnavailable when one worker fails."""
        path = "/collective_rpc"
        status, answer = await self._client.exchange("POST", path, orjson.dumps({"method": method, "args": list(args)}))
        if status == 404 or b"has no attribute 'areal_" in answer:
            raise ServerUnavailable(
                f"{self.name} runs without areal's extension: {_EXTENSION_HELP}", code="server.no_extension"
            )
        if status != 200:
            raise self._client.refusal(path, status, answer)
        if errors := self._client.parsed(answer, worker_errors):
            raise ServerUnavailable(f"{self.name} failed {method}: {errors[0]}", code="server.request_failed")
        return answer

    async def load(self) -> ReplicaLoad:
        answer = await self._client.get("/metrics")
        try:
            return parse_load(answer.decode())
        except (KeyError, ValueError) as error:
            raise self._client.unreadable(error) from error

    async def load_adapter(self, name: str, path: str) -> None:
        if not await asyncio.to_thread((Path(path) / "adapter_config.json").is_file):  # vLLM's workers would disagree
            raise RequestError(
                f"{self.name} cannot load the LoRA adapter {path}: it has no adapter_config.json",
                code="server.adapter_folder",
            )
        await self._client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        await self._client.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def close(self) -> None:
        self._client.close()


@dataclass
class _PartCollector:
    """Passes on the tokens of one part as soon as their versions are known."""

    replica_name: str
    on_chunk: OnChunk
    finish_reason: FinishReason | None = None
    num_passed_on: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    """Held until the end of the part, because a weight update started before they arrived."""
    logprobs: list[float] = field(default_factory=list[float])

    def add(self, piece: Piece, version: int | None) -> None:
        """`version` generated the tokens of this piece; None when only the end of the part reports it."""
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason
        versions: list[int] | None = None
        if piece.finish_reason is not None:
            versions = self._reported_versions(piece)
        elif version is None:
            return
        num_new = len(self.token_ids)
        known = [version or 0] * num_new if versions is None else versions[self.num_passed_on :]
        chunk = PartChunk(self.token_ids, self.logprobs, known, piece.finish_reason, versions)
        self.num_passed_on += num_new
        self.token_ids, self.logprobs = [], []
        self.on_chunk(chunk)

    def _reported_versions(self, last: Piece) -> list[int]:
        try:
            return part_versions(last.spans, self.num_passed_on + len(self.token_ids))
        except ValueError as error:
            raise ServerUnavailable(
                f"{self.replica_name} did not report the versions of an answer: {error}",
                code="server.unreadable_answer",
            ) from error
