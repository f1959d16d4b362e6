"""One run of an agent: the job, the session as the agent's code sees it, and what comes out."""

import asyncio
import inspect
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from areal.agent.agent_watch import AgentWatch, place_of, printed_place
from areal.agent.environment import run_environment
from areal.agent.turns import END_CODES
from areal.api.errors import ArealError, ConfigError, InputError, RewardError
from areal.api.functions import FunctionRef, load_function
from areal.observe.episode_metrics import logged_metrics
from areal.system.process import tied_to_this_process

OutcomeStatus = Literal["ok", "error", "timeout", "died", "unusable"]
_OUTPUT_CHARS = 400
_COLUMN = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJob:
    """What one run of an agent needs. JSON can represent it."""

    row: dict[str, Any]
    base_url: str
    """Of the session server, without /v1."""
    key: str
    """Secret key of the session: the API key of the agent's clients."""
    agent: FunctionRef | None = None
    """An async function `run(row, client, session)`, or a class with such a method."""
    command: tuple[str, ...] = ()
    """A program and its arguments; {column} is replaced by that column of the row."""
    environment: FunctionRef | None = None
    """A class that implements Environment."""
    tools: tuple[FunctionRef, ...] = ()
    """Functions that answer the tool calls of the policy, with or without an environment."""
    watch: bool = False
    """Report what the agent leaves behind and the last error in its files. For one run at a time in a process."""

    @property
    def files(self) -> frozenset[str]:
        """The source files of its code."""
        refs = [ref for ref in (self.agent, self.environment, *self.tools) if ref is not None]
        return frozenset(inspect.getsourcefile(load_function(ref)) or "" for ref in refs)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """The end of one run of an agent."""

    status: OutcomeStatus
    """timeout = ended at its limit; died = its process ended; unusable = it cannot be loaded."""
    message: str = ""
    """Why the status is not ok, with the line of the agent's code."""
    reward: float | None = None
    """None: the agent gave none for the whole session."""
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    """Of turns: by the id of a completion, the id of a tool call, or the number of the turn from 0."""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """Further named numbers."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """What the agent logged with log_metric."""
    refusal: str = ""
    """One of END_CODES, if its error comes from this refusal of a request."""
    leaks: list[str] = field(default_factory=list[str])
    """Tasks and processes that the agent left behind. Of an agent in Python only when its job has `watch`."""
    last_error: str = ""
    """The last error in the agent's files, with its line; only when its job has `watch`."""


class AgentSession:
    """The session of a run, for the agent's code."""

    def __init__(self, job: AgentJob) -> None:
        self.key = job.key
        self.base_url = f"{job.base_url}/v1"
        """For OpenAI clients. Anthropic clients use `anthropic_base_url`."""
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
        with logged_metrics() as logged, nullcontext() if watch is None else watch.following():
            try:
                found = outcome_of(await function(job.row, client, session), session)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - user code: it fails this session
                refusal = refusal_in("\n".join(_texts(error)))
                found = AgentOutcome(status="error", message=described(error), refusal=refusal)
        if watch is not None:
            found = replace(found, leaks=await watch.leaks(), last_error=watch.last_error)
        return replace(found, metrics=logged.means())

    def _function(self, job: AgentJob) -> Callable[..., Any]:
        """What runs a job: `run(row, client, session)`."""
        if job.agent is not None:
            return self._runs.get(job.agent) or self._load(job.agent)
        environment = None if job.environment is None else load_function(job.environment)
        tools = [load_function(ref) for ref in job.tools]

        async def run(row: dict[str, Any], client: Any, session: AgentSession) -> Any:
            return await run_environment(client, row, None if environment is None else environment(), tools)

        return run

    def _load(self, ref: FunctionRef) -> Callable[..., Any]:
        found = load_function(ref)
        function: Any = found().run if isinstance(found, type) else found
        if not asyncio.iscoroutinefunction(function):
            message = f"{ref} must be an async function run(row, client, session), or a class with such a method"
            raise ConfigError(message, code="config.wrong_function")
        self._runs[ref] = function
        return function

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
    place = f" ({found})" if (found := printed_place(text)) else ""
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
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield f"{one} {getattr(one, 'body', '')}"  # of an SDK's error: what the session server answered
        earlier = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        left += [earlier] if earlier is not None else []
        left += one.exceptions if isinstance(one, BaseExceptionGroup) else ()


def described(error: BaseException) -> str:
    """One line for an exception: type, text and its last line outside of packages and of the standard library."""
    if isinstance(error, ArealError):
        return str(error)
    place = f" ({found})" if (found := place_of(error.__traceback__)) else ""
    return " ".join(f"{type(error).__name__}: {error}{place}".split())[: 2 * _OUTPUT_CHARS]
