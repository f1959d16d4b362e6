"""The pool of processes that run reward functions, with a time limit for each call.

Waits for a free worker; a result, or the replacement of a worker that ended, wakes it. Calls run in the order of their
requests. The limit `timeout_s` counts from the start of the call; a worker that exceeds it is killed and replaced. When
a worker dies, its call runs once more on another worker (an out-of-memory kill can have other causes), and is reported
as `died` when that one dies too. Reward functions must therefore allow a second call.
"""

import asyncio
import math
import signal
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

import orjson

from areal.api.config import RewardConfig
from areal.api.data import row_json
from areal.api.errors import RewardError
from areal.api.registry import FunctionRef
from areal.observe.log import get_logger
from areal.reward import sandbox as sandbox_backends
from areal.system.device import cpu_count
from areal.system.worker_process import WorkerEnded, WorkerProcess, areal_worker

MAX_CALLS_PER_MESSAGE = 64
_MESSAGE_GOAL_S = 0.002
"""Expected run time of the calls in one message: longer calls are sent one by one to different workers."""
_LOAD_LIMIT_S = 60.0  # Minimum limit for a worker's start and for the import of a function's module, on a busy machine.
_MAX_FAILED_STARTS = 3
_TRIES = 2
_EXIT_WAIT_S = 0.5
_SHORT_WAIT_S = 2.0


