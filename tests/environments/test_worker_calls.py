"""The answers of the worker program to calls that are cancelled, with its event loop in this process."""

import asyncio
import json
import socket
from types import SimpleNamespace

from areal.environments.worker import Server


class Adapter:
    def __init__(self, env, args):
        pass

    def double(self, number):
        return 2 * number


async def test_a_call_that_is_cancelled_before_it_begins_is_answered() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    server = Server(theirs, SimpleNamespace(Adapter=Adapter, INSTALL=""), "", {})
    serving = asyncio.create_task(server.serve())
    reader, writer = await asyncio.open_connection(sock=ours)
    calls = [{"id": number, "call": "double", "arguments": {"number": number}} for number in (1, 2)]
    lines = [calls[0], {"cancel": 1}, calls[1]]  # read together, as after a call that blocked the worker
    writer.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    async with asyncio.timeout(10):
        _, *answers = [json.loads(await reader.readline()) for _ in range(3)]
    writer.close()
    await serving
    by_id = {answer["id"]: answer for answer in answers}
    assert by_id[1]["error"]["code"] == "env.timeout"
    assert by_id[2]["result"] == 4
