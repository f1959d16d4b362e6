"""A worker process for agents: runs several sessions at the same time on one event loop.

Waits for the next message of its pool; the closed socket ends it. `areal.system.worker_process` starts it.
"""

import asyncio
import dataclasses
import os
import socket
import sys
from typing import Any

import orjson

from areal.agent.agent_run import AgentJob, AgentOutcome, LoadedAgents, place_of
from areal.api.registry import FunctionRef
from areal.system.worker_process import enter_worker

_MAX_MESSAGE_BYTES = 1 << 28


async def serve(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=channel, limit=_MAX_MESSAGE_BYTES)
    agents, tasks = LoadedAgents(), dict[int, asyncio.Task[None]]()

    def send(message: dict[str, Any]) -> None:
        writer.write(orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_DATACLASS))

    async def run(number: int, job: AgentJob) -> None:
        try:
            outcome = await agents.run(job)
        except asyncio.CancelledError as error:
            outcome = AgentOutcome(status="timeout", message=place_of(error.__traceback__))
        send({"number": number, "outcome": outcome})

    send({"ready": os.getpid()})
    while (line := await reader.readline()).endswith(b"\n"):
        message = orjson.loads(line)
        number = message["number"]
        if "job" not in message:
            if number in tasks:
                tasks[number].cancel()
            continue
        tasks[number] = task = asyncio.create_task(run(number, _job_of(message["job"])), name=f"agent-{number}")
        task.add_done_callback(lambda _, number=number: tasks.pop(number, None))
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    await agents.aclose()


def job_message(number: int, job: AgentJob) -> dict[str, Any]:
    return {"number": number, "job": dataclasses.asdict(job)}


def _job_of(given: dict[str, Any]) -> AgentJob:
    names = ("agent", "environment")
    refs: dict[str, Any] = {name: given[name] and FunctionRef(**given[name]) for name in names}
    tools = tuple(FunctionRef(**ref) for ref in given["tools"])
    return AgentJob(**given | refs | {"tools": tools, "command": tuple(given["command"])})


def main(argv: list[str]) -> None:
    channel = enter_worker(argv)
    if channel is not None:
        asyncio.run(serve(channel))


if __name__ == "__main__":
    main(sys.argv[1:])
