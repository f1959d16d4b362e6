"""The stages of every turn of a run, on disk before an episode adopts it: intent, generated, delivered.

One file for each controller process, JSON lines, below RunPaths.turns. The event `accepted` of the ledger is the last
stage, adopted. A line is written at once, so the end of the process loses none; `durable` waits for the disk.
"""

import asyncio
import functools
import hashlib
import itertools
import logging
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from areal.agent.dialects import chat_completions, completions, messages, responses
from areal.agent.dialects.dialect import Asked, Dialect, Fields, Sent, invalid, openai_error, unsupported
from areal.agent.directory import OpenRequest, SessionDirectory, SessionReward, Sessions
from areal.agent.processes import AgentPool
from areal.agent.session import LARGE
from areal.agent.turns import SessionTurns, TurnAnswer, TurnRefused
from areal.api.config import AgentConfig
from areal.api.data import tokens_checksum
from areal.api.errors import ArealError, RequestError, ServerUnavailable
from areal.data.tokenizer import Tokenizer
from areal.observe.http_log import HttpLogger
from areal.observe.log import get_logger
from areal.system.device import cpu_count
from areal.system.durable import append_whole, write_atomic
from areal.system.http_guard import Refusal, RequestGuard, read_body, wrong_type
from areal.system.network import Host, http_address, listen, new_token, run_token
from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths


