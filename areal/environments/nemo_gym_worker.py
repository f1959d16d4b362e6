"""NeMo-Gym in a worker: a resources server as an application in this process, without Ray and its other servers.

areal runs the loop that an agent server of the package would: an episode has a cookie jar of its own, and either
`/seed_session`, the routes of the tools and `/verify`, or `/reset` and `/step`.
"""

import contextlib
import importlib
import inspect
import json
import os
import sys
import traceback
import uuid
from typing import Any

INSTALL = "pip install nemo-gym==0.7.0"
_PYTHON = (3, 13)  # The package asks for 3.13.14; for an older Python, pip finds an older version of the package.
_ADDRESS = "http://resources"
_TEXTS = {"input_text", "output_text", "text"}


class NoServer(Exception):
    code = "env.not_found"


class ServerRefused(Exception):
    """A route of the server did not answer with 200."""


class Adapter:
    """`env`: a resources server, by the name of its folder in the package, or as FOLDER with an app.py. `args`:
    `config` of the server, in the place of what its YAML file says. Rows are those of the package; a row that has no
    `responses_create_params` is an example of the server, of this number."""

    def __init__(self, env, args):
        utils = _utils()
        self.httpx = importlib.import_module("httpx")
        self._env, self._folder = env, _folder(env)
        module = _module(self._folder)
        base = importlib.import_module("nemo_gym.base_resources_server").SimpleResourcesServer
        kind: Any = _server_class(module, base)
        config_class = kind.model_fields["config"].annotation
        options = {**_written_config(self._folder), **args.get("config", {})}
        name = os.path.basename(self._folder)
        config = config_class(**{"host": "127.0.0.1", "port": 1, "entrypoint": "app.py", "name": name, **options})
        # No other server is there: a verifier that asks one, such as a model that scores, fails.
        self.app = kind(config=config, server_client=utils.ServerClient.model_construct()).setup_webserver()
        paths = {getattr(route, "path", "") for route in self.app.routes}
        self.steps = {"/reset", "/step"} <= paths
        self._examples = None

    async def facts(self):
        self._lifespan = self.app.router.lifespan_context(self.app)
        await self._lifespan.__aenter__()
        return {}

    def task(self, row):
        """The row as the package has it. Its `env` is that of workflow_args, and it has no `config`."""
        if row.get("env") not in (None, "", self._env, os.path.basename(self._folder)):
            text = f"a row names the server {row['env']!r}, and workflow_args.env is {self._env!r}"
            raise NoServer(f"{text}: one run has one server")
        if row.get("config"):
            keys = ", ".join(row["config"])
            raise NoServer(f"a row has the config {keys}, which no server takes: use workflow_args.args.config")
        if "responses_create_params" in row:
            return row
        if self._examples is None:
            file = os.path.join(self._folder, "data/example.jsonl")
            if not os.path.isfile(file):
                raise NoServer(f"{file} does not exist: rows need the column responses_create_params")
            with open(file, encoding="utf-8") as lines:
                self._examples = [json.loads(line) for line in lines]
        return self._examples[(row["seed"] + row["index"]) % len(self._examples)]

    def episode(self):
        return Episode(self)


def _utils():
    try:
        return importlib.import_module("nemo_gym.server_utils")
    except ModuleNotFoundError as error:
        if error.name != "nemo_gym" or sys.version_info >= _PYTHON:
            raise
        text = "NeMo-Gym 0.7.0 needs Python 3.13.14 or newer: make an environment with it and name it in"
        running = f"{sys.executable} is Python {sys.version.split()[0]}"
        raise NoServer(f"{text} workflow_args.python; {running}") from error


def _folder(env):
    package = importlib.import_module("resources_servers").__path__
    candidates = [os.path.join(folder, env) for folder in package] + [os.path.abspath(env)]
    for folder in candidates:
        if env and os.path.isfile(os.path.join(folder, "app.py")):
            return folder
    raise NoServer(f"workflow_args.env={env!r} is no resources server of nemo-gym and no folder with an app.py")


def _module(folder):
    """The module app of a server: one of the package, or one of the user's folder."""
    above, name = os.path.split(folder)
    inside = os.path.basename(above) == "resources_servers"
    try:
        if inside:
            return importlib.import_module(f"resources_servers.{name}.app")
        sys.path.insert(0, folder)
        return importlib.import_module("app")
    except ModuleNotFoundError as error:
        needed = os.path.join(folder, "requirements.txt")
        listed = f", and what else {needed} lists" if os.path.isfile(needed) else ""
        text = f"the server {name} needs the module {error.name}{listed}: {sys.executable} -m pip install {error.name}"
        raise NoServer(text) from error


def _server_class(module, base):
    servers = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, base)]
    made_here = [
        server for server in servers if server.__module__ == module.__name__ and not inspect.isabstract(server)
    ]
    if not made_here:
        raise NoServer(f"{module.__file__} has no resources server: no class of SimpleResourcesServer")
    return made_here[-1]


def _written_config(folder):
    """The config of the server in the first of its YAML files, without what names its place."""
    yaml = importlib.import_module("yaml")
    with contextlib.suppress(FileNotFoundError):
        for file in sorted(os.listdir(os.path.join(folder, "configs"))):
            with open(os.path.join(folder, "configs", file), encoding="utf-8") as text:
                instances = [
                    instance for instance in (yaml.safe_load(text) or {}).values() if isinstance(instance, dict)
                ]
            for instance in instances:
                if config := (instance.get("resources_servers") or {}).get(os.path.basename(folder)):
                    return {name: value for name, value in config.items() if name != "datasets"}
    return {}


