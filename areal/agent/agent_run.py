"""One run of an agent: the job, the session as the agent's code sees it, and what comes out."""

import asyncio
import inspect
import math
import os
import re
import signal
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol

import psutil

from areal.agent.tool_calls import Tool, answer_call, parsed_arguments, tool_schema
from areal.agent.turns import BUDGET_CODES, END_CODES, Message
from areal.api.errors import ArealError, ConfigError, InputError, RewardError
from areal.api.registry import FunctionRef, load_function
from areal.data.chat import checked_messages
from areal.observe.step_files import LoggedMetrics
from areal.system.process import tied_to_this_process

# Sessions without code of an agent: an environment that answers the policy, and Python functions as its tools.

MAX_TURNS = 64  # Turns of a session without agent.max_turns.
_TOOL_TIMEOUT_S = 60.0
_MAX_THREADS = 1024  # Plain agents of one worker that run at the same time.


class Environment(Protocol):
    """What the policy talks to. One instance per session."""

    async def reset(self, row: dict[str, Any]) -> list[Message]: ...

    async def step(self, message: Message) -> tuple[list[Message], float, bool]:
        """The messages after an answer without tool calls, its reward, and whether the dialogue ends."""
        ...


async def run_environment(
    client: Any, row: dict[str, Any], environment: Environment | None, tools: Sequence[Tool]
) -> dict[str, Any] | None:
    """One dialogue. `client`: AsyncOpenAI of the session. Returns the reward of each turn that the environment gave.

    Tool calls of an answer run at the same time and are answered; any other answer goes to the environment. A dialogue
    that the budget of the session ends has the rewards so far, 0 without any. Without an environment the first answer
    without a call ends the dialogue, and it has no reward here.
    """
    messages = list(await environment.reset(row) if environment is not None else first_messages(row))
    schemas, turns = [tool_schema(tool) for tool in tools], dict[str, float]()
    for _ in range(MAX_TURNS):
        options = {"tools": schemas} if schemas else {}
        try:
            completion = await client.chat.completions.create(model="policy", messages=messages, **options)
        except Exception as error:
            if getattr(error, "code", None) not in BUDGET_CODES:
                raise
            break
        answer = completion.choices[0].message
        message = _sent_back(answer)
        messages.append(message)
        if answer.tool_calls:
            messages += await asyncio.gather(*(_tool_message(call, tools) for call in answer.tool_calls))
            continue
        if environment is None:
            break
        result = await environment.step(message)
        new, reward, is_done = _checked(result)
        turns[completion.id] = reward
        messages += new
        if is_done:
            break
    return {"reward": 0.0, "turns": turns} if environment is not None else None


def first_messages(row: dict[str, Any]) -> list[Message]:
    """The messages of a row, which begin a session without an environment. ConfigError when it has none, InputError
    when they are unusable."""
    if isinstance(row.get("messages"), list):
        return checked_messages(row["messages"])
    if isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    message = f"a row needs `messages` or `prompt` where no environment gives the first messages, not {sorted(row)}"
    message += ": set train_dataset.map_fn (docs/data.md)"
    raise ConfigError(message, code="agent.no_messages")


def _sent_back(answer: Any) -> Message:
    message: Message = {"role": "assistant", "content": answer.content}
    if reasoning := (answer.model_extra or {}).get("reasoning_content"):
        message["reasoning_content"] = reasoning
    if answer.tool_calls:
        message["tool_calls"] = [call.model_dump() for call in answer.tool_calls]
    return message


async def _tool_message(call: Any, tools: Sequence[Tool]) -> Message:
    arguments, problem = parsed_arguments(call.function.arguments)
    content = await answer_call(call.function.name, arguments, problem, tools, timeout_s=_TOOL_TIMEOUT_S)
    if isinstance(content, list):
        content = [
            {"type": "image_url", "image_url": {"url": part["url"]}} if part["type"] == "image" else part
            for part in content
        ]
    return {"role": "tool", "tool_call_id": call.id, "content": content}


def _checked(result: Any) -> tuple[list[Message], float, bool]:
    try:
        messages, reward, is_done = result
        return list(messages), float(reward), bool(is_done)
    except (TypeError, ValueError) as error:
        message = f"step returned {result!r}: return (messages, reward, done)"
        raise RewardError(message, code="agent.wrong_step") from error


# What a run of an agent leaves behind, and the last error in its code: for rehearsals.

