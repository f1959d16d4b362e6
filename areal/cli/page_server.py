"""`areal watch --web`: serves the page of one run on loopback, and sends its facts as they change."""

import asyncio
import hashlib
import hmac
import signal
import sys
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from areal.api.errors import ArealError
from areal.cli.charts import PageFacts, StepColumns, StepTable, page_facts
from areal.cli.show import LEVELS, answers_of, parse_question
from areal.cli.span_lanes import SpanLanes
from areal.cli.watch import GrowingRows, Watched
from areal.cli.web_page import Page, page
from areal.ledger.audit import ledger_folder
from areal.system.http_guard import RequestGuard
from areal.system.network import Host, http_address, listen, new_token, store_prefix
from areal.system.run_paths import RunPaths

_CHOICES = {"newest": (), "best": ("--best", "8"), "worst": ("--worst", "8"), "rejected": ("--rejected",)}
"""What the page may ask for -> the words of `areal show`."""
_MAX_SAMPLES = 8
_SILENT_S = 15.0  # Without news, a comment is sent after this time: it finds connections that the browser has left.
_SEND_S = 30.0  # A browser that takes no data for this long is disconnected.
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageFeed:
    """What one open page has got of a run, and what is new."""

    def __init__(self, run: Path) -> None:
        """InputError when `run` is no run folder."""
        self._watched = Watched(run)
        self._rows = GrowingRows(RunPaths(run).metrics)
        self._table = StepTable()
        self._spans = SpanLanes(RunPaths(run).trace)

    def look(self) -> tuple[StepColumns | None, PageFacts]:
        """The values of new steps, None without any, and the facts as they are now."""
        rows, replaces = self._rows.read()
        if replaces:
            self._table = StepTable()
        columns = self._table.take(rows, replaces=replaces) if rows or replaces else None
        return columns, page_facts(self._watched.look(), self._table, self._watched.config, self._spans.chart())


def cookie_name(key: str) -> str:
    """The name of the cookie: a browser sends those of one host to all its ports, so each run has its own."""
    return f"areal_page_{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def page_key(token: str) -> str:
    """What a browser sends with each request. It is made from the token of the run, which it does not disclose."""
    return store_prefix(token, "page of areal watch")


def make_app(run: Path, *, key: str, interval_s: float) -> web.Application:
    """The application: GET / (the page), /events (facts and steps as server-sent events), /samples?choice=NAME.

    `key`: the query `key` of the first request and the cookie of all others.
    """
    handlers = _Handlers(run, page("watch", title="areal watch", connects=True), key, interval_s)
    app = web.Application(middlewares=[_guarded(key)])
    app.add_routes(
        [web.get("/", handlers.page), web.get("/events", handlers.events), web.get("/samples", handlers.samples)]
    )
    app.on_response_prepare.append(_add_headers)
    return app


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


def _guarded(key: str) -> Any:
    """A middleware that refuses requests for other hosts, of other pages, and without the key."""
    guard, cookie = RequestGuard(key, Host()), cookie_name(key)

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        if refusal := guard.foreign(request.headers):
            return web.Response(status=refusal.status, text=refusal.message)
        sent = request.query.get("key") or request.cookies.get(cookie) or ""
        if not hmac.compare_digest(sent.encode("utf-8", "surrogateescape"), key.encode()):
            return web.Response(status=401, text="open the address that areal watch --web prints")
        return await handler(request)

    return check


class _Handlers:
    def __init__(self, run: Path, page: Page, key: str, interval_s: float) -> None:
        self._run = run
        self._page = page
        self._key = key
        self._interval_s = interval_s
        self._reads = asyncio.Lock()

    async def page(self, request: web.Request) -> web.Response:
        response = web.Response(text=self._page.html, content_type="text/html", charset="utf-8")
        response.headers["Content-Security-Policy"] = f"{self._page.policy}; frame-ancestors 'none'"
        response.set_cookie(cookie_name(self._key), self._key, httponly=True, samesite="Strict", path="/")
        return response

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Until the browser leaves: `steps` with new steps, `facts` when they differ from those sent before."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        feed = await asyncio.to_thread(PageFeed, self._run)
        clock, sent, sent_s = asyncio.get_running_loop().time, b"", 0.0
        try:
            while True:
                columns, facts = await asyncio.to_thread(feed.look)
                news = orjson.dumps(facts)
                parts = [b"event: steps\ndata: %b\n\n" % orjson.dumps(columns)] if columns else []
                parts += [b"event: facts\ndata: %b\n\n" % news] if news != sent else []
                if not parts and clock() - sent_s >= _SILENT_S:
                    parts = [b":\n\n"]
                if parts:
                    async with asyncio.timeout(_SEND_S):
                        await response.write(b"".join(parts))
                    sent, sent_s = news, clock()
                await asyncio.sleep(self._interval_s)
        except (ConnectionError, TimeoutError):  # the browser has left
            return response

    async def samples(self, request: web.Request) -> web.Response:
        words = _CHOICES.get(request.query.get("choice", ""))
        if words is None:
            return web.Response(status=400, text=f"choice is one of {', '.join(_CHOICES)}")
        async with self._reads:
            answers = await asyncio.to_thread(self._answers, words)
        return web.Response(body=orjson.dumps(answers, default=repr), content_type="application/json")

    def _answers(self, words: tuple[str, ...]) -> dict[str, Any]:
        limit = () if "--best" in words or "--worst" in words else ("--limit", str(_MAX_SAMPLES))
        question = parse_question([str(self._run), "--tokens", *words, *limit])
        try:
            answers = answers_of(question, ledger_folder(self._run))
        except ArealError as error:
            return {"samples": [], "notice": str(error), "levels": LEVELS}
        return {"samples": answers.samples, "notice": answers.notice, "levels": LEVELS}


def serve_page(run: Path, *, port: int, interval_s: float) -> int:
    """Serve the page of `run` until Ctrl-C or SIGTERM; returns the exit status. LaunchError: the port is in use."""
    try:
        token = RunPaths(run).token.read_text(encoding="utf-8").strip()
    except OSError:  # a run of another user, or one that never started
        token = ""
    asyncio.run(_serve(run, token or new_token(), port, interval_s))
    return 0


async def _serve(run: Path, token: str, port: int, interval_s: float) -> None:
    host, stopped = Host(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    bound = listen(host, token, port)
    runner = web.AppRunner(
        make_app(run, key=page_key(token), interval_s=interval_s), access_log=None, shutdown_timeout=1.0
    )
    await runner.setup()
    try:
        await web.SockSite(runner, bound).start()
        sys.stdout.write(f"{http_address(bound)}/?key={page_key(token)}\nCtrl-C ends the page, not the run\n")
        sys.stdout.flush()
        await stopped.wait()
    finally:
        await runner.cleanup()
