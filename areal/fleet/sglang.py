"""The client of one SGLang server. With `sglang_wire`, the only module that knows its URLs and its JSON.

Written for SGLang 0.5.23; `sglang_wire.ServerFacts` states what differs in versions since 0.5.10. A call ends with the
server's answer, with the connection, or with its caller's time limit.
"""

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from areal.api.data import WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.adapters import ServedAdapters
from areal.fleet.replica import GenerationPart, OnChunk, PartChunk, PauseMode, ReplicaInfo, ReplicaLoad
from areal.fleet.server_client import HttpReplica, group_body
from areal.fleet.sglang_wire import (
    PartReader,
    ServerFacts,
    bucket_body,
    generate_body,
    generated_tokens,
    parse_facts,
    parse_version,
    parse_vocabulary,
    vocabulary_probe,
)
from areal.fleet.stop_gate import generate_with_stops
from areal.observe.log import get_logger
from areal.system.checkpoint_files import folder_problem

log = get_logger(__name__)

DRAIN_S = 1.0
"""How long a pause waits until aborted requests return; SGLang itself checks for them once a second."""


class SGLangReplica(HttpReplica):
    """See `areal.fleet.replica.Replica`."""

    def __init__(self, name: str, address: str, token: str = "") -> None:
        super().__init__(name, address, token)
        self._version = 0
        """From the last report of the server or the last update."""
        self._facts: ServerFacts | None = None
        self._vocab_size = 0
        """0: not known yet."""
        self._is_updating = False
        self._num_updates = 0
        """Started so far."""
        self._num_running = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self._adapters = ServedAdapters(self.load_adapter, self.unload_adapter)

    # Generation

    async def generate(self, part: GenerationPart, on_chunk: OnChunk) -> None:
        """See the protocol. A cancelled call drops its connection, and the server then aborts the request."""
        facts = await self._known_facts()
        self._num_running += 1
        self._drained.clear()
        try:
            with self._adapters.part(part, on_chunk) as (own, on_own):
                await generate_with_stops(own, functools.partial(self._generate, own, facts), self._texts, on_own)
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._drained.set()
        await self._adapters.drop_unused()

    async def _generate(self, part: GenerationPart, facts: ServerFacts, on_chunk: OnChunk) -> None:
        reader = PartReader(self._version, part.experts)

        def read(answer: dict[str, Any]) -> PartChunk:
            if "error" in answer:  # the status of a stream is sent before the error occurs
                status = answer["error"].get("code", 400)
                refused = orjson.dumps(answer)
                raise self._client.refusal("/generate", status if isinstance(status, int) else 500, refused)
            return reader.read(answer, self._version)

        def on_event(event: bytes) -> None:
            on_chunk(self._client.parsed(event, read))

        make_body = functools.partial(generate_body, part, facts, stream=part.is_streamed)
        await self._send_part("/generate", part.is_streamed, make_body, on_event)
        if not reader.finished:
            raise self._unfinished()

    async def _texts(self, token_lists: list[Sequence[int]]) -> list[str]:
        answer = await self._client.post("/detokenize", {"tokens": token_lists, "skip_special_tokens": False})
        return self._client.parsed(answer, lambda found: [str(text) for text in found["text"]])

    # Control

    async def pause(self, mode: PauseMode) -> None:
        """abort: the server checks once a second whether all requests have returned, so they are awaited here first."""
        if mode == "abort":
            await self._client.post("/abort_request", {"abort_all": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._drained.wait()
        await self._client.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._client.post("/continue_generation", {})

    async def info(self) -> ReplicaInfo:
        """Uses /server_info, which the process that computes answers also while it is paused, unlike /health.

        That process does not answer during a weight update: then only the HTTP process is asked.
        """
        facts = await self._known_facts(again=not self._is_updating)
        if not self._vocab_size:
            self._vocab_size = await self._ask_vocab_size()
        asked_at = None if self._is_updating else self._num_updates
        version = self._client.parsed(await self._client.get("/model_info"), parse_version)
        if asked_at == self._num_updates:  # otherwise an update has set it, or will
            self._version = version
        return ReplicaInfo(
            version=version, vocab_size=self._vocab_size, context_length=facts.context_length, weights_whole=None
        )

    async def _known_facts(self, *, again: bool = False) -> ServerFacts:
        if self._facts is None or again:
            self._facts = self._client.parsed(await self._client.get("/server_info"), parse_facts)
        return self._facts

    async def _ask_vocab_size(self) -> int:
        """A paused server would not answer, so it is resumed first: this new client did not pause it."""
        await self.resume()
        path = "/generate"
        status, answer = await self._client.exchange("POST", path, orjson.dumps(vocabulary_probe()))
        if status != 400:
            raise self._client.refusal(path, status, answer)
        try:
            return parse_vocabulary(answer)
        except ValueError as error:
            text = f"{self.name} does not report the size of its vocabulary: {error}"
            raise ServerUnavailable(text, code="server.unreadable_answer") from error

    async def load(self) -> ReplicaLoad:
        answer = await self._client.get("/v1/loads")
        metrics = await self._client.get("/metrics")

        def parse(found: dict[str, Any]) -> ReplicaLoad:
            loads = found["loads"]
            return ReplicaLoad(
                running=sum(load["num_running_reqs"] for load in loads),
                queued=sum(load["num_waiting_reqs"] for load in loads),
                cache_usage=max(load["token_usage"] for load in loads),
                generated_tokens=generated_tokens(metrics.decode()),
            )

        return self._client.parsed(answer, parse)

    # Weights

    async def update_weights(self, update: WeightUpdate, *, rank: int, mode: PauseMode) -> None:
        if update.kind == "adapter":
            await self._adapters.use(update.path, update.version)
            body = {"new_version": str(update.version), "abort_all_requests": False}
            await self._client.post("/update_weight_version", body)
            self._version = update.version
            return await self._adapters.drop_unused()
        facts = await self._known_facts()
        if mode == "in_place" and facts.has_step_in_flight and not self._num_updates:
            text = "%s: one token of each answer gets the version after its own at an update: start it with %s"
            log.warning(text, self.name, "--disable-overlap-schedule")
        self._is_updating = True
        self._num_updates += 1
        try:
            if update.is_folder:
                await self._load_folder(update, facts, keep_cache=mode == "in_place")
            else:
                await self._receive(update, facts, rank, keep_cache=mode == "in_place")
        finally:
            self._is_updating = False
        self._version = update.version

    async def _load_folder(self, update: WeightUpdate, facts: ServerFacts, *, keep_cache: bool) -> None:
        """RequestError when no weight was changed.

        Some folders end SGLang, and it answers 400 for others after it changed weights: that counts as a failure, and a
        good folder repairs the weights afterwards.
        """
        folder = Path(await self._folder_of(update))
        if update.kind == "disk":  # a copy on the server's machine has the checksums of the trainer's folder
            folder = folder.resolve()
            problem = await asyncio.to_thread(folder_problem, folder, Path(facts.first_folder))
            if problem:
                raise RequestError(problem, code="weights.bad_folder")
        path = "/update_weights_from_disk"
        body = {
            "model_path": str(folder),
            "load_format": "auto",  # a server that started with dummy weights would load dummy weights again
            "flush_cache": not keep_cache,
            "abort_all_requests": False,
            "weight_version": str(update.version),
        }
        status, answer = await self._client.exchange("POST", path, orjson.dumps(body))
        if status != 200:
            raise ServerUnavailable(str(self._client.refusal(path, status, answer)), code="server.request_failed")

    async def _receive(self, update: WeightUpdate, facts: ServerFacts, rank: int, *, keep_cache: bool) -> None:
        if self._group_name != update.group_name:
            await self.abandon_update()
            await self._client.post("/init_weights_update_group", group_body(update, rank))
            self._group_name = update.group_name
        if facts.has_update_sessions:
            await self._begin_session()
        last = len(update.buckets) - 1
        for index, bucket in enumerate(update.buckets):
            version = update.version if index == last else None
            body = bucket_body(bucket, update.group_name, version, keep_cache=keep_cache)
            await self._client.post("/update_weights_from_distributed", body)
        if facts.has_update_sessions:
            await self._client.post("/end_weight_update", {})

    async def _begin_session(self) -> None:
        """A session that an interrupted update left open is closed first."""
        path, body = "/begin_weight_update", {"selector": "all"}
        status, answer = await self._client.exchange("POST", path, orjson.dumps(body))
        if status == 400:
            await self._client.post("/end_weight_update", {})
            await self._client.post(path, body)
        elif status != 200:
            raise self._client.refusal(path, status, answer)

    async def abandon_update(self) -> None:
        """Leave the group. A server that waits for a bucket reads this only after its wait: it ends with the trainer's
        connection, or with torch's time limit."""
        if self._group_name:  # a pending join ends with the trainer's store
            group_name, self._group_name = self._group_name, ""
            path, body = "/destroy_weights_update_group", orjson.dumps({"group_name": group_name})
            status, answer = await self._client.exchange("POST", path, body)
            if status not in (200, 400):  # 400: it is not in the group
                raise self._client.refusal(path, status, answer)

    # LoRA adapters

    async def load_adapter(self, name: str, path: str) -> None:
        await self._client.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(Path(path).resolve())})

    async def unload_adapter(self, name: str) -> None:
        await self._client.post("/unload_lora_adapter", {"lora_name": name})
