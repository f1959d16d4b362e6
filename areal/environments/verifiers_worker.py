"""verifiers in a worker: one slot of an environment for each session. Its chat loop runs in this process.

The package would run its harness `null` as a program of its own for each episode, which takes more than a second of CPU
time, from packages that `uv` downloads first. Here the same source is a module, loaded once.
"""

import argparse
import asyncio
import contextlib
import contextvars
import importlib
import json
import os
import sys
import traceback
import types
from importlib.machinery import SourceFileLoader
from typing import Any
from urllib.parse import urlsplit

INSTALL = "pip install verifiers==0.4.0"
_HARNESS = "areal_null"  # The package names a plugin by its module.
_KEY: contextvars.ContextVar[str] = contextvars.ContextVar("key of the session")
_MCP_LIMIT_S = 60.0
_CONNECT_LIMIT_S = 5.0


class OldApi(Exception):
    code = "env.old_api"


class NoTaskset(Exception):
    code = "env.not_found"


class ToolServerDied(Exception):
    code = "env.server_died"


def _verifiers(name):
    return importlib.import_module(f"verifiers.v1{name}")


class Adapter:
    """`env`: a taskset, by the name of its module or as FILE.py. `args`: the config of the environment as in the
    package, with `taskset` and its agent (`agent`), and `sampling` of its requests. The config of a row replaces keys
    of `taskset`."""

    def __init__(self, env, args):
        self._vf = _verifiers("")
        self._loaders = _verifiers(".utils.loaders")
        self._env = env
        self._sampling = args.get("sampling", {})
        self._config = {name: value for name, value in args.items() if name != "sampling"}
        self._opened = {}
        os.environ["PYTHONPATH"] = os.getcwd()  # Tool servers are processes that import the module of the taskset.
        sys.modules[_HARNESS] = _harness_module()

    def episode(self):
        """Episodes have nothing of their own; by their key, a close finds the process that ran one."""
        return self

    async def check(self, row):
        """Load the task of a row."""
        _, opened = await self._environment(row)
        opened.task(row)

    async def run(self, row, session):
        """One episode. `session`: `base_url` and `key` of the session that answers its requests."""
        key, opened = await self._environment(row)
        (slot,) = opened.env.slots(opened.task(row))
        # One address for all: the package keeps a client for each address. Its loop sends the key as a header.
        client = self._vf.EvalClientConfig(base_url=session["base_url"], api_key_var="AREAL_NO_KEY")
        _KEY.set(session["key"])
        sampling = self._vf.SamplingConfig(**self._sampling)
        context = self._vf.ModelContext(model="policy", client=client, sampling=sampling)
        episode = await opened.env.run_slot(slot, context)
        if not episode.ok and not await opened.is_serving():
            if opened.ends():
                del self._opened[key]
            raise ToolServerDied("a tool server of the environment has ended; the next episode starts it again")
        return _result(episode)

    async def _environment(self, row):
        """The environment of a row, with its key in `_opened`."""
        name = row.get("env") or self._env
        key = json.dumps([name, row.get("config") or {}], sort_keys=True)
        if key not in self._opened:
            self._opened[key] = asyncio.ensure_future(self._open(name, row.get("config") or {}))
        try:
            return key, await asyncio.shield(self._opened[key])
        except Exception:
            self._opened.pop(key, None)  # the next episode tries again
            raise

    async def _open(self, name, config):
        opened = Opened(name, self._loaders.load_environment(self._resolved(_module_name(name), config)))
        await opened.start()
        return opened

    def _resolved(self, name, config):
        """The whole config. Agents run in this process, and nothing is retried."""
        taskset = {**(self._config.get("taskset") or {}), **config, "id": name}
        try:
            self._loaders.taskset_class(name)
            kind = self._loaders.env_config_type(name, self._config.get("id", ""))
        except Exception as error:
            raise _cannot_load(name, error) from error
        roles = [
            role
            for role, model_field in kind.model_fields.items()
            if isinstance(model_field.default, self._vf.AgentConfig)
        ]
        agents = {role: self._agent(role) for role in roles}
        policies = [role for role, agent in agents.items() if not agent.get("client")]
        if len(policies) != 1:
            text = f"one agent of an episode is the policy, and {name} has {', '.join(policies) or 'none'}"
            raise NoTaskset(f"{text}: set workflow_args.args.AGENT.client of the others")
        return self._loaders.resolve_env_config({**self._config, **agents, "taskset": taskset, "retries": {}})

    def _agent(self, role):
        options = {"runtime": {"type": "subprocess"}, **(self._config.get(role) or {})}
        return {**options, "harness": {"id": _HARNESS}, "retries": {}}


