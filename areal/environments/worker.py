"""A program that serves episodes of one adapter under the interpreter of its package. It needs no areal.

    PYTHON worker.py ADAPTER_FILE ENV ARGS_JSON      the channel is standard input; messages are lines of JSON

A message has `id`, `call`, `arguments` and perhaps `episode`; the answer has the same `id`, and `result` or `error`. A
message with `cancel` ends the call of that id. The end of the channel ends this process and all that it has started.
"""

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
import types
from importlib.machinery import SourceFileLoader

_LINE_BYTES = 1 << 28
_PR_SET_PDEATHSIG = 1


class _Refused(Exception):
    """A call that is none of the adapter."""


def _error(error, install):
    """What the controller gets of an error: its kind, text and code."""
    kind, text = type(error).__name__, " ".join(str(error).split())
    code = getattr(error, "code", None)
    if not (isinstance(code, str) and code.startswith("env.")):
        code = "env.failed"
    if isinstance(error, ImportError):
        code, text = "env.not_found", f"{text}: {sys.executable} -m {install}"
    return {"error": {"kind": kind, "text": text, "code": code}}


def _method(target, name):
    if name.startswith("_") or not callable(getattr(target, name, None)):
        raise _Refused(f"{type(target).__name__} has no method {name}")
    return getattr(target, name)


async def _called(target, name, arguments):
    result = _method(target, name)(**arguments)
    return await result if inspect.isawaitable(result) else result


class Here:
    """An episode in this process."""

    def __init__(self, adapter):
        self._episode = adapter.episode()

    async def call(self, name, arguments):
        return await _called(self._episode, name, arguments)

    async def close(self):
        if hasattr(self._episode, "close"):
            await _called(self._episode, "close", {})


class Forked:
    """An episode in a child process: what it changes in the modules of Python stays there. Its methods are plain."""

    def __init__(self, adapter, channel):
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            try:
                ours.close()
                channel.close()
                _serve_child(adapter, theirs)
            finally:
                os._exit(0)
        theirs.close()
        self._socket = ours
        self._streams = None

    async def call(self, name, arguments):
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._socket, limit=_LINE_BYTES)
        reader, writer = self._streams
        writer.write(json.dumps([name, arguments]).encode() + b"\n")
        try:
            line = await reader.readline()
        except asyncio.CancelledError:
            os.kill(self._pid, signal.SIGKILL)  # or its late answer would be read as that of the next call
            raise
        if not line.endswith(b"\n"):
            raise _Died("the process of its episode ended")
        return _Answer(json.loads(line))

    async def close(self):
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class _Died(Exception):
    code = "env.server_died"


class _Answer(dict):
    """A whole answer, with `result` or `error`."""


def _serve_child(adapter, channel):
    """Answer the calls of one episode until the channel ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    episode = adapter.episode()
    with channel, channel.makefile("rb") as lines:
        for line in lines:
            name, arguments = json.loads(line)
            try:
                answer = {"result": _method(episode, name)(**arguments)}
            except Exception as error:  # noqa: BLE001 - code of others
                traceback.print_exc()
                answer = _error(error, "")
            channel.sendall(json.dumps(answer).encode() + b"\n")


def _cancelled(number):
    return {"id": number, "error": {"kind": "TimeoutError", "text": "it was cancelled", "code": "env.timeout"}}


class Server:
    """Runs the calls of the controller at the same time, on one event loop."""

    def __init__(self, channel, module, env, args):
        self._channel, self._module, self._env, self._args = channel, module, env, args
        self._adapter = None
        self._episodes = {}
        self._calls = {}

    async def serve(self):
        reader, self._writer = await asyncio.open_connection(sock=self._channel, limit=_LINE_BYTES)
        self._send({"id": 0, "result": await self._started()})
        while (line := await reader.readline()).endswith(b"\n"):
            message = json.loads(line)
            if "cancel" in message:
                if message["cancel"] in self._calls:
                    self._calls[message["cancel"]].cancel()
                continue
            number = message["id"]
            self._calls[number] = task = asyncio.ensure_future(self._answer(message))
            task.add_done_callback(lambda task, number=number: self._done(number, task))

    def _done(self, number, task):
        del self._calls[number]
        if task.cancelled():  # before its first step
            self._send(_cancelled(number))

    def _send(self, message):
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _started(self):
        """The facts of the adapter, or why it cannot start."""
        try:
            self._adapter = self._module.Adapter(self._env, self._args)
            facts = await _called(self._adapter, "facts", {}) if hasattr(self._adapter, "facts") else {}
            return {"facts": facts}
        except Exception as error:  # noqa: BLE001 - code of others
            traceback.print_exc()
            return _error(error, self._module.INSTALL)

    async def _answer(self, message):
        answer = {"id": message["id"]}
        try:
            result = await self._result(message["call"], message["arguments"], message.get("episode"))
            answer |= result if isinstance(result, _Answer) else {"result": result}
        except asyncio.CancelledError:
            answer = _cancelled(message["id"])
        except Exception as error:  # noqa: BLE001 - code of others
            if not isinstance(error, _Died):
                traceback.print_exc()
            answer |= _error(error, self._module.INSTALL)
        try:
            self._send(answer)
        except (TypeError, ValueError) as error:  # a result that JSON cannot represent
            self._send({"id": message["id"], **_error(error, "")})

    async def _result(self, name, arguments, key):
        if key is None:
            return await _called(self._adapter, name, arguments)
        if name == "close":
            if (episode := self._episodes.pop(key, None)) is not None:
                await episode.close()
            return None
        if key not in self._episodes:
            forks = getattr(self._module, "FORKS", False)
            self._episodes[key] = Forked(self._adapter, self._channel) if forks else Here(self._adapter)
        return await self._episodes[key].call(name, arguments)


def _end_with(channel):
    """End this process group when the other end of the channel is closed, also while a call blocks the event loop."""
    hangup = select.poll()
    hangup.register(channel, 0)
    hangup.poll()
    os.killpg(0, signal.SIGKILL)


def main(file, env, args):
    sys.path.pop(0)  # the folder of this file: its modules are no packages of the interpreter
    sys.path.insert(0, os.getcwd())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(0))
    channel.setblocking(False)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    loader = SourceFileLoader("environment_adapter", file)
    module = types.ModuleType(loader.name)
    loader.exec_module(module)
    asyncio.run(Server(channel, module, env, json.loads(args)).serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
