"""The scenarios of `areal rehearse`: what the scripted policy and the server do, and what counts as a loss."""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from areal.agent.agent_run import AgentOutcome
from areal.agent.directory import OpenedSession, OpenRequest, SessionReward
from areal.agent.tool_calls import split_answer, style_of
from areal.agent.turns import Message, ToolCall, TurnAnswer, TurnRefused, TurnRequest

StepKind = Literal[
    "call", "calls", "thought", "wrong", "unknown", "malformed", "answer", "cut", "empty", "busy", "down", "overflow"
]
"""call, calls: one or two valid tool calls; thought: reasoning and a valid call; wrong: a call with arguments that the
tool does not have; unknown: a call of a tool that the request does not have; malformed: a call that is no JSON, which
arrives as text and is counted, as in a run. These six are skipped when the request has no tools. busy, down, overflow:
refused with 429, 503, 400."""
Fault = Literal["", "closed", "dropped"]
"""closed: the connection ends before the reply. dropped: it ends in the middle of the reply."""
Problem = Literal["crashed", "hung", "leaked", "lost turns", "no reward", "zero reward"]
SLOW_S = 1.0  # Delay of a slow answer.


@dataclass(frozen=True, slots=True)
class Step:
    """What a request gets."""

    kind: StepKind
    faults: tuple[Fault, ...] = ()  # One for each of the first deliveries of the answer; later ones are complete.
    delay_s: float = 0.0

    @property
    def is_plain(self) -> bool:
        return self.kind in ("call", "answer") and not self.faults and not self.delay_s


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    text: str
    steps: tuple[Step, ...]
    keeps_reward: bool = True
    """The answers are those of the first scenario, so the reward must not become zero.
    False: the policy is at fault, and 0 is a valid reward."""
    may_fail: bool = False  # No answer can come: an error, or no reward, is right. A reward would blame the policy.
    num_refused: int = 0  # Sessions that a program from outside cannot open (429) before it gets one.


_CALL, _ANSWER = Step("call"), Step("answer")
SCENARIOS = (
    Scenario("answers", "a valid tool call, then the answer", (_CALL, _ANSWER)),
    Scenario("parallel_calls", "two tool calls in one answer", (Step("calls"), _ANSWER)),
    Scenario("thinking", "reasoning before a tool call", (Step("thought"), _ANSWER)),
    Scenario("wrong_arguments", "a call with arguments that the tool does not have", (Step("wrong"), _CALL, _ANSWER),
             keeps_reward=False),
    Scenario("unknown_tool", "a call of a tool that does not exist", (Step("unknown"), _CALL, _ANSWER),
             keeps_reward=False),
    Scenario("malformed_call", "a tool call that is no JSON, delivered as text", (Step("malformed"), _CALL, _ANSWER),
             keeps_reward=False),
    Scenario("cut_answer", "an answer cut by its limit", (Step("cut"), _CALL, _ANSWER), keeps_reward=False),
    Scenario("empty_answer", "an answer without text", (Step("empty"), _CALL, _ANSWER), keeps_reward=False),
    Scenario("busy", "429 with Retry-After, twice", (Step("busy"), Step("busy"), _CALL, _ANSWER), num_refused=1),
    Scenario("slow", "slow answers", (Step("call", delay_s=SLOW_S), Step("answer", delay_s=SLOW_S))),
    Scenario("dropped", "the connection ends in the middle of the first replies",
             (Step("call", ("dropped",)), Step("answer", ("dropped",)), _ANSWER)),
    Scenario("retries", "the connection ends before the first reply, twice",
             (Step("call", ("closed", "closed")), Step("answer", ("closed", "closed")), _ANSWER)),
    Scenario("overflow", "400: the prompt leaves no room for an answer", (_CALL, Step("overflow")), keeps_reward=False),
    Scenario("outage", "503 for every request", (Step("down"),), keeps_reward=False, may_fail=True),
)  # fmt: skip
"""The first one gives the reward to which the others are compared."""


def problems_of(
    scenario: Scenario,
    outcome: AgentOutcome,
    *,
    reward: float | None,
    good_reward: float | None,
    num_lost: int,
    needs_reward: bool = False,
) -> list[Problem]:
    """What was lost in a scenario. `reward`: of its session. `good_reward`: of the first scenario.

    `num_lost`: generated turns that the client never received. `needs_reward`: no function computes one."""
    problems: list[Problem] = []
    if outcome.status == "timeout":
        problems.append("hung")
    elif outcome.status == "died" or (outcome.status == "error" and not scenario.may_fail):
        problems.append("crashed")
    if outcome.leaks:
        problems.append("leaked")
    if num_lost:
        problems.append("lost turns")
    if outcome.status != "ok":
        return problems
    if scenario.may_fail:
        return [*problems, "zero reward"] if reward == 0 else problems
    if reward is None and (good_reward is not None or needs_reward):
        problems.append("no reward")
    if scenario.keeps_reward and reward == 0 and good_reward:
        problems.append("zero reward")
    return problems