class Opened:
    """An environment with its tool servers, which a task of its own holds, and its tasks so far."""

    def __init__(self, name, env):
        self._name, self.env = name, env
        self._tasks = []
        self._left = iter(env.taskset)
        self._ending = asyncio.Event()

    async def start(self):
        """Return when the tool servers run. Raises what stops them from it."""
        started = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold(started))
        await started

    async def _hold(self, started):
        try:
            async with self.env.serving():
                started.set_result(None)
                await self._ending.wait()
        except Exception as error:  # noqa: BLE001 - of the package
            if started.done():
                traceback.print_exc()
            else:
                started.set_exception(error)

    def ends(self):
        """End the tool servers. Whether they have not been told to end before."""
        is_first = not self._ending.is_set()
        self._ending.set()
        return is_first

    async def is_serving(self):
        """Whether its tool servers accept connections."""
        for server in self.env._shared_tools.values():
            place = urlsplit(server.url)
            try:
                connecting = asyncio.open_connection(place.hostname, place.port)
                _, writer = await asyncio.wait_for(connecting, _CONNECT_LIMIT_S)
            except (TimeoutError, OSError):
                return False
            writer.close()
        return not self._ending.is_set()

    def task(self, row):
        """The task of this number of the taskset, which is the seed and the index of the row."""
        number = row["seed"] + row["index"]
        while len(self._tasks) <= number:
            task = next(self._left, None)
            if task is None:
                text = f"{self._name} has {len(self._tasks)} tasks, so that seed + size of its rows is at most that"
                raise NoTaskset(f"{text}: a row asks for task {number}")
            self._tasks.append(task)
        return self._tasks[number]


def _module_name(name):
    """The module of a taskset. That of a file becomes importable, also by tool servers."""
    if not name.endswith(".py"):
        return name
    if not os.path.isfile(name):
        raise NoTaskset(f"there is no file {name}: correct env of workflow_args or of the rows")
    folder, file = os.path.split(os.path.abspath(name))
    if folder not in sys.path:
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], folder])
    return file.removesuffix(".py")


def _cannot_load(name, error):
    """What to say of a taskset that cannot be loaded."""
    if isinstance(error, ModuleNotFoundError):
        missing = getattr(error.__cause__, "name", None) or name
        what = "no taskset" if missing == name.replace("-", "_").lower() else f"{name} needs the module"
        return NoTaskset(f"{what} {missing}: {sys.executable} -m pip install {missing}")
    module = sys.modules.get(name.replace("-", "_").lower())
    if hasattr(module, "load_environment") or "'verifiers'" in str(error):
        text = f"{name} is written for the API 0.1 of verifiers, which 0.4.0 does not have"
        return OldApi(f"{text}: install a version with a Taskset of verifiers.v1 ({error})")
    return error


def _result(episode):
    """What the controller gets of an episode: no reward if it failed. The package scores one without a turn, too."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        kind, text = (errors[-1].type, errors[-1].message) if errors else ("EpisodeFailed", "it names no error")
        is_late = episode.is_timeout or any(trace.is_timeout for trace in episode.traces)
        return {
            "status": "timeout" if is_late else "error",
            "message": f"{kind}: {text.strip().rpartition(chr(10))[2]}",
        }
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        raise ValueError(
            f"the policy played {len(trained)} times in one episode: only environments of one are supported"
        )
    (trace,) = trained
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return {"status": "ok", "reward": float(trace.reward), "parts": {**metrics, **rewards}}


def _harness_module():
    """A plugin of the package: its harness `null`, whose program is a module of this process."""
    null = _verifiers(".harnesses.null.harness")
    launch = _verifiers(".harnesses.utils.launch")
    result = _verifiers(".runtimes").ProgramResult
    file = os.path.join(os.environ["HOME"], "null_program.py")
    with open(file, "w", encoding="utf-8") as written:
        written.write(launch.CHAT_PROGRAM_SOURCE)
    loader = SourceFileLoader("null_program", file)
    program: Any = types.ModuleType(loader.name)
    loader.exec_module(program)
    http = program.DefaultAsyncHttpxClient(timeout=None)  # All episodes share it.

    class Null(null.NullHarness):
        async def setup(self, runtime):
            pass

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
            key = {"x-api-key": _KEY.get()}
            client = program.AsyncOpenAI(
                base_url=endpoint, api_key=secret, max_retries=0, timeout=None, default_headers=key, http_client=http
            )
            system, prompt = self.resolve_prompt(data)
            first = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                first.append({"role": "user", "content": prompt})
            else:
                first += [launch.message_to_wire(message) for message in prompt or ()]
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            options = argparse.Namespace(
                bash=False, edit=False, search=False, api_key=secret, tool_interception_url=tool_interception_url
            )
            try:
                async with contextlib.AsyncExitStack() as stack:
                    connecting = program.connect_mcp({"mcpServers": servers}, stack, set())
                    tools, dispatch, opened = await asyncio.wait_for(connecting, _MCP_LIMIT_S)
                    compactor = program.Compactor(client, ctx.model, tools, False, None)
                    await program.run_chat_loop(options, compactor, first, dispatch, opened, http)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - what ends a program
                code = error.code if isinstance(error, SystemExit) else 1
                return result(exit_code=code, stdout="", stderr=traceback.format_exc())
            return result(exit_code=0, stdout="", stderr="")

    module: Any = types.ModuleType(_HARNESS)
    module.Null, module.__all__ = Null, ["Null"]
    return module
