"""The worker of an adapter, as the controller sees it: started on demand, with time limits, replaced when it dies.

Waits for answers of the worker; its end wakes every call. A call that exceeds its limit is cancelled, and its process
is killed when that does not help: then the calls of all its episodes fail with `env.server_died`.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from areal.api.errors import ArealError, ConfigError
from areal.system.network import TEACHER_TOKEN, TOKEN_VARIABLE
from areal.system.process import AREAL_PROCESS, ProcessContext, opened_log
from areal.system.worker_process import CallingWorker, WorkerProcess

START_LIMIT_S = 180.0  # Packages of others import for long on a busy machine.
_CONCURRENT = 64  # Episodes at the same time where the environment has no limit.
_HERE = Path(__file__).parent
_NOT_PASSED = (TOKEN_VARIABLE, TEACHER_TOKEN, AREAL_PROCESS, "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class EnvironmentFailed(ArealError, RuntimeError):
    """A call of an environment failed. It says nothing about the policy, so there is no reward."""

    def __init__(self, kind: str, text: str, *, code: str) -> None:
        """`kind`: name of the exception in the worker, which begins the message."""
        super().__init__(f"{kind}: {text}", code=code)


def _timed_out(text: str) -> EnvironmentFailed:
    return EnvironmentFailed("EnvironmentTimeout", text, code="env.timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a worker is started with."""

    adapter: str  # NAME_worker.py of this package.
    env: str
    python: str  # Interpreter; empty = that of this process.
    args: Mapping[str, Any]
    max_concurrent: int | None = None  # Episodes at the same time; None = what the environment takes.

    @property
    def interpreter(self) -> str:
        return os.path.expanduser(self.python) or sys.executable

    @property
    def command(self) -> list[str]:
        program, adapter = _HERE / "worker.py", _HERE / f"{self.adapter}_worker.py"
        return [self.interpreter, str(program), str(adapter), self.env, orjson.dumps(dict(self.args)).decode()]


class _Live(CallingWorker):
    """One process."""

    def __init__(self, setup: WorkerSetup, folder: Path) -> None:
        self._log = folder / "worker.log"
        with opened_log(self._log) as log:
            try:
                process = WorkerProcess(setup.command, _variables(setup, folder), log=log)
            except OSError as error:
                text = f"workflow_args.python: {setup.interpreter} cannot be started: {error.strerror}"
                raise EnvironmentFailed("EnvironmentMissing", text, code="env.not_found") from error
        super().__init__(process, f"environment {setup.adapter}", start_limit_s=START_LIMIT_S)

    async def facts(self) -> dict[str, Any]:
        """What the adapter says of itself, after its start. Raises EnvironmentFailed."""
        started = (await asyncio.shield(self.ready))["result"]  # others wait for it too
        return result_of({"result": started.get("facts"), **started})

    async def call(self, name: str, arguments: Mapping[str, Any], *, episode: str | None, limit_s: float) -> Any:
        text = f"{name} exceeded its limit of {limit_s:g} s"
        try:
            answer, is_late = await self.ask({"call": name, "arguments": arguments, "episode": episode}, limit_s)
        except TimeoutError:
            raise _timed_out(f"{text} and blocked its process") from None
        if is_late and answer.get("error", {}).get("code") == "env.timeout":
            raise _timed_out(text)
        return result_of(answer)  # it ended in time

    def _failure(self, number: int) -> EnvironmentFailed:
        return EnvironmentFailed("EnvironmentDied", f"{self.how}: {self._log}", code="env.server_died")


def result_of(answer: Mapping[str, Any]) -> Any:
    """The result in an answer of the worker. Raises EnvironmentFailed."""
    if (error := answer.get("error")) is not None:
        raise EnvironmentFailed(error["kind"], error["text"], code=error["code"])
    return answer["result"]


class EnvironmentWorker:
    """The worker of one workflow. Used on one event loop only."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._live: _Live | None = None
        self._episodes: dict[str, _Live] = {}
        self._temporary = ""
        self._places: asyncio.Semaphore | None = None

    async def facts(self) -> dict[str, Any]:
        """What the adapter says of itself, after its start. Raises EnvironmentFailed."""
        return await self._started().facts()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait until the environment takes one more episode. ConfigError if it takes fewer than max_concurrent."""
        facts, wanted = await self.facts(), self._setup.max_concurrent
        if self._places is None:
            capacity = facts.get("capacity") or wanted or _CONCURRENT
            if wanted is not None and capacity < wanted:
                text = f"the environment takes {capacity} episodes at the same time: lower it, or raise its capacity"
                raise ConfigError(f"workflow_args.max_concurrent={wanted}: {text}", code="env.capacity")
            self._places = asyncio.Semaphore(wanted or capacity)
        async with self._places:
            yield

    async def call(self, name: str, arguments: Mapping[str, Any], *, episode: str | None = None, limit_s: float) -> Any:
        """The result of a method of the adapter, or of an episode, which its first call opens. Raises
        EnvironmentFailed: `env.server_died` when the process ended, `env.timeout`, or the error of the adapter."""
        live = self._started() if episode is None else self._episodes.get(episode) or self._started()
        if episode is not None:
            self._episodes[episode] = live  # an episode that has lost its worker does not continue in the next one
        await live.facts()
        return await live.call(name, arguments, episode=episode, limit_s=limit_s)

    async def close_episode(self, episode: str, *, limit_s: float) -> None:
        """End an episode in the worker. One that has ended or does not answer is no error here."""
        if (live := self._episodes.pop(episode, None)) is not None and not live.has_ended:
            with suppress(EnvironmentFailed):
                await live.call("close", {}, episode=episode, limit_s=limit_s)

    @property
    def pid(self) -> int | None:
        return None if self._live is None else self._live.process.pid

    def _started(self) -> _Live:
        if self._live is None or self._live.has_ended:
            self._live = _Live(self._setup, self._folder())
        return self._live

    def _folder(self) -> Path:
        """Where the worker has its log, home and caches: in the run folder, else a temporary one."""
        context = ProcessContext.from_env()
        if context is None:
            self._temporary = self._temporary or tempfile.mkdtemp(prefix="areal-environment-")
        base = Path(self._temporary) if context is None else Path(context.run_dir) / "environments"
        folder = base / self._setup.adapter
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    async def aclose(self) -> None:
        if self._live is not None:
            await self._live.aclose()
        if self._temporary:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)


def _variables(setup: WorkerSetup, folder: Path) -> dict[str, str]:
    """The environment of a worker: no secret and no module path of areal, home and caches below `folder`."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    env = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED}
    caches = {"XDG_CACHE_HOME": home / ".cache", "XDG_CONFIG_HOME": home / ".config", "XDG_DATA_HOME": home / ".data"}
    others = {"OMP_NUM_THREADS": "1", "AREAL_MAX_CONCURRENT": str(setup.max_concurrent or _CONCURRENT)}
    return env | {name: str(path) for name, path in {"HOME": home, **caches}.items()} | others
