"""Owns the client of one SGLang server; with `sglang_wire`, the only file that knows its URLs and its JSON.

Written for SGLang 0.5.23; older ones down to 0.5.9 differ in what `sglang_wire.ServerFacts` tells. Calls wait for the
server's answer; each ends with the answer, with the connection, or with its caller's time limit.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from areal.api.data import WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.replica import GenerationPart, MemoryTag, PartChunk, PauseMode, ReplicaInfo, ReplicaLoad
from areal.fleet.server_client import ServerClient
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
from areal.fleet.stop_gate import generate_across_a_boundary
from areal.system.checkpoint_files import folder_problem

OnChunk = Callable[[PartChunk], None]
DRAIN_S = 1.0
"""How long a pause waits for aborted requests to come back by themselves; SGLang looks for them once a second."""


class SGLangReplica:
    """Speaks to one server over kept-alive connections. See `areal.fleet.replica.Replica`."""

    def __init__(self, name: str, address: str, *, token: str = "") -> None:
        self.name = name
        self.address = address
        self._client = ServerClient(name, address, token=token)
        self._version = 0
        """As the server last said, or as an update made it."""
        self._facts: ServerFacts | None = None
        self._vocab_size = 0
        """0: not asked yet."""
        self._group_name = ""
        self._is_updating = False
        self._num_updates = 0
        """Begun so far."""
        self._released: set[MemoryTag] = set()
        self._num_running = 0
        self._drained = asyncio.Event()
        self._drained.set()

    # Generation

    async def generate(self, part: GenerationPart, on_chunk: OnChunk) -> None:
        """Run a part; see the protocol. A cancelled call drops its connection, on which the server aborts it."""
        facts = await self._known_facts()
        self._num_running += 1
        self._drained.clear()
        try:
            if part.num_prior_output_tokens and part.gconfig.stop:
                await generate_across_a_boundary(
                    part, functools.partial(self._generate, part, facts), self._texts, on_chunk
                )
            else:
                await self._generate(part, facts, on_chunk)
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._drained.set()

    async def _generate(self, part: GenerationPart, facts: ServerFacts, on_chunk: OnChunk) -> None:
        reader = PartReader(self._version)
        refusals: list[RequestError] = []

        def on_event(event: bytes) -> None:
            try:
                answer = orjson.loads(event)
                if "error" in answer:  # a stream has its status before the server knows
                    status = answer["error"].get("code", 400)
                    raise self._client.refusal("/generate", status if isinstance(status, int) else 500, event)
                chunk = reader.read(answer, self._version)
            except RequestError as error:
                refusals.append(error)
                return
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise ServerUnavailable(f"{self.name} sent an answer that cannot be read: {error!r}") from error
            on_chunk(chunk)

        if part.max_new_tokens <= part.stream_interval:
            on_event(await self._client.post("/generate", generate_body(part, facts, stream=False)))
        else:
            await self._client.stream("/generate", generate_body(part, facts, stream=True), on_event)
        if refusals:
            raise refusals[0]
        if not reader.finished:
            raise ServerUnavailable(f"{self.name} ended an answer without a finish reason")

    async def _texts(self, token_lists: list[list[int]]) -> list[str]:
        answer = await self._client.post("/detokenize", {"tokens": token_lists, "skip_special_tokens": False})
        return self._client.parsed(answer, lambda found: [str(text) for text in found["text"]])

    # Control

    async def pause(self, mode: PauseMode) -> None:
        """abort: the server looks only once a second whether all have come back, so they are awaited here before."""
        if mode == "abort":
            await self._client.post("/abort_request", {"abort_all": True})
            try:
                async with asyncio.timeout(DRAIN_S):
                    await self._drained.wait()
            except TimeoutError:
                pass
        await self._client.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._client.post("/continue_generation", {})

    async def info(self) -> ReplicaInfo:
        """Of the endpoints that answer while paused, /server_info asks the process that computes; /health would not.
        That process answers nobody while it takes in weights: then only the one that speaks HTTP is asked."""
        if self._facts is None or not self._is_updating:
            self._facts = await self._ask_facts()
        if not self._vocab_size:
            self._vocab_size = await self._ask_vocab_size()
        asked_at = None if self._is_updating else self._num_updates
        version = self._client.parsed(await self._client.get("/model_info"), parse_version)
        if asked_at == self._num_updates:  # else an update has told, or will
            self._version = version
        return ReplicaInfo(
            version=version,
            vocab_size=self._vocab_size,
            context_length=self._facts.context_length,
            weights_whole=None,
        )

    async def _known_facts(self) -> ServerFacts:
        if self._facts is None:
            self._facts = await self._ask_facts()
        return self._facts

    async def _ask_facts(self) -> ServerFacts:
        return self._client.parsed(await self._client.get("/server_info"), parse_facts)

    async def _ask_vocab_size(self) -> int:
        """A paused server would let the question wait, so it is resumed: whoever paused it is not this new client."""
        await self.resume()
        path = "/generate"
        status, answer = await self._client.exchange("POST", path, orjson.dumps(vocabulary_probe()))
        if status != 400:
            raise self._client.refusal(path, status, answer)
        try:
            return parse_vocabulary(answer)
        except ValueError as error:
            raise ServerUnavailable(f"{self.name} does not tell the size of its vocabulary: {error}") from error

    async def load(self) -> ReplicaLoad:
        """How busy it is; see the protocol."""
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

    async def update_weights(self, update: WeightUpdate, *, rank: int) -> None:
        """Disk: load the folder. Collective: join the group if it is new, then receive bucket by bucket."""
        facts = await self._known_facts()
        self._is_updating = True
        self._num_updates += 1
        try:
            if update.kind == "disk":
                await self._load_folder(update, facts)
            else:
                await self._receive(update, facts, rank)
        finally:
            self._is_updating = False
        self._version = update.version

    async def _load_folder(self, update: WeightUpdate, facts: ServerFacts) -> None:
        """RequestError when nothing was changed. SGLang dies of some folders, and says 400 of others when weights were
        touched already: that counts as a failure, after which a good folder mends everything."""
        if problem := await asyncio.to_thread(folder_problem, Path(update.path), Path(facts.first_folder)):
            raise RequestError(problem)
        path = "/update_weights_from_disk"
        body = {
            "model_path": str(Path(update.path).resolve()),
            "load_format": "auto",  # a server that began with dummy weights would make up these too
            "flush_cache": True,
            "abort_all_requests": False,
            "weight_version": str(update.version),
        }
        status, answer = await self._client.exchange("POST", path, orjson.dumps(body))
        if status != 200:
            raise ServerUnavailable(str(self._client.refusal(path, status, answer)))

    async def _receive(self, update: WeightUpdate, facts: ServerFacts, rank: int) -> None:
        if self._group_name != update.group_name:
            await self._join_group(update, rank)
        if facts.has_update_sessions:
            await self._begin_session()
        last = len(update.buckets) - 1
        for index, bucket in enumerate(update.buckets):
            version = update.version if index == last else None
            await self._client.post("/update_weights_from_distributed", bucket_body(bucket, update.group_name, version))
        if facts.has_update_sessions:
            await self._client.post("/end_weight_update", {})

    async def _begin_session(self) -> None:
        """A session that an update left open when it stopped midway is closed first."""
        path, body = "/begin_weight_update", {"selector": "all"}
        status, answer = await self._client.exchange("POST", path, orjson.dumps(body))
        if status == 400:
            await self._client.post("/end_weight_update", {})
            await self._client.post(path, body)
        elif status != 200:
            raise self._client.refusal(path, status, answer)

    async def _join_group(self, update: WeightUpdate, rank: int) -> None:
        await self.abandon_update()
        await self._client.post(
            "/init_weights_update_group",
            {
                "master_address": update.master_address,
                "master_port": update.master_port,
                "rank_offset": rank,
                "world_size": update.world_size,
                "group_name": update.group_name,
                "backend": update.backend,
            },
        )
        self._group_name = update.group_name

    async def abandon_update(self) -> None:
        """Leave the group. A server that waits for a bucket reads this only when its wait has ended: with the trainer's
        connection, or with torch's time limit."""
        if self._group_name:  # one that still joins ends with the trainer's store
            group_name, self._group_name = self._group_name, ""
            path, body = "/destroy_weights_update_group", orjson.dumps({"group_name": group_name})
            status, answer = await self._client.exchange("POST", path, body)
            if status not in (200, 400):  # 400: it is not in the group
                raise self._client.refusal(path, status, answer)

    # LoRA adapters and memory

    async def load_adapter(self, name: str, path: str) -> None:
        await self._client.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(Path(path).resolve())})

    async def unload_adapter(self, name: str) -> None:
        await self._client.post("/unload_lora_adapter", {"lora_name": name})

    async def release_memory(self, tags: list[MemoryTag]) -> None:
        """See the protocol. What would kill the server is refused: it must be idle, and each tag is released once."""
        if not (await self._known_facts()).has_memory_saver:
            raise RequestError(f"{self.name} cannot give up memory: start it with sglang.enable_memory_saver=true")
        if again := self._released.intersection(tags):
            raise RequestError(f"{self.name} has given up {', '.join(sorted(again))} already")
        load = await self.load()
        if load.running or load.queued:
            raise RequestError(f"{self.name} is busy: pause it with mode abort before it gives up memory")
        await self._client.post("/release_memory_occupation", {"tags": tags})
        self._released.update(tags)

    async def resume_memory(self, tags: list[MemoryTag]) -> None:
        if missing := set(tags) - self._released:
            raise RequestError(f"{self.name} has not given up {', '.join(sorted(missing))}")
        await self._client.post("/resume_memory_occupation", {"tags": tags})
        self._released.difference_update(tags)

    async def close(self) -> None:
        """Drop all connections: every running call fails with ServerUnavailable."""
        self._client.close()
