"""The HTTP service: routes of the Tinker SDK 0.38 under /api/v1 for clients, and /trainer for the trainer ranks.

A client waits for a result in POST /retrieve_future, which is held until there is one, for at most `HOLD_S`. A request
is journalled before its number is answered, and its result before it is given out.
"""

import hmac
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from areal.api.errors import ArealError, RequestError
from areal.observe.log import get_logger
from areal.serve import wire
from areal.serve.sampling import Sampling, queue_of
from areal.serve.service import ADAPTER, Service, failure, weights_folder
from areal.serve.tenants import EXTERNAL, INFLIGHT, SAMPLER, TRAINING, Forgotten, Model, NotFound, SavedWeights
from areal.system.durable import COMPLETE
from areal.system.http_guard import RequestGuard, read_body
from areal.system.network import Host

_log = get_logger("serve")

HOLD_S = 25.0
"""A request for a result is held for this time. The SDK gives up after 45 s, and asks again at once after an answer."""
SESSION_S = 900.0
"""A session of which nothing was heard for this time has ended."""
SAMPLES_AHEAD = 1024
"""Numbers of samples that are journalled at once."""
MAX_BODY_BYTES = 64 * 2**20
API, DOWNLOAD = "/api/v1", "/download"
URL_S = 3600
"""A URL for a download is valid for this time."""
_USER = web.RequestKey("user", str)
_STATUSES = {NotFound.code: 404, "request.too_many": 429}
_NAME = re.compile(r"[\w-][\w.-]{0,127}")
_CHECKPOINT_TYPES = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}


def _json(value: Any, status: int = 200) -> web.Response:
    body = memoryview(
        orjson.dumps(value)
    ).tobytes()  # that of orjson takes 4 KB, until the connection has its next answer
    return web.Response(body=body, status=status, content_type="application/json")


_CONSTANT: Mapping[str, Mapping[str, Any]] = {
    "client/config": {"sample_use_retrieve_futures": True},  # A client waits for all its samples in one request.
    "client/dynamic_config": {},  # The flags keep their defaults: clients compute losses of their own.
    "telemetry": {"status": "accepted"},  # Nothing is kept.
}
"""Path -> the only answer."""


