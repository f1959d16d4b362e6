"""The gateway of a foreign server: what it lets through, and how answers and failures pass it."""

import asyncio
import tempfile
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from areal.fleet.server_host import _takes, gateway
from areal.system.folders import FolderServer
from areal.system.network import Host, bind_socket, http_address

TOKEN = "gateway-token"
WITH_TOKEN = {"Authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def server(handler):
    """A foreign server on loopback; yields its address."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    bound = bind_socket()
    await web.SockSite(runner, bound).start()
    try:
        yield http_address(bound)
    finally:
        await runner.cleanup()


@asynccontextmanager
async def behind_gateway(handler):
    """Yields a client session and the address of a gateway before a server with this handler."""
    async with (
        server(handler) as behind,
        gateway(Host(), TOKEN, behind) as address,
        aiohttp.ClientSession(headers=WITH_TOKEN) as session,
    ):
        yield session, address


async def test_a_request_passes_unchanged_but_for_the_token():
    seen = {}

    async def handler(request):
        seen.update(
            method=request.method,
            path=request.raw_path,
            body=await request.read(),
            headers={name.lower(): value for name, value in request.headers.items()},
        )
        return web.Response(status=418, text="done", headers={"X-Answer": "yes"})

    async with behind_gateway(handler) as (session, address):
        inputs = {"Content-Type": "application/json", "X-Request-Id": "17"}
        async with session.put(f"{address}/a%20b/c?x=1&x=2", data=b'{"n": 1}', headers=inputs) as answer:
            assert (answer.status, await answer.text(), answer.headers["X-Answer"]) == (418, "done", "yes")
    assert (seen["method"], seen["path"], seen["body"]) == ("PUT", "/a%20b/c?x=1&x=2", b'{"n": 1}')
    assert seen["headers"]["x-request-id"] == "17"
    assert "authorization" not in seen["headers"]


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Authorization": ""}, 401, "request.unauthorized"),
        ({"Authorization": "Bearer other"}, 401, "request.unauthorized"),
        ({"Origin": "http://page.example"}, 403, "request.foreign_origin"),
        ({"Host": "page.example"}, 403, "request.foreign_origin"),
        ({"Content-Type": "text/plain"}, 415, "request.content_type"),
    ],
)
async def test_a_refused_request_never_reaches_the_server(headers, status, code):
    async def handler(request):
        raise AssertionError("it must not be called")

    async with behind_gateway(handler) as (session, address):
        answer = await session.post(f"{address}/pause", data=b"{}", headers=headers)
        assert (answer.status, (await answer.json())["error"]["code"]) == (status, code)


async def test_each_piece_of_an_answer_passes_when_it_is_written():
    following = asyncio.Event()

    async def handler(request):
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await following.wait()
        await answer.write(b"data: 2\n\n")
        return answer

    async with behind_gateway(handler) as (session, address), session.get(f"{address}/stream") as answer:
        assert await answer.content.readuntil(b"\n\n") == b"data: 1\n\n"
        following.set()
        assert await answer.content.read() == b"data: 2\n\n"


async def test_a_client_that_leaves_aborts_the_request_to_the_server():
    aborted = asyncio.Event()

    async def handler(request):
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"first")
        try:
            await asyncio.Event().wait()
        finally:
            aborted.set()
        return answer

    async with behind_gateway(handler) as (session, address):
        answer = await session.get(f"{address}/stream")
        assert await answer.content.readexactly(5) == b"first"
        answer.close()
        await asyncio.wait_for(aborted.wait(), 20)


async def test_an_answer_that_the_server_breaks_off_is_broken_off():
    async def handler(request):
        answer = web.StreamResponse(headers={"Content-Length": "100"})
        await answer.prepare(request)
        await answer.write(b"part")
        request.transport.abort()
        return answer

    async with behind_gateway(handler) as (session, address):
        with pytest.raises(aiohttp.ClientPayloadError):
            async with session.get(f"{address}/x") as answer:
                await answer.read()


async def test_a_server_that_does_not_listen_is_a_bad_gateway():
    with bind_socket() as closed:
        nobody = http_address(closed)
        async with gateway(Host(), TOKEN, nobody) as address, aiohttp.ClientSession(headers=WITH_TOKEN) as session:
            assert (await session.get(f"{address}/health")).status == 502


async def test_the_gateways_of_all_parts_pull_the_weights(tmp_path, monkeypatch):
    """Each machine of a server copies them to the same path; other paths and failures are errors of the first part."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "v000001").mkdir()
    (tmp_path / "v000001/weights").write_bytes(b"weights")
    source = FolderServer(Host(), TOKEN)
    url = source.offer(tmp_path / "v000001")
    asked, answers = [], []

    async def part(request):
        asked.append((request.path, await request.json(), request.headers["Authorization"]))
        status, answer = answers.pop()
        return web.json_response(answer, status=status)

    async with (
        server(part) as other,
        gateway(Host(), TOKEN, "http://127.0.0.1:9", lambda: [other]) as address,
        aiohttp.ClientSession(headers=WITH_TOKEN) as session,
    ):

        async def pull():
            async with session.post(f"{address}/pull_weights", json={"url": url}) as answer:
                return answer.status, await answer.json()

        answers.append((500, {"error": {"message": "no space", "code": "weights.pull_failed"}}))
        status, answer = await pull()
        assert (status, answer["error"]["code"]) == (500, "weights.pull_failed")
        answers.append((400, {"error": {"message": "gone", "code": "weights.not_served"}}))
        status, answer = await pull()
        assert (status, answer["error"]["code"]) == (400, "weights.not_served")
        answers.append((200, {"path": "/elsewhere", "problem": "", "num_bytes": 7}))
        status, answer = await pull()
        assert (status, answer["error"]["code"]) == (500, "weights.pull_failed")
        assert "TMPDIR" in answer["error"]["message"]
        (copy,) = tmp_path.glob("areal-*/*/v000001-*")
        result = {"path": str(copy), "problem": "other weights", "num_bytes": 7}
        answers.append((200, result))
        assert await pull() == (200, result), "the first part has the copy already"
        async with session.get(f"{address}/pulled_weights/{copy.name}/0") as answer:
            assert (answer.status, await answer.read()) == (200, b"weights")
        assert asked == [("/pull_weights", {"url": url}, f"Bearer {TOKEN}")] * 4
    source.close()


async def test_when_a_part_fails_the_others_end():
    """The part that answers receives in a broadcast, in which it would wait for the part that failed."""
    receives, left = asyncio.Event(), asyncio.Event()

    async def take(body):
        receives.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    async def part(request):
        await receives.wait()
        return web.json_response({"error": {"message": "no group", "code": "weights.transfer_failed"}}, status=500)

    async with (
        aiohttp.ClientSession() as session,
        server(part) as other,
        server(_takes(take, session, TOKEN, lambda: [other])) as address,
        session.post(f"{address}/receive_weights", json={}) as answer,
    ):
        assert (answer.status, (await answer.json())["error"]["code"]) == (500, "weights.transfer_failed")
        assert left.is_set()