RewardStatus = Literal["ok", "error", "timeout", "not_finite", "died", "unusable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Result of one call of a reward function. `value` is 0.0 unless the status is ok."""

    status: RewardStatus
    """error = raised, or returned no number; timeout = killed at its limit; died = its process ended twice; unusable =
    the function cannot be loaded."""
    value: float
    message: str  # Why the status is not ok; else empty.
    seconds: float  # Run time of the function.
    metrics: Mapping[str, float] | None = None  # Other numbers that the function returned with its score; None = none.


@dataclass(slots=True, eq=False, kw_only=True)
class _Batch:
    function: FunctionRef
    shared: orjson.Fragment
    size: int
    fail_fast: bool
    done: asyncio.Future[None]
    results: dict[int, RewardResult] = field(default_factory=dict[int, RewardResult])

    def put(self, index: int, result: RewardResult) -> None:
        self.results[index] = result
        is_over = len(self.results) == self.size or (self.fail_fast and result.status != "ok")
        if is_over and not self.done.done():
            self.done.set_result(None)


@dataclass(slots=True, eq=False)
class _Call:
    batch: _Batch
    index: int
    completion: str
    completion_ids: Sequence[int]
    deaths: int = 0  # Number of workers that died while they ran it.


class _Worker(WorkerProcess):
    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__(*areal_worker("areal.reward.worker", env))
        self.loaded: set[FunctionRef] = set()  # Functions that it has imported.


def pool_size(config: RewardConfig) -> int:
    return config.workers or max(1, cpu_count() // 2)


class RewardPool:
    """Scores answers in worker processes, which it starts on demand. Used on one event loop only."""

    def __init__(self, config: RewardConfig, *, is_sandbox_checked: bool = False) -> None:
        """`is_sandbox_checked`: `log_reach` was called, so workers do not log the same again."""
        self._env = sandbox_backends.variable(config.sandbox, announced=is_sandbox_checked)
        self._timeout_s = config.timeout_s
        self._size = pool_size(config)
        self._queue: deque[_Call] = deque()
        self._queued = asyncio.Event()
        self._workers: dict[_Worker, deque[_Call]] = {}  # Calls sent to each worker, the running one first.
        self._num_idle = 0
        self._starting: set[_Worker] = set()
        self._failed_starts = 0
        self._mean_s: dict[FunctionRef, float] = {}
        self._recent_s = 0.0  # Mean time of the last calls of all functions.
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def waits_for(self) -> str:
        """What bounds the calls that wait, when workers need more than _SHORT_WAIT_S for them; else empty."""
        num_waiting, mean_s = len(self._queue), self._recent_s
        if not num_waiting or num_waiting * mean_s / self._size < _SHORT_WAIT_S:
            return ""
        workers = f"{self._size} worker{'s' if self._size > 1 else ''}"
        return f"{num_waiting:,} reward calls wait for {workers}, {mean_s:.1f} s each: increase reward.workers"

    async def score_many(
        self,
        function: FunctionRef,
        prompt: str,
        prompt_ids: Sequence[int],
        answers: Sequence[tuple[str, Sequence[int]]],
        row: dict[str, Any],
        *,
        fail_fast: bool = False,
    ) -> list[RewardResult]:
        """Score several answers (text, token ids) to one prompt, each with its own time limit; results in their order.

        `fail_fast`: return at the first failure, with the results known so far. InputError when JSON cannot represent
        `row`; every failure of a call is a status.
        """
        if self._closed:
            raise _closed_error()
        if not answers:
            return []
        shared = _shared_json(function, prompt, prompt_ids, row)
        done = asyncio.get_running_loop().create_future()
        batch = _Batch(function=function, shared=shared, size=len(answers), fail_fast=fail_fast, done=done)
        self._queue.extend(_Call(batch, index, text, ids) for index, (text, ids) in enumerate(answers))
        self._dispatch()
        await batch.done
        return [batch.results[index] for index in sorted(batch.results)]

    async def aclose(self) -> None:
        """Kill the workers; waiting and running calls raise RewardError."""
        self._closed = True
        workers = list(self._workers)
        for call in [*self._queue, *(call for calls in self._workers.values() for call in calls)]:
            if not call.batch.done.done():
                call.batch.done.set_exception(_closed_error())
        self._queue.clear()
        for worker in workers:
            worker.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in workers:  # of tasks that were cancelled before they ran
            worker.close()
            await asyncio.to_thread(worker.end)

    def _dispatch(self) -> None:
        """Wake idle workers for the waiting calls, and start workers while the pool is not full."""
        if self._closed or not self._queue:
            return
        self._queued.set()
        wanted = len(self._queue) - self._num_idle - len(self._starting)
        for _ in range(min(wanted, self._size - len(self._workers))):
            worker = _Worker(self._env)
            self._workers[worker] = deque()
            self._starting.add(worker)
            task = asyncio.create_task(self._work(worker), name=f"reward worker {worker.pid}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self, worker: _Worker) -> None:
        """Use one worker process until it ends or exceeds a time limit; then queue its remaining calls again."""
        wait_s = 0.0
        try:
            await self._serve(worker)
        except TimeoutError:
            self._on_overdue(worker)
        except WorkerEnded:
            wait_s = _EXIT_WAIT_S
        finally:
            worker.close()
            code = await asyncio.to_thread(worker.end, wait_s=wait_s)
        if wait_s:
            self._on_end(worker, code)

    async def _serve(self, worker: _Worker) -> None:
        """Send calls and receive their results. TimeoutError or WorkerEnded at the end of the worker."""
        await worker.connect(limit_s=_LOAD_LIMIT_S)
        self._starting.discard(worker)
        self._failed_starts = 0
        while True:
            while not (calls := self._take_calls()):
                self._queued.clear()
                self._num_idle += 1
                try:
                    await self._queued.wait()
                finally:
                    self._num_idle -= 1
                if worker.has_closed():
                    raise WorkerEnded
            self._workers[worker] = calls
            function = calls[0].batch.function
            worker.send([_message_part(part) for _, part in groupby(calls, attrgetter("batch"))])
            while calls:
                for message in await worker.receive(limit_s=self._limit_s(worker, function)):
                    if "loaded" in message:
                        worker.loaded.add(function)
                        continue
                    call = calls.popleft()
                    mean_s, seconds = self._mean_s.get(function), message["seconds"]
                    self._mean_s[function] = seconds if mean_s is None else 0.9 * mean_s + 0.1 * seconds
                    self._recent_s = 0.9 * self._recent_s + 0.1 * seconds if self._recent_s else seconds
                    call.batch.put(call.index, RewardResult(**message))

    def _limit_s(self, worker: _Worker, function: FunctionRef) -> float:
        # The first use of a function imports its module; the worker then reports `loaded`.
        return self._timeout_s if function in worker.loaded else max(self._timeout_s, _LOAD_LIMIT_S)

    def _take_calls(self) -> deque[_Call]:
        """The head of the queue, and the calls of the same function behind it that are sent in one message."""
        calls: deque[_Call] = deque()
        limit = 1
        while self._queue and len(calls) < limit:
            call = self._queue[0]
            if calls and (call.deaths or call.batch.function != calls[0].batch.function):
                break
            self._queue.popleft()
            if call.batch.done.done():
                continue  # its caller was cancelled, or the batch has failed
            if not calls:
                mean_s = max(self._mean_s.get(call.batch.function, _MESSAGE_GOAL_S), 1e-6)
                limit = 1 if call.deaths else min(MAX_CALLS_PER_MESSAGE, math.floor(_MESSAGE_GOAL_S / mean_s))
            calls.append(call)
        return calls

    def _on_overdue(self, worker: _Worker) -> None:
        started, calls = self._forget(worker)
        worker.kill()
        if not started:
            self._count_failed_start("did not start in time")
        elif calls:
            call = calls.popleft()
            limit_s = self._limit_s(worker, call.batch.function)
            loaded = call.batch.function in worker.loaded
            text = f"exceeded its limit of {limit_s:g} s" if loaded else f"took over {limit_s:g} s to import"
            call.batch.put(call.index, _failure("timeout", text, limit_s))
        self._queue_again(calls)

    def _on_end(self, worker: _Worker, code: int) -> None:
        started, calls = self._forget(worker)
        how = _exit_text(code)
        get_logger(__name__).warning("reward worker %d %s", worker.pid, how)
        if not started:
            self._count_failed_start(how)
        elif calls:
            calls[0].deaths += 1
            if calls[0].deaths >= _TRIES:
                call = calls.popleft()
                call.batch.put(call.index, _failure("died", f"its process {how}, {_TRIES} times", 0.0))
        self._queue_again(calls)

    def _forget(self, worker: _Worker) -> tuple[bool, deque[_Call]]:
        started = worker not in self._starting
        self._starting.discard(worker)
        return started, self._workers.pop(worker)

    def _queue_again(self, calls: deque[_Call]) -> None:
        self._queue.extendleft(reversed(calls))
        self._dispatch()

    def _count_failed_start(self, how: str) -> None:
        """After several failed starts in a row, fail the waiting calls: the pool must not start workers endlessly."""
        self._failed_starts += 1
        if self._failed_starts < _MAX_FAILED_STARTS:
            return
        self._failed_starts = 0
        waiting, self._queue = self._queue, deque()
        for call in waiting:
            call.batch.put(call.index, _failure("died", f"no reward worker could be started: the last {how}", 0.0))


def _message_part(calls: Iterable[_Call]) -> tuple[orjson.Fragment, list[tuple[str, list[int]]]]:
    parts = list(calls)
    return parts[0].batch.shared, [(call.completion, list(call.completion_ids)) for call in parts]


def _shared_json(function: FunctionRef, prompt: str, prompt_ids: Sequence[int], row: dict[str, Any]) -> orjson.Fragment:
    columns = orjson.Fragment(row_json(row))
    shared = {"function": function, "prompt": prompt, "prompt_ids": list(prompt_ids), "row": columns}
    return orjson.Fragment(orjson.dumps(shared, option=orjson.OPT_SERIALIZE_NUMPY))


def _closed_error() -> RewardError:
    return RewardError("the reward pool was closed before the answer was scored", code="reward.pool_closed")


def _failure(status: RewardStatus, message: str, seconds: float) -> RewardResult:
    return RewardResult(status=status, value=0.0, message=message, seconds=seconds)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by signal {-code}" + (" (SIGKILL; out of memory?)" if -code == signal.SIGKILL else "")