def chosen(names: Sequence[str]) -> tuple[Scenario, ...]:
    """The scenarios of these names after the first, which is always played; all when there are no names."""
    return tuple(scenario for scenario in SCENARIOS if not names or scenario is SCENARIOS[0] or scenario.name in names)


# The sessions of `areal rehearse`: a scripted policy instead of a model, and connections that end too early.

MAX_REQUESTS = 50  # Requests of a session. Further ones are refused, so that an agent without a limit of turns ends.
_RETRY_AFTER_S = 0.05
_NEED_TOOLS = ("call", "calls", "thought", "wrong", "unknown", "malformed")
_THOUGHT = "A tool knows this."
_MALFORMED = '<tool_call>\n{"name": "%s", "arguments": {"a": '
_STYLE = style_of("hermes", None)
_TYPES: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    answer: str
    arguments: str = ""  # Arguments of valid tool calls as JSON text; empty: made from the schema of the tool.


@dataclass(slots=True, eq=False)
class _Turn:
    answers: tuple[TurnAnswer, ...]
    faults: list[Fault] = field(default_factory=list[Fault])
    is_delivered: bool = False


class WholeStream:
    """Has the answers of a turn at once. Implements TurnStream."""

    def __init__(self, turn: Coroutine[Any, Any, tuple[TurnAnswer, ...]]) -> None:
        self.is_whole = False
        self._turn = asyncio.create_task(turn)

    async def grown(self, limit_s: float) -> tuple[TurnAnswer, ...]:
        await asyncio.wait([self._turn], timeout=limit_s)
        answers = self._turn.result() if self._turn.done() else ()
        self.is_whole = self._turn.done()
        return answers

    def leave(self, *, cancels: bool) -> None:
        """The turn continues: a scenario has the same steps for every agent."""


