"""`areal watch --web`: serves the page of one run on loopback, and sends its facts as they change."""

import asyncio
import hashlib
import hmac
import sys
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from areal.api.errors import ArealError
from areal.cli.charts import PageFacts, StepColumns, StepTable, page_facts
from areal.cli.show import LEVELS, Answers, answers_of, parse_question, scored, title_of
from areal.cli.span_lanes import SpanLanes
from areal.cli.watch import GrowingRows, Watched
from areal.cli.web_page import Page, page
from areal.ledger.audit import ledger_folder
from areal.system.http_guard import RequestGuard
from areal.system.network import Host, http_address, listen, new_token, store_prefix
from areal.system.run_paths import RunPaths

_CHOICES = {"newest": "--limit=8", "best": "--best=8", "worst": "--worst=8", "rejected": "--rejected --limit=8"}
"""What the page may ask for -> the words of `areal show`."""
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
    app = web.Application(middlewares=[handlers.check])
    for path, handler in (("/", handlers.page), ("/events", handlers.events), ("/samples", handlers.samples)):
        app.router.add_get(path, handler)
    app.on_response_prepare.append(_add_headers)
    return app


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


class _Handlers:
    def __init__(self, run: Path, page: Page, key: str, interval_s: float) -> None:
        self._run, self._page, self._key, self._interval_s = run, page, key, interval_s
        self._guard, self._reads = RequestGuard(key, Host()), asyncio.Lock()

    @web.middleware
    async def check(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuses requests for other hosts, of other pages, and without the key."""
        if refusal := self._guard.foreign(request.headers):
            return web.Response(status=refusal.status, text=refusal.message)
        sent = request.query.get("key") or request.cookies.get(cookie_name(self._key)) or ""
        if not hmac.compare_digest(sent.encode("utf-8", "surrogateescape"), self._key.encode()):
            return web.Response(status=401, text="open the address that areal watch --web prints")
        return await handler(request)

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
        question = parse_question([str(self._run), "--tokens", *words.split()])
        async with self._reads:
            try:
                answers = await asyncio.to_thread(answers_of, question, ledger_folder(self._run))
            except ArealError as error:
                answers = Answers(samples=[], more=False, notice=str(error))
        for facts in answers.samples:
            facts["title"], facts["scored"] = title_of(facts), scored(facts) if "trajectory" in facts else ""
        body = orjson.dumps({"samples": answers.samples, "notice": answers.notice, "levels": LEVELS}, default=repr)
        return web.Response(body=body, content_type="application/json")


def serve_page(run: Path, *, port: int, interval_s: float) -> int:
    """Serve the page of `run` until Ctrl-C or SIGTERM; returns the exit status. LaunchError: the port is in use."""
    try:
        token = RunPaths(run).token.read_text(encoding="utf-8").strip()
    except OSError:  # a run of another user, or one that never started
        token = ""
    token = token or new_token()
    bound, key = listen(Host(), token, port), page_key(token)

    def say_where(_: str) -> None:
        sys.stdout.write(f"{http_address(bound)}/?key={key}\nCtrl-C ends the page, not the run\n")
        sys.stdout.flush()

    app = make_app(run, key=key, interval_s=interval_s)
    web.run_app(app, sock=bound, access_log=None, shutdown_timeout=1.0, print=say_where)
    return 0
