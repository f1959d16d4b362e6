"""Simulated inference servers of controller_scale.py: as a process that streams over sockets, and in the process.

python benchmark/scale_servers.py native|sglang|vllm PAUSE_S

prints its port, and serves until its stdin is closed, with an event of each answer in PAUSE_S seconds in the mean.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import uvloop

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from areal.api.columns import Runs  # noqa: E402
from areal.api.data import GenerationRequest, WeightUpdate  # noqa: E402
from areal.fleet.replica import Chunks, PartChunk, PauseMode, Replica, ReplicaInfo, ReplicaLoad  # noqa: E402

VOCABULARY = 150_000
_ANSWERS = 8
"""Different answers."""
_SGLANG_INFO = {
    "version": "0.5.23",
    "max_req_input_len": 1 << 20,
    "internal_states": [{}],
    "model_path": "",
    "enable_deterministic_inference": False,
}
_SGLANG_META: dict[str, Any] = {  # as recorded of SGLang 0.5.23, tests/fleet/recordings
    "num_retractions": 0,
    "storage_prefetch_wait": 0.0,
    "storage_staging_wait": 0.0,
    "forward_entry_time": 1763851234.123456,
    "prefill_finished_time": 1763851234.234567,
    "queue_time": 0.000123,
    "input_token_logprobs": [],
    "reasoning_tokens": 0,
    "cached_tokens_details": {"device": 3, "host": 0},
    "dp_rank": None,
    "response_sent_to_client_ts": 1763851234.345678,
}


def tokens(rng: random.Random, count: int) -> tuple[list[int], list[float]]:
    """Random ids and float32 log-probabilities, as servers write them."""
    logprobs = array("f", [-rng.expovariate(2.0) for _ in range(count)])
    return [rng.randrange(VOCABULARY) for _ in range(count)], logprobs.tolist()


def event(dialect: str, ids: list[int], logprobs: list[float], end: int, *, last: bool) -> bytes:
    """One server-sent event with the tokens up to `end` of an answer, as a chunk of an HTTP body."""
    if dialect == "vllm":
        content = [
            {
                "token_id": token,
                "logprob": logprob,
                "rank": 3,
                "top_logprobs": [{"token_id": token, "logprob": logprob, "rank": 3}],
            }
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "finish_reason": "length" if last else None,
            "stop_reason": None,
            "token_ids": ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": "0", "start": 0, "end": end}] if last else None,
            "logprobs": {"content": content},
        }
        body: dict[str, Any] = {"request_id": "r", "usage": None, "output_mode": "tokens", "choices": [choice]}
    else:
        start = end - len(ids)
        meta: dict[str, Any] = {
            "id": "0123456789abcdef0123456789abcdef-000000-001",
            "finish_reason": {"type": "length", "length": end} if last else None,
            "prompt_tokens": 4,
            "completion_tokens": end,
            "cached_tokens": 0,
            "output_token_logprobs": [[logprob, token, None] for token, logprob in zip(ids, logprobs, strict=True)],
        }
        if dialect == "sglang":
            meta |= _SGLANG_META | {"weight_version": "0", "output_token_logprobs_length": end}
            if last:
                meta["weight_versions"] = [{"version": "0", "start": 0, "end": end}]
        else:
            meta |= {"weight_version": 0, "weight_versions": [{"version": 0, "start": 0, "end": end - start}]}
        body = {"output_ids": ids, "meta_info": meta}
        if dialect == "sglang":
            body["text"] = " word" * len(ids)
    data = b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
    if last:
        data += b"data: [DONE]\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data) + (b"0\r\n\r\n" if last else b"")


class Streams:
    """The events of the answers, made once: a server must be faster than the client that is measured."""

    def __init__(self, dialect: str) -> None:
        self._dialect = dialect
        self._answers: dict[tuple[int, int], list[list[bytes]]] = {}
        self._next = 0

    def events(self, count: int, interval: int) -> list[bytes]:
        answers = self._answers.setdefault((count, interval), [])
        if len(answers) < _ANSWERS:
            answers.append(list(self._make(random.Random(len(answers)), count, interval)))
        self._next += 1
        return answers[self._next % len(answers)]

    def _make(self, rng: random.Random, count: int, interval: int) -> Iterator[bytes]:
        ends = [*range(interval, count, interval), count]
        for start, end in zip([0, *ends], ends, strict=False):
            ids, logprobs = tokens(rng, end - start)
            yield event(self._dialect, ids, logprobs, end, last=end == count)


class StreamServer(asyncio.Protocol):
    """One connection."""

    def __init__(self, streams: Streams, pause_s: float) -> None:
        self._streams = streams
        self._pause_s = pause_s
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if not end or len(body) < size:
            return
        self._data = b""
        if head.split()[1] == b"/server_info":
            answer = json.dumps(_SGLANG_INFO).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
            return
        sampling = json.loads(body)["sampling_params"]
        count = sampling.get("max_new_tokens", sampling.get("max_tokens"))
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self._send(self._streams.events(count, sampling["stream_interval"]), 0)

    def _send(self, events: list[bytes], number: int) -> None:
        """One event, and the next one later: each arrives alone."""
        if number < len(events) and not self._transport.is_closing():
            self._transport.write(events[number])
            pause_s = 2 * self._pause_s * random.random()
            asyncio.get_running_loop().call_later(pause_s, self._send, events, number + 1)


class InProcessReplica(Replica):
    """A replica without a socket: the cost that is measured with it is that of the fleet and the controller."""

    @property
    def has_second_copy(self) -> bool:
        return False

    def __init__(self, name: str, *, chunk_tokens: int, chunk_s: float) -> None:
        self.name = name
        self.version = 0
        self._chunk_tokens, self._chunk_s = chunk_tokens, chunk_s
        rng = random.Random(name)
        ids, logprobs = tokens(rng, chunk_tokens)
        self._ids, self._logprobs = ids, logprobs
        self._stopped = asyncio.Event()

    async def generate(self, requests: Sequence[GenerationRequest]) -> Chunks:
        stopped, left = self._stopped, requests[0].gconfig.max_new_tokens
        while left > 0:
            await asyncio.sleep(self._chunk_s and self._chunk_s * 2 * random.random())
            if stopped.is_set():
                yield 0, PartChunk([], [], Runs(), "abort")
                return
            size = min(left, self._chunk_tokens)
            left -= size
            versions = Runs([(self.version, size)])
            ids, logprobs = (
                (self._ids, self._logprobs) if size == self._chunk_tokens else (self._ids[:size], self._logprobs[:size])
            )
            yield 0, PartChunk(ids, logprobs, versions, None if left else "length")

    async def abort(self, request_id: str) -> None: ...

    async def pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            stopped, self._stopped = self._stopped, asyncio.Event()
            stopped.set()

    async def resume(self) -> None: ...

    async def prepare_weights(self, update: WeightUpdate, *, rank: int) -> None: ...

    async def update_weights(self, update: WeightUpdate, *, rank: int, mode: PauseMode) -> None:
        await asyncio.sleep(0.05)
        self.version = update.version

    async def abandon_update(self) -> None: ...

    async def info(self) -> ReplicaInfo:
        return ReplicaInfo(version=self.version, vocab_size=VOCABULARY, context_length=1 << 20, weights_whole=True)

    async def load(self) -> ReplicaLoad:
        return ReplicaLoad(running=0, queued=0, cache_usage=0.0, generated_tokens=0)

    async def load_adapter(self, name: str, path: str) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def close(self) -> None: ...


class MemoryRegistry:
    """A name registry of servers that are all there."""

    def __init__(self, num_servers: int) -> None:
        self._servers = {
            f"servers/{index}": json.dumps({"address": f"http://127.0.0.1:{index + 1}", "pid": 1})
            for index in range(num_servers)
        }

    def add(self, name: str, value: str, *, replace: bool = False) -> None: ...

    def get(self, name: str) -> str | None:
        return self._servers.get(name)

    def list(self, prefix: str) -> dict[str, str]:
        return dict(self._servers) if prefix == "servers" else {}

    def remove(self, name: str) -> None: ...

    def wait(self, name: str, timeout_s: float) -> str:
        return self._servers[name]

    def clear(self) -> None: ...

    def close(self) -> None: ...


async def listen(dialect: str, pause_s: float) -> asyncio.Server:
    """A server in the running loop."""
    streams = Streams(dialect)
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: StreamServer(streams, pause_s), "127.0.0.1", 0, backlog=1024)


async def serve(dialect: str, pause_s: float) -> None:
    """Until stdin is closed."""
    server = await listen(dialect, pause_s)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1], float(sys.argv[2])))
