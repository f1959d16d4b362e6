"""The client of one native inference server. No other module knows its URLs and its JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from areal.api.data import WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.continuation import versions_of
from areal.fleet.replica import GenerationPart, PartChunk, PauseMode, ReplicaInfo, ReplicaLoad
from areal.fleet.server_client import ServerClient

_ALL_TOKENS = 100_000_000
"""The default of gconfig.top_k, which means no limit; the server's value is -1."""


class NativeReplica:
    """See `areal.fleet.replica.Replica`."""

    def __init__(self, name: str, address: str, *, token: str = "") -> None:
        self.name = name
        self.address = address
        self._client = ServerClient(name, address, token=token)
        self._group_name = ""

    async def generate(self, part: GenerationPart, on_chunk: Callable[[PartChunk], None]) -> None:
        """See the protocol. A cancelled call drops its connection, which ends the request on the server."""
        if part.adapter:
            raise _no_adapters()
        if part.max_new_tokens <= part.stream_interval:
            chunk = self._client.parsed(
                await self._client.post("/generate", _generate_body(part, stream=False)), parse_chunk
            )
            if chunk.finish_reason is None:
                raise _unfinished(self.name)
            on_chunk(chunk)
            return
        finished = False

        def on_event(event: bytes) -> None:
            nonlocal finished
            chunk = self._client.parsed(event, parse_chunk)
            finished = finished or chunk.finish_reason is not None
            on_chunk(chunk)

        await self._client.stream("/generate", _generate_body(part, stream=True), on_event)
        if not finished:
            raise _unfinished(self.name)

    async def pause(self, mode: PauseMode) -> None:
        await self._client.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._client.post("/continue_generation", {})

    async def update_weights(self, update: WeightUpdate, *, rank: int) -> None:
        """Disk: load the folder. Collective: join the group if it is new, then receive one bucket after another."""
        if update.kind == "disk":
            body = {"model_path": update.path, "weight_version": str(update.version), "flush_cache": True}
            await self._client.post("/update_weights_from_disk", {**body, "abort_all_requests": False})
            return
        if self._group_name != update.group_name:
            await self._join_group(update, rank)
        last = len(update.buckets) - 1
        for index, bucket in enumerate(update.buckets):
            await self._client.post(
                "/update_weights_from_distributed",
                {
                    "names": [spec.name for spec in bucket],
                    "dtypes": [spec.dtype for spec in bucket],
                    "shapes": [spec.shape for spec in bucket],
                    "group_name": update.group_name,
                    # One flush at the end is enough; the version is valid once all weights have arrived.
                    "flush_cache": index == last,
                    "weight_version": str(update.version) if index == last else None,
                    "load_format": "flattened_bucket",
                },
            )

    async def abandon_update(self) -> None:
        if self._group_name:  # a pending join ends with the trainer's store
            group_name, self._group_name = self._group_name, ""
            await self._client.post("/destroy_weights_update_group", {"group_name": group_name})

    async def _join_group(self, update: WeightUpdate, rank: int) -> None:
        if self._group_name:
            await self._client.post("/destroy_weights_update_group", {"group_name": self._group_name})
        self._group_name = ""
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

    async def info(self) -> ReplicaInfo:
        status, _ = await self._client.exchange("GET", "/health")
        if status not in (200, 503):
            raise ServerUnavailable(f"{self.name} answered /health with status {status}", code="server.request_failed")
        answer = await self._client.get("/get_model_info")
        try:
            model = orjson.loads(answer)
            return ReplicaInfo(
                version=int(model["weight_version"]),
                vocab_size=int(model["vocab_size"]),
                context_length=int(model["context_length"]),
                weights_whole=status == 200,  # 503: alive, but an update failed midway
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServerUnavailable(
                f"{self.name} does not describe itself as a native server ({error!r}): check that allocation_mode "
                "names the right backend",
                code="server.wrong_backend",
            ) from error

    async def load(self) -> ReplicaLoad:
        answer = await self._client.get("/server_info")
        return self._client.parsed(
            answer,
            lambda info: ReplicaLoad(
                running=int(info["running_requests"]),
                queued=int(info["queued_requests"]),
                cache_usage=info["kv_tokens_used"] / max(info["kv_tokens_capacity"], 1),
                generated_tokens=int(info["generated_tokens_total"]),
            ),
        )

    async def load_adapter(self, name: str, path: str) -> None:
        raise _no_adapters()

    async def unload_adapter(self, name: str) -> None:
        raise _no_adapters()

    async def close(self) -> None:
        self._client.close()


def _no_adapters() -> RequestError:
    return RequestError("native servers have no LoRA adapters: use sglang or vllm", code="server.no_adapters")


def _unfinished(name: str) -> ServerUnavailable:
    return ServerUnavailable(f"{name} ended an answer without a finish reason", code="server.unreadable_answer")


def _generate_body(part: GenerationPart, *, stream: bool) -> dict[str, Any]:
    gconfig = part.gconfig
    sampling: dict[str, Any] = {
        "max_new_tokens": part.max_new_tokens,
        "min_new_tokens": part.min_new_tokens,
        "temperature": gconfig.temperature,
        # top_k=1 selects the likeliest token and keeps the log-probability of this temperature.
        "top_p": 1.0 if gconfig.greedy else gconfig.top_p,
        "top_k": 1 if gconfig.greedy else (-1 if gconfig.top_k >= _ALL_TOKENS else gconfig.top_k),
        "stop_token_ids": gconfig.stop_token_ids,
        "stop": gconfig.stop,
        "frequency_penalty": gconfig.frequency_penalty,
        "repetition_penalty": gconfig.repetition_penalty,
        "ignore_eos": gconfig.ignore_eos,
    }
    if part.seed is not None:
        sampling["sampling_seed"] = part.seed
    if part.num_prior_output_tokens:
        sampling["num_prior_output_tokens"] = part.num_prior_output_tokens
    if stream:
        sampling["stream_interval"] = part.stream_interval
    body = {
        "rid": part.part_id,
        "input_ids": part.input_ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": stream,
    }
    if part.group_id:
        body["group_id"] = part.group_id
    return body


def parse_chunk(answer: dict[str, Any]) -> PartChunk:
    """One answer or event of /generate. KeyError, TypeError or ValueError when a field is missing or wrong."""
    meta = answer["meta_info"]
    token_ids: list[int] = answer["output_ids"]
    finish = meta["finish_reason"]
    spans = [(int(span["version"]), span["start"], span["end"]) for span in meta["weight_versions"]]
    reason = None if finish is None else finish["type"]
    if reason not in (None, "stop", "length", "abort"):
        raise ValueError(f"finish reason {reason!r}")
    return PartChunk(
        token_ids,
        [entry[0] for entry in meta["output_token_logprobs"]],
        versions_of(spans, len(token_ids)) if token_ids else [],
        reason,
    )
