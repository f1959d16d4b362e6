"""A worker process of a pool: its start, its channel, its time limits and its end. Messages are lines of JSON.

The child runs `python -m MODULE PARENT_PID SYS_PATH` with one end of a socket pair as standard input. The socket is
moved from descriptor 0 to another one, and standard output is redirected to standard error, so text that a user's code
prints cannot reach the channel.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import orjson

from areal.system.network import TEACHER_TOKEN, TOKEN_VARIABLE
from areal.system.process import AREAL_PROCESS, watch_parent

_READ_BYTES = 1 << 18
_GRACE_S = 5.0  # What a cancelled call has to end. Then its process is killed, with the other calls in it.
_log = logging.getLogger(__name__)


class WorkerEnded(Exception):
    """A worker process ended, or closed its channel."""


class WorkerProcess:
    """A child process that runs a user's code."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, log: BinaryIO | None = None) -> None:
        """`command`, `env`: see `areal_worker`, or a program that needs no areal. `log`: its output; None = that of
        this process. Raises OSError."""
        self._incomplete = b""  # A received line without its end.
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env=env,
                process_group=0,  # killed together with the processes that the user's function starts
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def connect(self, *, limit_s: float | None) -> dict[str, Any]:
        """Wait until it is ready. Returns its first message. The errors of `receive`."""
        self._streams = await asyncio.open_unix_connection(sock=self._socket)
        while not (messages := await self.receive(limit_s=limit_s)):
            pass
        return messages[0]

    def send(self, message: Any) -> None:
        """Send a message; data that does not fit into the socket is sent while the event loop runs."""
        assert self._streams is not None
        self._streams[1].write(orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))

    async def receive(self, *, limit_s: float | None) -> list[dict[str, Any]]:
        """The next messages. TimeoutError when no data comes within `limit_s`; WorkerEnded at the channel's end."""
        assert self._streams is not None
        reader = self._streams[0]
        try:
            try:
                async with asyncio.timeout(limit_s):
                    data = await reader.read(_READ_BYTES)
            except TimeoutError:
                # After the event loop was blocked, the limit ends together with the arrival of data that came in time.
                async with asyncio.timeout(0):
                    data = await reader.read(_READ_BYTES)
        except ConnectionError as error:
            raise WorkerEnded from error
        if not data:
            raise WorkerEnded
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        return [orjson.loads(line) for line in lines]

    def has_closed(self) -> bool:
        """Whether the end of its channel was received."""
        return self._streams is not None and self._streams[0].at_eof()

    def close(self) -> None:
        """Close the channel."""
        if self._streams is not None:
            self._streams[1].transport.abort()
        else:
            self._socket.close()

    def end(self, *, wait_s: float = 0.0) -> int:
        """Wait `wait_s` for its end, then kill it and its children. Returns its exit code. Blocks: call in a thread."""
        until = time.monotonic() + wait_s
        # It is reaped after its group is killed: until then no other process can get its id.
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while time.monotonic() < until and os.waitid(os.P_PID, self.pid, options) is None:
            time.sleep(0.002)
        self.kill()
        return self._process.wait()

    def kill(self) -> None:
        """Send SIGKILL to its process group; does nothing when it has ended."""
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()


class CallingWorker(ABC):
    """A worker process whose calls run at the same time, each with a time limit.

    A call is a message with an `id`, which its answer has too; {"cancel": id} cancels it. The first message of the
    process says that it is ready.
    """

    def __init__(self, process: WorkerProcess, name: str, *, start_limit_s: float) -> None:
        self.process = process
        self.calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        """Those without an answer, by their ids."""
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        """The first message."""
        self.has_ended = False
        self.how = "its process ended"
        """How the process ended, once it has."""
        self._name = f"{name} {process.pid}"
        self._number = 0
        self._task = asyncio.create_task(self._receive(start_limit_s), name=self._name)

    @abstractmethod
    def _failure(self, number: int) -> Exception:
        """The error of a call that the end of the process has ended; 0 = of the start."""

    async def ask(self, message: Mapping[str, Any], limit_s: float) -> tuple[dict[str, Any], bool]:
        """The answer to a message, and whether it came only after the limit, when the call was cancelled.

        TimeoutError when a cancelled call does not end: the process is killed. The error of `_failure` at its end.
        """
        self._number += 1
        number, done = self._number, asyncio.get_running_loop().create_future()
        self.calls[number] = done
        try:
            await asyncio.shield(self.ready)
            if self.has_ended:
                raise self._failure(number)
            self.process.send({"id": number, **message})
            try:
                return await asyncio.wait_for(asyncio.shield(done), limit_s), False
            except TimeoutError:
                return await self._overdue(number, done), True
            except asyncio.CancelledError:
                self._cancel(number)
                raise
        finally:
            self.calls.pop(number, None)

    async def _overdue(self, number: int, done: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
        self._cancel(number)
        try:
            return await asyncio.wait_for(asyncio.shield(done), _GRACE_S)
        except TimeoutError:
            _log.warning("%s does not answer: it is killed", self._name)
            self.process.kill()
            raise

    def _cancel(self, number: int) -> None:
        if not self.has_ended:
            self.process.send({"cancel": number})

    async def _receive(self, start_limit_s: float) -> None:
        try:
            self.ready.set_result(await self.process.connect(limit_s=start_limit_s))
            while True:
                for message in await self.process.receive(limit_s=None):
                    if (done := self.calls.get(message["id"])) is not None and not done.done():
                        done.set_result(message)
        except (WorkerEnded, TimeoutError):
            pass
        finally:
            self.has_ended = True
            self.process.close()
            code = await asyncio.to_thread(self.process.end, wait_s=0.5)
            self.how = f"its process {'ended' if self.ready.done() else 'did not start'}, exit code {code}"
            for number, done in ((0, self.ready), *self.calls.items()):
                if not done.done():
                    done.set_exception(self._failure(number))
                    done.exception()  # also where nobody waits

    async def aclose(self) -> None:
        self.process.kill()
        await asyncio.gather(self._task, return_exceptions=True)


def areal_worker(module: str, env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a worker with this main module of areal. `env`: variables in addition to those
    of this process, without its tokens: a worker runs code of users."""
    command = [sys.executable, "-m", module, str(os.getpid()), orjson.dumps(sys.path).decode()]
    return command, {**_environment(), **env}


def _environment() -> dict[str, str]:
    """A worker is not a process of the run, imports areal from the same place as its parent, and uses one thread."""
    left_out = (AREAL_PROCESS, TOKEN_VARIABLE, TEACHER_TOKEN)
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env["PYTHONPATH"] = os.pathsep.join(part for part in (root, env.get("PYTHONPATH", "")) if part)
    env.setdefault("OMP_NUM_THREADS", "1")
    return env


def enter_worker(argv: list[str]) -> socket.socket | None:
    """Tie a new worker process with the command line `argv` to its parent and take its channel.

    Then standard input is empty and standard output is standard error. None when the parent has ended.
    """
    watch_parent()
    if os.getppid() != int(argv[0]):
        return None  # the pool's process died while this one started
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.path[:] = orjson.loads(argv[1])
    return channel