class RehearsedSession:
    """Answers by the steps of a scenario. Implements SessionTurns."""

    def __init__(self, steps: Sequence[Step], script: Script) -> None:
        self._steps, self._script = list(steps), script
        self._turns: list[_Turn] = []
        self._by_fingerprint: dict[str, _Turn] = {}
        self.next_fault: Fault = ""  # The fault of the next reply with an answer.
        self.num_requests = 0
        self.has_played_fault = False  # Whether a request got something else than a plain answer or call.
        self.num_malformed = 0  # Tool calls that were delivered as text.
        self.loses_thinking = False  # Whether the client sent an answer back without its reasoning.
        self.reported = SessionReward()
        self.is_final = asyncio.Event()  # Set by a report that ends the session.
        self.last_text = ""  # The text of the last answer.
        self.messages: tuple[Message, ...] = ()  # Before the last answer.

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def num_lost(self) -> int:
        return sum(not turn.is_delivered for turn in self._turns)

    async def answer(self, request: TurnRequest) -> tuple[TurnAnswer, ...]:
        self.num_requests += 1
        turn = await self._turn(request)
        self.next_fault = turn.faults.pop(0) if turn.faults else ""
        return turn.answers

    def stream(self, request: TurnRequest) -> WholeStream:
        return WholeStream(self.answer(request))

    async def _turn(self, request: TurnRequest) -> _Turn:
        turn = self._by_fingerprint.get(request.fingerprint) if request.retry_count else None
        if turn is None:
            thought = any(answer.reasoning for turn in self._turns for answer in turn.answers)
            self.loses_thinking |= thought and not any(message.get("reasoning_content") for message in request.messages)
            step = self._next_step(request)
            await asyncio.sleep(step.delay_s)
            answers = tuple(self._answer(step, request, number) for number in range(request.num_answers))
            turn = _Turn(answers, list(step.faults))
            self._turns.append(turn)
            self._by_fingerprint[request.fingerprint] = turn
            self.last_text, self.messages = turn.answers[-1].text, request.messages
        return turn

    async def count_tokens(self, request: TurnRequest) -> int:
        return _num_tokens(request)

    def delivered(self, answers: Sequence[TurnAnswer]) -> None:
        for turn in self._turns:
            turn.is_delivered |= turn.answers[0].turn_id == answers[0].turn_id

    def _next_step(self, request: TurnRequest) -> Step:
        """The step of a request. TurnRefused when it is a refusal."""
        if self.num_requests > MAX_REQUESTS:
            raise TurnRefused(f"more than {MAX_REQUESTS} requests", code="agent.turn_budget", status=400)
        while len(self._steps) > 1 and self._steps[0].kind in _NEED_TOOLS and not request.tools:
            self._steps.pop(0)
        step = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        self.has_played_fault |= not step.is_plain
        match step.kind:
            case "busy":
                raise TurnRefused("no place", code="agent.no_place", status=429, retry_after_s=_RETRY_AFTER_S)
            case "down":
                raise TurnRefused("no server", code="agent.no_server", status=503, retry_after_s=_RETRY_AFTER_S)
            case "overflow":
                raise TurnRefused("the prompt is too long", code="agent.prompt_too_long", status=400, param="messages")
            case _:
                return step

    def _answer(self, step: Step, request: TurnRequest, number: int) -> TurnAnswer:
        turn_id = f"rehearsal-{len(self._turns)}.{number}"
        text, calls, reason = self._script.answer, tuple[ToolCall, ...](), "stop"
        kind = step.kind if request.tools or step.kind not in _NEED_TOOLS else "answer"
        match kind:
            case "call" | "calls" | "thought":
                arguments = [self._script.arguments or _arguments(request.tools[0])] * (1 + (kind == "calls"))
                calls = _calls(request, turn_id, arguments)
            case "wrong":
                calls = _calls(request, turn_id, ['{"no_such_argument": 1}'])
            case "unknown":
                calls = _calls(request, turn_id, ["{}"], name="no_such_tool")
            case "malformed":
                raw = _MALFORMED % request.tools[0]["function"]["name"]
                answer = split_answer(raw, (), _STYLE, tools=request.tools, turn_id=turn_id)
                text, calls = answer.text, answer.tool_calls
                self.num_malformed += answer.num_malformed
            case "cut":
                text, reason = text[: len(text) // 2], "length"
            case "empty":
                text = ""
            case _:
                pass
        return TurnAnswer(
            turn_id=turn_id, text="" if calls else text, tool_calls=calls,
            reasoning=_THOUGHT if kind == "thought" else "", token_ids=(1,), logprobs=(-0.5,),
            finish_reason="tool_calls" if calls else reason, num_prompt_tokens=_num_tokens(request),
        )  # fmt: skip


def _num_tokens(request: TurnRequest) -> int:
    """About as many as a tokenizer would give."""
    return 1 + len(str(request.messages or request.prompt)) // 4


def _calls(request: TurnRequest, turn_id: str, arguments: Sequence[str], name: str = "") -> tuple[ToolCall, ...]:
    name = name or request.tools[0]["function"]["name"]
    ids = (f"call-{turn_id}-{number}" for number in range(len(arguments)))
    return tuple(
        ToolCall(call_id=call_id, name=name, arguments=text) for call_id, text in zip(ids, arguments, strict=False)
    )


def _arguments(tool: dict[str, Any]) -> str:
    properties: dict[str, Any] = (tool["function"].get("parameters") or {}).get("properties") or {}
    return json.dumps({name: _value(schema) for name, schema in properties.items()})


def _value(schema: dict[str, Any]) -> Any:
    if choices := schema.get("enum") or schema.get("examples"):
        return choices[0]
    return schema.get("default", _TYPES.get(str(schema.get("type")), "1"))


class RehearsalDirectory:
    """The session that is rehearsed now. Implements SessionDirectory."""

    def __init__(self) -> None:
        self.key = ""
        self.session: RehearsedSession | None = None
        self.place: OpenedSession | None = None  # What the next program from outside gets.
        self.num_refused = 0  # Programs that are refused before.

    def find(self, key: str) -> RehearsedSession | None:
        return self.session if key == self.key else None

    async def open(self, wish: OpenRequest) -> OpenedSession:
        if self.place is None or self.num_refused:
            self.num_refused = max(self.num_refused - 1, 0)
            raise TurnRefused("no place", code="agent.no_place", status=429, retry_after_s=_RETRY_AFTER_S)
        opened, self.place = self.place, None
        return opened

    async def finish(self, key: str, reward: SessionReward) -> None:
        session = self.find(key)
        if session is None:
            raise TurnRefused("this session does not exist", code="agent.unknown_session", status=404)
        session.reported = reward
        if reward.final:
            session.is_final.set()

    async def end_connection(self, request: web.Request, response: web.StreamResponse) -> None:
        """End the connection where the scenario says so; for `on_response_prepare` of the server."""
        session, transport = self.session, request.transport
        if session is None or transport is None or response.status != 200 or not session.next_fault:
            return
        fault, session.next_fault = session.next_fault, ""
        body = response.body if isinstance(response, web.Response) else None
        if fault == "dropped" and isinstance(body, bytes):
            kind = response.headers.get("Content-Type", "application/json")
            head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
            transport.write(head.encode() + body[: len(body) // 2])
        transport.close()
        raise ConnectionResetError(f"{fault} by the rehearsal")
