"""Applications by a table of routes, whose sessions are cookies."""

import contextlib
import json
from types import SimpleNamespace


class Config:
    def __init__(self, host, port, entrypoint, name, **options):
        self.name, self.options = name, options


class SimpleResourcesServer:
    model_fields = {"config": SimpleNamespace(annotation=Config)}  # noqa: RUF012

    def __init__(self, config, server_client):
        self.config = config

    def setup_webserver(self):
        return App(self.routes())


class App:
    def __init__(self, routes):
        self._functions, self._sessions = routes, {}
        self.routes = [SimpleNamespace(path=path) for path in routes]
        self.router = SimpleNamespace(lifespan_context=self._started)

    @contextlib.asynccontextmanager
    async def _started(self, app):
        yield

    async def __call__(self, scope, receive, send):
        body, cookies = json.loads((await receive())["body"]), dict(scope["headers"]).get(b"cookie", b"")
        key = cookies.partition(b"=")[2] or b"%d" % len(self._sessions)
        function = self._functions.get(scope["path"])
        result = None if function is None else function(self._sessions.setdefault(key, {}), body)
        status = 404 if result is None else 200
        headers = [(b"content-type", b"application/json"), (b"set-cookie", b"session=" + key)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(result).encode()})
