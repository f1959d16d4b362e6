"""JSON bodies of the HTTP requests and answers of the native server."""

from typing import Any

import orjson
from aiohttp import web

from areal.api.errors import RequestError
from areal.system.http_guard import read_body

TOO_LARGE = "request.too_large"
MAX_CONTROL_BYTES = 1 << 24
"""Maximum size of a control request. A bucket of a weight update names its weights, about 100 bytes each."""
_JSON_HEADERS = {"Content-Type": "application/json"}


async def read_json(request: web.Request, max_bytes: int = MAX_CONTROL_BYTES) -> Any:
    """The parsed body; an empty body is an empty object. RequestError unless it is JSON of at most `max_bytes`."""
    length = request.content_length or 0
    data = b"" if length > max_bytes else await read_body(request)
    if max(length, len(data)) > max_bytes:
        raise RequestError(f"the body is longer than {max_bytes} bytes", code=TOO_LARGE)
    try:
        return orjson.loads(data) if data else {}
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}", code="request.not_json") from error


def ok() -> web.Response:
    return json_response({"success": True})


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, headers=_JSON_HEADERS)


def error_body(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message}, "code": code}


def error_response(status: int, message: str, code: str) -> web.Response:
    return json_response(error_body(message, code), status)
