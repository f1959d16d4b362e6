"""The scenarios of `areal rehearse`: what the scripted policy and the server do, and what counts as a loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from areal.agent.agent_run import AgentOutcome

StepKind = Literal[
    "call", "calls", "wrong", "unknown", "malformed", "answer", "cut", "empty", "busy", "down", "overflow"
]
"""call, calls: one or two valid tool calls; wrong: a call with arguments that the tool does not have; unknown: a call
of a tool that the request does not have; malformed: a call that is no JSON, which arrives as text and is counted, as in
a run. These five are skipped when the request has no tools. busy, down, overflow: refused with 429, 503, 400."""
Fault = Literal["", "closed", "dropped"]
"""closed: the connection ends before the reply. dropped: it ends in the middle of the reply."""
Problem = Literal["crashed", "hung", "leaked", "lost turns", "no reward", "zero reward"]
SLOW_S = 1.0
"""Delay of a slow answer."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a request gets."""

    kind: StepKind
    faults: tuple[Fault, ...] = ()
    """Of the first deliveries of the answer; later ones are complete."""
    delay_s: float = 0.0

    @property
    def is_plain(self) -> bool:
        return self.kind in ("call", "answer") and not self.faults and not self.delay_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A sequence of steps; the last one is repeated."""

    name: str
    text: str
    steps: tuple[Step, ...]
    keeps_reward: bool = True
    """The answers are those of the first scenario, so the reward must not become zero.
    False: the policy is at fault, and 0 is a valid reward."""
    may_fail: bool = False
    """No answer can come: an error, or no reward, is right. A reward would blame the policy."""
    num_refused: int = 0
    """Sessions that a program from outside cannot open (429) before it gets one."""


_CALL, _ANSWER = Step("call"), Step("answer")
SCENARIOS = (
    Scenario(name="answers", text="a valid tool call, then the answer", steps=(_CALL, _ANSWER)),
    Scenario(name="parallel_calls", text="two tool calls in one answer", steps=(Step("calls"), _ANSWER)),
    Scenario(
        name="wrong_arguments",
        text="a call with arguments that the tool does not have",
        steps=(Step("wrong"), _CALL, _ANSWER),
        keeps_reward=False,
    ),
    Scenario(
        name="unknown_tool",
        text="a call of a tool that does not exist",
        steps=(Step("unknown"), _CALL, _ANSWER),
        keeps_reward=False,
    ),
    Scenario(
        name="malformed_call",
        text="a tool call that is no JSON, delivered as text",
        steps=(Step("malformed"), _CALL, _ANSWER),
        keeps_reward=False,
    ),
    Scenario(
        name="cut_answer", text="an answer cut by its limit", steps=(Step("cut"), _CALL, _ANSWER), keeps_reward=False
    ),
    Scenario(
        name="empty_answer", text="an answer without text", steps=(Step("empty"), _CALL, _ANSWER), keeps_reward=False
    ),
    Scenario(
        name="busy",
        text="429 with Retry-After, twice",
        steps=(Step("busy"), Step("busy"), _CALL, _ANSWER),
        num_refused=1,
    ),
    Scenario(name="slow", text="slow answers", steps=(Step("call", delay_s=SLOW_S), Step("answer", delay_s=SLOW_S))),
    Scenario(
        name="dropped",
        text="the connection ends in the middle of the first replies",
        steps=(Step("call", ("dropped",)), Step("answer", ("dropped",)), _ANSWER),
    ),
    Scenario(
        name="retries",
        text="the connection ends before the first reply, twice",
        steps=(Step("call", ("closed", "closed")), Step("answer", ("closed", "closed")), _ANSWER),
    ),
    Scenario(
        name="overflow",
        text="400: the prompt leaves no room for an answer",
        steps=(_CALL, Step("overflow")),
        keeps_reward=False,
    ),
    Scenario(name="outage", text="503 for every request", steps=(Step("down"),), keeps_reward=False, may_fail=True),
)
"""The first one gives the reward to which the others are compared."""


def problems_of(
    scenario: Scenario, outcome: AgentOutcome, *, reward: float | None, good_reward: float | None, num_lost: int
) -> list[Problem]:
    """What was lost in a scenario. `reward`: of its session. `good_reward`: of the first scenario.

    `num_lost`: generated turns that the client never received."""
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
    if reward is None and good_reward is not None:
        problems.append("no reward")
    if scenario.keeps_reward and reward == 0 and good_reward:
        problems.append("zero reward")
    return problems


def chosen(names: Sequence[str]) -> tuple[Scenario, ...]:
    """The scenarios of these names after the first, which is always played; all when there are no names."""
    return tuple(one for one in SCENARIOS if not names or one is SCENARIOS[0] or one.name in names)