class TurnJournal:
    """The journal of one process. Implements TurnEvents."""

    def __init__(self, folder: Path) -> None:
        """Make the next file in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        taken = {path.stem for path in folder.glob("*.jsonl")}
        name = next(name for number in itertools.count(1) if (name := f"{number:06d}") not in taken)
        self._file = open(folder / f"{name}.jsonl", "xb", buffering=0)  # noqa: SIM115 - closed by aclose()
        self._num_written = self._num_durable = 0
        self._sync: asyncio.Task[None] | None = None

    def intent(self, turn_ids: Sequence[str]) -> None:
        self._write({"event": "intent", "turns": turn_ids})

    def generated(self, turn_id: str, token_ids: Sequence[int]) -> None:
        self._write(
            {"event": "generated", "turn": turn_id, "tokens": len(token_ids), "crc": tokens_checksum(token_ids)}
        )

    def delivered(self, turn_ids: Sequence[str]) -> None:
        self._write({"event": "delivered", "turns": turn_ids})

    def _write(self, event: dict[str, Any]) -> None:
        append_whole(self._file, orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE))
        self._num_written += 1

    async def durable(self) -> None:
        """Return when all lines so far are on disk. Callers at the same time share one sync."""
        wanted = self._num_written
        while self._num_durable < wanted:
            if self._sync is None:
                self._sync = asyncio.create_task(self._to_disk(), name="turn-journal-sync")
                self._sync.add_done_callback(lambda sync: sync.cancelled() or sync.exception())  # callers may leave
            await asyncio.shield(self._sync)

    async def _to_disk(self) -> None:
        reached = self._num_written
        try:
            await asyncio.to_thread(os.fsync, self._file.fileno())
            self._num_durable = reached
        finally:
            self._sync = None

    async def aclose(self) -> None:
        if self._sync is not None:
            await asyncio.gather(self._sync, return_exceptions=True)
        self._file.close()


# The HTTP interface of sessions: turns in the dialects of OpenAI and Anthropic, and sessions opened from outside.
#
#     POST /v1/chat/completions    /v1/completions    /v1/responses    /v1/messages
#                                                 a turn; the session is known by `Authorization: Bearer KEY` or
#                                                 `x-api-key: KEY`, or by the path /sessions/KEY/v1/...
#     POST /v1/messages/count_tokens
#     GET  /v1/models
#     POST /sessions                              admin token: open a session
#     POST /sessions/KEY/reward                   a reward, and the end of the session
#
# docs/http.md has the fields and the errors. No line of a log contains a key.

_log = get_logger(__name__)

BODY_TIMEOUT_S = 60.0  # A client that sends its body slower than this is refused.
WRITE_TIMEOUT_S = 60.0
"""A client that does not read its reply for this time loses the connection, as one that has left."""
KEEP_ALIVE_S = 10.0
MAX_REWARD, MAX_NUMBERS = 1e30, 4096
MAX_VALUES = 2**19  # Values of a request, by the marks before them: as objects they block the loop for 0.2 s.
RETRY_S, MAX_RETRY_S = 1.0, 5.0
"""Retry-After of a refusal without a time, and its maximum. The openai SDK does not retry above 120 s. Below that, and
the anthropic SDK always, a client sleeps for the whole time, also beyond its own time limit."""
KEY_PATTERN = "[A-Za-z0-9_-]{1,128}"
_KEY = f"{{key:{KEY_PATTERN}}}"
_NAME = re.compile(r"[A-Za-z0-9_./:-]{1,128}")
Parse = Callable[[dict[str, Any]], Asked]
_DIALECTS = {
    "/chat/completions": chat_completions.DIALECT,
    "/completions": completions.DIALECT,
    "/responses": responses.DIALECT,
    "/messages": messages.DIALECT,
}


class SessionServer:
    """The routes over a directory of sessions. `application` makes the application, whose end cancels open turns."""

    def __init__(
        self,
        directory: SessionDirectory,
        *,
        admin_token: str,
        token_text: Callable[[int], str],
        host: Host | None = None,
        model: str = "policy",
        keep_alive_s: float = KEEP_ALIVE_S,
        max_body_mb: int = 16,
        refuses_foreign: bool = False,
    ) -> None:
        """`admin_token`: opens sessions from outside. `token_text`: text of a token id. `model`: its listed name.
        `max_body_mb`: limit of a request in MiB. `refuses_foreign`: refuse the fields `FieldTable.foreign`."""
        self._directory = directory
        self._guard = RequestGuard(admin_token, host or Host())
        self._token_text = functools.lru_cache(maxsize=2**18)(token_text)
        self._model = model
        self._keep_alive_s = keep_alive_s
        self._max_body_bytes = max_body_mb * 2**20
        self._refuses_foreign = refuses_foreign
        self._seen_foreign = set[str]()  # Fields that were warned about.
        self._turns: set[asyncio.Task[tuple[TurnAnswer, ...]]] = set()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._errors], client_max_size=self._max_body_bytes)
        for path, dialect in _DIALECTS.items():
            for prefix in ("/v1", f"/sessions/{_KEY}/v1"):
                app.router.add_post(prefix + path, self._turn_handler(dialect))
        for prefix in ("/v1", f"/sessions/{_KEY}/v1"):
            app.router.add_post(f"{prefix}/messages/count_tokens", self._count_tokens)
            app.router.add_get(f"{prefix}/models", self._models)
        app.router.add_post("/sessions", self._open)
        app.router.add_post(f"/sessions/{_KEY}/reward", self._reward)
        app.on_cleanup.append(self._end_turns)
        return app

    def runner(self, logger: logging.Logger) -> web.AppRunner:
        """How the application is served: no access log, which would contain keys; a handler ends with its answer, not
        with the connection of its client; no compressed bodies."""
        return web.AppRunner(
            self.application(),
            access_log=None,
            logger=logger,
            auto_decompress=False,
            handler_cancellation=False,
            shutdown_timeout=1.0,
        )

    async def _end_turns(self, app: web.Application) -> None:
        for turn in self._turns:
            turn.cancel()
        await asyncio.gather(*self._turns, return_exceptions=True)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if refusal := self._guard.foreign(request.headers):
                raise _refused(refusal)
            return await handler(request)
        except web.HTTPException as error:
            refused = TurnRefused(f"{request.method}: {error.reason}", code="agent.no_route", status=error.status)
            answer = _refusal(refused, openai_error)
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
            return answer
        except Exception as error:  # noqa: BLE001 - one request
            return _refusal(_as_refused(error, "a request"), openai_error)

    def _turn_handler(self, dialect: Dialect) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                session, asked = await self._asked(request, dialect, dialect.parse)
                if asked.stream:
                    return await self._stream(request, dialect, asked, session)
                answers = await self._start(session, asked)
                return await _deliver(request, _json(dialect.reply(asked, answers, self._sent())), session, answers)
            except Exception as error:  # noqa: BLE001 - one request
                return _refusal(_as_refused(error, dialect.name), dialect.error)

        return handle

    async def _asked(self, request: web.Request, dialect: Dialect, parse: Parse) -> tuple[SessionTurns, Asked]:
        session = self._session(request)
        body, canonical = await _json_body(request)
        fingerprint = hashlib.sha256(dialect.name.encode() + b"\0" + canonical).hexdigest()
        retry_count = _retry_count(request)
        asked = await asyncio.to_thread(parse, body) if len(canonical) > LARGE else parse(body)
        for name, why in asked.foreign.items():
            if self._refuses_foreign:
                raise unsupported(name, f"{why} (agent.foreign_fields: ignore accepts it)")
            if name not in self._seen_foreign:
                self._seen_foreign.add(name)
                _log.warning("the field %s of a request has no effect: %s", name, why)
        turn = replace(asked.turn, num_bytes=len(canonical), fingerprint=fingerprint, retry_count=retry_count)
        return session, replace(asked, turn=turn)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        dialect = messages.DIALECT
        try:
            session, asked = await self._asked(request, dialect, messages.parse_count)
            return _json({"input_tokens": await session.count_tokens(asked.turn)})
        except Exception as error:  # noqa: BLE001 - one request
            return _refusal(_as_refused(error, dialect.name), dialect.error)

    def _session(self, request: web.Request) -> SessionTurns:
        """The session of a request. TurnRefused: 404 for a path, 401 for headers."""
        if key := request.match_info.get("key"):
            if session := self._directory.find(key):
                return session
            raise TurnRefused("this session does not exist or has ended", code="agent.unknown_session", status=404)
        headers = request.headers
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        sent = (bearer if scheme == "Bearer" else "", headers.get("x-api-key", ""))
        keys = {key for key in sent if re.fullmatch(KEY_PATTERN, key)}
        sessions = [session for key in keys if (session := self._directory.find(key))]
        if len(sessions) != 1:
            problem = "the key in `Authorization: Bearer` or `x-api-key` belongs to no session"
            if sessions:
                problem = "`Authorization` and `x-api-key` belong to two sessions"
            raise TurnRefused(problem, code="agent.unknown_session", status=401)
        return sessions[0]

    def _start(self, session: SessionTurns, asked: Asked) -> asyncio.Future[tuple[TurnAnswer, ...]]:
        """The answers. The turn continues when the client closes its connection."""
        turn = asyncio.create_task(session.answer(asked.turn), name="turn of a session")
        self._turns.add(turn)
        turn.add_done_callback(self._turn_ended)
        return asyncio.shield(turn)

    def _turn_ended(self, turn: asyncio.Task[tuple[TurnAnswer, ...]]) -> None:
        self._turns.discard(turn)
        if not turn.cancelled():
            turn.exception()  # its handler reports it; without one, the session has recorded it

    def _sent(self) -> Sent:
        return Sent(created_s=int(time.time()), token_text=self._token_text)

    async def _stream(
        self, request: web.Request, dialect: Dialect, asked: Asked, session: SessionTurns
    ) -> web.StreamResponse:
        """The events of the answers. A refusal that comes early has its own status, a later one is an event. A client
        that leaves after the head of the stream, for which no SDK sends a retry, ends its turn."""
        turn, events_of = session.stream(asked.turn), dialect.stream(asked, self._sent())
        response, now_s = web.StreamResponse(headers=_STREAM_HEADERS), asyncio.get_running_loop().time
        sent_s, is_over, is_answered, answers = now_s(), False, False, ()
        try:
            while not is_over:
                try:
                    answers = await turn.grown(max(sent_s + self._keep_alive_s - now_s(), 0.0))
                    events = b"".join(events_of(answers))
                    is_over = is_answered = turn.is_whole
                except Exception as error:
                    refused = _as_refused(error, dialect.name)
                    if not response.prepared:
                        raise refused from error
                    events, is_over = dialect.error_event(refused), True
                if not response.prepared and is_answered:
                    return await _deliver(request, web.Response(body=events, headers=_STREAM_HEADERS), session, answers)
                if response.prepared and (request.transport is None or request.transport.is_closing()):
                    raise ConnectionResetError
                if not events and now_s() - sent_s >= self._keep_alive_s:
                    events = dialect.keep_alive
                if events:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await response.prepare(request)
                        await response.write(events)
                    sent_s = now_s()
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await response.write_eof()
            if is_answered:
                session.delivered(answers)
        except (ConnectionError, TimeoutError):
            _abort(request)
            turn.leave(cancels=response.prepared)
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "areal"}
        return _json({"object": "list", "data": [model]})

    async def _open(self, request: web.Request) -> web.Response:
        if refusal := self._guard.unauthorized(request.headers):
            raise _refused(refusal)
        fields = Fields((await _json_body(request))[0])
        wish = OpenRequest(group=fields.text("group") or "", row=fields.object("row") or {})
        fields.finish()
        opened = await self._directory.open(wish)
        return _json({**asdict(opened), "base_url": f"{request.url.origin()}/sessions/{opened.key}/v1"})

    async def _reward(self, request: web.Request) -> web.Response:
        fields = Fields((await _json_body(request))[0])
        reward = SessionReward(
            reward=fields.number("reward", -MAX_REWARD, MAX_REWARD),
            parts=_numbers(fields, "parts"),
            turns=_numbers(fields, "turns"),
            final=fields.flag("final", default=True),
        )
        fields.finish()
        await self._directory.finish(request.match_info["key"], reward)
        return _json({})


_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_JSON_HEADERS = {"Content-Type": "application/json"}


def _numbers(fields: Fields, name: str) -> dict[str, float]:
    """Named numbers. The names become metrics, or are ids of turns."""
    table = fields.fields(name)
    if table is None:
        return {}
    for key in (names := table.names()):
        if len(names) > MAX_NUMBERS or not _NAME.fullmatch(key):
            raise invalid(name, f"must be at most {MAX_NUMBERS} numbers by names of 1 to 128 letters, digits and ._:/-")
    return {key: value for key in names if (value := table.number(key, -MAX_REWARD, MAX_REWARD)) is not None}


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, headers=_JSON_HEADERS)


async def _deliver(
    request: web.Request, response: web.Response, session: SessionTurns, answers: Sequence[TurnAnswer]
) -> web.Response:
    """Send a whole reply. Its turn counts as delivered unless the client has left."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.prepare(request)
            await response.write_eof()
        session.delivered(answers)
    except (ConnectionError, TimeoutError):
        _abort(request)
    return response


