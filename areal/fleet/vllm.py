"""The client of one vLLM server. With `vllm_wire`, the only module that knows its URLs and its JSON.

Written for vLLM 0.32 with --enable-scale-out, VLLM_SERVER_DEV_MODE=1 and areal's worker extension. The server reports
the policy versions of an answer only at its end, so tokens that arrive during a weight update are held until then.
"""

from __future__ import annotations

import asyncio
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson

from areal.api.columns import Packed, Runs
from areal.api.data import WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.adapters import ServedAdapters
from areal.fleet.continuation import versions_of
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
from areal.fleet.server_client import HttpReplica, group_body
from areal.fleet.stop_gate import generate_with_stops
from areal.fleet.vllm_wire import (
    Piece,
    WorkerState,
    generate_body,
    parse_load,
    parse_piece,
    parse_worker_state,
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


class VLLMReplica(HttpReplica):
    """See `areal.fleet.replica.Replica`."""

    def __init__(self, name: str, address: str, token: str = "") -> None:
        super().__init__(name, address, token)
        self._version = 0
        """From the last report of the server."""
        self._num_updates = 0
        """Started so far."""
        self._is_updating = False
        self._info: ReplicaInfo | None = None
        """From the last health check."""
        self._adapters = ServedAdapters(self.load_adapter, self.unload_adapter)

    async def generate(self, part: GenerationPart, on_chunk: OnChunk) -> None:
        """See the protocol. A cancelled call drops its connection, and the server then aborts the request."""
        to_texts = functools.partial(self._texts, part.gconfig.stop or [])
        with self._adapters.part(part, on_chunk) as (own, on_own):
            await generate_with_stops(own, functools.partial(self._generate, own), to_texts, on_own)
        await self._adapters.drop_unused()

    async def _generate(self, part: GenerationPart, on_chunk: OnChunk) -> None:
        path = "/inference/v1/generate"
        collector = _PartCollector(self.name, on_chunk)
        version, num_updates = self._version, self._num_updates

        def on_event(event: bytes) -> None:
            if event.startswith(b'{"error"'):  # a stream can end with an error
                status = self._client.parsed(event, lambda found: int(found["error"]["code"]))
                raise self._client.refusal(path, status, event)
            piece = self._client.parsed(event, parse_piece)
            collector.add(piece, version if self._num_updates == num_updates else None)

        make_body = functools.partial(generate_body, part, stream=part.is_streamed)
        await self._send_part(path, part.is_streamed, make_body, on_event)
        if collector.finish_reason is None:
            raise self._unfinished()

    async def _texts(self, stops: list[str], token_lists: list[Sequence[int]]) -> list[str]:
        """The texts of lists, each a prefix of the next. If the last has no stop string, the others stay empty."""
        whole = await self._text(token_lists[-1])
        if not any(stop in whole for stop in stops):
            return [""] * (len(token_lists) - 1) + [whole]
        return list(await asyncio.gather(*(self._text(token_ids) for token_ids in token_lists)))

    async def _text(self, token_ids: Sequence[int]) -> str:
        answer = await self._client.post("/detokenize", {"tokens": token_ids})
        return self._client.parsed(answer, lambda found: str(found["prompt"]))

    async def pause(self, mode: PauseMode) -> None:
        """abort and retract clear the cache of keys and values of the old weights."""
        clear_cache = "false" if mode == "in_place" else "true"
        query = urlencode({"mode": "abort" if mode == "abort" else "keep", "clear_cache": clear_cache})
        await self._client.post(f"/pause?{query}", {})

    async def resume(self) -> None:
        await self._client.post("/resume", {})

    async def update_weights(self, update: WeightUpdate, *, rank: int, mode: PauseMode) -> None:
        if update.kind == "adapter":
            await self._adapters.use(update.path, update.version)
            await self._client.post("/update_weight_version", {"new_version": str(update.version)})
            self._version = update.version
            return await self._adapters.drop_unused()
        self._is_updating = True
        try:
            folder = await self._folder_of(update) if update.is_folder else ""
            if update.kind == "disk":
                state = await self._worker_state()
                if problem := await asyncio.to_thread(folder_problem, Path(folder), Path(state.first_folder)):
                    raise RequestError(f"{self.name} cannot load these weights: {problem}", code="weights.bad_folder")
            elif update.kind == "collective" and self._group_name != update.group_name:
                self._group_name = ""
                await self._call_workers("areal_join", {**group_body(update, rank), "timeout_s": BUCKET_TIMEOUT_S})
                self._group_name = update.group_name
            # The server has no version until the end: an update that fails never counts as the version before.
            self._num_updates += 1
            await self._client.post("/update_weight_version", {"new_version": str(NO_VERSION)})
            if folder:
                await self._call_workers("areal_load_folder", folder)
            else:
                await self._receive(update)
            await self._use_weights(update.version, keep_cache=mode == "in_place")
        finally:
            self._is_updating = False
        self._version = update.version

    async def _receive(self, update: WeightUpdate) -> None:
        await self._call_workers("areal_start_update")
        for bucket in update.buckets:
            info = {
                "names": [spec.name for spec in bucket],
                "dtype_names": [spec.dtype for spec in bucket],
                "shapes": [spec.shape for spec in bucket],
            }
            await self._call_workers("areal_receive", info)
        await self._call_workers("areal_finish_update")

    async def _use_weights(self, version: int, *, keep_cache: bool) -> None:
        """Clear the cache of the old weights unless it is kept, then set the version."""
        try:
            if not keep_cache:
                answer = await self._client.post("/reset_prefix_cache?reset_running_requests=true", {})
                if not self._client.parsed(answer, lambda found: found["success"]):
                    text = f"{self.name} did not clear the KV cache of the old weights"
                    raise ServerUnavailable(text, code="server.request_failed")
            await self._client.post("/update_weight_version", {"new_version": str(version)})
        except RequestError as error:  # RequestError would mean that the weights are unchanged
            raise ServerUnavailable(str(error), code="server.request_failed") from error

    async def abandon_update(self) -> None:
        """A server that waits for a bucket reads no call: its wait ends with the trainer's connection, or after
        BUCKET_TIMEOUT_S. The next update joins again."""
        self._group_name = ""

    async def info(self) -> ReplicaInfo:
        """Only the HTTP process answers during a weight update."""
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
            text = f"{self.name} runs without areal's extension: {_EXTENSION_HELP}"
            raise ServerUnavailable(text, code="server.no_extension")
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
            text = f"{self.name} cannot load the LoRA adapter {path}: it has no adapter_config.json"
            raise RequestError(text, code="server.adapter_folder")
        await self._client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        await self._client.post("/v1/unload_lora_adapter", {"lora_name": name})


@dataclass
class _PartCollector:
    """Passes on the tokens of one part as soon as their versions are known."""

    replica_name: str
    on_chunk: OnChunk
    finish_reason: FinishReason | None = None
    num_passed_on: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    """Held until the end of the part, because a weight update started before they arrived."""
    logprobs: array[float] = field(default_factory=lambda: array("f"))

    def add(self, piece: Piece, version: int | None) -> None:
        """`version` generated the tokens of this piece; None when only the end of the part reports it."""
        try:
            self.token_ids.extend(piece.token_ids)
            self.logprobs.extend(piece.logprobs)
        except (TypeError, OverflowError) as error:
            text = f"{self.replica_name} sent numbers of the wrong type or range: {error}"
            raise ServerUnavailable(text, code="server.unreadable_answer") from error
        self.finish_reason = piece.finish_reason
        versions: Runs[int] | None = None
        if piece.finish_reason is not None:
            versions = self._reported_versions(piece)
        elif version is None:
            return
        num_new = len(self.token_ids)
        known = Runs([(version or 0, num_new)]) if versions is None else versions[self.num_passed_on :]
        chunk = PartChunk(Packed(self.token_ids), Packed(self.logprobs), known, piece.finish_reason, versions)
        self.num_passed_on += num_new
        self.token_ids, self.logprobs = array("i"), array("f")
        self.on_chunk(chunk)

    def _reported_versions(self, last: Piece) -> Runs[int]:
        try:
            return versions_of(last.spans or [], self.num_passed_on + len(self.token_ids))
        except ValueError as error:
            text = f"{self.replica_name} did not report the versions of an answer: {error}"
            raise ServerUnavailable(text, code="server.unreadable_answer") from error
