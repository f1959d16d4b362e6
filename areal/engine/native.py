"""Owns the client of one native inference server; the only file that knows its URLs and its JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson

from areal.api.data import WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable
from areal.engine.continuation import versions_of
from areal.engine.replica import GenerationPart, PartChunk, PauseMode, ReplicaInfo

STREAM_FROM_TOKENS = 64
"""A part that may get this long is streamed, so that the death of the server costs few tokens. Shorter ones come in
one piece: making them again costs less than an event per token."""
CONNECT_TIMEOUT_S = 10.0
_ALL_TOKENS = 100_000_000
"""The default of gconfig.top_k, which means no limit; the wire says -1."""
_HEADERS = {"Content-Type": "application/json"}
_TRY_ELSEWHERE = (408, 429)
"""Client-error statuses that speak of the server's state, not of the request."""


class NativeReplica:
    """Speaks to one server over kept-alive connections. See `areal.engine.replica.Replica`."""

    def __init__(self, name: str, address: str, *, token: str = "") -> None:
        self.name = name
        self.address = address
        self._base = address.rstrip("/")
        self._headers = {**_HEADERS, "Authorization": f"Bearer {token}"} if token else _HEADERS
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._scopes: set[asyncio.Timeout] = set()
        """One for each running /generate: `close` lets them expire."""
        self._group_name = ""

    async def generate(self, part: GenerationPart, on_chunk: Callable[[PartChunk], None]) -> None:
        """Run a part; see the protocol. A cancelled call drops its connection, which frees its place in the server."""
        stream = part.max_new_tokens >= STREAM_FROM_TOKENS
        body = orjson.dumps(_generate_body(part, stream=stream))
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                await self._post_generate(body, stream, on_chunk)
        except (aiohttp.ClientError, OSError) as error:
            raise self._unavailable("/generate", error) from error
        finally:
            self._scopes.discard(scope)

    async def _post_generate(self, body: bytes, stream: bool, on_chunk: Callable[[PartChunk], None]) -> None:
        async with self._open().post(self._base + "/generate", data=body, headers=self._headers) as response:
            if response.status != 200:
                raise _refusal(self.name, "/generate", response.status, await response.read())
            if stream:
                await self._read_events(response.content, on_chunk)
                return
            chunk = self._parse(await response.read())
            if chunk.finish_reason is None:
                raise ServerUnavailable(f"{self.name} answered /generate without a finish reason")
            on_chunk(chunk)

    async def _read_events(self, content: aiohttp.StreamReader, on_chunk: Callable[[PartChunk], None]) -> None:
        rest = b""
        finished = False
        async for data in content.iter_any():
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if not event.startswith(b"data: "):
                    continue  # comments and keep-alives
                payload = event[6:]
                if payload == b"[DONE]":
                    continue
                chunk = self._parse(payload)
                finished = finished or chunk.finish_reason is not None
                on_chunk(chunk)
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

    async def health(self) -> None:
        await self._request("GET", "/health", None)

    async def info(self) -> ReplicaInfo:
        answer = orjson.loads(await self._request("GET", "/get_model_info", None))
        try:
            return ReplicaInfo(
                version=int(answer["weight_version"]),
                vocab_size=int(answer["vocab_size"]),
                context_length=int(answer["context_length"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServerUnavailable(f"{self.name} described itself in a way that cannot be read: {error!r}") from error

    async def close(self) -> None:
        """Drop all connections: every running call fails with ServerUnavailable."""
        self._closed = True
        for scope in self._scopes:  # closing the session does not wake those who wait for the next event of a stream
            scope.reschedule(0.0)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        return await self._request("POST", path, orjson.dumps(body))

    async def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        try:
            async with self._open().request(method, self._base + path, data=body, headers=self._headers) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._unavailable(path, error) from error
        if response.status != 200:
            raise _refusal(self.name, path, response.status, answer)
        return answer

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ServerUnavailable(f"{self.name} was taken out of the fleet")
        if self._session is None:
            # How long a call may last is its caller's business. Every request holds a connection: no limit there.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
                timeout=timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=2**20,
                auto_decompress=False,
            )
        return self._session

    def _unavailable(self, path: str, error: BaseException) -> ServerUnavailable:
        return ServerUnavailable(
            f"{self.name} at {self.address} did not answer {path}: {error or type(error).__name__}"
        )


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
    """The factory the fleet uses for native servers."""
    return NativeReplica(name, address)