class Episode:
    """One episode, with its cookies."""

    def __init__(self, adapter):
        self._adapter = adapter
        transport = adapter.httpx.ASGITransport(app=adapter.app)
        self._client: Any = adapter.httpx.AsyncClient(transport=transport, base_url=_ADDRESS, timeout=None)
        self._output = []
        self._is_cut = False
        self._closes = False

    async def reset(self, row):
        self._row = self._adapter.task(row)
        asked = self._row["responses_create_params"]
        self._tools = [_chat_tool(tool) for tool in asked.get("tools") or ()]
        messages = _chat_messages(asked)
        answer = await self._post("/reset" if self._adapter.steps else "/seed_session", self._row)
        if self._adapter.steps and answer.get("observation"):
            messages.append({"role": "user", "content": answer["observation"]})
        self._closes = (answer.get("info") or {}).get("supports_explicit_close") is True
        return {"messages": messages, "tools": self._tools}

    async def step(self, message, is_cut):
        new, self._is_cut = _output_items(message), is_cut
        self._output += new
        if self._adapter.steps:
            return await self._stepped(new)
        calls = message.get("tool_calls") or ()
        if is_cut or not calls:
            return await self.verify()
        results = [await self._tool_message(call) for call in calls]
        self._output += [
            {"type": "function_call_output", "call_id": result["tool_call_id"], "output": result["content"]}
            for result in results
        ]
        return {"messages": results, "tools": self._tools, "done": False}

    async def _stepped(self, new):
        answer = await self._post("/step", self._row | {"response": self._response(new)})
        done = bool(answer.get("terminated") or answer.get("truncated"))
        outputs = (answer.get("info") or {}).get("tool_outputs") or ()
        messages = [
            {"role": "tool", "tool_call_id": output["call_id"], "content": output["output"]} for output in outputs
        ]
        if answer.get("observation"):
            messages.append({"role": "user", "content": answer["observation"]})
        reward = float(answer.get("reward") or 0.0)
        return {"messages": messages, "tools": self._tools, "reward": reward, "done": done}

    async def verify(self):
        """The reward of the dialogue so far; None if the server says that it is no valid measurement."""
        if self._adapter.steps:  # a dialogue that ends early has the rewards of its steps
            return {"messages": [], "done": True}
        answer = await self._post("/verify", self._row | {"response": self._response(self._output)})
        parts = {name: float(value) for name, value in (answer.get("reward_components") or {}).items()}
        if answer.get("mask_sample"):
            return {"messages": [], "done": True, "reward": None, "parts": {"mask_sample": 1.0, **parts}}
        return {"messages": [], "done": True, "rewards": [float(answer["reward"])], "parts": parts}

    async def _post(self, path, body):
        answer = await self._client.post(path, json=body)
        if answer.status_code != 200:
            raise ServerRefused(f"{path} answered {answer.status_code}: {answer.text[:400]}")
        return answer.json()

    async def _tool_message(self, call):
        """The result of a tool call; an error of the tool is a result too. The name of a call is a route of the server,
        so only the tools of the row are called: another route could verify or begin again."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            if name not in {tool["function"]["name"] for tool in self._tools}:
                text = json.dumps({"error": f"there is no tool {name}"})
            else:
                text = (await self._client.post(f"/{name}", json=json.loads(arguments))).text
        except json.JSONDecodeError as error:
            text = json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
        except Exception:  # noqa: BLE001 - a tool
            traceback.print_exc()
            text = "Internal Server Error"
        return {"role": "tool", "tool_call_id": call["id"], "content": text}

    def _response(self, output):
        """The answers as an object of the Responses API."""
        tools = self._row["responses_create_params"].get("tools") or []
        shared = {"object": "response", "created_at": 0, "model": "policy", "parallel_tool_calls": True}
        made = {"id": f"resp_{uuid.uuid4().hex}", **shared, "tool_choice": "auto", "tools": tools, "output": output}
        return made | ({"incomplete_details": {"reason": "max_output_tokens"}} if self._is_cut else {})

    async def close(self):
        try:
            if self._closes:
                await self._post("/close", {})
        finally:
            await self._client.aclose()


def _text(content):
    """The text of content in parts. ValueError for a part that is none."""
    if isinstance(content, str):
        return content
    for part in content or ():
        if part.get("type") not in _TEXTS:
            raise ValueError(f"a message has a part of type {part.get('type')!r}: only text is supported")
    return "".join(part["text"] for part in content or ())


def _chat_tool(tool):
    if tool.get("type") != "function":
        raise ValueError(f"a row offers a tool of type {tool.get('type')!r}: only functions are supported")
    return {
        "type": "function",
        "function": {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key)},
    }


def _chat_messages(asked):
    """The messages of a row, from its input in the form of the Responses API."""
    written = asked.get("input") or []
    messages = [{"role": "system", "content": asked["instructions"]}] if asked.get("instructions") else []
    for item in [{"role": "user", "content": written}] if isinstance(written, str) else written:
        kind = item.get("type") or "message"
        if kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _text(item["content"])})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not messages or "tool_calls" not in messages[-1]:
                messages.append({"role": "assistant", "content": None, "tool_calls": []})
            messages[-1]["tool_calls"].append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        elif kind != "reasoning":
            raise ValueError(f"the input of a row has an item of type {kind!r}")
    return messages


def _output_items(message):
    """An answer of the policy as items of the Responses API."""
    items = []
    if message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": message["reasoning_content"]}]
        items.append({"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": summary})
    if message.get("content"):
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        shared = {"role": "assistant", "status": "completed", "content": [text]}
        items.append({"type": "message", "id": f"msg_{uuid.uuid4().hex}", **shared})
    for call in message.get("tool_calls") or ():
        named = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        items.append({"type": "function_call", "call_id": call["id"], **named})
    return items