def _abort(request: web.Request) -> None:
    """End the connection of a client that has left or does not read."""
    if request.transport is not None:
        request.transport.abort()


def _refusal(refused: TurnRefused, body: Callable[[TurnRefused], dict[str, Any]]) -> web.Response:
    answer = _json(body(refused), refused.status)
    wait_s = RETRY_S if refused.retry_after_s is None and refused.status in (429, 503) else refused.retry_after_s
    if wait_s is not None:
        wait_s = min(wait_s, MAX_RETRY_S)
        answer.headers["Retry-After"] = str(math.ceil(wait_s))
        answer.headers["retry-after-ms"] = str(math.ceil(wait_s * 1000))
    return answer


def _refused(refusal: Refusal) -> TurnRefused:
    return TurnRefused(refusal.message, code=refusal.code, status=refusal.status)


def _as_refused(error: Exception, what: str) -> TurnRefused:
    """What a client reads about an error. An error that is no refusal is logged, without the key of the session."""
    match error:
        case TurnRefused():
            return error
        case RequestError():
            return TurnRefused(str(error), code=error.code, status=400)
        case ServerUnavailable():
            return TurnRefused(str(error), code=error.code, status=503)
        case ArealError():
            _log.error("%s failed: %s [%s]", what, error, error.code)
            return TurnRefused(str(error), code=error.code, status=500)
        case _:
            _log.error("%s failed", what, exc_info=error)
            return TurnRefused(f"{type(error).__name__} in the session server", code=ArealError.code, status=500)


