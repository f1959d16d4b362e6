"""The native server's dialect of a fake server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from areal.fleet.native import NativeReplica
from areal.fleet.replica import Replica
from tests.fleet.fake_server import Asked, FakeServer, Refused, spans, tokens
from tests.run_token import TOKEN


class FakeNative(FakeServer):
    dialect = "native"
    received = ""
    """The update whose weights it has received."""

    @staticmethod
    def client(name: str, address: str) -> Replica:
        return NativeReplica(name, address, TOKEN)

    def routes(self) -> Iterable[web.RouteDef]:
        yield web.post("/generate", self._generate)
        yield web.get("/health", self._health)
        yield web.get("/get_model_info", self._info)
        yield web.get("/server_info", self._load)
        for path in (
            "pause_generation",
            "continue_generation",
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
        return web.json_response({"weight_version": str(self.version), "vocab_size": 5000, "context_length": 4096})

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
            case _:
                await self.receive()
                self.received = body["update_id"]
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling = body["sampling_params"]
        asked = Asked(
            request_id=body["rid"],
            input_ids=body["input_ids"],
            max_new_tokens=sampling["max_new_tokens"],
            min_new_tokens=sampling["min_new_tokens"],
            stream=body["stream"],
            body=body,
        )
        async with self.running(asked):
            if asked.stream:
                return await self._stream(request, asked, sampling["stream_interval"])
            made = [entry async for entry in self.make(asked)]
            versions = [version for version, _ in made if version is not None]
            return web.json_response(self._answer(len(asked.input_ids), versions, made[-1][1]))

    async def _stream(self, request: web.Request, asked: Asked, interval: int) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        pending: list[int] = []
        start = len(asked.input_ids)
        async for version, reason in self.make(asked):
            pending += [] if version is None else [version]
            if reason or len(pending) == interval:
                event = self._answer(start, pending, reason)
                start += len(pending)
                pending = []
                with contextlib.suppress(ConnectionResetError):
                    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _answer(self, start: int, versions: list[int], reason: str | None) -> dict[str, Any]:
        ids, logprobs = tokens(start, versions)
        return {
            "text": "",
            "output_ids": ids,
            "meta_info": {
                "id": "x",
                "finish_reason": {"type": reason} if reason else None,
                "output_token_logprobs": [[logprob, id_, None] for logprob, id_ in zip(logprobs, ids, strict=True)],
                "weight_version": str(self.version),
                "weight_versions": spans(versions),
            },
        }
