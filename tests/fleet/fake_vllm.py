"""vLLM's dialect of a fake server. Every body is that of a recorded answer, with the fake's own figures put in."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from aiohttp import web

from areal.fleet.replica import AnswerForm, Replica
from areal.fleet.vllm import VLLMReplica
from tests.fleet.fake_server import Asked, FakeServer, Refused, spans, tokens

RECORDING: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "recordings" / "vllm-0.32.0.json").read_text(encoding="utf-8")
)
"""Made by tests/servers/record_vllm.py."""


def recorded(name: str) -> Any:
    """The body of a recorded answer, to be changed at will."""
    return copy.deepcopy(RECORDING[name]["body"])


class FakeVLLM(FakeServer):
    dialect = "vllm"
    can_abandon = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.adapters: dict[str, str] = {}
        self.extension_missing = False
        """It was started without areal's worker extension."""
        self.fail_cache_reset = False
        self.error_in_stream = False
        """Streams end with an error after their first token."""
        self._group_name = ""
        self._is_updating = False
        """From the start of a collective update to its finish the weights count as a mixture."""

    @staticmethod
    def client(name: str, address: str, form: AnswerForm | None = None) -> Replica:
        return VLLMReplica(name, address, form=form)

    def routes(self) -> Iterable[web.RouteDef]:
        yield web.post("/inference/v1/generate", self._generate)
        yield web.get("/health", self._health)
        yield web.get("/weight_info", self._weight_info)
        yield web.get("/metrics", self._metrics)
        yield web.post("/detokenize", self._detokenize)
        controls: dict[str, Callable[[Any, web.Request], Awaitable[Any]]] = {
            "/pause": self._pause,
            "/resume": self._resume,
            "/collective_rpc": self._call_workers,
            "/reset_prefix_cache": self._reset_cache,
            "/update_weight_version": self._set_version,
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
        }
        for path, control in controls.items():
            yield web.post(path, self._handler(control))

    def _handler(self, control: Callable[[Any, web.Request], Awaitable[Any]]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            await self.answers()
            answer = await control(await request.json(), request)
            if isinstance(answer, web.Response):
                return answer
            return web.Response(text=answer) if isinstance(answer, str) else web.json_response(answer)

        return handle

    def error(self, status: int, message: str) -> web.Response:
        body = recorded("no_such_method" if status >= 500 else "generate_refused")
        body["error"] |= {"message": message, "code": status}
        return web.json_response(body, status=status)

    def _as_recorded(self, name: str) -> web.Response:
        return web.json_response(recorded(name), status=RECORDING[name]["status"])

    # What it says of itself

    async def _health(self, request: web.Request) -> web.Response:
        await self.answers()
        return web.Response(text=recorded("health"))

    async def _weight_info(self, request: web.Request) -> web.Response:
        await self.answers()
        return web.json_response(recorded("weight_info") | {"weight_version": str(self.version)})

    async def _metrics(self, request: web.Request) -> web.Response:
        await self.answers()
        if self.fail_load:
            return web.Response(status=500, text="no figures")
        figures = [self.num_running, 0, 0.25, self.generated_tokens]  # in the order of the recording
        lines = recorded("metrics").splitlines()
        told = [f"{line.rpartition(' ')[0]} {figure}" for line, figure in zip(lines, figures, strict=True)]
        return web.Response(text="# HELP what follows\n" + "\n".join(told) + "\n")

    async def _state(self) -> Any:
        body = recorded("state")
        body["results"][0] |= {
            "vocab_size": 5000,
            "context_length": 4096,
            "weights_whole": not self.torn,
        }
        return body

    async def _detokenize(self, request: web.Request) -> web.Response:
        """A token is a letter: 1000 is a, and so on, again and again."""
        await self.answers()
        ids = (await request.json())["tokens"]
        return web.json_response(recorded("detokenize") | {"prompt": "".join(letter(id_) for id_ in ids)})

    # Control

    async def _pause(self, body: Any, request: web.Request) -> Any:
        mode = request.query["mode"]
        self.keeps_cache = request.query["clear_cache"] == "false"
        assert not (self.keeps_cache and mode == "abort")
        self.pause({"abort": "abort", "keep": "retract"}[mode])
        return recorded(f"pause_{mode}")

    async def _resume(self, body: Any, request: web.Request) -> Any:
        self.resume()
        return recorded("resume")

    async def _call_workers(self, body: Any, request: web.Request) -> Any:
        if self.extension_missing:
            return self._as_recorded("no_such_method")
        methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "areal_state": self._state,
            "areal_load_folder": self._load_folder,
            "areal_join": self._join,
            "areal_start_update": self._start_update,
            "areal_receive": self._receive,
            "areal_finish_update": self._finish,
        }
        if body["method"] not in methods:
            return self._as_recorded("no_such_method")
        try:
            return await methods[body["method"]](*body["args"])
        except Refused as refused:
            if refused.status < 500:
                raise
            answer = recorded("receive_failed")
            answer["results"][0]["error"] = refused.message
            return answer

    async def _load_folder(self, path: str) -> Any:
        await self.load(path)
        self._is_updating = False
        return recorded("load_folder")

    async def _start_update(self) -> Any:
        self._is_updating = self.torn = True
        return recorded("start_update")

    async def _reset_cache(self, body: Any, request: web.Request) -> Any:
        assert request.query["reset_running_requests"] == "true"
        assert not self.keeps_cache
        return recorded("reset_cache") | {"success": not self.fail_cache_reset}

    async def _set_version(self, body: Any, request: web.Request) -> Any:
        if int(body["new_version"]) < 0:  # as an update begins
            self.version = -1
        else:
            self.commit(int(body["new_version"]))
            self.torn = self._is_updating
        return recorded("set_version") | {"new_version": body["new_version"]}

    async def _join(self, info: Any) -> Any:
        assert info.keys() == RECORDING["join"]["request"]["body"]["args"][0].keys()
        if self._group_name:  # areal's engine leaves the group before by itself
            self.leave(self._group_name)
        self._group_name = info["group_name"]
        self.join(group_name=info["group_name"], rank=info["rank_offset"], world_size=info["world_size"])
        return recorded("join")

    async def _receive(self, bucket: Any) -> Any:
        assert bucket.keys() == RECORDING["receive"]["request"]["body"]["args"][0].keys()
        await self.receive()
        return recorded("receive")

    async def _finish(self) -> Any:
        self._is_updating = self.torn = False
        return recorded("finish")

    async def _load_adapter(self, body: Any, request: web.Request) -> Any:
        if body["lora_name"] in self.adapters:
            return self._as_recorded("load_adapter_again")
        if not Path(body["lora_path"]).is_dir():
            return self._as_recorded("load_adapter_missing")
        self.adapters[body["lora_name"]] = body["lora_path"]
        self.keep_adapter(body["lora_name"])
        return recorded("load_adapter")

    async def _unload_adapter(self, body: Any, request: web.Request) -> Any:
        if self.adapters.pop(body["lora_name"], None) is None:
            return self._as_recorded("unload_adapter_again")
        return recorded("unload_adapter")

    # Generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling = body["sampling_params"]
        if body.get("model") is not None and body["model"] not in self.adapters:
            return self._as_recorded("generate_unknown_model")
        asked = Asked(
            request_id=body["request_id"],
            input_ids=body["token_ids"],
            max_new_tokens=sampling["max_tokens"],
            min_new_tokens=sampling["min_tokens"],
            stream=body["stream"],
            body=body,
        )
        async with self.running(asked):
            if asked.stream:
                return await self._stream(request, asked, sampling["stream_interval"])
            made = [entry async for entry in self.make(asked)]
            versions = [version for version, _ in made if version is not None]
            answer = recorded("generate")
            _fill(answer, len(asked.input_ids), versions, made[-1][1], versions)
            return web.json_response(answer)

    async def _stream(self, request: web.Request, asked: Asked, interval: int) -> web.StreamResponse:
        """The first token comes alone, then `interval` of them at a time; the versions come with the last."""
        response = web.StreamResponse(headers={"Content-Type": RECORDING["generate_stream"]["content_type"]})
        await response.prepare(request)
        pending: list[int] = []
        versions: list[int] = []
        async for version, reason in self.make(asked):
            if version is not None:
                pending.append(version)
                versions.append(version)
            if reason or len(versions) == 1 or len(pending) == interval:
                event = recorded("generate_stream")[-1 if reason else 0]
                start = len(asked.input_ids) + len(versions) - len(pending)
                _fill(event, start, pending, reason, versions if reason else None)
                pending = []
                await self._send(response, event)
                if self.error_in_stream:
                    await self._send(response, recorded("no_such_method"))
                    break
        await self._send(response, None)
        return response

    @staticmethod
    async def _send(response: web.StreamResponse, event: Any) -> None:
        data = b"[DONE]" if event is None else json.dumps(event, separators=(",", ":")).encode()
        with contextlib.suppress(ConnectionResetError):
            await response.write(b"data: " + data + b"\n\n")


def letter(token_id: int) -> str:
    return chr(ord("a") + (token_id - 1000) % 26)


def _fill(answer: Any, start: int, versions: list[int], reason: str | None, told: list[int] | None) -> None:
    """Put tokens into a recorded answer; `told`: the versions of the whole part."""
    ids, logprobs = tokens(start, versions)
    choice = answer["choices"][0]
    entry = choice["logprobs"]["content"][0]
    choice |= {
        "token_ids": ids,
        "finish_reason": reason,
        "weight_versions": spans(told) if told else None,
        "logprobs": {
            "content": [
                entry | {"token_id": id_, "logprob": logprob} for id_, logprob in zip(ids, logprobs, strict=True)
            ]
        },
    }
