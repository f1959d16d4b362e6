"""The native server's dialect of a fake server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from areal.fleet.native import NativeReplica
from areal.fleet.replica import AnswerForm, Replica
from areal.inference.request_parser import MAX_PROMPTS, GroupBody
from tests.fleet.fake_server import Asked, FakeServer, Refused, spans, tokens
from tests.run_token import TOKEN


class FakeNative(FakeServer):
    dialect = "native"
    received = ""
    """The update whose weights it has received."""
    adapters: tuple[str, ...] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.groups: list[list[str]] = []
        """The ids of each request for a group."""
        self.max_group = MAX_PROMPTS
        """Samples of such a request that run at the same time."""
        self.refused_ids: list[int] | None = None
        """A prompt that a request for a group may not have."""
        self.reports_install = asyncio.Event()
        """Until it is set, the server does not answer that it has installed weights."""
        self.reports_install.set()
        self.pulled: dict[str, Any] = {}
        """The answer to a request to copy weights."""

    @staticmethod
    def client(name: str, address: str, form: AnswerForm | None = None) -> Replica:
        return NativeReplica(name, address, TOKEN, form)

    def routes(self) -> Iterable[web.RouteDef]:
        yield web.post("/generate", self._generate)
        yield web.post("/generate_group", self._generate_group)
        yield web.post("/abort_request", self._abort_request)
        yield web.get("/health", self._health)
        yield web.get("/get_model_info", self._info)
        yield web.get("/server_info", self._load)
        for path in (
            "pause_generation",
            "continue_generation",
            "pull_weights",
            "update_weights_from_disk",
            "init_weights_update_group",
            "update_weights_from_distributed",
            "install_weights",
            "destroy_weights_update_group",
        ):
            yield web.post("/" + path, self._control)

    def error(self, status: int, message: str) -> web.Response:
        return web.json_response({"error": {"message": message}}, status=status)

    async def _health(self, request: web.Request) -> web.Response:
        await self.answers()
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        await self.answers()
        facts = {"vocab_size": 5000, "context_length": 4096, "adapters": list(self.adapters)}
        facts |= {"max_group_samples": self.max_group}
        return web.json_response({"weight_version": str(self.version), **facts})

    async def _load(self, request: web.Request) -> web.Response:
        await self.answers()
        if self.fail_load:
            return self.error(500, "no figures")
        return web.json_response(
            {
                "running_requests": self.num_running,
                "queued_requests": 0,
                "kv_tokens_used": 64,
                "kv_tokens_capacity": 256,
                "generated_tokens_total": self.generated_tokens,
            }
        )

    async def _control(self, request: web.Request) -> web.Response:
        await self.answers()
        body = await request.json()
        match request.path[1:]:
            case "pause_generation":
                self.pause(body["mode"])
            case "continue_generation":
                self.resume()
            case "pull_weights":
                return web.json_response(self.pulled)
            case "update_weights_from_disk":
                await self.load(body["model_path"])
                self.received = body["update_id"]
            case "init_weights_update_group":
                self.join(group_name=body["group_name"], rank=body["rank_offset"], world_size=body["world_size"])
            case "destroy_weights_update_group":
                self.leave(body["group_name"])
            case "install_weights":
                if body["update_id"] != self.received:
                    raise Refused(400, "the update lacks weights")
                self.interrupt(body["mode"])
                self.keeps_cache = body["mode"] == "in_place"
                self.commit(int(body["weight_version"]))
                await self.reports_install.wait()
            case _:
                await self.receive()
                self.received = body["update_id"]
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked = self._asked(body)
        if not asked.stream:
            return web.json_response([event async for event in self._events(asked)][-1])
        stream = _Stream(request)
        async for event in self._events(asked):
            await stream.write(json.dumps(event))
        await stream.write("[DONE]")
        return stream.response

    async def _generate_group(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        try:
            TypeAdapter(GroupBody).validate_json(await request.read())
        except ValidationError as error:
            raise Refused(400, str(error)) from error
        pairs = [(prompt, sample) for prompt in body["prompts"] for sample in prompt["samples"]]
        self.groups.append([sample["rid"] for _, sample in pairs])
        every = [self._asked({**body, **prompt, **sample}) for prompt, sample in pairs]
        if any(asked.input_ids == self.refused_ids for asked in every):
            raise Refused(400, "cannot generate for this prompt")
        stream = _Stream(request)

        async def answer(number: int, asked: Asked) -> dict[str, Any]:
            async for event in self._events(asked):
                if asked.stream:
                    await stream.write(json.dumps([[number, event]]))
            return event

        if not every[0].stream:
            return web.json_response(await asyncio.gather(*(answer(*item) for item in enumerate(every))))
        await asyncio.gather(*(answer(*item) for item in enumerate(every)))
        await stream.write("[DONE]")
        return stream.response

    async def _abort_request(self, request: web.Request) -> web.Response:
        self.calls.append(("abort", await request.json()))
        return web.json_response({"success": True})

    @staticmethod
    def _asked(body: dict[str, Any]) -> Asked:
        sampling = body["sampling_params"]
        return Asked(
            request_id=body["rid"],
            input_ids=body["input_ids"],
            max_new_tokens=sampling["max_new_tokens"],
            min_new_tokens=sampling["min_new_tokens"],
            stream=body["stream"],
            body=body,
        )

    async def _events(self, asked: Asked) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream; without one the whole answer."""
        interval = asked.body["sampling_params"].get("stream_interval", 0)
        pending: list[int] = []
        start = len(asked.input_ids)
        async with self.running(asked):
            async for version, reason in self.make(asked):
                pending += [] if version is None else [version]
                if reason or len(pending) == interval:
                    yield self._answer(start, pending, reason)
                    start += len(pending)
                    pending = []

    def _answer(self, start: int, versions: list[int], reason: str | None) -> dict[str, Any]:
        ids, logprobs = tokens(start, versions)
        return {
            "text": "",
            "output_ids": ids,
            "meta_info": {
                "id": "x",
                "finish_reason": {"type": reason} if reason else None,
                "output_token_logprobs": [[logprob, id_, None] for logprob, id_ in zip(logprobs, ids, strict=True)],
                "cached_tokens": 3,
                "weight_version": str(self.version),
                "weight_versions": spans(versions),
            },
        }


class _Stream:
    """Server-sent events; the status is sent with the first, so that a request can be refused until then."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._lock = asyncio.Lock()
        self.response = web.StreamResponse()

    async def write(self, data: str) -> None:
        async with self._lock:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            with contextlib.suppress(ConnectionResetError):
                await self.response.write(b"data: " + data.encode() + b"\n\n")