_OWN_FOLDER = str(Path(__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")
_SETTLE_S = 0.2  # What tasks and processes have to end after the agent has returned.
_FRAME = re.compile(r'^  File "([^"\n]+)", line ([0-9]+)', re.MULTILINE)
_CONTROL = (StopIteration, StopAsyncIteration, GeneratorExit)


def place_of(trace: TracebackType | None) -> str:
    """FILE:LINE of the last code of a traceback outside of the standard library and of packages; empty = none."""
    return last_place(traceback.extract_tb(trace))


def last_place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The same for a stack."""
    others = (_OWN_FOLDER, _STDLIB, "<")
    users = [
        frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith(others)
    ]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else ""


def printed_place(text: str) -> str:
    """The same for the output of a program in Python with a traceback; empty = none."""
    frames = [traceback.FrameSummary(file, int(line), "", lookup_line=False) for file, line in _FRAME.findall(text)]
    return last_place(frames)


class AgentWatch:
    """Follows the tasks, child processes and errors of one agent. At most one at a time in a process."""

    def __init__(self, files: Collection[str]) -> None:
        """`files`: the source of the agent, in which errors are followed."""
        self._files = files
        self._tasks: dict[asyncio.Task[Any], str] = {}  # Each with the line that created it.
        self._children: set[psutil.Process] = set()
        self.last_error = ""  # Error and line of the last exception in the agent's files.

    @contextmanager
    def following(self) -> Iterator[None]:
        loop, owner = asyncio.get_running_loop(), asyncio.current_task()
        before, trace = loop.get_task_factory(), sys.gettrace()

        def create(
            loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
        ) -> asyncio.Task[Any]:
            task = asyncio.Task(coro, loop=loop, **options)
            current = asyncio.current_task()
            if current is owner or current in self._tasks:
                self._tasks[task] = last_place(traceback.extract_stack())
            return task

        self._children = set(psutil.Process().children(recursive=True))
        loop.set_task_factory(create)  # pyright: ignore[reportArgumentType]
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(trace)
            loop.set_task_factory(before)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        return self._local if frame.f_code.co_filename in self._files else None

    def _local(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "exception" and not issubclass(arg[0], _CONTROL):
            self.last_error = f"{arg[0].__name__} ({frame.f_code.co_filename}:{frame.f_lineno})"
        return self._local

    async def leaks(self) -> list[str]:
        """The tasks and processes that remain, each with what is known of its origin. They are ended."""
        if left := {task for task in self._tasks if not task.done()}:
            await asyncio.wait(left, timeout=_SETTLE_S)
        tasks = [task for task in self._tasks if not task.done()]
        descriptions = [f"task {task.get_name()} ({self._tasks[task]})" for task in tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_SETTLE_S)
        children = [child for child in psutil.Process().children(recursive=True) if child not in self._children]
        _, alive = psutil.wait_procs(children, timeout=_SETTLE_S if children else 0)
        for child in alive:
            try:
                descriptions.append(f"process {child.pid} ({' '.join(child.cmdline())[:80]})")
                child.kill()
            except psutil.NoSuchProcess:
                continue
        return descriptions


OutcomeStatus = Literal["ok", "error", "timeout", "died", "unusable"]
_OUTPUT_CHARS = 400
_COLUMN = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJob:
    """What one run of an agent needs. JSON can represent it."""

    row: dict[str, Any]
    base_url: str  # The session server's address, without /v1.
    key: str  # Secret key of the session: the API key of the agent's clients.
    agent: FunctionRef | None = None  # An async function `run(row, client, session)`, or a class with such a method.
    command: tuple[str, ...] = ()  # A program and its arguments; {column} is replaced by that column of the row.
    environment: FunctionRef | None = None  # A class that implements Environment.
    tools: tuple[FunctionRef, ...] = ()
    """Functions that answer the tool calls of the policy, with or without an environment."""
    watch: bool = False
    """Report what the agent leaves behind and the last error in its files. For one run at a time in a process."""

    @property
    def files(self) -> frozenset[str]:
        refs = [ref for ref in (self.agent, self.environment, *self.tools) if ref is not None]
        return frozenset(inspect.getsourcefile(load_function(ref)) or "" for ref in refs)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    status: OutcomeStatus
    """timeout = ended at its limit; died = its process ended, not by it; unusable = it cannot be loaded."""
    message: str = ""  # Why the status is not ok, with the line of the agent's code.
    reward: float | None = None  # None: the agent gave none for the whole session.
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    """Rewards of turns, by the id of a completion, the id of a tool call, or the number of the turn from 0."""
    parts: dict[str, float] = field(default_factory=dict[str, float])  # Further named numbers.
    metrics: dict[str, float] = field(default_factory=dict[str, float])  # What the agent logged with log_metric.
    refusal: str = ""  # One of END_CODES, if its error comes from this refusal of a request.
    leaks: list[str] = field(default_factory=list[str])
    """Tasks and processes that the agent left behind. Of an agent in Python only when its job has `watch`."""
    last_error: str = ""  # The last error in the agent's files, with its line; only when its job has `watch`.


class AgentSession:
    """The session of a run, for the agent's code."""

    def __init__(self, job: AgentJob) -> None:
        self.key = job.key
        self.base_url = f"{job.base_url}/v1"  # For OpenAI clients. Anthropic clients use `anthropic_base_url`.
        self.anthropic_base_url = job.base_url
        self.rewards: dict[str, float] = {}
        self.total: float | None = None

    def reward(self, value: float, *, of: str | int | None = None) -> None:
        """Give the session a reward, or a turn: `of` is the id of its completion, of a tool call, or its number from 0.

        A later reward of the same replaces the earlier one. InputError unless `value` is a finite number.
        """
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"reward({value!r}): it must be a finite number", code="workflow.not_finite")
        if of is None:
            self.total = float(value)
        else:
            self.rewards[str(of)] = float(value)


class LoadedAgents:
    """The agents that this process has imported, with the HTTP client that their OpenAI clients share."""

    def __init__(self) -> None:
        self._runs: dict[FunctionRef, Callable[..., Any]] = {}
        self._client: Any = None
        self._threads: ThreadPoolExecutor | None = None  # of agents that are plain functions

    async def run(self, job: AgentJob) -> AgentOutcome:
        """Run the agent of a job. Every error of its code is an outcome."""
        if job.command:
            return await run_command(job)
        try:
            function: Any = self._function(job)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything
            return AgentOutcome(status="unusable", message=described(error))
        session = AgentSession(job)
        client = self._openai(session)
        watch = AgentWatch(job.files) if job.watch else None
        with LoggedMetrics() as logged, nullcontext() if watch is None else watch.following():
            try:
                result = outcome_of(await function(job.row, client, session), session)
            except (asyncio.CancelledError, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - user code: it fails this session
                refusal = refusal_in("\n".join(_texts(error)))
                result = AgentOutcome(status="error", message=described(error), refusal=refusal)
        if watch is not None:
            result = replace(result, leaks=await watch.leaks(), last_error=watch.last_error)
        return replace(result, metrics=logged.means())

    def _function(self, job: AgentJob) -> Callable[..., Any]:
        if job.agent is not None:
            return self._runs.get(job.agent) or self._load(job.agent)
        environment = None if job.environment is None else load_function(job.environment)
        tools = [load_function(ref) for ref in job.tools]

        async def run(row: dict[str, Any], client: Any, session: AgentSession) -> Any:
            return await run_environment(client, row, None if environment is None else environment(), tools)

        return run

    def _load(self, ref: FunctionRef) -> Callable[..., Any]:
        loaded = load_function(ref)
        function: Any = loaded().run if isinstance(loaded, type) else loaded
        if not asyncio.iscoroutinefunction(function):
            function = partial(self._in_thread, function)
        self._runs[ref] = function
        return function

    async def _in_thread(self, function: Callable[..., Any], row: dict[str, Any], _: Any, session: AgentSession) -> Any:
        """Run a plain function with a client that waits. When the session ends first, its next request fails."""
        from openai import OpenAI

        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MAX_THREADS, "agent")
        with OpenAI(base_url=session.base_url, api_key=session.key) as client:
            call = partial(copy_context().run, function, row, client, session)
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _openai(self, session: AgentSession) -> Any:
        """A client of the session. All share their connections: each HTTP client would load the certificates again."""
        from openai import AsyncOpenAI

        if self._client is None:
            self._client = AsyncOpenAI(base_url=session.base_url, api_key=session.key)
        return self._client.with_options(base_url=session.base_url, api_key=session.key)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.close()


def outcome_of(result: object, session: AgentSession) -> AgentOutcome:
    """What an agent returned: a number, None, or a mapping.

    In a mapping `reward` is the reward of the session and `turns` holds rewards of turns; other numbers are parts.
    Raises RewardError.
    """
    total, rewards, parts = session.total, dict(session.rewards), dict[str, float]()
    if isinstance(result, Mapping):
        items: Mapping[Any, Any] = result
        total = _number("reward", items["reward"]) if items.get("reward") is not None else total
        rewards |= {str(of): _number(f"turns[{of!r}]", value) for of, value in dict(items.get("turns") or {}).items()}
        others = {str(name): value for name, value in items.items() if name not in ("reward", "turns")}
        parts = {name: _number(name, value) for name, value in others.items() if hasattr(value, "__float__")}
    elif result is not None:
        total = _number("the reward", result)
    return AgentOutcome(status="ok", reward=total, rewards=rewards, parts=parts)


def _number(name: str, value: object) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__") or not math.isfinite(float(value)):  # pyright: ignore[reportArgumentType]
        message = f"the agent returned {name}={value!r}: return a finite number"
        raise RewardError(message, code="agent.wrong_reward")
    return float(value)  # pyright: ignore[reportArgumentType]


async def run_command(job: AgentJob, *, knows_session: bool = True) -> AgentOutcome:
    """Run the command of a job. Its reward comes from elsewhere. It ends when the caller is cancelled.

    `knows_session`: the session is in its environment; otherwise it opens one.
    """
    argv = [with_columns(part, job.row) for part in job.command]
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PATH": search_path()} | (client_variables(job) if knows_session else {}),
            start_new_session=True,  # killed together with the processes that it starts
            preexec_fn=tied_to_this_process(),
        )
    except OSError as error:
        return AgentOutcome(status="unusable", message=f"cannot start {argv[0]}: {error.strerror or error}")
    leaks = list[str]()
    try:
        output, _ = await process.communicate()
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
            leaks.append(f"a process that {argv[0]} started")  # its group is not empty
        await process.wait()
    if process.returncode == 0:
        return AgentOutcome(status="ok", leaks=leaks)
    text = output.decode("utf-8", "replace").strip()
    place = f" ({last})" if (last := printed_place(text)) else ""
    message = f"{argv[0]} ended with exit code {process.returncode}{place}: {text[-_OUTPUT_CHARS:]}"
    return AgentOutcome(status="error", message=message, refusal=refusal_in(text), leaks=leaks)


