"""Answers to sampling requests: from the JSON body to requests to the fleet, and back to a message of the SDK."""

import asyncio
import base64
import contextlib
import hashlib
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from areal.api.columns import joined
from areal.api.config.rollout import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse, PromptScoring, WeightUpdate
from areal.api.errors import ArealError, RequestError
from areal.api.metrics import gather_or_cancel
from areal.fleet.fleet import Fleet
from areal.observe.log import get_logger
from areal.serve.wire import MAX_SAMPLES, SampleBody, encode_sample, invalid

_log = get_logger("serve")
KEEP_S = 600.0
"""The result of a sample is kept for this time."""
CLONE = 1_000_000_000
"""A client that is a clone of another one counts its samples from a multiple of this number."""


class _Turn:
    """Weights with the samples that use them or wait for them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_users, self.is_leaving = folder, 0, False
        self.name: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # Set once they are loaded.
        self.name.add_done_callback(_noted)
        self.may_leave = asyncio.Event()


class WeightPool(ABC):
    """The weights on the inference servers: loaded at the first request, those unused longest leave for others.

    Without room a request waits, in the order of the first requests for their weights. Weights that are to leave get no
    new users, so that all have their turn.
    """

    def __init__(self, limit: int, base: Path | None) -> None:
        """`limit`: what the servers hold at once. `base`: the base model; None = they always have it."""
        self._limit, self._base = limit, base
        self._begun: dict[_Turn, asyncio.Task[None]] = {}  # In the order of the last use.
        self._queued: list[_Turn] = []

    @abstractmethod
    async def _load(self, folder: Path) -> str:
        """The name of the weights in `folder` for requests, once all servers have them. ArealError if none has."""

    @abstractmethod
    async def _unload(self, folder: Path) -> None:
        """Nothing uses them any more."""

    @asynccontextmanager
    async def used(self, folder: Path | None) -> AsyncIterator[str]:
        """The name of the weights in `folder` (None: the base model), which stay on the servers while the block runs;
        empty when requests need none. The error of their load, of any kind."""
        folder = folder or self._base
        if folder is None:
            yield ""
            return
        turn = self._turn_of(folder)
        turn.num_users += 1
        self._advance()
        try:
            yield await asyncio.shield(turn.name)
        finally:
            turn.num_users -= 1
            if not turn.num_users and turn in self._queued:
                self._queued.remove(turn)
            self._advance()

    def _turn_of(self, folder: Path) -> _Turn:
        """The turn that a request joins."""
        for turn in (*self._begun, *self._queued):
            if turn.folder == folder and not turn.is_leaving:
                if turn in self._begun:
                    self._begun[turn] = self._begun.pop(turn)
                return turn
        self._queued.append(turn := _Turn(folder))
        return turn

    def _advance(self) -> None:
        """Load what has room, and choose what leaves for the others."""
        present = {turn.folder for turn in self._begun}  # the same weights cannot be loaded twice
        for turn in [turn for turn in self._queued if turn.folder not in present][: self._limit - len(self._begun)]:
            self._queued.remove(turn)
            self._begun[turn] = asyncio.create_task(self._serve(turn), name=f"weights {turn.folder}")
        queued = {turn.folder for turn in self._queued}

        def rank(turn: _Turn) -> tuple[bool, ...]:
            return not turn.may_leave.is_set(), turn.folder not in queued, turn.num_users > 0

        for number, turn in enumerate(sorted(self._begun, key=rank)):  # one in use stays once another is idle
            turn.is_leaving = turn.may_leave.is_set() or number < len(self._queued)
            if turn.is_leaving and not turn.num_users:
                turn.may_leave.set()

    async def _serve(self, turn: _Turn) -> None:
        """Load weights, and unload them when they may leave."""
        try:
            try:
                turn.name.set_result(await self._load(turn.folder))
            except Exception as error:  # noqa: BLE001 - every sample of this turn gets it, and the next turn begins
                turn.name.set_exception(error)
                return
            await turn.may_leave.wait()
            await self._unload(turn.folder)
        finally:
            del self._begun[turn]
            self._advance()

    def __contains__(self, folder: Path) -> bool:
        """Whether servers may read the weights in `folder`: also one that starts again loads them."""
        return any(turn.folder == folder for turn in self._begun)

    async def close(self) -> None:
        """Cancel loads and unloads, and wait for their end."""
        self._queued.clear()
        tasks = list(self._begun.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class AdapterPool(WeightPool):
    """Several adapters at once, by name."""

    def __init__(self, fleet: Fleet, limit: int) -> None:
        super().__init__(limit, None)
        self._fleet = fleet

    async def _load(self, folder: Path) -> str:
        await self._fleet.load_adapter(_adapter_name(folder), str(folder))
        return _adapter_name(folder)

    async def _unload(self, folder: Path) -> None:
        try:
            await self._fleet.unload_adapter(_adapter_name(folder))
        except ArealError as error:
            _log.warning("adapter %s was not unloaded: %s", folder, error)


class WholeWeights(WeightPool):
    """One whole checkpoint at a time, on all inference servers; its name is empty."""

    def __init__(self, fleet: Fleet, base: Path) -> None:
        """`base`: a checkpoint with the weights that the servers start with."""
        super().__init__(1, base)
        self._fleet = fleet
        self._targets: list[Path] = []
        """What servers have or may load: the last checkpoint that was loaded, and attempts since."""
        self._version = 0
        """The version of the last attempt. Two checkpoints never have the same one."""

    async def _load(self, folder: Path) -> str:
        if self._version == self._fleet.version == 0:
            self._targets = [self._base or folder]  # no gateway has given these servers anything
        if self._targets != [folder]:
            self._targets.append(folder)
            self._version += 1
            await self._fleet.update_weights(WeightUpdate(version=self._version, kind="disk", path=str(folder)))
            self._targets = [folder]
        return ""

    async def _unload(self, folder: Path) -> None:
        """The next checkpoint replaces it."""

    def __contains__(self, folder: Path) -> bool:
        return folder in self._targets


class Sampling:
    """The samples of all clients, from their requests until their results are not needed any more.

    A client waits for one result (`wait`), or for the next results of a sampling session (`completions`).
    """

    def __init__(self, fleet: Fleet, weights: WeightPool, *, context_length: int) -> None:
        """`weights`: loads trained weights into the servers. This closes it."""
        self._fleet, self._context_length = fleet, context_length
        self._weights = weights
        self.has_started = asyncio.Event()
        """The owner sets it when the fleet has started. Requests wait for it."""
        self._tasks: dict[str, asyncio.Task[bytes]] = {}  # Samples by their ids.
        self._named: Counter[Path] = Counter()  # Folders of weights -> the samples without a result that use them.
        self._queues: dict[str, CompletionQueue] = {}  # Keys are sampling sessions with their clone.

    def start(self, request_id: str, body: SampleBody, folder: Path | None) -> None:
        """Begin a sample. `folder`: of the weights; None = the base model. A wrong request fails as its result."""
        task = self._tasks[request_id] = asyncio.create_task(self._sample(request_id, body, folder), name=request_id)
        task.add_done_callback(self._ended)
        if folder is not None:
            self._named[folder] += 1
            task.add_done_callback(partial(self._release, folder))

    def uses(self, folder: Path) -> bool:
        """Whether the weights in a folder are on the servers, or a sample without a result needs them."""
        return folder in self._named or folder in self._weights

    def _release(self, folder: Path, _task: asyncio.Task[bytes]) -> None:
        self._named[folder] -= 1
        if not self._named[folder]:
            del self._named[folder]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    def _ended(self, task: asyncio.Task[bytes]) -> None:
        request_id = task.get_name()
        _noted(task)
        if self._tasks.get(request_id) is task:  # else it was cancelled, or sent again since
            self._queue(queue_of(request_id)).add(request_id)
            asyncio.get_running_loop().call_later(KEEP_S, self._expire, task)

    def _expire(self, task: asyncio.Task[bytes]) -> None:
        """Drop a result that its client has not asked for in time."""
        request_id = task.get_name()
        if self._tasks.get(request_id, task) is not task:
            return  # the client sent it again
        self._tasks.pop(request_id, None)
        if (queue := self._queues.get(queue_of(request_id))) is not None:
            queue.drop(request_id)

    async def wait(self, request_id: str, limit_s: float) -> "asyncio.Task[bytes] | None":
        """The finished sample; None when it needs longer than `limit_s`. KeyError for one that is not known."""
        task, loop = self._tasks[request_id], asyncio.get_running_loop()
        if not task.done():  # asyncio.wait does the same with three times the memory, of which there are thousands
            is_over: asyncio.Future[None] = loop.create_future()
            timer = loop.call_later(limit_s, _set, is_over)
            task.add_done_callback(partial(_set, is_over))
            await is_over
            timer.cancel()
        return task if task.done() else None

    async def completions(
        self, queue: str, cursor: int, retrieved: Sequence[str], limit_s: float
    ) -> tuple[int, list[str]]:
        """The ids of samples that have ended since the answer with `cursor`, and the next cursor. `retrieved`: samples
        whose results the client has."""
        for request_id in retrieved:
            if request_id in self._tasks and queue_of(request_id) == queue:
                del self._tasks[request_id]
        return await self._queue(queue).after(cursor, limit_s)

    def is_older(self, queue: str, cursor: int) -> bool:
        """Whether an earlier process made a cursor, or none did."""
        return cursor < self._queue(queue).first

    def size_of(self, request_id: str) -> int | None:
        """Bytes of the result of a sample that has ended; None = it has failed."""
        task = self._tasks.get(request_id)
        return None if task is None or task.cancelled() or task.exception() is not None else len(task.result())

    def _queue(self, queue: str) -> "CompletionQueue":
        return self._queues.setdefault(queue, CompletionQueue())

    def cancel(self, request_id: str) -> None:
        if (task := self._tasks.pop(request_id, None)) is not None:
            task.cancel()

    def forget(self, sampler: str) -> None:
        """Cancel all samples of a sampling session."""
        for request_id in [name for name in self._tasks if name.rpartition(":")[0] == sampler]:
            self.cancel(request_id)
        for queue in [name for name in self._queues if name.rpartition(":")[0] == sampler]:
            del self._queues[queue]

    def first_open(self, queue: str) -> int | None:
        """The lowest number of the samples of a queue; None = there are none."""
        names = (name for name in self._tasks if queue_of(name) == queue)
        return min((int(name.rpartition(":")[2]) for name in names), default=None)

    async def close(self) -> None:
        """Cancel all samples and loads, and wait for their ends."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._weights.close()

    async def _sample(self, request_id: str, body: SampleBody, folder: Path | None) -> bytes:
        """A SampleResponse."""
        requests = make_requests(body, request_id, context_length=self._context_length)
        top_k, with_logprobs = body.topk_sample_logprobs, bool(body.prompt_logprobs)
        del body  # thousands of samples wait
        if not self.has_started.is_set():
            await self.has_started.wait()
        async with self._weights.used(folder) as name:
            if name:
                requests = [replace(request, adapter=name) for request in requests]
            answers = await self._generated(requests)
            rescored: list[GenerationResponse] = []
            if top_k:  # likeliest tokens that are wanted at each place of an answer
                rescored = await self._generated([*map(partial(rescoring, top_k), requests, answers)])
        return encode_sample(answers, rescored, with_logprobs=with_logprobs)

    def _generated(self, requests: list[GenerationRequest]) -> Awaitable[list[GenerationResponse]]:
        return gather_or_cancel([self._fleet.agenerate(request) for request in requests])


