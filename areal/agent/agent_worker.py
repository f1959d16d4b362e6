"""A worker process for agents: runs several sessions at the same time on one event loop.

Waits for the next message of its pool; the closed socket ends it. `areal.system.worker_process` starts it.
"""

import asyncio
import contextvars
import mmap
import os
import socket
import struct
import sys
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import coroutine
from typing import Any, NoReturn

import orjson

from areal.agent.agent_run import AgentJob, AgentOutcome, LoadedAgents, described, place_of
from areal.api.registry import FunctionRef
from areal.system.worker_process import enter_worker

_MAX_MESSAGE_BYTES = 1 << 28

# Which job ends the process: a file that the pool reads afterwards has the number of the job whose code runs on the
# event loop, and that of the job which calls os._exit, also in a thread. 0 = none.

MARK_VARIABLE, MARK_BYTES = "AREAL_AGENT_MARK", 16
_MARK = struct.Struct("=q")
_number_of_job = contextvars.ContextVar("_number_of_job", default=0)


def guilty_job(mark: mmap.mmap) -> int:
    """The number of the job that has ended the process; 0 = not known."""
    return _MARK.unpack_from(mark, 8)[0] or _MARK.unpack_from(mark, 0)[0]


@coroutine
def _marked(steps: Coroutine[Any, Any, Any], mark: mmap.mmap) -> Generator[Any, Any, Any]:
    """The same coroutine, with the mark of its job while it runs."""
    number, value, error = _number_of_job.get(), None, None
    while True:
        _MARK.pack_into(mark, 0, number)
        try:
            wanted = steps.send(value) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value
        finally:
            _MARK.pack_into(mark, 0, 0)
        value, error = None, None
        try:
            value = yield wanted
        except BaseException as thrown:  # noqa: BLE001 - it goes to the coroutine
            error = thrown


async def _run(steps: Coroutine[Any, Any, Any], mark: mmap.mmap) -> Any:
    try:
        return await _marked(steps, mark)
    except (SystemExit, KeyboardInterrupt) as error:  # these would end the event loop
        raise RuntimeError(f"{type(error).__name__} in a task: {error}") from error


def _mark_jobs(mark: mmap.mmap) -> None:
    """Mark the steps of every task that has a job, and calls of os._exit."""

    def new_task(loop: asyncio.AbstractEventLoop, steps: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_run(steps, mark) if _number_of_job.get() else steps, loop=loop, **options)

    def end(exit_now: Callable[[int], NoReturn], code: int) -> NoReturn:
        _MARK.pack_into(mark, 8, _number_of_job.get())
        exit_now(code)

    asyncio.get_running_loop().set_task_factory(new_task)  # pyright: ignore[reportArgumentType]
    os._exit = partial(end, os._exit)


async def serve(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=channel, limit=_MAX_MESSAGE_BYTES)
    agents, tasks = LoadedAgents(), dict[int, asyncio.Task[None]]()
    with open(os.environ[MARK_VARIABLE], "r+b") as file:
        _mark_jobs(mmap.mmap(file.fileno(), MARK_BYTES))

    def send(message: dict[str, Any]) -> None:
        writer.write(orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_DATACLASS))

    async def run(number: int, job: AgentJob) -> None:
        try:
            outcome = await agents.run(job)
        except asyncio.CancelledError as error:
            outcome = AgentOutcome(status="timeout", message=place_of(error.__traceback__))
        except KeyboardInterrupt as error:  # of the agent: SIGINT is ignored here
            outcome = AgentOutcome(status="error", message=described(error))
        send({"id": number, "outcome": outcome})

    send({"ready": os.getpid()})
    while (line := await reader.readline()).endswith(b"\n"):
        message = orjson.loads(line)
        if "cancel" in message:
            if message["cancel"] in tasks:
                tasks[message["cancel"]].cancel()
            continue
        number = message["id"]
        _number_of_job.set(number)
        tasks[number] = task = asyncio.create_task(run(number, _job_of(message["job"])), name=f"agent-{number}")
        _number_of_job.set(0)
        task.add_done_callback(lambda _, number=number: tasks.pop(number, None))
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    await agents.aclose()


def _job_of(fields: dict[str, Any]) -> AgentJob:
    names = ("agent", "environment")
    refs: dict[str, Any] = {name: fields[name] and FunctionRef(**fields[name]) for name in names}
    tools = tuple(FunctionRef(**ref) for ref in fields["tools"])
    return AgentJob(**fields | refs | {"tools": tools, "command": tuple(fields["command"])})


def main(argv: list[str]) -> None:
    channel = enter_worker(argv)
    if channel is not None:
        asyncio.run(serve(channel))


if __name__ == "__main__":
    main(sys.argv[1:])
