"""JSON bodies of the HTTP requests and answers of the native server."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from areal.api.errors import RequestError

_JSON_HEADERS = {"Content-Type": "application/json"}


async def read_json(request: web.Request) -> Any:
    """The parsed body; an empty body is an empty object."""
    data = await request.read()
    try:
        return orjson.loads(data) if data else {}
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}", code="request.not_json") from error


def ok() -> web.Response:
    return json_response({"success": True})


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, headers=_JSON_HEADERS)


def error_response(status: int, message: str, code: str) -> web.Response:
    return json_response({"error": {"message": message}, "code": code}, status)
