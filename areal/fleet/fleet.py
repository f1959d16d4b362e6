"""Generation over many replicas: answers survive interruptions, dead replicas, and a trainer that recovers.

`agenerate` waits for a serving replica (until a health check or a weight update ends), for the version of its newest
token (until a recovered trainer has reached it again) and for tokens (until the server answers or dies, or
request_timeout). `areal.fleet.weight_updater` states what a weight update waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from operator import attrgetter
from typing import Any

import numpy as np

from areal.api.columns import ExpertShape, Packed, RoutedExperts, Runs, RunsBuilder, append, joined, to_runs
from areal.api.config.rollout import GenerationHyperparameters, InferenceEngineConfig
from areal.api.data import (
    MAX_LOGPROB,
    GenerationRequest,
    GenerationResponse,
    PromptScores,
    ScoredRow,
    StopReason,
    TokenChunk,
    TokenScores,
)
from areal.api.engine import PinnedReplica
from areal.api.errors import ArealError, RequestError, ServerUnavailable
from areal.api.metrics import gather_or_cancel
from areal.data.image_files import RunImages
from areal.fleet.older_policies import OlderPolicies
from areal.fleet.replica import NO_VERSION, AnswerForm, PartChunk, Replica, ReplicaFactory, RequestLimits
from areal.fleet.replica_set import Event, ReplicaSet, Slot, State, Weights
from areal.fleet.weight_updater import WeightUpdater
from areal.observe.log import get_logger
from areal.system.discovery import NameRegistry
from areal.system.process import raise_open_file_limit

_log = get_logger(__name__)

# ----------------------------------------------------------------------------------------------------------------------
# The rules by which an answer generated in parts, on several replicas or under several versions, is one answer.
#
# Token limits apply to the whole answer: each part may add what is left. An answer never continues under an older
# policy than the one that generated its newest token.


def token_budget(gconfig: GenerationHyperparameters, num_prompt_tokens: int) -> int:
    """Maximum tokens of the whole answer. RequestError when the prompt leaves no room."""
    if num_prompt_tokens == 0:
        raise RequestError("the prompt is empty: a request needs at least one token id", code="request.invalid_field")
    budget = min(gconfig.max_new_tokens, gconfig.max_tokens - num_prompt_tokens)
    if budget <= 0:
        raise RequestError(
            f"a prompt of {num_prompt_tokens} tokens leaves no room for an answer under "
            f"gconfig.max_tokens={gconfig.max_tokens}: raise it or shorten the prompt",
            code="request.too_long",
        )
    return budget


class Answer:
    """One answer while it is generated: the tokens so far, and the part that a replica is to add now."""

    def __init__(self, request: GenerationRequest, form: AnswerForm, pin: Pin | None = None) -> None:
        """`pin`: the replica that gives all of it."""
        self.request = request
        self.pin = pin
        self.part = request
        """What a replica is asked for now: all of the answer, or the rest after an interruption."""
        self.call: Call | None = None
        """The call that the part belongs to; None when it has ended."""
        self.num_parts = 0
        """Requested so far."""
        self._num_cached = 0
        self.num_failures = 0
        self.avoid = ""
        """The replica that failed last."""
        self.stop_reason: StopReason | None = None
        """None while the answer is not complete."""
        self._form = form
        self._experts = None if form.experts is None else RoutedExperts(form.experts, b"")
        self._scores: PromptScores | None = None
        self._vocab_size = 2**31
        """Of the servers, once `check` knows it."""
        self._budget = token_budget(request.gconfig, len(request.input_ids))
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._versions: RunsBuilder[int] = RunsBuilder()
        self._replicas: list[str] = []
        self.grown: asyncio.Event | None = None
        """Set when tokens were added, for a caller that takes them while the answer is generated."""
        self._num_taken = 0
        self._is_withdrawn = False
        """Tokens that were taken are no part of the answer any more."""
        self._part_start = 0
        """Number of tokens when the current part was requested."""
        self._started_s = self._ended_s = time.perf_counter()
        self._first_token_s: float | None = None

    @property
    def is_short(self) -> bool:
        """No part of it is streamed."""
        return self._budget <= self._form.stream_interval

    @property
    def has_new_tokens(self) -> bool:
        """Whether the current part has added some."""
        return len(self._token_ids) > self._part_start

    @property
    def newest_version(self) -> int | None:
        """The policy version of the newest token, None before the first."""
        return self._versions.values[-1] if self._versions.values else None

    def check(self, limits: RequestLimits) -> None:
        """RequestError when the answer exceeds these limits.

        Such a request ends some servers, and others silently shorten its answer.
        """
        gconfig, num_prompt = self.request.gconfig, len(self.request.input_ids)
        self._vocab_size = vocab_size = limits.vocab_size
        context = limits.context_length
        _check_ids(self.request.input_ids, vocab_size, "the prompt", "use the tokenizer of the served model")
        if gconfig.stop_token_ids:
            _check_ids(gconfig.stop_token_ids, vocab_size, "gconfig.stop_token_ids", "remove it")
        if self._form.vision is not None:
            self._form.vision.collapsed(self.request.input_ids, self.request.images)
        elif self.request.images:
            text = "the prompt has images, and the served model takes none: use a model for images and text"
            raise RequestError(text, code="request.no_images")
        if num_prompt >= context:
            raise RequestError(
                f"a prompt of {num_prompt} tokens exceeds the servers' context length of {context}: shorten it",
                code="request.too_long",
            )
        if num_prompt + self._budget > context:
            raise RequestError(
                f"prompt ({num_prompt} tokens) and answer (up to {self._budget}) exceed the servers' context length: "
                f"set gconfig.max_new_tokens to at most {context - num_prompt}, or gconfig.max_tokens={context}",
                code="request.too_long",
            )

    def next_part(self, replica_name: str) -> GenerationRequest:
        """The part that `replica_name` is to add now."""
        request, gconfig, done = self.request, self.request.gconfig, len(self._token_ids)
        if not self._replicas or self._replicas[-1] != replica_name:
            self._replicas.append(replica_name)
        self.num_parts += 1
        self._part_start = done
        left = self._budget - done
        least = min(max(gconfig.min_new_tokens - done, 0), left)
        if (gconfig.max_new_tokens, gconfig.min_new_tokens) != (left, least):
            gconfig = dataclasses.replace(gconfig, max_new_tokens=left, min_new_tokens=least)
        elif self.num_parts == 1:
            return request
        self.part = dataclasses.replace(
            request,
            request_id=f"{request.request_id}-{self.num_parts % 1000:03d}",
            input_ids=joined("i", (request.input_ids, Packed(self._token_ids))) if done else request.input_ids,
            gconfig=gconfig,
            num_prior_output_tokens=done,
            num_known_experts=0 if self._experts is None else len(self._experts),
            scoring=None if self._scores else request.scoring,
        )
        return self.part

    def add(self, chunk: PartChunk) -> None:
        """Append tokens of the current part.

        ServerUnavailable when the replica breaks the protocol or returns to an older policy: the tokens from there on
        are not appended.
        """
        token_ids, logprobs, versions, finish_reason, part_versions, _, num_cached, scores = chunk
        if self.num_parts == 1:
            self._num_cached = num_cached
        count, done = len(token_ids), len(self._token_ids)
        if len(logprobs) != count or len(versions) != count:
            others = f"{len(logprobs)} log-probabilities and {len(versions)} versions"
            raise self._broken(f"sent {count} tokens with {others}")
        if done + count > self._budget:
            raise self._broken("sent more tokens than requested")
        try:
            append(self._token_ids, token_ids)
            append(self._logprobs, logprobs)
        except (TypeError, OverflowError) as error:
            del self._token_ids[done:]
            raise self._broken(f"sent numbers of the wrong type or range: {error}") from error
        if self._first_token_s is None and count:
            self._first_token_s = time.perf_counter()
        if part_versions is None:
            self._add_versions(to_runs(versions))
        else:
            num_in_part = done + count - self._part_start
            if len(part_versions) != num_in_part:
                self._cut(self._part_start)  # no token of the part has a known version
                raise self._broken(f"reported {len(part_versions)} versions for a part of {num_in_part} tokens")
            self._versions.cut(self._part_start)
            self._add_versions(to_runs(part_versions))
        if scores is not None:
            self._scores = scores.cut(len(self.request.input_ids))
        if finish_reason is not None:
            if self._experts is not None:
                self._experts = self._with_experts(self._experts, chunk)
            if finish_reason != "abort":
                self.stop_reason = finish_reason
        if self.grown is not None:
            self.grown.set()

    def _add_versions(self, versions: Runs[int]) -> None:
        """The versions of further tokens. Tokens from the first version that decreases are dropped."""
        done = self._versions
        if done.extend_last(versions):
            return
        start = 0
        for version, end in zip(versions.values, versions.ends, strict=True):
            if done.values and version < done.values[-1]:
                newest = done.values[-1]
                self._cut(len(done))
                raise self._broken(f"continued under version {version}, after version {newest}")
            done.add(version, end - start)
            start = end

    def _with_experts(self, known: RoutedExperts, last: PartChunk) -> RoutedExperts:
        """`known` with the experts of the last chunk of a part. They belong to the pass that generated the next token:
        later parts, which compute earlier tokens again, do not replace them."""
        reported, is_aborted = last.routed_experts, last.finish_reason == "abort"
        missing = len(self.request.input_ids) + len(self._token_ids) - 1 - len(known)
        if reported is None and is_aborted:
            return known
        if reported is None or (len(reported) < missing and not is_aborted):
            count = 0 if reported is None else len(reported)
            raise self._broken(f"sent routed experts of {count} of {missing} tokens")
        try:
            return RoutedExperts.joined([known, reported[:missing]])
        except ValueError as error:
            raise self._broken(f"sent unusable routed experts: {error}") from error

    def _all_experts(self, known: RoutedExperts) -> RoutedExperts:
        """One row for each token but the last; unknown for parts that ended without a record."""
        count = len(self.request.input_ids) + len(self._token_ids) - 1
        rest = RoutedExperts.unknown(known.shape, count - len(known))
        return RoutedExperts.joined([known[:count], rest])

    def _cut(self, num_tokens: int) -> None:
        self._is_withdrawn = self._is_withdrawn or num_tokens < self._num_taken
        del self._token_ids[num_tokens:]
        del self._logprobs[num_tokens:]
        self._versions.cut(num_tokens)
        if self._experts is not None:
            self._experts = self._experts[: len(self.request.input_ids) + num_tokens - 1]

    def _broken(self, text: str) -> ServerUnavailable:
        return ServerUnavailable(f"{self._replicas[-1]} {text}", code="server.unreadable_answer")

    def end_part(self, highest_version: int) -> str:
        """A part that was aborted or failed may have completed the answer nevertheless.

        Returns why the part has numbers that no trainer can use, and drops its tokens; empty: it has none.
        """
        self._ended_s = time.perf_counter()
        if problem := self._unusable(self._part_start, highest_version):
            self._cut(max(self._part_start, self._num_taken))
            if self._unusable(self._part_start, highest_version):
                self._cut(self._part_start)
            self.stop_reason = None
            return f"{self._replicas[-1]} sent {problem}"
        gconfig, token_ids = self.request.gconfig, self._token_ids
        if self.stop_reason is None:
            may_stop = token_ids and not gconfig.ignore_eos and len(token_ids) >= gconfig.min_new_tokens
            if len(token_ids) >= self._budget:
                self.stop_reason = "length"
            elif may_stop and token_ids[-1] in gconfig.stop_token_ids:
                self.stop_reason = "stop"
        return ""

    def _unusable(self, start: int, highest_version: int) -> str:
        """Why no trainer can use the tokens from `start` on; empty: it can."""
        versions = self._versions.values
        ids, logprobs = (
            (self._token_ids[start:], self._logprobs[start:]) if start else (self._token_ids, self._logprobs)
        )
        if len(ids) > _SHORT:  # NaN compares false; a negative id is a large number
            token_numbers, numbers = np.frombuffer(ids, "u4"), np.frombuffer(logprobs, "f4")
            are_ids = np.maximum.reduce(token_numbers) < self._vocab_size
            are_logprobs = np.maximum.reduce(numbers) <= MAX_LOGPROB and np.minimum.reduce(numbers) > -np.inf
            del token_numbers, numbers  # an array with a view cannot be cut
        else:
            are_ids = not ids or (min(ids) >= 0 and max(ids) < self._vocab_size)
            are_logprobs = not logprobs or (max(logprobs) <= MAX_LOGPROB and sum(logprobs) > -math.inf)
        if not are_ids:
            return f"a token id outside of its vocabulary (0 to {self._vocab_size - 1})"
        if not are_logprobs:
            return "a log-probability that is positive or not finite"
        if ids and not NO_VERSION <= versions[0] <= versions[-1] <= highest_version:
            return f"versions {versions[0]} to {versions[-1]}, and {highest_version} was the highest so far"
        return ""

    def take(self, highest_version: int) -> TokenChunk | None:
        """The usable tokens since the last call; None without any. They stay part of the answer when its part fails.

        ServerUnavailable when a server has withdrawn tokens that were taken.
        """
        if self._is_withdrawn:
            raise self._broken("withdrew tokens of an answer that is streamed")
        start, end = self._num_taken, len(self._token_ids)
        if start == end or self._unusable(start, highest_version):
            return None
        self._num_taken = end
        versions = self._versions.column()[start:end]
        return TokenChunk(Packed(self._token_ids[start:]), Packed(self._logprobs[start:]), versions)

    def response(self) -> GenerationResponse:
        first_s = self._ended_s if self._first_token_s is None else self._first_token_s
        return GenerationResponse(
            request_id=self.request.request_id,
            input_ids=self.request.input_ids,
            output_ids=Packed(self._token_ids),
            output_logprobs=Packed(self._logprobs),
            output_versions=self._versions.column(),
            stop_reason=self.stop_reason or "interrupted",
            replicas=self._replicas,
            routed_experts=None if self._experts is None else self._all_experts(self._experts),
            num_interruptions=self.num_parts - 1,
            latency_s=self._ended_s - self._started_s,
            ttft_s=first_s - self._started_s,
            num_cached_tokens=self._num_cached,
            prompt_scores=self._scores,
        )


_SHORT = 32
"""Up to this number of tokens, the functions of Python are faster than those of numpy."""


def _check_ids(ids: Sequence[int], vocab_size: int, where: str, fix: str) -> None:
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        text = f"{where} has token id {wrong}, outside of the servers' vocabulary (0 to {vocab_size - 1}): {fix}"
        raise RequestError(text, code="request.token_id")


# ----------------------------------------------------------------------------------------------------------------------
# Parts that are requested in the same turn of the event loop are one call of a replica that takes groups.
#
# Streamed parts share a call with those of the same prompt; short ones, which are not streamed, also with those of
# other prompts: up to `Replica.max_group`, which begin in one step of the server. Those of several calls begin in
# several steps, each of which computes prompts beside the answers before.

MAX_MERGED_TOKENS = 4096
"""Prompt tokens of a call for several prompts. A server accepts more."""


_settings_of = attrgetter(
    "gconfig", "adapter", "images", "num_prior_output_tokens", "num_known_experts", "raw_logprobs", "only_stops",
    "scoring",
)  # fmt: skip
"""What all parts of a call have in common."""


class Round:
    """Parts of answers that one caller waits for together."""

    def __init__(self, size: int) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_left = size
        self._error: ArealError | None = None

    def end(self, error: ArealError | None) -> None:
        """One part has ended. After the last the caller gets the first error, or a refusal rather than a failure."""
        self._num_left -= 1
        if error is not None and (self._error is None or isinstance(error, RequestError)):
            self._error = error
        if self._num_left or self.ended.done():
            return
        if self._error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(self._error)


class Call:
    """One call of a replica, for the parts of one answer or more."""

    def __init__(self, replica: Replica, part: GenerationRequest, is_streamed: bool) -> None:
        self.replica = replica
        self.key = (replica, part.group_id if is_streamed else "")
        """Parts with another key are in another call."""
        self.asked: list[tuple[Answer, Round]] = []
        self.num_left = 0
        """Parts that have not ended."""
        self.is_sent = self.has_failed = False
        self.is_streamed = is_streamed
        self.task: asyncio.Task[None] | None = None
        self._first = part
        self._num_tokens = 0
        """Tokens of the prompts."""

    def takes(self, part: GenerationRequest) -> bool:
        """Whether `part` can be requested with the others."""
        first = self._first
        if self.is_sent or (not self.is_streamed and len(self.asked) >= self.replica.max_group):
            return False
        if _settings_of(part) != _settings_of(first):
            return False
        if part.group_id == first.group_id and part.input_ids == first.input_ids:
            return True
        may_merge = not self.is_streamed and not part.images
        return may_merge and self._num_tokens + len(part.input_ids) <= MAX_MERGED_TOKENS

    def add(self, answer: Answer, waiter: Round) -> None:
        is_same = bool(self.asked) and self.asked[-1][0].part.input_ids is answer.part.input_ids
        self._num_tokens += 0 if is_same else len(answer.part.input_ids)
        self.asked.append((answer, waiter))
        self.num_left += 1
        answer.call = self

    def end(self, answer: Answer, waiter: Round, error: ArealError | None = None) -> None:
        """A part has ended."""
        answer.call = None
        self.num_left -= 1
        self.has_failed = self.has_failed or error is not None
        waiter.end(error)


class Calls:
    """The calls of all replicas of a fleet."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._waiting: dict[tuple[Replica, str], list[Call]] = {}
        """Calls that are sent in the next turn of the loop, by key."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_tokens = 0
        """Received so far."""

    def request(self, answer: Answer, waiter: Round, replica: Replica) -> None:
        """Let `replica` generate the part of an answer, in one call with others if possible."""
        part = answer.part
        call = Call(replica, part, part.gconfig.max_new_tokens > self._form.stream_interval)
        if replica.max_group > 1 and (part.group_id or not call.is_streamed):
            waiting = self._waiting.setdefault(call.key, [])
            for other in waiting:
                if other.takes(part):
                    other.add(answer, waiter)
                    return
            waiting.append(call)
        # Starts in the next turn of the loop: the other parts of this turn have joined by then.
        call.task = self._start(self._run(call), "generate")
        call.add(answer, waiter)

    def drop(self, answer: Answer) -> None:
        """Nobody waits for a part any more."""
        call, answer.call = answer.call, None
        if call is None or call.task is None:
            return
        call.num_left -= 1
        if call.num_left == 0:
            if not call.is_sent:
                self._waiting.pop(call.key, None)
            call.task.cancel()  # drops the connection, which ends all parts
        elif call.is_sent:
            self._abort(call, answer)

    def _abort(self, call: Call, answer: Answer) -> None:
        """End one of several parts on the server."""

        async def abort() -> None:
            with contextlib.suppress(RequestError, ServerUnavailable):  # the server may have ended
                await call.replica.abort(answer.part.request_id)

        self._start(abort(), "abort a part")

    async def _run(self, call: Call) -> None:
        self._waiting.pop(call.key, None)
        call.is_sent = True
        if asked := [pair for pair in call.asked if pair[0].call is call and not pair[1].ended.done()]:
            await self._send(call, asked)

    async def _send(self, call: Call, asked: list[tuple[Answer, Round]]) -> None:
        """Request parts; an error ends those that have not ended."""
        kind: type[ArealError] = ServerUnavailable
        code = "server.unreadable_answer"
        text = "the server ended an answer without a finish reason"
        try:
            async with aclosing(call.replica.generate([answer.part for answer, _ in asked])) as chunks:
                async for number, chunk in chunks:
                    self._take(call, *asked[number], chunk)
                    if call.has_failed and call.num_left == 0:
                        return
        except ArealError as failure:
            prompts = by_prompt(asked)
            if isinstance(failure, RequestError) and len(prompts) > 1:  # perhaps of one prompt only
                await asyncio.gather(*(self._send(call, prompt) for prompt in prompts))
                return
            kind, text, code = type(failure), str(failure), failure.code
        except Exception as failure:  # noqa: BLE001 - of one call: its callers get it
            text = f"an answer cannot be read: {failure!r}"
        for answer, waiter in asked:
            if answer.call is call:
                call.end(answer, waiter, kind(text, code=code))

    def _take(self, call: Call, answer: Answer, waiter: Round, chunk: PartChunk | ArealError) -> None:
        if answer.call is not call:
            return
        if isinstance(chunk, ArealError):
            call.end(answer, waiter, chunk)
            return
        self.num_tokens += len(chunk.token_ids)
        try:
            answer.add(chunk)
        except ServerUnavailable as error:
            call.end(answer, waiter, error)
            if call.num_left:
                self._abort(call, answer)
            return
        if chunk.finish_reason is not None:
            call.end(answer, waiter)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Wait for the tasks. Their connections are dropped before."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


def by_prompt(asked: list[tuple[Answer, Round]]) -> list[list[tuple[Answer, Round]]]:
    """The parts, in order, in lists of equal prompts and group ids."""
    prompts: list[list[tuple[Answer, Round]]] = []
    for pair in asked:
        part, last = pair[0].part, prompts[-1][0][0].part if prompts else None
        if last is not None and part.group_id == last.group_id and part.input_ids == last.input_ids:
            prompts[-1].append(pair)
        else:
            prompts.append([pair])
    return prompts


class Pin(PinnedReplica):
    """Implements `areal.api.engine.PinnedReplica`."""

    def __init__(self, fleet: Fleet, slot: Slot, replicas: ReplicaSet) -> None:
        self._fleet, self._slot, self._replicas = fleet, slot, replicas
        self._version = slot.version
        slot.weights = Weights.PINNED
        replicas.apply(slot, Event.CHECK_PASSED)

    @property
    def version(self) -> int:
        return self._version

    @property
    def is_lost(self) -> bool:
        slot = self._slot
        is_kept = slot.weights is Weights.PINNED and slot.version == self._version
        return not is_kept or slot not in self._replicas.slots

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        return await self._fleet.agenerate(request, pin=self)

    async def slot(self, limit_s: float) -> Slot:
        """The slot, once its server answers. ServerUnavailable when it is lost, or after `limit_s`."""
        lateness = self._replicas.lateness
        deadline_s = lateness.now_s + limit_s
        while self._slot.state is not State.STALE or self.is_lost:
            if self.is_lost or self._replicas.is_closed or lateness.now_s >= deadline_s:
                text = f"{self._slot.name} does not keep version {self._version}: {self._slot.reason}"
                raise ServerUnavailable(text, code="fleet.replica_lost")
            await self._replicas.wait_for_change(deadline_s - lateness.now_s)
        return self._slot

    def release(self) -> None:
        if not self.is_lost:
            self._slot.weights = Weights.VALID
            self._slot.failed_version = self._replicas.target_version  # weights without a folder: those of the next
            self._replicas.apply(self._slot, Event.CHECK_PASSED)
            self._slot.wake.set()


class Fleet:
    """Implements `areal.api.engine.InferenceFleet` over the servers of a registry."""

    def __init__(
        self,
        registry: NameRegistry,
        num_servers: int,
        config: InferenceEngineConfig,
        factory: ReplicaFactory,
        *,
        abandoned: range = range(0),
        seed: int = 1,
        dtype: str = "bfloat16",
        experts: ExpertShape | None = None,
        vision: RunImages | None = None,
        owns_adapters: bool = False,
    ) -> None:
        """`abandoned`: versions from before the trainer recovered, which it will make again with other weights.

        `seed` of the canary probe; `dtype` in which the servers compute, which bounds its tolerance. `experts`: answers
        have the chosen experts of a model of this shape. `vision`: of a model that takes images. `owns_adapters`: only
        this fleet loads adapters into its servers, which lose those that it does not know.
        """
        self._config = config
        self._form = AnswerForm(stream_interval=config.stream_interval, experts=experts, vision=vision)
        self._calls = Calls(self._form)
        self._replicas = ReplicaSet(
            registry, num_servers, config, lambda name, address: factory(name, address, self._form), abandoned
        )
        self._updater = WeightUpdater(self._replicas, config, seed=seed, dtype=dtype, vision=vision)
        self.update_weights = self._updater.update
        self._replicas.owns_adapters = owns_adapters
        self.load_adapter, self.unload_adapter = self._replicas.load_adapter, self._replicas.unload_adapter
        older = OlderPolicies(self._replicas, lambda: self._updater.served)
        self.keep_policy, self.older_policy = older.keep, older.held
        self.probe_tokens = self._updater.canary.tokens
        self.compare = self._updater.canary.compare
        self._num_waiting = 0
        self._awaited_versions: Counter[int] = Counter()
        """Number of answers that wait until the fleet serves a version again, by version."""

    @property
    def version(self) -> int:
        """The policy version that the fleet serves."""
        return self._replicas.target_version

    @property
    def limits(self) -> RequestLimits:
        return self._replicas.limits

    @property
    def vocab_size(self) -> int:
        return self.limits.vocab_size

    async def start(self) -> None:
        """Wait until `num_servers` replicas are healthy. ServerUnavailable, with the reasons, if they do not get so in
        setup_timeout after all are registered."""
        raise_open_file_limit()
        await self._replicas.start()

    async def close(self) -> None:
        """Stop all tasks and drop all connections; running requests fail."""
        await self._replicas.close()
        await self._calls.close()

    def live_replicas(self, version: int) -> list[str]:
        """Ids of the replicas that an update to `version` must reach: alive, and not serving that version already.

        Empty before the fleet has started: it waits for all replicas.
        """
        if not self._replicas.has_started:
            return []
        lacking = {State.STALE, State.SUSPECT} | (set() if version == self.version else {State.SERVING})
        slots = [slot for slot in self._replicas.slots if slot.weights is not Weights.PINNED]
        return [slot.incarnation for slot in slots if slot.state in lacking]

    async def score(
        self, rows: Sequence[ScoredRow], *, version: int, top_k: int, limit_s: float
    ) -> list[TokenScores] | None:
        """See `areal.api.engine.InferenceFleet.score`."""
        slots = [slot for slot in self._replicas.serving if slot.version == version]
        slot = min(slots, key=attrgetter("num_running"), default=None)
        if slot is None or slot.replica is None:
            return None
        # A server generates a token after the row, for which it needs room.
        longest = self.limits.context_length - 1
        rows = [dataclasses.replace(row, token_ids=row.token_ids[:longest]) for row in rows]
        try:
            async with asyncio.timeout(limit_s):
                scores = await gather_or_cancel([slot.replica.score(row, min(top_k, self.vocab_size)) for row in rows])
        except (RequestError, ServerUnavailable, TimeoutError) as error:
            _log.warning("%s does not score the trained tokens of a step: %s", slot.name, error or f"{limit_s:g} s")
            return None
        return scores if slot in self._replicas.serving and slot.version == version else None

    def pin(self) -> Pin | None:
        """See `areal.api.engine.InferenceFleet.pin`. The least busy replica; its running requests end there."""
        if len(self._replicas.serving) < 2:
            return None
        return Pin(self, min(self._replicas.serving, key=attrgetter("num_running")), self._replicas)

    # Generation

    async def agenerate(self, request: GenerationRequest, *, pin: Pin | None = None) -> GenerationResponse:
        """One complete answer, whatever happens to the replicas meanwhile.

        RequestError: the request can never succeed. ServerUnavailable: more replicas failed than request_retries
        allows, or none served for request_timeout. While the fleet serves an older version than that of the newest
        token, the request waits without a limit.
        """
        answer = Answer(request, self._form, pin)
        await self._finish(answer)
        return answer.response()

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """The same answer, as its tokens arrive (rollout.stream_interval). Raises ServerUnavailable too when a server
        withdraws tokens after they were passed on."""
        answer = Answer(request, self._form)
        answer.grown = grown = asyncio.Event()
        work = asyncio.create_task(self._finish(answer), name="streamed answer")
        work.add_done_callback(lambda _: grown.set())
        try:
            while not work.done():
                await grown.wait()
                grown.clear()
                if not work.done() and (chunk := answer.take(self._replicas.highest_version)) is not None:
                    yield chunk
            work.result()
            rest = answer.take(self._replicas.highest_version) or TokenChunk((), (), ())
            yield rest._replace(response=answer.response())
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def agenerate_group(self, requests: Sequence[GenerationRequest]) -> list[GenerationResponse]:
        """The same for requests with one prompt. Short answers are one call of one replica; what it leaves unfinished
        continues as other answers do."""
        answers = [Answer(request, self._form) for request in requests]
        if len(answers) > 1 and all(answer.is_short for answer in answers):
            await self._extend(answers, await self._pick(answers[0]))
        await gather_or_cancel([self._finish(answer) for answer in answers if answer.stop_reason is None])
        return [answer.response() for answer in answers]

    async def _finish(self, answer: Answer) -> None:
        while answer.stop_reason is None:
            await self._extend([answer], await self._pick(answer))

    async def _extend(self, answers: Sequence[Answer], slot: Slot) -> None:
        """Let one replica add to answers. ServerUnavailable when one has failed too often."""
        replica, serving, version = slot.replica, self._replicas.router.serving, self._replicas.target_version
        assert replica is not None  # a serving slot has a connection
        for answer in answers:
            if answer.num_parts == 0:  # the limits are known once a replica has answered
                answer.check(self._replicas.limits)
            answer.next_part(slot.name)
        problem: str | None = None
        """Why the replica failed; empty when the error is not a failure of the replica."""
        serving.change(slot, +len(answers))
        try:
            async with self._replicas.lateness.timeout(self._config.request_timeout):
                waiter = Round(len(answers))
                for answer in answers:
                    self._calls.request(answer, waiter, replica)
                await waiter.ended
        except ServerUnavailable as error:
            # The fleet may have gone back to an older version, or removed the replica.
            is_expected = any(map(self._is_behind, answers)) or slot not in self._replicas.slots
            problem = "" if is_expected else str(error)
            if not is_expected:
                self._replicas.request_failed(slot, replica, problem)
        except TimeoutError:
            slot.num_failures += 1
            limit = f"{self._config.request_timeout:g} s (rollout.request_timeout)"
            problem = f"{slot.name} gave no complete answer in {limit}"
        finally:
            serving.change(slot, -len(answers))
            for answer in answers:
                if answer.call is not None:
                    self._calls.drop(answer)
        # A server can end an answer with a new version before it reports that it has installed it.
        while (coming := self._updater.updating_to) is not None and coming > self._replicas.highest_version:
            if all(answer.newest_version != coming for answer in answers):
                break
            await self._replicas.wait_for_change(None)
        is_expected = self._updater.updating_to is not None or version != self._replicas.target_version
        for answer in answers:
            invalid = answer.end_part(self._replicas.highest_version)
            if answer.stop_reason is not None:
                continue
            if invalid:
                slot.num_invalid += 1
                self._replicas.request_failed(slot, replica, invalid)
                self._failed(answer, slot, invalid, code="server.invalid_answer")
            elif problem is None and not is_expected and not answer.has_new_tokens:
                # counted as a failure: without a limit the request would be sent again forever
                self._failed(answer, slot, f"{slot.name} aborted the request without a token")
            elif problem:
                self._failed(answer, slot, problem)

    def _failed(self, answer: Answer, slot: Slot, problem: str, code: str = "fleet.too_many_retries") -> None:
        answer.avoid = slot.name
        answer.num_failures += 1
        if answer.num_failures > self._config.request_retries:
            raise ServerUnavailable(
                f"request {answer.request.request_id} failed {answer.num_failures} times "
                f"(rollout.request_retries={self._config.request_retries}), last: {problem}",
                code=code,
            )

    async def _pick(self, answer: Answer) -> Slot:
        """A serving replica; waits for one, and without a time limit for the version of the answer's newest token.

        ServerUnavailable after request_timeout without a serving replica.
        """
        if answer.pin is not None:
            return await answer.pin.slot(self._config.request_timeout)
        limit_s, lateness = self._config.request_timeout, self._replicas.lateness
        deadline_s: float | None = None
        while True:
            newest = answer.newest_version if answer.num_parts else None
            awaited = [] if newest is None or newest <= self._replicas.target_version else [newest]
            is_switching = self._replicas.is_switching
            if not awaited and not is_switching and len(self._replicas.router.serving):
                return self._replicas.router.pick(answer.request, answer.avoid)
            if self._replicas.is_closed:
                raise ServerUnavailable("the fleet is closed", code="fleet.closed")
            if deadline_s is None or awaited or is_switching:  # an update has its own time limits
                deadline_s = lateness.now_s + limit_s
            elif lateness.now_s >= deadline_s:
                raise ServerUnavailable(
                    f"request {answer.request.request_id} found no serving replica for {limit_s:g} s "
                    f"(rollout.request_timeout): {self._replicas.describe()}",
                    code="fleet.no_live_replica",
                )
            self._num_waiting += 1
            self._awaited_versions.update(awaited)
            try:
                if awaited:  # a new target decides, whether or not a request can be sent before
                    await self._replicas.wait_for_change(deadline_s - lateness.now_s)
                else:
                    await self._replicas.wait_to_send(deadline_s - lateness.now_s)
            finally:
                self._num_waiting -= 1
                self._awaited_versions.subtract(awaited)

    def _is_behind(self, answer: Answer) -> bool:
        """Whether the fleet serves an older policy than the one that generated the newest token of an answer."""
        return answer.newest_version is not None and self._replicas.target_version < answer.newest_version

    # Status

    def status(self) -> dict[str, Any]:
        """JSON-ready: the served version, each replica, waiting requests and their cause, generated tokens."""
        waiting_for = ""
        awaited = +self._awaited_versions
        if self._replicas.is_switching:
            waiting_for = f"the update to version {self._updater.updating_to}"
        elif not self._replicas.serving:
            waiting_for = f"a serving replica: {self._replicas.describe()}"
        elif awaited:
            waiting_for = f"version {max(awaited)}, for {awaited.total()} unfinished answers; {self.version} is served"
        return {
            "version": self.version,
            "replicas": [slot.status() for slot in self._replicas.slots],
            "waiting_requests": self._num_waiting,
            "waiting_for": waiting_for,
            "updating_to": self._updater.updating_to,
            "needs_weights": self._updater.needs_weights(),
            "generated_tokens": self._calls.num_tokens,
            "uncompared": self._updater.canary.num_uncompared,
        }
