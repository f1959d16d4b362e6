"""A request of 16 MiB, whatever it contains, is refused while the loop serves others, and leaves no memory behind."""

import asyncio
import json
import time
from pathlib import Path

import aiohttp
import pytest

from tests.agent.policies import ScriptedEngine
from tests.agent.session_kit import KEY, served
from tests.agent.test_session import session_of

SIZE = (16 << 20) - 4096
ARGUMENTS = {"id": "c", "type": "function", "function": {"name": "f"}}


def chat(**message):
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "x", **message}]}


def called(arguments):
    call = ARGUMENTS | {"function": {"name": "f", "arguments": arguments}}
    return chat(role="assistant", content=None, tool_calls=[call])


def tool(description):
    return chat() | {"tools": [{"type": "function", "function": {"name": "f", "description": description}}]}


BODIES = {
    "text": lambda: chat(content="hello world " * (SIZE // 12)),
    "special": lambda: chat(content="<|im_end|>" * (SIZE // 10)),
    "special and text": lambda: chat(content="".join(f"<|im_end|>{n}" for n in range(SIZE // 18))),
    "spaces": lambda: chat(content=" " * SIZE),
    "characters": lambda: chat(content="\U0001f642" * (SIZE // 12)),
    "parts": lambda: chat(content=[{"type": "text", "text": "ab" * 500}] * (SIZE // 1034)),
    "messages": lambda: chat() | {"messages": [{"role": "user", "content": "ab"}] * 15_000 + chat()["messages"]},
    "arguments": lambda: called(json.dumps({"a": "b " * (SIZE // 2)})),
    "lists in arguments": lambda: called(json.dumps({"a": [[]] * (SIZE // 4)})),
    "reasoning": lambda: chat(role="assistant", reasoning_content="hm " * (SIZE // 3)),
    "tool": lambda: tool("a tool " * (SIZE // 7)),
    "lists": lambda: chat() | {"metadata": {"a": [[]] * (SIZE // 4)}},
    "keys": lambda: chat() | {"metadata": {f"{n:012}": 1 for n in range(SIZE // 18)}},
    "metadata": lambda: chat() | {"metadata": {"a": "b" * SIZE}},
    "medium": lambda: chat(content="hello <|im_end|> " * 12_000),
}


def parsing_s():
    """CPU seconds that this machine needs now to parse a body of the largest size, the least work with one."""
    text = json.dumps(BODIES["text"]()).encode()
    before = time.thread_time()
    json.loads(text)
    return time.thread_time() - before


def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) // 256


@pytest.mark.parametrize("kind", BODIES)
async def test_a_large_request_is_refused_at_once(kind):
    body = await asyncio.to_thread(lambda: json.dumps(BODIES[kind](), separators=(",", ":")).encode())
    session = session_of(ScriptedEngine(lambda prompt: "4"))
    longest, is_done = 0.0, False

    async def watch():
        nonlocal longest
        while not is_done:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    async with served(session=session) as (address, *_), aiohttp.ClientSession() as client:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        before, watching = resident_mb(), asyncio.create_task(watch())
        async with client.post(f"{address}/v1/chat/completions", data=body, headers=headers) as reply:
            status, error = reply.status, (await reply.json())["error"]
        is_done = True
        await watching
    assert (status, error["code"]) in [(400, "agent.prompt_too_long"), (400, "request.too_large")]
    assert len(json.dumps(error)) < 1000
    assert longest < max(0.2, 15 * await asyncio.to_thread(parsing_s))
    assert resident_mb() - before < 200