def _adapter_name(folder: Path) -> str:
    return f"{folder.parent.parent.name[:40]}-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"


def _noted(future: "asyncio.Future[Any]") -> None:
    """Retrieve the error: that nobody asks for it is no reason for a traceback in the log."""
    if not future.cancelled():
        future.exception()


def _set(future: "asyncio.Future[None]", *_: object) -> None:
    if not future.done():
        future.set_result(None)


def queue_of(request_id: str) -> str:
    """The queue in which a client learns of the end of a sample: of its sampling session and the client's clone."""
    sampler, _, number = request_id.rpartition(":")
    return f"{sampler}:{int(number) // CLONE}"


class CompletionQueue:
    """The ids of samples that have ended, until the client has read them. Cursors grow, also over restarts."""

    def __init__(self) -> None:
        self.first = self._last = int(time.time() * 1e6)
        self._ids: deque[str] = deque()
        self._has_more = asyncio.Event()

    def add(self, request_id: str) -> None:
        self._ids.append(request_id)
        self._last += 1
        self._has_more.set()

    def drop(self, request_id: str) -> None:
        """Forget an id, if it is the oldest: a client that asks for each result never reads the queue."""
        if self._ids and self._ids[0] == request_id:
            self._ids.popleft()

    async def after(self, cursor: int, limit_s: float) -> tuple[int, list[str]]:
        while self._ids and self._last - len(self._ids) < cursor:
            self._ids.popleft()
        if not self._ids and limit_s:
            self._has_more.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_more.wait(), limit_s)
        return self._last, list(self._ids)


