"""Answers to sampling requests: from the JSON body to requests to the fleet, and back to a message of the SDK."""

import asyncio
import base64
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse, PromptScoring
from areal.api.errors import ArealError, RequestError
from areal.api.metrics import gather_or_cancel
from areal.fleet.fleet import Fleet
from areal.observe.log import get_logger
from areal.serve.wire import SampledAnswer, encode_sample

_log = get_logger("serve")
MAX_SAMPLES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The base of JSON bodies. Fields that the SDK may add are ignored."""

    __pydantic_config__ = ConfigDict(extra="ignore", strict=False, allow_inf_nan=False)


Number = Annotated[int, Field(ge=0, lt=2**63)]
"""A number that clients count or choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk(Body):
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(Body):
    chunks: list[TextChunk]

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


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
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0


class AdapterPool:
    """The adapters on the inference servers: loaded at the first request, the one unused longest leaves for others."""

    def __init__(self, fleet: Fleet, limit: int) -> None:
        self._fleet, self._limit = fleet, limit
        self._loaded: dict[str, asyncio.Task[None]] = {}
        """Name -> the load, in the order of the last use."""
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._users: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def used(self, folder: Path) -> AsyncIterator[str]:
        """The name of the adapter in `folder`, which stays on the servers while the block runs.

        Waits for room while all adapters are in use.
        """
        name = f"{folder.parent.parent.name[:40]}-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
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


class Sampling:
    """Generates answers."""

    def __init__(self, fleet: Fleet, *, max_adapters: int, context_length: int) -> None:
        self._fleet, self._context_length = fleet, context_length
        self._adapters = AdapterPool(fleet, max_adapters)
        self.has_started = asyncio.Event()
        """The owner sets it when the fleet has started. Requests wait for it."""

    async def sample(self, body: SampleBody, adapter: Path | None, group_id: str) -> bytes:
        """A SampleResponse. `adapter`: its folder; None = the base model."""
        await self.has_started.wait()
        if adapter is None:
            return await self._sample(body, "", group_id)
        async with self._adapters.used(adapter) as name:
            return await self._sample(body, name, group_id)

    async def close(self) -> None:
        """To call after the last sample."""
        await self._adapters.close()

    async def _sample(self, body: SampleBody, adapter: str, group_id: str) -> bytes:
        requests = make_requests(body, adapter, group_id, context_length=self._context_length)
        answers = await gather_or_cancel([self._fleet.agenerate(request) for request in requests])
        return encoded(body, answers)


def make_requests(body: SampleBody, adapter: str, group_id: str, *, context_length: int) -> list[GenerationRequest]:
    """The requests to the fleet, one for each sample. RequestError for settings that no server has."""
    prompt, settings = body.prompt.token_ids, body.sampling_params
    if body.topk_sample_logprobs:
        text = "topk_sample_logprobs is not supported: ask for the log-probabilities of the tokens alone"
        raise RequestError(text, code="request.invalid_field")
    if body.prompt_logprobs_last_n is not None and not 1 <= body.prompt_logprobs_last_n < len(prompt):
        raise RequestError(
            "prompt_logprobs_last_n must be between 1 and the prompt's tokens - 1", code="request.invalid_field"
        )
    room = context_length - len(prompt)
    if room < 1:
        text = f"the prompt has {len(prompt)} tokens, and prompt and answer at most {context_length}"
        raise RequestError(text, code="request.too_long")
    stops, words = _stops(settings.stop)
    gconfig = GenerationHyperparameters(
        max_new_tokens=min(settings.max_tokens or room, room),
        max_tokens=context_length,
        greedy=settings.temperature == 0,
        temperature=settings.temperature or 1.0,
        top_p=settings.top_p,
        top_k=100_000_000 if settings.top_k < 1 else settings.top_k,
        stop_token_ids=stops,
        stop=words or None,
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
            adapter=adapter,
            raw_logprobs=True,
            only_stops=settings.stop is not None,
            scoring=scoring if number == 0 else None,
        )
        for number in range(body.num_samples)
    ]


def _stops(stop: str | list[str] | list[int] | None) -> tuple[list[int], list[str]]:
    """Token ids and strings that end an answer."""
    listed = [stop] if isinstance(stop, str) else stop or []
    return [one for one in listed if isinstance(one, int)], [one for one in listed if isinstance(one, str)]


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


def encoded(body: SampleBody, answers: list[GenerationResponse]) -> bytes:
    """The SampleResponse of these answers, in order."""
    samples = [
        SampledAnswer(
            token_ids=list(one.output_ids), logprobs=list(one.output_logprobs), is_cut=one.stop_reason == "length"
        )
        for one in answers
    ]
    return encode_sample(
        samples,
        scores=answers[0].prompt_scores,
        with_logprobs=bool(body.prompt_logprobs),
        num_cached=answers[0].num_cached_tokens,
    )
