"""The table of a chat template: for each kind of answer and each next message, whether the bridge is exact."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal.agent.bridge.probe import (
    MARK,
    QUESTION,
    RESULT,
    TOOLS,
    TemplateFacts,
    answer,
    control_texts,
    result_of,
    user,
)
from areal.api.errors import InputError
from areal.data.answer_tail import AnswerTail, BridgeGap, placeholder, split_tail
from areal.data.chat_template import ChatTemplate

Next = Literal["U", "T", "TU"]
"""What follows an answer: a user message, the results of its calls, or both."""
Scope = Literal["all", "chat", "tools", "one-call", "bare-call"]
"""Which dialogues: all; answers without calls; calls and their results after one question; with
one call in an answer; and without text in addition to it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Which parts an answer has."""

    reasoning: bool
    content: bool
    num_calls: int
    """0, 1, or 2 for several."""

    def __str__(self) -> str:
        parts = ["r"] * self.reasoning + ["c"] * self.content + ["t"] * self.num_calls
        return f"A({','.join(parts)})"


def shape_of(message: Mapping[str, Any]) -> Shape:
    calls = len(message.get("tool_calls") or ())
    reasoning = bool(message.get("reasoning_content"))
    return Shape(reasoning, bool(message.get("content")) or not (calls or reasoning), min(calls, 2))


def next_of(new_messages: Sequence[Mapping[str, Any]]) -> Next:
    roles = [message["role"] for message in new_messages]
    if "tool" not in roles:
        return "U"
    return "T" if roles[-1] == "tool" else "TU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    shape: Shape
    following: Next
    num_contexts: int
    """Dialogues of which it was checked at the end."""
    gap: BridgeGap | None
    """None: proved."""
    counterexample: str = ""
    """The shortest dialogue that fails, for example `S U A(t) T A(c) U`."""


@dataclass(slots=True)
class _Tally:
    num_contexts: int = 0
    gap: BridgeGap | None = None
    counterexample: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A dialogue that the policy has to answer next."""

    messages: tuple[dict[str, Any], ...]
    prompt: str
    name: str
    num_answers: int
    num_calls: int


def table(template: ChatTemplate, facts: TemplateFacts, *, max_answers: int, scope: Scope = "all") -> tuple[Row, ...]:
    """Check every dialogue of up to `max_answers` answers, with and without tools and a system message.

    (H) The prompt of an answer is a prefix of the next prompt. (T) The text after the end token of the answer does not
    depend on what the answer says. Templates with the form of `facts`.
    """
    template = template.with_forms(facts.forms)
    pairs = pairs_of(template, facts, scope)
    tallies = {pair: _Tally() for pair in pairs}
    nodes = list(_first_nodes(template, facts, with_tools=any(shape.num_calls for shape, _ in pairs)))
    for _ in range(max_answers):
        nodes = [
            child
            for node, tools in nodes
            for shape, following in pairs
            if tools or not shape.num_calls
            for child in _check(template, facts, node, tools, shape, following, tallies[shape, following])
        ]
    return tuple(
        Row(
            shape=shape,
            following=following,
            num_contexts=tally.num_contexts,
            gap=tally.gap,
            counterexample=tally.counterexample,
        )
        for (shape, following), tally in tallies.items()
        if tally.num_contexts
    )


def summary(rows: Sequence[Row], on_drift: str) -> str:
    """One line about a table: which turns extend a session, and what happens to the others."""
    broken = [f"{row.shape} {row.following} ({row.gap.reason})" for row in rows if row.gap is not None]
    if not broken:
        return f"the chat template keeps earlier tokens: all {len(rows)} kinds of turns are proved to extend them"
    extending = ", ".join(f"{row.shape} {row.following}" for row in rows if row.gap is None) or "none"
    then = {
        "fork": "start a fork",
        "realign": "overwrite up to 64 tokens or start a fork",
        "reject": "are refused",
    }[on_drift]
    return (
        f"the chat template changes earlier tokens: turns of the kind {', '.join(broken)} {then} "
        f"(agent.on_drift={on_drift}); those that extend them: {extending}. areal prove-template shows the dialogues"
    )


