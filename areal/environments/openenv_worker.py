"""OpenEnv in a worker: a WebSocket session for each episode; its HTTP routes have no state."""

import asyncio
import contextlib
import importlib
import json
import os
import re
import socket
import sys
import urllib.error
import urllib.request
from typing import Any

INSTALL = "pip install openenv-core==0.3.0 uvicorn"
_START_LIMIT_S = 120.0
_END_LIMIT_S = 2.0
_CODE = re.compile(r"\(code: (\w+)\)")
_NOT_SEEN = ("reward", "done", "metadata")
_NUMBERS = {"integer": int, "number": float}


class ServerDied(Exception):
    code = "env.server_died"


class NoCapacity(Exception):
    code = "env.capacity"


class NoServer(Exception):
    code = "env.not_found"


class Adapter:
    """`env`: the address of a server, or FILE:APP, which this process serves. `args`: `action`, the field that gets the
    text of an answer, or "json"; `observation`, the field that the policy sees, or "json"; `instruction`, before the
    first observation; `invalid_reward` of an action that the server refuses; `reset`, further arguments of a reset."""

    def __init__(self, env, args):
        self._client_class = importlib.import_module("openenv.core").GenericEnvClient
        self._env, self.args = env, args
        self._server: Any = None
        self._address = env if "://" in env else ""
        self._starting = asyncio.Lock()

    async def facts(self):
        """The number of sessions that the server takes, found by opening that many."""
        wanted, clients = int(os.environ.get("AREAL_MAX_CONCURRENT", "64")), []
        address = await self.address()
        try:
            schema = await asyncio.to_thread(_read_json, f"{address}/schema")
        except OSError as error:
            raise NoServer(f"{address} does not answer ({error}): start the server of the environment") from error
        self.fields = (schema.get("action") or {}).get("properties", {})
        needed = [name for name in (schema.get("action") or {}).get("required", []) if name != "metadata"]
        self.action = self.args.get("action") or (needed[0] if len(needed) == 1 else "json")
        try:
            while len(clients) < wanted:
                clients.append(client := self._client_class(base_url=address))
                try:
                    await client.connect()
                    await client.state()
                except Exception as error:
                    if code_of(error) != "CAPACITY_REACHED" and not _is_closed(error):
                        raise
                    clients.pop()
                    break
        finally:
            for client in clients:
                await client.disconnect()
        if not clients:
            raise NoCapacity(f"{address} has no free session: end its other sessions")
        return {"capacity": len(clients)}

    async def address(self):
        """The address of the server, which is started if it has ended."""
        async with self._starting:
            if not self._address or (self._server is not None and self._server.returncode is not None):
                await self._serve()
        return self._address

    async def may_have_ended(self):
        """A connection was lost: give a server that is about to end the time to do so, so that another one starts."""
        if self._server is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._server.wait(), _END_LIMIT_S)

    async def _serve(self):
        file, _, name = self._env.rpartition(":")
        if not os.path.isfile(file):
            raise NoServer(f"workflow_args.env={self._env!r} is no address http://... and no FILE.py:APP")
        folder, module = os.path.split(os.path.abspath(file))
        app = f"{module.removesuffix('.py')}:{name}"
        with socket.socket() as bound:  # the server inherits it, so that no other process gets the port
            bound.bind(("127.0.0.1", 0))
            options = ["--fd", str(bound.fileno()), "--app-dir", folder, "--log-level", "warning"]
            command = [sys.executable, "-m", "uvicorn", app, *options]
            self._server = await asyncio.create_subprocess_exec(*command, pass_fds=[bound.fileno()])
            self._address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with asyncio.timeout(_START_LIMIT_S):
            while self._server.returncode is None:
                try:
                    return await asyncio.to_thread(_read_json, f"{self._address}/schema")
                except OSError:
                    await asyncio.sleep(0.1)
        raise NoServer(f"the server of {self._env} ended with exit code {self._server.returncode}")

    async def server_pid(self):
        """Process of the server that was started here."""
        return self._server.pid

    async def client(self):
        return self._client_class(base_url=await self.address())

    def episode(self):
        return Episode(self)


def _read_json(address):
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError:
        return {}


def code_of(error):
    """The code of a server's error in the text of the client's one; empty = none."""
    match = _CODE.search(str(error))
    return match[1] if match else ""


def _is_closed(error):
    return type(error).__name__.startswith("ConnectionClosed")


class Episode:
    """One session."""

    def __init__(self, adapter):
        self._adapter, self._args = adapter, adapter.args
        self._client: Any = None

    async def reset(self, row):
        self._client = await self._adapter.client()
        options = {"seed": row.get("seed", 0) + row.get("index", 0), **(self._args.get("reset") or {})}
        result = await self._asked(self._client.reset(**{**options, **(row.get("config") or {})}))
        text = self._seen(result.observation)
        instruction = self._args.get("instruction", "")
        return {"messages": [{"role": "user", "content": f"{instruction}\n{text}" if instruction else text}]}

    async def step(self, message, is_cut):
        """The reward is that of this turn. An episode ends at `done`: a further step would be paid again."""
        try:
            action = self._action(message["content"] or "")
        except ValueError as error:
            return self._refused(error)
        try:
            result = await self._asked(self._client.step(action))
        except RuntimeError as error:
            if code_of(error) != "VALIDATION_ERROR":  # else the policy's action is wrong
                raise
            return self._refused(error)
        text = self._seen(result.observation)
        reward = 0.0 if result.reward is None else float(result.reward)
        return {"messages": [{"role": "user", "content": text}], "reward": reward, "done": bool(result.done)}

    def _refused(self, error):
        text = f"The action was refused: {str(error).splitlines()[0]}"
        reward = self._args.get("invalid_reward", 0.0)
        return {"messages": [{"role": "user", "content": text}], "reward": reward, "done": False}

    async def _asked(self, call):
        try:
            return await call
        except Exception as error:
            if isinstance(error, OSError) or _is_closed(error):
                await self._adapter.may_have_ended()
                raise ServerDied(str(error)) from error
            raise

    def _action(self, text):
        """The action that an answer means. ValueError when it is no JSON object where one is expected."""
        field = self._adapter.action
        if field == "json":
            action = json.loads(text)
            if not isinstance(action, dict):
                raise ValueError("write a JSON object")
            return action
        convert = _NUMBERS.get(self._adapter.fields.get(field, {}).get("type"))
        text = text.strip()
        try:
            return {field: convert(text) if convert else text}
        except ValueError:
            return {field: text}  # the server refuses it

    def _seen(self, observation):
        shown = {name: value for name, value in observation.items() if name not in _NOT_SEEN}
        field = self._args.get("observation") or (next(iter(shown)) if len(shown) == 1 else "json")
        return json.dumps(shown) if field == "json" else str(shown.get(field, ""))

    async def close(self):
        if self._client is not None:
            await self._client.disconnect()
