"""SGLang's dialect of a fake server. Every body is that of a recorded answer, with the fake's own figures put in."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from aiohttp import web

from areal.fleet.replica import AnswerForm, Replica
from areal.fleet.sglang import SGLangReplica
from tests.fleet.fake_server import Asked, FakeServer, spans, tokens

RECORDING: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "recordings" / "sglang-0.5.23.json").read_text(encoding="utf-8")
)
"""Made by tests/servers/record_sglang.py."""
VOCABULARY = 5000


def recorded(name: str) -> Any:
    """The body of a recorded answer, to be changed at will."""
    return copy.deepcopy(RECORDING[name]["body"])


class FakeSGLang(FakeServer):
    dialect = "sglang"
    takes_min_new_tokens = False
    can_abandon = False
    midway_status = 400
    takes_min_new_tokens = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.adapters: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        """Laid over what /server_info tells."""
        self._mode = ""
        """Of the last pause."""
        self.model_settings: dict[str, Any] = {}
        """Laid over what /model_info tells."""
        self.tells_spans = True
        """Servers before 0.5.19 do not tell the version of each token."""
        self.paths: list[str] = []
        """Of all requests but those for generation and health."""
        self.bodies: list[dict[str, Any]] = []
        """Of the same requests."""
        self.has_session = False
        self._busy = asyncio.Lock()
        """Held while it takes in a bucket: it can do nothing else then."""
        self.error_in_stream = False
        """Streams are refused after their head was sent."""

    @staticmethod
    def client(name: str, address: str, form: AnswerForm | None = None) -> Replica:
        return SGLangReplica(name, address, form=form)

    def routes(self) -> Iterable[web.RouteDef]:
        yield web.post("/generate", self._generate)
        yield web.get("/server_info", self._server_info)
        yield web.get("/model_info", self._model_info)
        yield web.get("/v1/loads", self._loads)
        yield web.get("/metrics", self._metrics)
        controls: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._load_folder,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._destroy,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_distributed": self._receive,
            "/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
            "/update_weight_version": self._set_version,
            "/detokenize": self._detokenize,
        }
        for path, control in controls.items():
            yield web.post(path, self._handler(control))

    def _handler(self, control: Callable[[Any], Awaitable[Any]]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            await self.answers()
            body = await request.json()
            self.paths.append(request.path)
            self.bodies.append(body)
            answer = await control(body)
            return answer if isinstance(answer, web.Response) else web.json_response(answer)

        return handle

    def error(self, status: int, message: str) -> web.Response:
        return web.json_response(_told(recorded("generate_refused"), message), status=status)

    def _as_recorded(self, name: str) -> web.Response:
        if RECORDING[name]["content_type"] != "application/json":
            return web.Response(text=recorded(name), status=RECORDING[name]["status"])
        return web.json_response(recorded(name), status=RECORDING[name]["status"])

    # What it says of itself

    async def _server_info(self, request: web.Request) -> web.Response:
        await self.answers()
        # Of 4096 tokens, as the real one of its 1024, so many are never cut.
        return web.json_response(recorded("server_info") | {"max_req_input_len": 4096} | self.settings)

    async def _model_info(self, request: web.Request) -> web.Response:
        await self.answers()
        return web.json_response(
            recorded("model_info_numbered") | {"weight_version": str(self.version)} | self.model_settings
        )

    async def _loads(self, request: web.Request) -> web.Response:
        await self.answers()
        if self.fail_load:
            return web.Response(status=500, text="no figures")
        body = recorded("loads")
        body["loads"][0] |= {
            "num_running_reqs": self.num_running,
            "num_waiting_reqs": 0,
            "token_usage": 0.25,
        }
        return web.json_response(body)

    async def _metrics(self, request: web.Request) -> web.Response:
        await self.answers()
        figures = {"sglang:generation_tokens_total": self.generated_tokens, "sglang:num_running_reqs": self.num_running}
        lines: list[str] = []
        for line in recorded("metrics").splitlines():  # the label sets after the first count nothing here
            lines.append(f"{line.rpartition(' ')[0]} {figures.pop(line.partition('{')[0], 0)}\n")
        return web.Response(text="".join(lines))

    async def _detokenize(self, body: Any) -> Any:
        """A token is a letter: 1000 is a, and so on, again and again."""
        assert body.keys() == RECORDING["detokenize"]["request"]["body"].keys()
        return recorded("detokenize") | {"text": ["".join(letter(id_) for id_ in ids) for ids in body["tokens"]]}

    # Control

    async def _abort(self, body: Any) -> Any:
        assert body == {"abort_all": True}
        aborted, self._aborted = self._aborted, asyncio.Event()
        self._abort_round += 1
        aborted.set()
        return self._as_recorded("abort_request")

    async def _pause(self, body: Any) -> Any:
        self.pause(body["mode"])
        self._mode = body["mode"]
        return recorded("pause_abort" if self._mode == "abort" else "pause_retract")

    async def _continue(self, body: Any) -> Any:
        self.resume()
        return recorded("continue")

    async def _load_folder(self, body: Any) -> Any:
        assert body.keys() == RECORDING["load_folder"]["request"]["body"].keys()
        self.keeps_cache = not body["flush_cache"]
        assert not (self.keeps_cache and self._mode != "in_place")
        assert not body["abort_all_requests"]
        await self.load(body["model_path"])
        self.commit(int(body["weight_version"]))
        return recorded("load_folder")

    async def _join(self, body: Any) -> Any:
        assert body.keys() == RECORDING["join"]["request"]["body"].keys()
        self.join(group_name=body["group_name"], rank=body["rank_offset"], world_size=body["world_size"])
        return recorded("join")

    async def _destroy(self, body: Any) -> Any:
        async with self._busy:
            self.leave(body["group_name"])
        return recorded("destroy")

    async def _begin(self, body: Any) -> Any:
        if self.has_session:
            return self._as_recorded("begin_again")
        self.has_session = True
        return recorded("begin")

    async def _end(self, body: Any) -> Any:
        self.has_session = False
        return recorded("end")

    async def _receive(self, body: Any) -> Any:
        assert body.keys() == RECORDING["receive"]["request"]["body"].keys()
        async with self._busy:
            await self.receive()
        if body["flush_cache"]:
            self.commit(int(body["weight_version"]))
        else:
            self.version = int(body["weight_version"])
        return recorded("receive")

    async def _set_version(self, body: Any) -> Any:
        assert body.keys() == {"new_version", "abort_all_requests"}  # as UpdateWeightVersionReqInput of SGLang 0.5.23
        self.commit(int(body["new_version"]))
        return {"success": True, "message": "", "new_version": body["new_version"]}

    async def _load_adapter(self, body: Any) -> Any:
        if body["lora_name"] in self.adapters:
            return self._as_recorded("load_adapter_again")
        self.adapters[body["lora_name"]] = body["lora_path"]
        self.keep_adapter(body["lora_name"])
        return recorded("load_adapter")

    async def _unload_adapter(self, body: Any) -> Any:
        if self.adapters.pop(body["lora_name"], None) is None:
            return self._as_recorded("unload_adapter_again")
        return recorded("unload_adapter")

    # Generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling = body["sampling_params"]
        if str(2**31 - 1) in sampling.get("logit_bias", {}):
            await self.answers()
            body = _told(recorded("vocabulary"), f"logit_bias must has keys in [0, {VOCABULARY - 1}], got 2147483647.")
            return web.json_response(body, status=RECORDING["vocabulary"]["status"])
        known = RECORDING["generate_stream"]["request"]["body"]
        assert body.keys() - {"lora_path", "image_data"} == known.keys()
        assert sampling.keys() - {"sampling_seed", "logit_bias"} <= known["sampling_params"].keys()
        if body.get("lora_path") is not None and body["lora_path"] not in self.adapters:
            return self._as_recorded("generate_unknown_adapter")
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
            name = "generate" if versions else "generate_queued"
            return web.json_response(self._filled(recorded(name), len(asked.input_ids), 0, versions, made[-1][1]))

    async def _stream(self, request: web.Request, asked: Asked, interval: int) -> web.StreamResponse:
        """The first token comes alone, then `interval` of them at a time; the versions come with the last."""
        response = web.StreamResponse(headers={"Content-Type": RECORDING["generate_stream"]["content_type"]})
        await response.prepare(request)
        if self.error_in_stream:
            await _send(response, recorded("generate_stream_refused")[0])
            await _send(response, None)
            return response
        cumulative = not (recorded("server_info") | self.settings)["incremental_streaming_output"]
        versions: list[int] = []
        num_sent = 0
        async for version, reason in self.make(asked):
            versions += [] if version is None else [version]
            if reason or len(versions) == 1 or len(versions) - num_sent == interval:
                event = recorded("generate_stream_aborted" if reason == "abort" else "generate_stream")
                first = 0 if cumulative else num_sent
                filled = self._filled(event[-1 if reason else 0], len(asked.input_ids), first, versions, reason)
                num_sent = len(versions)
                await _send(response, filled)
        await _send(response, None)
        return response

    def _filled(self, answer: Any, start: int, first: int, versions: list[int], reason: str | None) -> Any:
        """A recorded answer with the tokens of a part from `first` on."""
        ids, logprobs = tokens(start + first, versions[first:])
        meta = answer["meta_info"]
        if "output_token_logprobs" in meta or ids:
            entries = [[logprob, id_, None] for logprob, id_ in zip(logprobs, ids, strict=True)]
            meta |= {"output_token_logprobs": entries, "output_token_logprobs_length": len(versions)}
        meta |= {"completion_tokens": len(versions), "cached_tokens": 3, "weight_version": str(self.version)}
        if reason is not None and meta["finish_reason"]["type"] != reason:
            meta["finish_reason"] = {"type": reason, "matched": ids[-1]} if reason == "stop" else {"type": reason}
        if reason is not None:
            meta["weight_versions"] = spans(versions)
        if not self.tells_spans:
            meta.pop("weight_versions", None)
        return answer | {"output_ids": ids}


def letter(token_id: int) -> str:
    return chr(ord("a") + (token_id - 1000) % 26)


def _told(body: Any, message: str) -> Any:
    body["error"]["message"] = message
    return body


async def _send(response: web.StreamResponse, event: Any) -> None:
    data = b"[DONE]" if event is None else json.dumps(event, separators=(",", ":")).encode()
    with contextlib.suppress(ConnectionResetError):
        await response.write(b"data: " + data + b"\n\n")