async def _json_body(request: web.Request) -> tuple[dict[str, Any], bytes]:
    """The JSON object of a request, and the same as canonical bytes. TurnRefused unless it is one."""
    if refusal := wrong_type(request.headers, has_body=request.can_read_body):
        raise _refused(refusal)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            data = await read_body(request)
    except web.HTTPRequestEntityTooLarge:
        message = f"the body is longer than {request.client_max_size >> 20} MiB: raise agent.max_body_mb"
        raise TurnRefused(
            f"{message}, or send less, such as smaller images", code="request.too_large", status=413
        ) from None
    except TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise TurnRefused(message, code="request.broken_body", status=408) from None
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        message = f"the body has more than {MAX_VALUES} values"
        raise TurnRefused(message, code="request.too_large", status=400)
    try:
        body = orjson.loads(data or b"{}")
        canonical = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, TypeError) as error:  # TypeError: it is too deep
        raise TurnRefused(f"the body is not JSON: {error}", code="request.not_json", status=400) from None
    if not isinstance(body, dict):
        raise TurnRefused("the body is not a JSON object", code="request.not_json", status=400)
    return body, canonical


def _retry_count(request: web.Request) -> int:
    count = request.headers.get("x-stainless-retry-count", "0")
    if not re.fullmatch(r"[0-9]{1,9}", count):
        raise invalid("x-stainless-retry-count", "must be a number")
    return int(count)


