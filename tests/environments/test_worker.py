"""The program that runs under another interpreter, in this process: its answers to calls and to their cancellation."""

import asyncio
import json
import socket
from types import SimpleNamespace

from areal.environments.worker import Server


class Adapter:
    def __init__(self, env, args):
        pass

    def episode(self):
        return self

    async def reset(self):
        return "begun"


async def test_a_call_that_is_cancelled_before_its_first_step_is_answered() -> None:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    serving = asyncio.create_task(Server(theirs, SimpleNamespace(Adapter=Adapter, INSTALL=""), "", {}).serve())
    reader, writer = await asyncio.open_connection(sock=ours)
    call = b'{"id": %d, "call": "reset", "given": {}, "episode": "a"}\n'
    writer.write(call % 1 + b'{"cancel": 1}\n' + call % 2)  # as after a call that blocked the worker
    answers = [json.loads(await asyncio.wait_for(reader.readline(), 20)) for _ in range(3)]
    assert answers[0] == {"id": 0, "result": {"facts": {}}}
    by_id = {answer["id"]: answer for answer in answers[1:]}
    assert by_id[1]["error"]["code"] == "env.timeout"
    assert by_id[2] == {"id": 2, "result": "begun"}
    writer.close()
    await serving
