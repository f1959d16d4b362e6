"""One session: its budgets, the record of its turns, and the answers of the policy to them."""

import asyncio
import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import orjson

from areal.agent.answer_stream import AnswerSplit, StreamedAnswer
from areal.agent.images import parts_of, with_stored_images
from areal.agent.tool_calls import AnswerStyle, parsed_json, split_answer
from areal.agent.transcript import Context, Transcript
from areal.agent.turns import (
    FinishReason,
    Message,
    TurnAnswer,
    TurnRefused,
    TurnRequest,
    TurnSettings,
    answer_message,
    with_call_ids,
)
from areal.api.columns import to_array
from areal.api.config import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse, TokenChunk
from areal.api.engine import InferenceEngine
from areal.api.errors import ArealError, InputError, RequestError, RewardError, ServerUnavailable
from areal.data.tokenizer import Tokenizer

# ----------------------------------------------------------------------------------------------------------------------
# Whether an answer has the format that its request asked for: JSON of a schema.
#
# Sampling is not constrained: the log-probabilities of a constrained sampler are not those that the trainer computes.

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_MAX_DEPTH = 64


def has_format(text: str, schema: Mapping[str, Any]) -> bool:
    """Whether a text is JSON of a schema, by types, choices, properties and items; other keywords are not checked."""
    value = parsed_json(text.strip())
    return (value is not None or text.strip() == "null") and _fits(value, schema, schema, 0)


def _fits(value: Any, schema: Any, root: Mapping[str, Any], depth: int) -> bool:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return schema is not False

    def fits(value: Any, part: Any) -> bool:
        return _fits(value, part, root, depth + 1)

    if isinstance(reference := schema.get("$ref"), str):
        target: Any = root
        for name in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(name, True) if name and isinstance(target, Mapping) else target
        return fits(value, target)
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds or list(_TYPES)
    is_of_type = any(isinstance(value, _TYPES.get(kind, (object,))) for kind in kinds)
    if not is_of_type or (isinstance(value, bool) and "boolean" not in kinds):
        return False
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    if any(not any(fits(value, part) for part in schema[name]) for name in ("anyOf", "oneOf") if name in schema):
        return False
    if not all(fits(value, part) for part in schema.get("allOf", ())):
        return False
    if isinstance(value, list):
        return all(fits(item, schema.get("items", True)) for item in value)
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        return set(schema.get("required", ())) <= value.keys() and all(
            fits(item, known.get(name, others)) for name, item in value.items()
        )
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Refuses a prompt that has no room for an answer before it is rendered: by its bytes, then by its least tokens.

LARGE = 1 << 16  # Characters above which a prompt is read, rendered and tokenised in a thread.
_OF_MESSAGE = 64  # Characters that take as long as the frame of a message.
_PIECE = 1 << 14  # Characters that are tokenised at once.
_CUT_TOKENS = 8  # Tokens that a piece may have only because the text is cut there.
_BYTES_PER_TOKEN, _LEAST_BYTES = 64, 1 << 20  # A request may have this many bytes without its images.


def _texts(request: TurnRequest) -> Iterator[str]:
    """What every template shows, without reasoning, which some hide."""
    if isinstance(request.prompt, str):
        yield request.prompt
    for message in request.messages:
        content = message.get("content")
        yield from [content] if isinstance(content, str) else [part.get("text", "") for part in parts_of(message)]
        yield from (call["function"]["arguments"] for call in message.get("tool_calls") or ())
    if request.tools:
        yield orjson.dumps(request.tools).decode()


def is_large(request: TurnRequest) -> bool:
    return sum(map(len, _texts(request))) + _OF_MESSAGE * len(request.messages) > LARGE


def check_bytes(request: TurnRequest, max_tokens: int) -> None:
    """TurnRefused when a request has more bytes than any prompt of `max_tokens` tokens needs."""
    images = sum(len(part.get("url", "")) for message in request.messages for part in parts_of(message))
    limit = max(_BYTES_PER_TOKEN * max_tokens, _LEAST_BYTES)
    if request.num_bytes - images > limit:
        raise _too_long(f"the request has {request.num_bytes - images} bytes without images, the limit is {limit}")