def make_requests(body: SampleBody, group_id: str, *, context_length: int) -> list[GenerationRequest]:
    """The requests to the fleet, one for each sample. RequestError for settings that no server has."""
    prompt, settings = body.prompt.token_ids, body.sampling_params
    if body.prompt_logprobs_last_n is not None and not 1 <= body.prompt_logprobs_last_n < len(prompt):
        raise invalid("prompt_logprobs_last_n must be between 1 and the prompt's tokens - 1")
    room = context_length - len(prompt) - bool(body.topk_sample_logprobs)
    if room < 1:
        text = f"the prompt has {len(prompt)} tokens, and prompt and answer at most {context_length}"
        raise RequestError(text, code="request.too_long")
    stop: list[str | int] = [settings.stop] if isinstance(settings.stop, str) else [*(settings.stop or ())]
    gconfig = GenerationHyperparameters(
        max_new_tokens=min(settings.max_tokens or room, room),
        max_tokens=context_length,
        greedy=settings.temperature == 0,
        temperature=settings.temperature or 1.0,
        top_p=settings.top_p,
        top_k=100_000_000 if settings.top_k < 1 else settings.top_k,
        stop_token_ids=[token for token in stop if isinstance(token, int)],
        stop=[text for text in stop if isinstance(text, str)] or None,
    )
    wants_prompt = body.prompt_logprobs or body.topk_prompt_logprobs or body.prompt_alt_tokens_k
    scoring = None
    if wants_prompt or body.target_prompt_logprobs is not None:
        last = body.prompt_logprobs_last_n
        scoring = PromptScoring(
            first=1 if last is None else len(prompt) - last,
            top_k=body.topk_prompt_logprobs,
            num_draws=body.prompt_alt_tokens_k,
            targets=_targets(body.target_prompt_logprobs),
        )
    return [
        GenerationRequest(
            request_id=f"{group_id[-40:]}-{number:04d}",
            input_ids=prompt,
            gconfig=gconfig,
            group_id=group_id,
            seed=None if settings.seed is None else settings.seed + number,
            raw_logprobs=True,
            only_stops=settings.stop is not None,
            scoring=scoring if number == 0 else None,
        )
        for number in range(body.num_samples)
    ]


def rescoring(top_k: int, request: GenerationRequest, answer: GenerationResponse) -> GenerationRequest:
    """The request for the likeliest tokens at each place of an answer, which becomes part of a prompt."""
    return replace(
        request,
        request_id=f"{request.request_id[:-4]}{MAX_SAMPLES + int(request.request_id[-4:])}",
        input_ids=joined("i", (request.input_ids, answer.output_ids)),
        gconfig=replace(request.gconfig, max_new_tokens=1),
        only_stops=True,
        scoring=PromptScoring(first=len(request.input_ids), top_k=top_k),
    )


def _targets(tensor: dict[str, Any] | None) -> tuple[tuple[int, ...], ...]:
    """The rows of target_prompt_logprobs, given as a list or base64 of int64 with a shape."""
    if tensor is None:
        return ()
    try:
        data, shape = tensor["data"], tensor["shape"]
        values = np.frombuffer(base64.b64decode(data), "<i8") if isinstance(data, str) else np.asarray(data, np.int64)
        return tuple(tuple(row) for row in values.reshape(shape).tolist())
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise invalid(f"target_prompt_logprobs has no rows of token ids: {error}") from error