def pairs_of(template: ChatTemplate, facts: TemplateFacts, scope: Scope) -> list[tuple[Shape, Next]]:
    """The kinds of answers of the declared scenario, with what follows them."""
    thinks = template.enable_thinking and facts.takes_reasoning
    text = Shape(thinks, True, 0)
    if scope == "chat" or (scope == "all" and not facts.takes_tools):
        return [(text, "U")]
    calls = [Shape(thinks, False, 1), Shape(thinks, True, 1), Shape(thinks, False, 2)] if facts.takes_tools else []
    if scope != "all":
        most = {"tools": len(calls), "one-call": 2, "bare-call": 1}[scope]
        return [(shape, "T") for shape in calls[:most]]
    return [(text, "U"), *((shape, following) for shape in calls for following in ("T", "TU"))]


def _first_nodes(template: ChatTemplate, facts: TemplateFacts, *, with_tools: bool) -> Iterator[tuple[_Node, bool]]:
    for system in (False, True) if facts.takes_system else (False,):
        for tools in (False, True) if with_tools else (False,):
            messages = (*([{"role": "system", "content": "areal0system"}] if system else []), user())
            try:
                prompt = template.render(messages, TOOLS if tools else ())
            except InputError:
                continue
            name = "S U" if system else "U"
            yield _Node(messages=messages, prompt=prompt, name=name, num_answers=0, num_calls=0), tools


def _check(
    template: ChatTemplate,
    facts: TemplateFacts,
    node: _Node,
    tools: bool,
    shape: Shape,
    following: Next,
    tally: _Tally,
) -> Iterator[tuple[_Node, bool]]:
    """Check one more answer. Yields the dialogue with it, unless the template refuses it."""
    said = answer(
        reasoning=shape.reasoning, content=shape.content, num_calls=shape.num_calls, first_call=node.num_calls
    )
    shown = placeholder(said, f"{MARK}{node.num_answers}x")
    new = [result_of(call, f"{RESULT}{call['id']}") for call in said.get("tool_calls", ())]
    if following != "T":
        new.append(user(f"{QUESTION}{node.num_answers}"))  # some templates compare messages with the last one
    tally.num_contexts += 1
    name = f"{node.name} {shape} {following[0] * shape.num_calls}{'U' if following != 'T' else ''}"
    schemas = TOOLS if tools else ()
    try:
        prompt = template.render([*node.messages, shown, *new], schemas)
        gap = _gap(template, facts, node, schemas, shown, new, prompt)
    except InputError as error:
        prompt, gap = None, BridgeGap(reason="refused", detail=str(error.__cause__ or error))
    if gap is not None and tally.gap is None:
        tally.gap, tally.counterexample = gap, name
    if prompt is not None:
        yield (
            _Node(
                messages=(*node.messages, shown, *new),
                prompt=prompt,
                name=name,
                num_answers=node.num_answers + 1,
                num_calls=node.num_calls + shape.num_calls,
            ),
            tools,
        )


def _gap(
    template: ChatTemplate,
    facts: TemplateFacts,
    node: _Node,
    schemas: Sequence[Mapping[str, Any]],
    shown: Mapping[str, Any],
    new: Sequence[Mapping[str, Any]],
    prompt: str,
) -> BridgeGap | None:
    mark = f"{MARK}{node.num_answers}x"
    tail = split_tail(node.prompt, prompt, shown, mark, facts.stops)
    if isinstance(tail, BridgeGap):
        return tail
    if tail.edit is not None:
        return tail.edit
    if "tool_calls" not in shown and _lacks_prompt(template, node, schemas, prompt, mark):
        return BridgeGap(reason="no_prompt", detail=f"the answer follows {prompt[len(node.prompt) :][:40]!r}")
    last = f"another{node.num_answers}x"
    variant = placeholder(shown, f" 7\n\n- {last}")
    other = template.render([*node.messages, variant, *new], schemas)
    other_tail = split_tail(node.prompt, other, variant, last, facts.stops)
    if not isinstance(other_tail, AnswerTail) or other_tail.text != tail.text:
        return BridgeGap(reason="tail_differs", detail=f"the text after the answer is not always {tail.text[:60]!r}")
    return None


def _lacks_prompt(
    template: ChatTemplate, node: _Node, schemas: Sequence[Mapping[str, Any]], prompt: str, mark: str
) -> bool:
    """Whether the template has no generation prompt though it writes a header before an answer."""
    if template.render(node.messages, schemas, add_generation_prompt=False) != node.prompt:
        return False
    header = prompt[len(node.prompt) : prompt.find(mark)]
    controls = [text for text in control_texts(template, special=True) if text in header]
    shared = any(text in node.prompt[: node.prompt.find(QUESTION)] for text in controls)
    return "assistant" in header.lower() or shared
