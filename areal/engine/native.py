"""Owns the client of one native inference server; the only file that knows its URLs and its JSON."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import orjson

from areal.api.data import WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable
from areal.engine.continuation import versions_of
from areal.engine.http_connection import HttpClient, OnData
from areal.engine.replica import GenerationPart, PartChunk, PauseMode, ReplicaInfo

TOKEN_VARIABLE = "AREAL_SERVER_TOKEN"
"""Environment variable with the secret that servers off loopback demand (areal.inference.server has it too, but
importing that would import torch)."""
_ALL_TOKENS = 100_000_000
"""The default of gconfig.top_k, which means no limit; the wire says -1."""
_TRY_ELSEWHERE = (408, 429)
"""Client-error statuses that speak of the server's state, not of the request."""


class NativeReplica:
    """Speaks to one server over kept-alive connections. See `areal.engine.replica.Replica`."""

    def __init__(self, name: str, address: str, *, token: str = "") -> None:
        self.name = name
        self.address = address
        self._client = HttpClient(address, token=token)
        self._group_name = ""

    async def generate(self, part: GenerationPart, on_chunk: Callable[[PartChunk], None]) -> None:
        """Run a part; see the protocol. A cancelled call drops its connection, which frees its place in the server."""
        if part.max_new_tokens <= part.stream_interval:
            body = orjson.dumps(_generate_body(part, stream=False))
            chunk = self._parse(await self._request("POST", "/generate", body))
            if chunk.finish_reason is None:
                raise ServerUnavailable(f"{self.name} answered /generate without a finish reason")
            on_chunk(chunk)
            return
        finished = False
        rest = b""

        def on_data(data: bytes) -> None:
            nonlocal finished, rest
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: ") and event != b"data: [DONE]":  # else a comment, a keep-alive, the end
                    chunk = self._parse(event[6:])
                    finished = finished or chunk.finish_reason is not None
                    on_chunk(chunk)

        await self._request("POST", "/generate", orjson.dumps(_generate_body(part, stream=True)), on_data)
        if not finished:
            raise ServerUnavailable(f"{self.name} ended a stream without a finish reason")

    def _parse(self, payload: bytes) -> PartChunk:
        try:
            return parse_chunk(orjson.loads(payload))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ServerUnavailable(f"{self.name} sent an answer that cannot be read: {error!r}") from error

    async def pause(self, mode: PauseMode) -> None:
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def update_weights(self, update: WeightUpdate, *, rank: int) -> None:
        """Disk: load the folder. Collective: join the group if it is new, then receive bucket by bucket."""
        if update.kind == "disk":
            body = {"model_path": update.path, "weight_version": str(update.version), "flush_cache": True}
            await self._post("/update_weights_from_disk", {**body, "abort_all_requests": False})
            return
        if self._group_name != update.group_name:
            await self._join_group(update, rank)
        last = len(update.buckets) - 1
        for index, bucket in enumerate(update.buckets):
            await self._post(
                "/update_weights_from_distributed",
                {
                    "names": [spec.name for spec in bucket],
                    "dtypes": [spec.dtype for spec in bucket],
                    "shapes": [spec.shape for spec in bucket],
                    "group_name": update.group_name,
                    # One flush at the end is enough; the version counts only once every weight is there.
                    "flush_cache": index == last,
                    "weight_version": str(update.version) if index == last else None,
                    "load_format": "flattened_bucket",
                },
            )

    async def abandon_update(self) -> None:
        if self._group_name:  # one that still joins ends with the trainer's store
            group_name, self._group_name = self._group_name, ""
            await self._post("/destroy_weights_update_group", {"group_name": group_name})

    async def _join_group(self, update: WeightUpdate, rank: int) -> None:
        if self._group_name:
            await self._post("/destroy_weights_update_group", {"group_name": self._group_name})
        self._group_name = ""
        await self._post(
            "/init_weights_update_group",
            {
                "master_address": update.master_address,
                "master_port": update.master_port,
                "rank_offset": rank,
                "world_size": 1 + len(update.replicas),
                "group_name": update.group_name,
                "backend": update.backend,
            },
        )
        self._group_name = update.group_name

    async def info(self) -> ReplicaInfo:
        status, _ = await self._exchange("GET", "/health")
        if status not in (200, 503):
            raise ServerUnavailable(f"{self.name} answered /health with status {status}")
        answer = await self._request("GET", "/get_model_info")
        try:
            model = orjson.loads(answer)
            return ReplicaInfo(
                version=int(model["weight_version"]),
                vocab_size=int(model["vocab_size"]),
                context_length=int(model["context_length"]),
                weights_whole=status == 200,  # 503: alive, but an update stopped midway
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServerUnavailable(f"{self.name} described itself in a way that cannot be read: {error!r}") from error

    @property
    def answers_during_update(self) -> bool:
        return True

    async def close(self) -> None:
        """Drop all connections: every running call fails with ServerUnavailable."""
        self._client.close()

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        return await self._request("POST", path, orjson.dumps(body))

    async def _request(self, method: str, path: str, body: bytes = b"", on_data: OnData | None = None) -> bytes:
        status, answer = await self._exchange(method, path, body, on_data)
        if status != 200:
            raise _refusal(self.name, path, status, answer)
        return answer

    async def _exchange(
        self, method: str, path: str, body: bytes = b"", on_data: OnData | None = None
    ) -> tuple[int, bytes]:
        try:
            return await self._client.request(method, path, body, on_data)
        except ServerUnavailable as error:
            raise ServerUnavailable(f"{self.name} at {self.address} did not answer {path}: {error}") from error


def _generate_body(part: GenerationPart, *, stream: bool) -> dict[str, Any]:
    gconfig = part.gconfig
    sampling: dict[str, Any] = {
        "max_new_tokens": part.max_new_tokens,
        "min_new_tokens": part.min_new_tokens,
        "temperature": gconfig.temperature,
        # The likeliest token is greedy's choice, and its log-probability is still the one at this temperature.
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
    """One answer or event of /generate. KeyError, TypeError or ValueError when it is not as agreed."""
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


def _refusal(name: str, path: str, status: int, answer: bytes) -> RequestError | ServerUnavailable:
    """The error that says what a status other than 200 means."""
    try:
        message = orjson.loads(answer)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer[:200].decode(errors="replace") or "no message"
    if 400 <= status < 500 and status not in _TRY_ELSEWHERE:
        return RequestError(f"{name} refused {path}: {message}")
    return ServerUnavailable(f"{name} failed {path} with status {status}: {message}")


def make_native_replica(name: str, address: str) -> NativeReplica:
    """The factory the fleet uses for native servers; the launcher gives every process of a run the same token."""
    return NativeReplica(name, address, token=os.environ.get(TOKEN_VARIABLE, ""))