def with_columns(text: str, row: Mapping[str, Any]) -> str:
    """`text` with {column} replaced by that column of the row; other braces stay."""
    return _COLUMN.sub(lambda match: str(row[match[1]]) if match[1] in row else match[0], text)


def search_path() -> str:
    """PATH of commands: `python` is the interpreter of this process, also when its environment is not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def client_variables(job: AgentJob) -> dict[str, str]:
    """The environment variables from which OpenAI and Anthropic clients take the session."""
    return {
        "OPENAI_BASE_URL": f"{job.base_url}/v1",
        "OPENAI_API_KEY": job.key,
        "ANTHROPIC_BASE_URL": job.base_url,
        "ANTHROPIC_API_KEY": job.key,
    }


def refusal_in(text: str) -> str:
    """The one of END_CODES in the text of an error, as the SDKs and their tracebacks print it; empty = none."""
    return next((code for code in END_CODES if code in text), "")


def _texts(error: BaseException) -> Iterator[str]:
    """The texts of an error, of the errors that it replaced, and of those in a group, without traceback."""
    left, seen = [error], set[int]()
    while left:
        raised = left.pop()
        if id(raised) in seen:
            continue
        seen.add(id(raised))
        yield f"{raised} {getattr(raised, 'body', '')}"  # of an SDK's error: what the session server answered
        earlier = raised.__cause__ or (None if raised.__suppress_context__ else raised.__context__)
        left += [earlier] if earlier is not None else []
        left += raised.exceptions if isinstance(raised, BaseExceptionGroup) else ()


def described(error: BaseException) -> str:
    """One line for an exception: type, text and its last line outside of packages and of the standard library."""
    if isinstance(error, ArealError):
        return str(error)
    place = f" ({last})" if (last := place_of(error.__traceback__)) else ""
    return " ".join(f"{type(error).__name__}: {error}{place}".split())[: 2 * _OUTPUT_CHARS]
