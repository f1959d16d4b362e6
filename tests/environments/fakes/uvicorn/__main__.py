"""Serves the game of the fake openenv: guess a number. Two sessions at the same time; it is paid after `done` too."""

import asyncio
import contextlib
import json
import socket
import sys

OPEN = set()
SCHEMA = {"action": {"properties": {"number": {"type": "integer"}}, "required": ["number"]}}


def result(text, reward, done):
    return {"observation": {"text": text}, "reward": reward, "done": done}


def answer(state, kind, data):
    if kind == "reset":
        state["number"], state["turns"] = data["seed"] % 10, 0
        return result("guess", None, False)
    if kind != "step":
        return {}
    if not isinstance(data["number"], int):
        return {"code": "VALIDATION_ERROR", "text": "not an integer"}
    if data["number"] == 99:
        return {"code": "EXECUTION_ERROR", "text": "a fault"}
    if data["number"] == 98:
        return None
    state["turns"] += 1
    right = data["number"] == state["number"]
    return result("right" if right else "wrong", float(right), right or state["turns"] == 3)


async def serve(reader, writer):
    first, state = await reader.readline(), {}
    if first.startswith(b"GET"):
        body = json.dumps(SCHEMA).encode()
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()
        return
    if len(OPEN) == 2:
        writer.write(json.dumps({"code": "CAPACITY_REACHED", "text": "full"}).encode() + b"\n")
        writer.close()
        return
    OPEN.add(writer)
    with contextlib.suppress(ConnectionError):
        while first:
            actual = answer(state, *json.loads(first))
            writer.write((b"<html>502" if actual is None else json.dumps(actual).encode()) + b"\n")
            first = await reader.readline()
    OPEN.discard(writer)


async def main(bound):
    async with await asyncio.start_server(serve, sock=bound) as server:
        await server.serve_forever()


asyncio.run(main(socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))))