# The session server of a process: its socket, its routes, and the pool that runs the agents.

_TEXT_MB, _IMAGE_MB = 16, 4  # Limits of a request without agent.max_body_mb, and what each of its images adds.


class AgentServices:
    """What all agents of a process share. It starts with the first session, on the loop that runs then."""

    def __init__(self, config: AgentConfig, tokenizer: Tokenizer, *, max_images: int = 0) -> None:
        """`max_images`: of a request; 0 = the policy takes none."""
        self._config = config
        self._max_body_mb = config.max_body_mb or _TEXT_MB + _IMAGE_MB * max_images
        self._tokenizer = tokenizer
        self.sessions = Sessions()
        workers = 0 if config.inline else config.workers or max(1, cpu_count() // 2)
        self._num_workers = workers
        self._pool: AgentPool | None = None
        self._runner: web.AppRunner | None = None
        self._http_log: HttpLogger | None = None
        self.journal: TurnJournal | None = None  # The journal of this process's run; None without a run.
        self.base_url = ""  # The running server's address, without /v1.

    @property
    def pool(self) -> AgentPool:
        if self._pool is None:
            self._pool = AgentPool(num_workers=self._num_workers, sessions_per_worker=self._config.sessions_per_worker)
        return self._pool

    async def start(self) -> None:
        if self._runner is not None:
            return
        context = ProcessContext.from_env()
        token = run_token() or new_token()
        host = Host(bind=self._config.host, advertise=self._config.host) if self._config.host else Host()
        bound = listen(host, token, self._config.port)
        server = SessionServer(
            self.sessions,
            admin_token=token,
            token_text=lambda token_id: self._tokenizer.decode([token_id]),
            host=host,
            max_body_mb=self._max_body_mb,
            refuses_foreign=self._config.foreign_fields == "refuse",
        )
        self._http_log = HttpLogger()
        self._runner = server.runner(self._http_log)
        self.base_url = http_address(bound, host.advertise)
        if context is not None:
            paths = RunPaths(Path(context.run_dir))
            self.journal = TurnJournal(paths.turns)
            write_atomic(paths.sessions, orjson.dumps({"base_url": self.base_url}))
        await self._runner.setup()  # from here on, other callers may run: everything else is set
        await web.SockSite(self._runner, bound).start()
        _log.info("sessions are served at %s", self.base_url)

    async def aclose(self) -> None:
        """End the agents, then the server."""
        if self._pool is not None:
            await self._pool.aclose()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._http_log is not None:
            self._http_log.close()
        if self.journal is not None:
            await self.journal.aclose()