def check_tokens(request: TurnRequest, tokenizer: Tokenizer, max_tokens: int) -> None:
    """TurnRefused when the messages of a request have more than `max_tokens` tokens, at least one each. Blocks: call in
    a thread."""
    count = len(request.messages)
    for text in _texts(request):
        for begin in range(0, len(text), _PIECE):
            ids = tokenizer.encode(text[begin : begin + _PIECE], add_special_tokens=False)
            count += max(len(ids) - _CUT_TOKENS, 0)
            if count >= max_tokens:
                raise _too_long(f"the prompt has at least {count} tokens")


def _too_long(problem: str) -> TurnRefused:
    message = f"{problem}: gconfig.max_tokens leaves no room for an answer"
    return TurnRefused(message, code="agent.prompt_too_long", status=400)


RETRY_AFTER_S = 1.0  # What a client waits before it repeats a turn for which no server was available.

_END_TOKENS = 16  # Tokens at the end of a prompt that show whether it opens the reasoning.


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Budgets of a session. None: no limit."""

    max_turns: int | None = None
    max_tokens: int | None = None  # Generated tokens of all turns together.
    max_seconds: float | None = None  # They count from the opening of the session.


@dataclass(slots=True, kw_only=True)
class SessionBudget:
    """What a session has used of its limits. Pure: times are arguments."""

    limits: SessionLimits
    opened_s: float
    num_turns: int = 0
    num_tokens: int = 0

    def seconds_left(self, now_s: float) -> float | None:
        """None: no limit."""
        limit = self.limits.max_seconds
        return None if limit is None else max(self.opened_s + limit - now_s, 0.0)

    def begin_turn(self, now_s: float, num_answers: int) -> int | None:
        """Count a turn. Returns the maximum generated tokens of each of its answers, None = no limit.

        Turns at the same time share no room: together they may exceed max_tokens. Raises TurnRefused.
        """
        limits = self.limits
        if limits.max_turns is not None and self.num_turns >= limits.max_turns:
            raise _used_up("turns", f"agent.max_turns={limits.max_turns} turns", "agent.turn_budget")
        if self.seconds_left(now_s) == 0.0:
            raise _used_up("time", f"agent.max_seconds={limits.max_seconds:g} seconds", "agent.time_budget")
        room = None if limits.max_tokens is None else (limits.max_tokens - self.num_tokens) // num_answers
        if room is not None and room < 1:
            raise _used_up("tokens", f"agent.max_tokens={limits.max_tokens} generated tokens", "agent.token_budget")
        self.num_turns += 1
        return room


def _used_up(what: str, limit: str, code: str) -> TurnRefused:
    return TurnRefused(f"the session has used its {what}: the limit is {limit}", code=code, status=400)


@dataclass(slots=True, kw_only=True)
class SessionCounts:
    turns: int = 0  # Requests that were answered.
    tool_calls: int = 0
    malformed_calls: int = 0
    retries: int = 0  # Requests that were answered from the record.
    format_errors: int = 0  # Answers that are not of the format that the client asked for.
    cut_answers: int = 0  # Answers that a limit of tokens ended.
    timed_out: int = 0  # Turns that the time limit of the session ended.
    other_sampling: int = 0  # Turns with another temperature or top_p than the run.
    failures: int = 0  # Turns that the servers did not answer.
    generated_tokens: int = 0
    queue_s: float = 0.0  # Seconds before the first token of each answer, added up.
    first_queue_s: float = 0.0  # The same of the first answer alone.
    refused: Counter[str] = field(default_factory=Counter[str])  # How many by code.


class TurnEvents(Protocol):
    """The record of the stages of turns: intent, generated, delivered."""

    def intent(self, turn_ids: Sequence[str]) -> None: ...
    def generated(self, turn_id: str, token_ids: Sequence[int]) -> None: ...
    def delivered(self, turn_ids: Sequence[str]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    tokenizer: Tokenizer
    settings: GenerationHyperparameters  # Those of one answer, with every token that ends one.
    limits: SessionLimits
    sampling: Literal["client", "config"]  # Whose temperature, top_p and so on are used.
    new_transcript: Callable[[], Transcript]
    style: AnswerStyle  # How the policy writes reasoning and tool calls.
    adapter: str = ""  # That answers instead of the current policy.


class _Turn:
    """`task`, which `Session` sets, generates the answers."""

    task: asyncio.Task[tuple[TurnAnswer, ...]]

    def __init__(self, *, is_streamed: bool) -> None:
        self.num_deliveries = 0
        self.is_streamed = is_streamed
        self.answers: list[StreamedAnswer] = []  # The answers of a streamed turn; empty until generation starts.
        self.readers: set[_Stream] = set()

    def add(self, answer: StreamedAnswer, chunk: TokenChunk) -> None:
        answer.add(chunk)
        self.wake()

    def wake(self, *_: object) -> None:
        for reader in self.readers:
            reader.news.set()


class _Stream:
    """Implements TurnStream."""

    def __init__(self, turn: _Turn, budget: SessionBudget) -> None:
        self._turn = turn
        self._budget = budget
        self.is_whole = False
        self.news = asyncio.Event()
        turn.readers.add(self)
        turn.task.add_done_callback(turn.wake)

    async def grown(self, limit_s: float) -> tuple[TurnAnswer, ...]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.news.wait()
        self.news.clear()
        if not self._turn.task.done():
            return tuple(answered.answer for answered in self._turn.answers)
        answers, self.is_whole = self._turn.task.result(), True
        return answers

    def leave(self, *, cancels: bool) -> None:
        turn = self._turn
        turn.readers.discard(self)
        if cancels and not turn.readers and turn.task.cancel():
            self._budget.num_tokens += sum(len(answered.answer.token_ids) for answered in turn.answers)


class _Reading(NamedTuple):
    """How the answers to a request are read. See `split_answer`."""

    tools: Sequence[dict[str, Any]]
    in_reasoning: bool
    may_close: bool


class Session:
    """One session. Implements SessionTurns. Used on one event loop only."""

    def __init__(
        self,
        session_id: str,
        setup: SessionSetup,
        engine: InferenceEngine,
        *,
        group_id: str = "",
        events: TurnEvents | None = None,
    ) -> None:
        """`group_id`: of the sessions of one row. `events` None: nothing is recorded, as in evaluations."""
        self.session_id = session_id
        self.version = engine.version  # Policy version at the start.
        self.counts = SessionCounts()
        self.transcript = setup.new_transcript()
        self._setup = setup
        self._engine = engine
        self._group_id = group_id or session_id
        self._events = events
        self._of_episode = contextvars.copy_context()  # for its trace; requests arrive in the context of the server
        self._now_s = asyncio.get_running_loop().time
        self.budget = SessionBudget(limits=setup.limits, opened_s=self._now_s())
        self._turns: dict[str, list[_Turn]] = {}  # Turns by fingerprint, oldest first.
        self._num_answers = 0
        self._tasks: set[asyncio.Task[tuple[TurnAnswer, ...]]] = set()
        self._in_use = asyncio.Lock()  # Guards the transcript: no answer is added while a thread reads it.
        self._by_answer: dict[str, _Turn] = {}
        self._names: dict[str, str] = {}  # Ids of tool calls, and numbers of turns, -> turn id.
        self._model_ids: dict[str, str] = {}  # Id of a tool call -> its id in the text of the answer.
        self.last_answer: TurnAnswer | None = None
        self.last_context: Sequence[int] = ()  # Tokens before the last answer.
        self.last_messages: list[Message] = []  # The dialogue with the last answer; empty after a plain prompt.
        self.is_finished = False

    async def answer(self, request: TurnRequest) -> tuple[TurnAnswer, ...]:
        """The answers to a request, or those of the request that it repeats. Raises TurnRefused.

        The turn continues when the caller is cancelled, so that a retry finds its answers.
        """
        return await asyncio.shield(self._turn(request, is_streamed=False).task)

    def stream(self, request: TurnRequest) -> _Stream:
        """The same, while the answers are generated. A turn that its only client leaves is no part of the session."""
        return _Stream(self._turn(request, is_streamed=True), self.budget)

    async def count_tokens(self, request: TurnRequest) -> int:
        """Tokens of the prompt of a request, without a turn. Raises TurnRefused."""
        _, context = await self._prepared(request)
        return len(context.token_ids)

    def delivered(self, answers: Sequence[TurnAnswer]) -> None:
        for answer in answers[:1]:
            if (turn := self._by_answer.get(answer.turn_id)) is not None:
                turn.num_deliveries += 1
        if self._events is not None:
            self._events.delivered([answer.turn_id for answer in answers if answer.token_ids])

    async def _prepared(self, request: TurnRequest) -> tuple[TurnRequest, Context]:
        """A request as the transcript has its messages (images are stored, and tool calls have the ids in the text),
        and its context. A large one is rendered in a thread. TurnRefused."""
        max_tokens, tokenizer = self._setup.settings.max_tokens, self._setup.tokenizer
        check_bytes(request, max_tokens)
        if in_thread := is_large(request):
            await asyncio.to_thread(check_tokens, request, tokenizer, max_tokens)
        request = await with_stored_images(request, self.transcript.images)
        messages = tuple(with_call_ids(message, self._model_ids) for message in request.messages)

        def prepared() -> tuple[TurnRequest, Context]:
            restored = self.transcript.restored(replace(request, messages=messages))
            return restored, self._context(restored, self._forced(restored))

        async with self._in_use:
            return await asyncio.to_thread(prepared) if in_thread else prepared()

    def turn_of(self, name: str) -> str:
        """The turn id that `name` means: a turn id, the id of a tool call, or the number of a turn from 0. RewardError
        for another one."""
        turn = name if name in self.transcript.turns else self._names.get(name)
        if turn is None:
            message = f"a reward is for {name!r}, which is no turn of session {self.session_id}: give the id of a"
            raise RewardError(f"{message} completion or tool call, or a number from 0", code="agent.unknown_turn")
        return turn

    async def finish(self) -> None:
        """Refuse further turns, and cancel those under way."""
        self.is_finished = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _recorded(self, request: TurnRequest) -> _Turn | None:
        """The turn that `request` repeats. Of several equal ones, the first that the client has not received."""
        if request.retry_count < 1 or not request.fingerprint:
            return None
        turns = (turn for turn in self._turns.get(request.fingerprint, ()) if not turn.task.cancelling())
        return min(turns, key=lambda turn: turn.num_deliveries, default=None)

    def _turn(self, request: TurnRequest, *, is_streamed: bool) -> _Turn:
        if (turn := self._recorded(request)) is not None:
            self.counts.retries += 1
            return turn
        try:
            return self._begin(request, is_streamed)
        except TurnRefused as refused:
            self.counts.refused[refused.code] += 1
            raise

    def _begin(self, request: TurnRequest, is_streamed: bool) -> _Turn:
        if self.is_finished:
            raise TurnRefused("the session has ended", code="agent.session_ended", status=400)
        room = self.budget.begin_turn(self._now_s(), request.num_answers)
        name = f"turn-{self.session_id}-{self.budget.num_turns}"
        turn = _Turn(is_streamed=is_streamed)
        turn.task = asyncio.create_task(self._answer(request, room, turn), name=name, context=self._of_episode)
        self._turns.setdefault(request.fingerprint, []).append(turn)
        self._tasks.add(turn.task)
        turn.task.add_done_callback(partial(self._ended, request.fingerprint))
        return turn

    def _ended(self, fingerprint: str, task: asyncio.Task[tuple[TurnAnswer, ...]]) -> None:
        self._tasks.discard(task)
        if _has_failed(task):  # its error keeps the request in memory
            self._turns[fingerprint] = [turn for turn in self._turns[fingerprint] if turn.task is not task]
        if not task.cancelled() and isinstance(error := task.exception(), TurnRefused):
            self.counts.refused[error.code] += 1

    async def _answer(self, request: TurnRequest, room: int | None, turn: _Turn) -> tuple[TurnAnswer, ...]:
        request, context = await self._prepared(request)
        settings = self._settings(request.settings, len(context.token_ids), room)
        first, self._num_answers = self._num_answers, self._num_answers + request.num_answers
        turn_ids = [f"{self.session_id}.{first + number}" for number in range(request.num_answers)]
        if self._events is not None:
            self._events.intent(turn_ids)
        try:
            async with asyncio.timeout(self.budget.seconds_left(self._now_s())):
                responses = await self._generate(turn_ids, request, context, settings, turn)
        except TimeoutError:
            self.counts.timed_out += 1
            unfinished = [streamed.answer for streamed in turn.answers]
            unfinished = unfinished or [self._begun(turn_id, request, context) for turn_id in turn_ids]
            answers = tuple(replace(answer, finish_reason="length", token_ids=(), logprobs=()) for answer in unfinished)
        except (InputError, RequestError) as error:
            raise TurnRefused(str(error), code="agent.request_refused", status=400) from error
        except ServerUnavailable as error:
            self.counts.failures += 1
            raise TurnRefused(str(error), code="agent.no_server", status=503, retry_after_s=RETRY_AFTER_S) from error
        except ArealError as error:
            self.counts.failures += 1
            raise TurnRefused(str(error), code="agent.generation_failed", status=500) from error
        else:
            texts = [response.raw_text() for response in turn.answers] or [
                self._raw_text(context, response) for response in responses
            ]
            async with self._in_use:
                answers = tuple(
                    self._add(request, context, turn_id, response, text)
                    for turn_id, response, text in zip(turn_ids, responses, texts, strict=True)
                )
        self._names[str(self.counts.turns)] = answers[0].turn_id
        self.counts.turns += 1
        self._names |= {call.call_id: answer.turn_id for answer in answers for call in answer.tool_calls}
        self._by_answer |= {answer.turn_id: turn for answer in answers}
        return answers

    def _context(self, request: TurnRequest, forced: Sequence[int] = ()) -> Context:
        try:
            return self.transcript.context(request, forced)
        except InputError as error:
            raise TurnRefused(str(error), code="agent.template_refused", status=400, param="messages") from error

    def _forced(self, request: TurnRequest) -> list[int]:
        """The tokens that an answer begins with: a text, or what makes it call the tool that the request requires.
        TurnRefused where none are known."""
        if request.prefill:
            return self._setup.tokenizer.encode(request.prefill, add_special_tokens=False)
        if request.tool_choice in ("auto", "none"):
            return []
        start = self.transcript.call_start(request)
        if start is not None:
            answer = split_answer(start.example, (), self._setup.style, tools=request.tools, turn_id="")
            if [call.name for call in answer.tool_calls] == [start.name]:
                return start.token_ids
        text = "tool_choice: with this chat template and agent.tool_parser the beginning of a call is not known"
        raise TurnRefused(f"{text}: use auto", code="agent.unsupported_field", status=400, param="tool_choice")

    async def _generate(
        self,
        turn_ids: Sequence[str],
        request: TurnRequest,
        context: Context,
        settings: GenerationHyperparameters,
        turn: _Turn,
    ) -> list[GenerationResponse]:
        input_ids, images = self.transcript.plain(context.token_ids)
        seed = request.settings.seed
        requests = [
            GenerationRequest(
                request_id=_request_id(turn_id),
                input_ids=input_ids,
                images=images,
                gconfig=settings,
                group_id=self._group_id,
                seed=None if seed is None else seed + number,
                adapter=self._setup.adapter,
            )
            for number, turn_id in enumerate(turn_ids)
        ]
        if turn.is_streamed:
            turn.answers = [self._streamed(turn_id, request, context) for turn_id in turn_ids]
            works = [self._collected(turn, *pair) for pair in zip(turn.answers, requests, strict=True)]
        else:
            works = [self._engine.agenerate(request) for request in requests]
        if len(works) == 1:
            return [await works[0]]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(work) for work in works]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _collected(self, turn: _Turn, answer: StreamedAnswer, request: GenerationRequest) -> GenerationResponse:
        async with contextlib.aclosing(self._engine.stream(request)) as chunks:
            async for chunk in chunks:
                turn.add(answer, chunk)
                if chunk.response is not None:
                    return chunk.response
        raise ServerUnavailable("an answer ended without a response", code="server.unreadable_answer")

    def _streamed(self, turn_id: str, request: TurnRequest, context: Context) -> StreamedAnswer:
        setup, reading = self._setup, self._reading(request, context)
        split = AnswerSplit(
            setup.style, has_tools=bool(reading.tools), in_reasoning=reading.in_reasoning, may_close=reading.may_close
        )
        forced = context.token_ids[len(context.token_ids) - context.num_forced :]
        decode = setup.tokenizer.decode
        begun = self._begun(turn_id, request, context)
        return StreamedAnswer(begun, split, decode, setup.settings.stop_token_ids, forced)

    def _begun(self, turn_id: str, request: TurnRequest, context: Context) -> TurnAnswer:
        """An answer without tokens."""
        ids = context.token_ids
        return TurnAnswer(
            turn_id=turn_id, text="", finish_reason=None, num_prompt_tokens=len(ids), token_ids=(), logprobs=(),
            prompt_ids=to_array("i", self.transcript.plain(ids)[0]) if request.shows_prompt else (),
        )  # fmt: skip

    def _reading(self, request: TurnRequest, context: Context) -> _Reading:
        style, num_asked = self._setup.style, len(context.token_ids) - context.num_forced
        tail = self._setup.tokenizer.decode([*self.transcript.plain(context.token_ids[:num_asked][-_END_TOKENS:])[0]])
        if request.prompt is not None:
            before = request.prompt if isinstance(request.prompt, str) else tail
            return _Reading((), in_reasoning=False, may_close=style.leaves_reasoning_open(before))
        tools = () if request.tool_choice == "none" else request.tools
        return _Reading(tools, in_reasoning=style.opens_reasoning(tail), may_close=False)

    def _raw_text(self, context: Context, response: GenerationResponse) -> str:
        """All text of an answer, with its special tokens but the end token."""
        ids = response.output_ids
        has_end = ids[-1:] and ids[-1] in self._setup.settings.stop_token_ids
        forced = context.token_ids[len(context.token_ids) - context.num_forced :]
        return self._setup.tokenizer.decode([*forced, *(ids[:-1] if has_end else ids)])

    def _settings(self, wish: TurnSettings, num_prompt_tokens: int, room: int | None) -> GenerationHyperparameters:
        ours = self._setup.settings
        in_context = ours.max_tokens - num_prompt_tokens  # at least 1, or the transcript refuses the prompt
        limits = (ours.max_new_tokens, in_context, room, wish.max_new_tokens)
        max_new = min(limit for limit in limits if limit is not None)
        settings = replace(ours, max_new_tokens=max_new, min_new_tokens=min(ours.min_new_tokens, max_new))
        settings = replace(settings, stop=[*(ours.stop or ()), *wish.stop] or None)
        if self._setup.sampling == "config":
            return settings
        wanted = {
            "temperature": wish.temperature,
            "top_p": wish.top_p,
            "top_k": wish.top_k,
            "frequency_penalty": wish.frequency_penalty,
            "presence_penalty": wish.presence_penalty,
        }
        changes = {name: value for name, value in wanted.items() if value is not None}
        if changes.get("temperature") == 0:
            changes["temperature"] = ours.temperature
            settings = replace(settings, greedy=True)
        changed = replace(settings, **changes)  # pyright: ignore[reportArgumentType]
        self.counts.other_sampling += changed != replace(settings, greedy=ours.greedy)
        return changed

    def _add(
        self, request: TurnRequest, context: Context, turn_id: str, response: GenerationResponse, text: str
    ) -> TurnAnswer:
        """Record one answer. It is part of the transcript before the client gets it."""
        ids, counts = response.output_ids, self.counts
        if self._events is not None:
            self._events.generated(turn_id, ids)
        counts.first_queue_s = counts.first_queue_s if self.last_answer else response.ttft_s
        counts.generated_tokens += len(ids)
        counts.queue_s += response.ttft_s
        self.budget.num_tokens += len(ids)
        reading = self._reading(request, context)
        split = split_answer(
            text,
            ids,
            self._setup.style,
            tools=reading.tools,
            turn_id=turn_id,
            in_reasoning=reading.in_reasoning,
            may_close=reading.may_close,
            is_cut=response.stop_reason != "stop",
        )
        finish: FinishReason = "stop" if response.stop_reason == "stop" else "length"
        if finish == "length":
            counts.cut_answers += 1
        elif split.tool_calls:
            finish = "tool_calls"
        if request.answer_schema is not None and not split.tool_calls:
            counts.format_errors += not has_format(split.text, request.answer_schema)
        counts.tool_calls += len(split.tool_calls)
        counts.malformed_calls += split.num_malformed
        answer = replace(
            self._begun(turn_id, request, context),
            text=split.text,
            reasoning=split.reasoning,
            tool_calls=split.tool_calls,
            finish_reason=finish,
            num_cached_tokens=response.num_cached_tokens,
            token_ids=ids,
            logprobs=response.output_logprobs,
        )
        self._model_ids |= {call.call_id: call.model_id for call in split.tool_calls if call.model_id}
        message = with_call_ids(answer_message(answer), self._model_ids)
        self.transcript.add_answer(context, turn_id, response, message)
        self.last_answer, self.last_context = answer, context.token_ids
        self.last_messages = [*request.messages, message] if request.messages else []
        return answer


def _has_failed(task: asyncio.Task[tuple[TurnAnswer, ...]]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _request_id(turn_id: str) -> str:
    """An id of fixed length: servers may match ids by prefix."""
    session, _, number = turn_id.rpartition(".")
    return f"{session}-{int(number):06d}"