def _constant(answer: Mapping[str, Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        return _json(answer)

    return handler


def _number(request: web.Request, name: str, default: int | None = None) -> int:
    """A number of the query."""
    text = request.query.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise wire.invalid(f"{name}={text[:40]} is not a number")
    return int(text)


def date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class Keys:
    """The API keys by the names of their users."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = {name: key.encode() for name, key in keys.items()}

    def owner(self, sent: str) -> str:
        """The name of the user of a key; empty = not known."""
        data = sent.encode("utf-8", "surrogateescape")
        return next((name for name, key in self._keys.items() if hmac.compare_digest(key, data)), "")

    def signature(self, user: str, text: str) -> str:
        """Shows that this service wrote `text` for a user. NotFound for an unknown one."""
        if user not in self._keys:
            raise NotFound(f"there is no user {user}")
        return hmac.new(self._keys[user], text.encode(), "sha256").hexdigest()


class Gateway:
    """The handlers of requests. `request[_USER]` is the name of the user, empty for trainer ranks."""

    def __init__(self, service: Service, sampling: Sampling, keys: Keys, *, hold_s: float = HOLD_S) -> None:
        self._service, self._sampling, self._keys, self._hold_s = service, sampling, keys, hold_s
        self._tenants = service.tenants
        service.is_sampled = sampling.uses
        self._lost = {name: (used.first, used.limit) for name, used in self._tenants.numbers.items()}
        """Queue -> the samples that an earlier gateway may not have answered."""
        open_sessions = [name for name in self._tenants.sessions if name not in self._tenants.ended]
        self._heard = dict.fromkeys(open_sessions, time.monotonic())  # Session -> when something was heard of it.

    def routes(self) -> list[web.RouteDef]:
        named = (  # POST, with the path of their names
            self.create_session, self.session_heartbeat, self.create_model, self.get_info, self.forward_backward,
            self.optim_step, self.save_weights, self.save_weights_for_sampler, self.save_weights_external,
            self.load_weights, self.weights_info, self.create_sampling_session, self.asample, self.retrieve_future,
            self.retrieve_futures, self.cancel_future,
        )  # fmt: skip
        checkpoint = f"{API}/training_runs/{{model}}/checkpoints/{{kind}}/{{name}}"
        return [
            *(web.post(f"{API}/{handler.__name__}", handler) for handler in named),
            *(web.post(f"{API}/{path}", _constant(answer)) for path, answer in _CONSTANT.items()),
            web.get(f"{API}/healthz", _constant({"status": "ok"})),
            web.get(f"{API}/get_server_capabilities", self.capabilities),
            web.get(f"{API}/samplers/{{sampler}}", self.get_sampler),
            web.get(f"{API}/sessions", self.list_sessions),
            web.get(f"{API}/sessions/{{session}}", self.get_session),
            web.post(f"{API}/sessions/{{session}}/finish", self.finish_session),
            web.get(f"{API}/training_runs", self.list_runs),
            web.get(f"{API}/training_runs/{{model}}", self.get_run),
            web.get(f"{API}/training_runs/{{model}}/checkpoints", self.list_of_run),
            web.get(f"{API}/checkpoints", self.list_checkpoints),
            web.get(f"{checkpoint}/external_weights_urls", self.download_urls),
            web.delete(checkpoint, self.delete),
            web.post(f"{checkpoint}/publish", self.publish),
            web.delete(f"{checkpoint}/publish", self.publish),
            web.put(f"{checkpoint}/ttl", self.set_ttl),
            web.post("/trainer/command", self.next_command),
            web.post("/trainer/result", self.finish_command),
            web.get(f"{DOWNLOAD}/{{user}}/{{expires}}/{{signature}}/{{model}}/{{name}}/{{file}}", self.download),
        ]

    # Sessions.

    async def capabilities(self, request: web.Request) -> web.Response:
        served = self._service.served
        model = {"model_name": served.name, "max_context_length": served.context_length}
        return _json({"supported_models": [model | {"trainable": True, "sampleable": True}]})

    async def create_session(self, request: web.Request) -> web.Response:
        """A repeated request, known by its idempotency key, gets the same session."""
        name = f"{request[_USER]}/{request.headers.get('X-Idempotency-Key') or uuid.uuid4().hex}"
        session = uuid.uuid5(uuid.NAMESPACE_URL, name).hex
        if session not in self._tenants.sessions:
            await self._service.record_once(session, {"event": "session", "id": session, "key": request[_USER]})
        if session not in self._tenants.ended:
            self._heard[session] = time.monotonic()
        return _json({"type": "create_session", "session_id": session})

    async def session_heartbeat(self, request: web.Request) -> web.Response:
        session = wire.parsed(wire.SessionBody, await read_body(request)).session_id
        if session in self._tenants.ended:
            return _json({"error": f"session {session} has ended"}, 410)
        self._heard[self._tenants.session(session, request[_USER])] = time.monotonic()
        return _json({"type": "session_heartbeat"})

    async def finish_session(self, request: web.Request) -> web.Response:
        await self._end(self._tenants.session(request.match_info["session"], request[_USER]))
        return web.Response(status=204)

    async def end_silent_sessions(self) -> None:
        """End the sessions of clients that are gone: their samplers and samples. Their models stay."""
        since = time.monotonic() - SESSION_S
        for session in [name for name, at in self._heard.items() if at < since]:
            await self._end(session)

    async def _end(self, session: str) -> None:
        self._heard.pop(session, None)
        for sampler in [known.id for known in self._tenants.samplers.values() if known.session == session]:
            self._sampling.forget(sampler)
        await self._service.record({"event": "ended", "id": session})

    async def list_sessions(self, request: web.Request) -> web.Response:
        sessions = self._tenants.sessions.items()
        names = [name for name, key in sessions if key == request[_USER] and name not in self._tenants.ended]
        return _json({"sessions": names})

    async def get_session(self, request: web.Request) -> web.Response:
        session = self._tenants.session(request.match_info["session"], request[_USER])
        models = [model.id for model in self._tenants.models.values() if model.session == session]
        samplers = [sampler.id for sampler in self._tenants.samplers.values() if sampler.session == session]
        return _json({"training_run_ids": models, "sampler_ids": samplers})

    # Training.

    async def create_model(self, request: web.Request) -> web.Response:
        body = wire.parsed(wire.CreateModelBody, await read_body(request))
        self._require_base(body.base_model)
        if (kind := body.optimizer_config.get("type", "adamw")) != "adamw":
            raise wire.invalid(f"optimizer_config.type={kind} is not supported: use adamw")
        settings = body.lora_config.model_dump()
        model = await self._new_model(request[_USER], body.session_id, body.model_seq_id, settings, body.user_metadata)
        return await self._accepted(model, 0, "create", {"settings": settings})

    def _require_base(self, name: str) -> None:
        if name != self._service.served.name:
            raise NotFound(f"base_model {name} is not served here, only {self._service.served.name}")

    async def _new_model(
        self, key: str, session: str, number: int, settings: Mapping[str, Any], metadata: dict[str, Any] | None
    ) -> str:
        self._tenants.session(session, key)
        model = f"{session}:train:{number}"
        if model not in self._tenants.models:
            event = {"event": "model", "id": model, "session": session, "settings": dict(settings)}
            event |= {"created_at": time.time(), "user_metadata": metadata}
            await self._service.record_once(model, event)
        return model

    async def _accepted(
        self, model: str, seq: int, kind: str, arguments: Mapping[str, Any], body: bytes | None = None
    ) -> web.Response:
        request_id = await self._service.accept(model, seq, kind, arguments, body)
        return _json({"request_id": request_id, "model_id": model})

    async def load_weights(self, request: web.Request) -> web.Response:
        """The first request of a new model, or a request to one."""
        body, key = wire.parsed(wire.LoadBody, await read_body(request)), request[_USER]
        if body.model_seq_id is None:
            return await self._training_request(request, "load", lambda *_: self._to_load(body, key))
        model = f"{self._tenants.session(body.session_id, key)}:train:{body.model_seq_id}"
        known = self._tenants.models.get(model)
        if known is not None and known.operations:
            return _json({"request_id": f"{model}:0", "model_id": model})
        arguments = self._to_load(body, key)
        await self._new_model(key, body.session_id, body.model_seq_id, arguments["settings"], body.user_metadata)
        return await self._accepted(model, 0, "load", arguments)

    def _to_load(self, body: wire.LoadBody, key: str) -> Mapping[str, Any]:
        saved = self._tenants.weights(body.path, key, time.time())
        if saved.kind != TRAINING:
            raise wire.invalid(f"{body.path} has no state for training: use a path of save_state")
        if body.base_model is not None:
            self._require_base(body.base_model)
        arguments = {"path": body.path, "saved_seq": saved.seq, "optimizer": body.optimizer}
        arguments |= {"num_steps": saved.num_steps if body.optimizer else 0}
        return arguments | {"settings": dict(saved.settings)}

    async def _training_request(
        self, request: web.Request, kind: str, arguments_of: Callable[[Model, int, bytes], Mapping[str, Any]]
    ) -> web.Response:
        """Accept a request to a model. What is wrong with its fields is its result: it has used its number."""
        data = await read_body(request)
        address = wire.parsed(wire.TrainingBody, data)
        model, seq = self._tenants.model(address.model_id, request[_USER]), address.seq_id
        if kind != "step" and seq in model.operations:  # what it asks for may exist since
            return _json({"request_id": model.operations[seq].request_id, "model_id": model.id})
        try:
            arguments = arguments_of(model, seq, data)
        except RequestError as error:
            return await self._accepted(model.id, seq, "invalid", {"error": str(error)}, data)
        return await self._accepted(model.id, seq, kind, arguments)

    async def get_info(self, request: web.Request) -> web.Response:
        model = self._tenants.model(wire.parsed(wire.ModelBody, await read_body(request)).model_id, request[_USER])
        served = self._service.served
        data = {"arch": "", "model_name": served.name, "tokenizer_id": served.tokenizer}
        facts = {"type": "get_info", "model_id": model.id, "model_data": data, "is_lora": True}
        return _json(facts | {"lora_rank": model.settings["rank"], "model_name": served.name})

    async def forward_backward(self, request: web.Request) -> web.Response:
        """What is wrong with the content is the result of the request: the SDK continues with the next number."""
        data = await read_body(request)
        message = wire.parsed_message("ForwardBackwardRequest", data)
        model = self._tenants.model(message.model_id, request[_USER])
        if message.seq_id < 1:
            raise wire.invalid(f"seq_id must be at least 1, got {message.seq_id}")
        return await self._accepted(model.id, message.seq_id, "loss", {"forward_only": message.forward_only}, data)

    async def optim_step(self, request: web.Request) -> web.Response:
        return await self._training_request(request, "step", _to_step)

    async def save_weights(self, request: web.Request) -> web.Response:
        return await self._training_request(request, "save", partial(self._to_save, TRAINING))

    async def save_weights_for_sampler(self, request: web.Request) -> web.Response:
        return await self._training_request(request, "export", partial(self._to_save, SAMPLER))

    async def save_weights_external(self, request: web.Request) -> web.Response:
        return await self._training_request(request, "export", partial(self._to_save, EXTERNAL))

    def _to_save(self, where: str, model: Model, seq: int, data: bytes) -> Mapping[str, Any]:
        body = wire.parsed(wire.SaveBody, data)
        arguments: dict[str, Any] = {"name": body.path or f"{seq:06d}", "where": where}
        if not _NAME.fullmatch(arguments["name"]):
            raise wire.invalid(f"path: {arguments['name']!r} is not a name of letters, digits, -, _ and .")
        if body.age_encryption_recipients:
            raise wire.invalid("age_encryption_recipients is not supported: the files are not encrypted")
        if body.sampling_session_seq_id is not None:
            arguments["name"] = INFLIGHT if body.kind == "inflight" else f"session-{body.sampling_session_seq_id}"
            arguments["sampler"] = f"{model.session}:sample:{body.sampling_session_seq_id}"
        path = f"tinker://{model.id}/{where}/{arguments['name']}"
        may_replace = body.overwrite or arguments["name"] == INFLIGHT
        if self._tenants.is_saved(path, time.time()) and not may_replace:
            raise wire.invalid(f"{path} exists: give another name, or overwrite")
        return arguments | {"ttl_seconds": body.ttl_seconds, "user_metadata": body.user_metadata}

    # Sampling.

    async def create_sampling_session(self, request: web.Request) -> web.Response:
        body = wire.parsed(wire.SamplerBody, await read_body(request))
        session = self._tenants.session(body.session_id, request[_USER])
        seq = 0
        if body.model_path:
            seq = self._tenants.weights(body.model_path, request[_USER], time.time()).seq
        elif body.base_model is None:
            raise wire.invalid("give model_path or base_model")
        else:
            self._require_base(body.base_model)
        sampler = f"{session}:sample:{body.sampling_session_seq_id}"
        if sampler not in self._tenants.samplers:
            event = {"event": "sampler", "id": sampler, "session": session, "path": body.model_path or ""}
            await self._service.record_once(sampler, event | {"seq": seq})
        return _json({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def get_sampler(self, request: web.Request) -> web.Response:
        sampler = self._tenants.sampler(request.match_info["sampler"], request[_USER])
        name = self._service.served.name
        return _json({"sampler_id": sampler.id, "base_model": name, "model_path": sampler.path or None})

    async def asample(self, request: web.Request) -> web.Response:
        body = wire.parsed(wire.SampleBody, await read_body(request))
        sampler = self._tenants.sampler(body.sampling_session_id, request[_USER])
        request_id = f"{sampler.id}:{body.seq_id}"
        await self._number_samples(queue_of(request_id), body.seq_id)
        if request_id not in self._sampling:
            folder = None
            if sampler.path:
                saved = self._tenants.saved.get(sampler.path)
                if saved is None:
                    raise NotFound(f"{sampler.path} was deleted")
                seq = saved.seq if sampler.seq is None else sampler.seq
                folder = weights_folder(self._service.folder, sampler.path, seq) / ADAPTER
            self._sampling.start(request_id, body, folder)
        if sampler.session in self._heard:
            self._heard[sampler.session] = time.monotonic()
        ids = [f"{request_id}:{number}" for number in range(body.num_samples)]
        return _json({"request_id": request_id, "sample_sequence_ids": ids})

    async def _number_samples(self, queue: str, seq: int) -> None:
        """Journal, for many samples at once, which numbers a client may have used: a later gateway tells it that they
        are lost."""
        while (seen := self._tenants.numbers.get(queue)) is None or seq >= seen.limit:
            first = self._sampling.first_open(queue)
            event = {"event": "samples", "queue": queue, "first": seq if first is None else min(first, seq)}
            await self._service.record_once(queue, event | {"limit": seq + SAMPLES_AHEAD})

    async def cancel_future(self, request: web.Request) -> web.Response:
        request_id = wire.parsed(wire.FutureBody, await read_body(request)).request_id
        self._tenants.sampler(request_id.rpartition(":")[0], request[_USER])
        self._sampling.cancel(request_id)
        return _json({})

    # Results.

    async def retrieve_future(self, request: web.Request) -> web.Response:
        request_id = wire.parsed(wire.FutureBody, await read_body(request)).request_id
        if ":sample:" in request_id:
            return await self._sampled(request_id, request[_USER])
        try:
            operation = self._tenants.operation(request_id, request[_USER])
        except Forgotten as error:  # as a result: the SDK sends a request again after other answers
            return web.Response(body=failure(str(error)), content_type="application/json")
        if not await self._service.wait(lambda: operation.is_done, self._hold_s):
            return _json({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        assert operation.result is not None
        operation.is_read = True
        data = self._service.journal.read(operation.result)
        is_message = operation.kind == "loss" and operation.is_ok
        return web.Response(body=data, content_type=wire.PROTOBUF if is_message else "application/json")

    async def retrieve_futures(self, request: web.Request) -> web.Response:
        """Which samples of a client have ended since its last request. Those of an earlier gateway have failed."""
        body = wire.parsed(wire.FuturesBody, await read_body(request))
        sampler = self._tenants.sampler(body.target.sampling_session_id, request[_USER])
        queue = f"{sampler.id}:{body.target.cloned_sampler_id}"
        lost: list[str] = []
        if queue in self._lost and self._sampling.is_older(queue, body.prev_cursor):
            numbers = range(*self._lost[queue])
            lost = [name for name in (f"{sampler.id}:{seq}" for seq in numbers) if name not in self._sampling]
        timeout_s = self._hold_s if body.timeout is None else body.timeout
        limit_s = 0.0 if lost else min(timeout_s, self._hold_s)
        if queue not in self._tenants.numbers:  # a clone that has sent nothing yet, or a name that a client made up
            await self._service.wait(lambda: queue in self._tenants.numbers, limit_s)
            return _json({"completions": [], "cursor": body.prev_cursor})
        retrieved = body.retrieved_request_ids
        cursor, names = await self._sampling.completions(queue, body.prev_cursor, retrieved, limit_s)
        facts: list[dict[str, Any]] = [{"state": "failed", "request_id": name} for name in lost]
        for name in names:
            size = self._sampling.size_of(name)
            state = {"state": "failed"} if size is None else {"state": "finished"}
            facts.append(state | {"request_id": name, "response_payload_uncompressed_size": size})
        return _json({"completions": facts, "cursor": cursor})

    async def _sampled(self, request_id: str, key: str) -> web.Response:
        self._tenants.sampler(request_id.rpartition(":")[0], key)
        if request_id not in self._sampling:
            return _json({"error": f"sample {request_id} is not known here: send it again"}, 410)
        task = await self._sampling.wait(request_id, self._hold_s)
        if task is None:
            return _json({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        if task.cancelled():
            return web.Response(body=failure("the request was cancelled"), content_type="application/json")
        if (error := task.exception()) is None:
            return web.Response(body=task.result(), content_type=wire.PROTOBUF)
        if not isinstance(error, ArealError):
            _log.error("%s failed", request_id, exc_info=error)
        category = "user" if isinstance(error, RequestError) else "server"
        return web.Response(body=failure(str(error) or type(error).__name__, category), content_type="application/json")

    # Lists of saved weights.

    def _checkpoint(self, saved: SavedWeights) -> dict[str, Any]:
        return {
            "checkpoint_id": f"{saved.kind}/{saved.name}",
            "checkpoint_type": _CHECKPOINT_TYPES[saved.kind],
            "time": date(saved.at),
            "tinker_path": saved.path,
            "public": saved.is_public,
            "user_metadata": saved.user_metadata,
            "expires_at": None if saved.expires_at is None else date(saved.expires_at),
        }

    def _run(self, model: Model) -> dict[str, Any]:
        newest = {
            saved.kind: self._checkpoint(saved) for saved in self._tenants.saved.values() if saved.model == model.id
        }
        return {
            "training_run_id": model.id,
            "base_model": self._service.served.name,
            "model_owner": self._tenants.key_of(model.session),
            "is_lora": True,
            "lora_rank": model.settings["rank"],
            "last_request_time": date(model.created_at),
            "last_checkpoint": newest.get(TRAINING),
            "last_sampler_checkpoint": newest.get(SAMPLER),
            "user_metadata": model.user_metadata,
        }

    def _page(self, request: web.Request, name: str, items: list[dict[str, Any]]) -> web.Response:
        offset, limit = (_number(request, name, default) for name, default in (("offset", 0), ("limit", 100)))
        cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
        return _json({name: items[offset : offset + limit], "cursor": cursor})

    async def list_runs(self, request: web.Request) -> web.Response:
        return self._page(request, "training_runs", [self._run(run) for run in self._tenants.models_of(request[_USER])])

    async def get_run(self, request: web.Request) -> web.Response:
        return _json(self._run(self._tenants.model(request.match_info["model"], request[_USER])))

    async def list_of_run(self, request: web.Request) -> web.Response:
        model = self._tenants.model(request.match_info["model"], request[_USER])
        checkpoints = [self._checkpoint(saved) for saved in self._tenants.saved.values() if saved.model == model.id]
        return _json({"checkpoints": checkpoints})

    async def list_checkpoints(self, request: web.Request) -> web.Response:
        every = self._tenants.saved.values()
        checkpoints = [self._checkpoint(saved) for saved in every if self._tenants.owner(saved) == request[_USER]]
        return self._page(request, "checkpoints", checkpoints)

    async def weights_info(self, request: web.Request) -> web.Response:
        path = wire.parsed(wire.PathBody, await read_body(request)).tinker_path
        saved = self._tenants.weights(path, request[_USER], time.time())
        facts = {name: value for name, value in saved.settings.items() if name.startswith("train_")}
        facts |= {"base_model": self._service.served.name, "is_lora": True, "lora_rank": saved.settings["rank"]}
        return _json(facts)

    def _own(self, request: web.Request) -> SavedWeights:
        place = request.match_info
        model = self._tenants.model(place["model"], request[_USER])
        return self._tenants.weights(
            f"tinker://{model.id}/{place['kind']}/{place['name']}", request[_USER], time.time()
        )

    async def delete(self, request: web.Request) -> web.Response:
        await self._service.delete(self._own(request))
        return web.Response(status=204)

    async def publish(self, request: web.Request) -> web.Response:
        await self._service.change(self._own(request), is_public=request.method == "POST")
        return web.Response(status=204)

    async def set_ttl(self, request: web.Request) -> web.Response:
        ttl_s = wire.parsed(wire.TtlBody, await read_body(request)).ttl_seconds
        await self._service.change(self._own(request), expires_at=None if ttl_s is None else time.time() + ttl_s)
        return web.Response(status=204)

    async def download_urls(self, request: web.Request) -> web.Response:
        """A URL for each file of external weights, which needs no key."""
        saved, expires = self._own(request), int(time.time()) + URL_S
        user, urls = request[_USER], dict[str, str]()
        for file in [path for path in sorted(self._files(saved).iterdir()) if path.name != COMPLETE]:
            place = f"{saved.model}/{saved.name}/{file.name}"
            signature = self._keys.signature(user, f"{expires}/{place}")
            urls[file.name] = f"{request.url.origin()}{DOWNLOAD}/{user}/{expires}/{signature}/{place}"
        return _json({"urls": urls, "expires": date(expires)})

    async def download(self, request: web.Request) -> web.StreamResponse:
        """A file of external weights, for a URL of `download_urls`."""
        user, expires, model, name, file = (
            request.match_info[part] for part in ("user", "expires", "model", "name", "file")
        )
        expected = self._keys.signature(user, f"{expires}/{model}/{name}/{file}")
        if not hmac.compare_digest(request.match_info["signature"].encode(), expected.encode()):
            raise NotFound("this URL was not made here, or its user has another key")
        if int(expires) < time.time():
            raise NotFound("this URL has expired: ask for another one")
        saved = self._tenants.weights(f"tinker://{model}/{EXTERNAL}/{name}", user, time.time())
        return web.FileResponse(self._files(saved) / file)

    def _files(self, saved: SavedWeights) -> Path:
        if saved.kind != EXTERNAL:
            raise NotFound(f"{saved.path} was not saved by save_weights_external")
        return weights_folder(self._service.folder, saved.path, saved.seq) / ADAPTER

    # The trainer ranks.

    async def next_command(self, request: web.Request) -> web.Response:
        asked = wire.parsed(wire.CommandBody, await read_body(request))
        command = await self._service.command(asked.run_id, asked.epoch, asked.number)
        if command is None:
            return web.Response(status=204)
        head = orjson.dumps(command[0])
        return web.Response(body=len(head).to_bytes(4) + head + command[1], content_type="application/octet-stream")

    async def finish_command(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        number, rank, failed = (_number(request, name) for name in ("number", "rank", "failed"))
        epoch = request.query.get("epoch", "")
        await self._service.finish(epoch, number, rank, result=body, failed=failed == 1)
        return _json({})


def _to_step(_model: Model, _seq: int, data: bytes) -> Mapping[str, Any]:
    adam = wire.parsed(wire.StepBody, data).adam_params
    settings = {"lr": adam.learning_rate, "beta1": adam.beta1, "beta2": adam.beta2, "eps": adam.eps}
    return {"settings": settings | {"weight_decay": adam.weight_decay, "max_norm": adam.grad_clip_norm or 1e30}}


def make_app(gateway: Gateway, keys: Keys, *, token: str, host: Host) -> web.Application:
    """The application: clients send a key as X-API-Key, trainer ranks the run's `token` as a bearer token."""
    guard = RequestGuard(token, host)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = guard.foreign(request.headers)
        if refusal is None and request.path.startswith("/trainer/"):
            refusal = guard.unauthorized(request.headers)
        if refusal is not None:
            return _json({"error": refusal.message, "code": refusal.code}, refusal.status)
        request[_USER] = keys.owner(request.headers.get("X-API-Key", ""))
        if not request[_USER] and request.path.startswith(API) and request.path != f"{API}/healthz":
            return _json({"error": "X-API-Key is not a key of this service", "code": "request.unauthorized"}, 401)
        try:
            return await handler(request)
        except ArealError as error:
            status = _STATUSES.get(error.code, 422) if isinstance(error, RequestError) else 503
            answer = _json({"error": str(error), "code": error.code}, status)
            if answer.status == 429:
                answer.headers["Retry-After"] = "1"
            return answer
        except web.HTTPException:
            raise
        except Exception as error:  # noqa: BLE001 - one request: the service and other clients continue
            _log.exception("%s failed", request.path)
            return _json({"error": f"{type(error).__name__}: {error}", "code": ArealError.code}, 500)

    app = web.Application(middlewares=[check], client_max_size=MAX_BODY_BYTES)
    app.add_routes(gateway.routes())
    return app
