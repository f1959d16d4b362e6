"""Answers to sampling requests: from the JSON body to requests to the fleet, and back to a message of the SDK."""

import asyncio
import base64
import contextlib
import hashlib
import time
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field

from areal.api.columns import Packed, joined
from areal.api.config.rollout import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse, PromptScoring, WeightUpdate
from areal.api.errors import ArealError, RequestError
from areal.api.metrics import gather_or_cancel
from areal.fleet.fleet import Fleet
from areal.observe.log import get_logger
from areal.serve.wire import SampledAnswer, encode_sample

_log = get_logger("serve")
MAX_SAMPLES, MAX_TOP = 1024, 1024
KEEP_S = 600.0
"""The result of a sample is kept for this time."""
CLONE = 1_000_000_000
"""A client that is a clone of another one counts its samples from a multiple of this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The base of JSON bodies. Fields that the SDK may add are ignored."""

    __pydantic_config__ = ConfigDict(extra="ignore", strict=False, allow_inf_nan=False)


Number = Annotated[int, Field(ge=0, lt=2**63)]
"""A number that clients count or choose."""
TopK = Annotated[int, Field(ge=0, le=MAX_TOP)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk(Body):
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(Body):
    chunks: list[TextChunk]

    @property
    def token_ids(self) -> Packed[int]:
        try:
            return Packed(array("i", [token for chunk in self.chunks for token in chunk.tokens]))
        except OverflowError as error:
            raise RequestError(f"the prompt has no token ids: {error}", code="request.invalid_field") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings(Body):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Number | None = None
    stop: str | list[str] | list[int] | None = None
    """None: the end token of the model. A list replaces it; an empty one: nothing ends an answer."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBody(Body):
    """Fields of /asample."""

    sampling_session_id: str
    seq_id: Number
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    prompt: Prompt
    sampling_params: SampleSettings = field(default_factory=SampleSettings)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: TopK = 0
    topk_sample_logprobs: TopK = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: TopK = 0


class AdapterPool:
    """The adapters on the inference servers: loaded at the first request, the one unused longest leaves for others."""

    def __init__(self, fleet: Fleet, limit: int) -> None:
        self._fleet, self._limit = fleet, limit
        self._loaded: dict[str, asyncio.Task[None]] = {}  # Name -> the load, in the order of the last use.
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._users: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def used(self, folder: Path | None) -> AsyncIterator[str]:
        """The name of the adapter in `folder`, which stays on the servers while the block runs; empty for None.

        Waits for room while all adapters are in use.
        """
        if folder is None:
            yield ""
            return
        name = _adapter_name(folder)
        async with self._changed:
            while name not in self._loaded:
                if name not in self._leaving and len(self._loaded) + len(self._leaving) < self._limit:
                    self._loaded[name] = asyncio.create_task(self._fleet.load_adapter(name, str(folder)), name=name)
                    break
                if name not in self._leaving and not self._leaving:
                    self._let_leave()
                await self._changed.wait()
            task = self._loaded[name] = self._loaded.pop(name)
            self._users[name] += 1
        try:
            await asyncio.shield(task)
            yield name
        except BaseException:
            if task.done() and (task.cancelled() or task.exception() is not None):
                self._loaded.pop(name, None)
            raise
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
            async with self._changed:
                self._changed.notify_all()

    def __contains__(self, folder: Path) -> bool:
        """Whether servers may read the adapter in `folder`: also one that starts again loads it."""
        return (name := _adapter_name(folder)) in self._loaded or name in self._leaving

    async def close(self) -> None:
        """Cancel loads and unloads, and wait for their end."""
        tasks = [*self._loaded.values(), *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _let_leave(self) -> None:
        """Unload the adapter that was not used for the longest time, if one has no user."""
        name = next((name for name in self._loaded if name not in self._users), None)
        if name is not None:
            task = self._loaded.pop(name)
            self._leaving[name] = asyncio.create_task(self._unload(name, task), name=f"unload {name}")

    async def _unload(self, name: str, load: asyncio.Task[None]) -> None:
        try:
            await load
            await self._fleet.unload_adapter(name)
        except ArealError as error:
            _log.warning("adapter %s was not unloaded: %s", name, error)
        finally:
            async with self._changed:
                del self._leaving[name]
                self._changed.notify_all()


@dataclass(slots=True, eq=False)
class _Turn:
    """Samples that need the same weights."""

    folder: Path
    is_loaded: "asyncio.Future[None]"
    num_users: int = 0


class WholeWeights:
    """One whole checkpoint at a time on all inference servers. Requests for one checkpoint form a turn; a request joins
    a queued turn of its checkpoint, or the running turn if none is queued. Turns run in the order of their first
    requests."""

    def __init__(self, fleet: Fleet, base: Path) -> None:
        """`base`: a checkpoint with the weights that the servers start with."""
        self._fleet, self._base = fleet, base
        self._loaded: Path | None = None
        """What the servers have; None = what an earlier gateway gave them, or a part of them."""
        self._targets: list[Path] = []
        """What a server that starts again may load: the last checkpoint that was loaded, and attempts since."""
        self._version = 0
        """Of the last attempt. Two checkpoints never have the same one."""
        self._turns: deque[_Turn] = deque()
        self._load: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def used(self, folder: Path | None) -> AsyncIterator[str]:
        """All servers have the checkpoint in `folder` (None: the base model) while the block runs. Yields "".
        Waits for earlier turns. ArealError when no server could load the checkpoint."""
        turn = self._join(folder or self._base)
        try:
            await asyncio.shield(turn.is_loaded)
            yield ""
        finally:
            turn.num_users -= 1
            if not turn.num_users:
                is_running = turn is self._turns[0]
                self._turns.remove(turn)
                if is_running and self._turns:
                    self._begin()

    def _join(self, folder: Path) -> _Turn:
        for turn in self._turns:
            if turn.folder == folder and (turn is not self._turns[0] or len(self._turns) == 1):
                break
        else:
            turn = _Turn(folder, asyncio.get_running_loop().create_future())
            turn.is_loaded.add_done_callback(_noted)
            self._turns.append(turn)
            if len(self._turns) == 1:
                self._begin()
        turn.num_users += 1
        return turn

    def _begin(self) -> None:
        """Start the load of the first turn, after that of the turn before, which also runs without requests."""
        self._load = asyncio.create_task(self._run(self._turns[0], self._load), name="load weights")

    async def _run(self, turn: _Turn, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await asyncio.wait([before])
        if self._version == self._fleet.version == 0:
            self._loaded = self._base  # no gateway has given these servers anything
        try:
            if self._loaded != turn.folder:
                self._loaded = None
                self._targets.append(turn.folder)
                self._version += 1
                update = WeightUpdate(version=self._version, kind="disk", path=str(turn.folder))
                await self._fleet.update_weights(update)
                self._loaded, self._targets = turn.folder, [turn.folder]
        except Exception as error:  # noqa: BLE001 - every sample of this turn gets it, and the next turn begins
            turn.is_loaded.set_exception(error)
        else:
            turn.is_loaded.set_result(None)

    def __contains__(self, folder: Path) -> bool:
        """Whether servers may read the checkpoint in `folder`: also one that starts again loads it."""
        return folder in self._targets

    async def close(self) -> None:
        """Cancel the load, and wait for its end."""
        if self._load is not None:
            self._load.cancel()
            await asyncio.gather(self._load, return_exceptions=True)


class Sampling:
    """The samples of all clients, from their requests until their results are not needed any more.

    A client waits for one result (`wait`), or for the next results of a sampling session (`completions`).
    """

    def __init__(self, fleet: Fleet, weights: AdapterPool | WholeWeights, *, context_length: int) -> None:
        """`weights`: loads trained weights into the servers. This closes it."""
        self._fleet, self._context_length = fleet, context_length
        self._weights = weights
        self.has_started = asyncio.Event()
        """The owner sets it when the fleet has started. Requests wait for it."""
        self._tasks: dict[str, asyncio.Task[bytes]] = {}  # Samples by their ids.
        self._named: Counter[Path] = Counter()  # Folders of weights -> the samples without a result that use them.
        self._queues: dict[str, CompletionQueue] = {}  # By the sampling session with its clone.

    def start(self, request_id: str, body: SampleBody, folder: Path | None) -> None:
        """Begin a sample. `folder`: of the weights; None = the base model. A wrong request fails as its result."""
        try:
            requests = make_requests(body, request_id, context_length=self._context_length)
        except RequestError as error:
            work = _failed(error)
        else:
            work = self._sample(requests, folder, body.topk_sample_logprobs, with_logprobs=bool(body.prompt_logprobs))
        task = self._tasks[request_id] = asyncio.create_task(work, name=request_id)
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
        if not task.cancelled():
            task.exception()  # a client that never asks for it is no reason for a traceback in the log
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

    async def _sample(
        self, requests: list[GenerationRequest], folder: Path | None, top_k: int, *, with_logprobs: bool
    ) -> bytes:
        """A SampleResponse. `top_k`: likeliest tokens that are wanted at each place of an answer."""
        if not self.has_started.is_set():
            await self.has_started.wait()
        async with self._weights.used(folder) as name:
            if name:
                requests = [replace(request, adapter=name) for request in requests]
            answers = await self._generated(requests)
            rescored: list[GenerationResponse] = []
            if top_k:
                pairs = zip(requests, answers, strict=True)
                again = [rescoring(request, answer, top_k) for request, answer in pairs]
                rescored = await self._generated(again)
        return encoded(answers, rescored, with_logprobs=with_logprobs)

    def _generated(self, requests: list[GenerationRequest]) -> Awaitable[list[GenerationResponse]]:
        return gather_or_cancel([self._fleet.agenerate(request) for request in requests])


def _adapter_name(folder: Path) -> str:
    return f"{folder.parent.parent.name[:40]}-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"


def _noted(future: "asyncio.Future[None]") -> None:
    """Retrieve the error, which every request gets: asyncio logs a traceback for one that nobody retrieves."""
    if not future.cancelled():
        future.exception()


def _set(future: "asyncio.Future[None]", *_: object) -> None:
    if not future.done():
        future.set_result(None)


async def _failed(error: RequestError) -> bytes:
    raise error


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
        raise RequestError(
            "prompt_logprobs_last_n must be between 1 and the prompt's tokens - 1", code="request.invalid_field"
        )
    room = context_length - len(prompt) - bool(body.topk_sample_logprobs)
    if room < 1:
        text = f"the prompt has {len(prompt)} tokens, and prompt and answer at most {context_length}"
        raise RequestError(text, code="request.too_long")
    stop = settings.stop
    gconfig = _gconfig(
        min(settings.max_tokens or room, room), context_length, settings.temperature, settings.top_p, settings.top_k,
        stop if isinstance(stop, str) else tuple(stop or ()),
    )  # fmt: skip
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
            only_stops=stop is not None,
            scoring=scoring if number == 0 else None,
        )
        for number in range(body.num_samples)
    ]


@lru_cache(maxsize=1024)
def _gconfig(
    max_new_tokens: int,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    stop: str | tuple[str | int, ...],
) -> GenerationHyperparameters:
    """The settings that most samples of a client have in common. `stop`: token ids and strings that end an answer."""
    listed = (stop,) if isinstance(stop, str) else stop
    return GenerationHyperparameters(
        max_new_tokens=max_new_tokens,
        max_tokens=max_tokens,
        greedy=temperature == 0,
        temperature=temperature or 1.0,
        top_p=top_p,
        top_k=100_000_000 if top_k < 1 else top_k,
        stop_token_ids=[token for token in listed if isinstance(token, int)],
        stop=[text for text in listed if isinstance(text, str)] or None,
    )


def rescoring(request: GenerationRequest, answer: GenerationResponse, top_k: int) -> GenerationRequest:
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
        text = f"target_prompt_logprobs has no rows of token ids: {error}"
        raise RequestError(text, code="request.invalid_field") from error


def encoded(
    answers: Sequence[GenerationResponse], rescored: Sequence[GenerationResponse], *, with_logprobs: bool
) -> bytes:
    """The SampleResponse of these answers, in order. `rescored`: what they are as prompts, as far as that is wanted."""
    samples = [
        SampledAnswer(
            token_ids=list(answer.output_ids),
            logprobs=list(answer.output_logprobs),
            is_cut=answer.stop_reason == "length",
        )
        for answer in answers
    ]
    num_prompt = len(answers[0].input_ids)
    tops = [answer.prompt_scores.top[num_prompt:] for answer in rescored if answer.prompt_scores is not None]
    return encode_sample(
        samples,
        tops,
        scores=answers[0].prompt_scores,
        with_logprobs=with_logprobs,
        num_cached=answers[0].num_cached_tokens,
    )
