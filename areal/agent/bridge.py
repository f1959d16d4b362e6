"""The template bridge: what a chat template writes between an answer and the next answer, as token ids."""

import datetime
import functools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal, Protocol

from areal.agent.turns import Message
from areal.api.errors import InputError
from areal.data.chat_template import (
    MARK,
    QUESTION,
    RESULT,
    TOOLS,
    AnswerTail,
    BridgeGap,
    ChatTemplate,
    DialogueTemplate,
    TemplateFacts,
    TemplateScenario,
    answer,
    control_texts,
    placeholder,
    result_of,
    split_tail,
    user,
)
from areal.data.tokenizer import Tokenizer

# How a chat template begins an answer that calls a tool, found by rendering such an answer.


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStart:
    """What an answer must begin with so that it calls a tool."""

    token_ids: list[int]
    example: str  # The text of an answer that begins so; it calls `name`.
    name: str


def start_text(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], name: str
) -> tuple[str, str, str] | None:
    """The text from the generation prompt to the name of a called tool, an example of an answer, and its tool.

    `name`: the tool that must be called, then the text continues up to its arguments; empty = any tool. None: the
    template does not write such an answer after this prompt.
    """
    shown = template.nonce
    try:
        before = template.render(messages, tools)
        texts = [
            template.render([*messages, _calling(shown, arguments)], tools, add_generation_prompt=False)
            for arguments in ({}, {"areal": "1"})
        ]
    except InputError:
        return None
    if any(not text.startswith(before) or shown not in text[len(before) :] for text in texts):
        return None
    answers = [text[len(before) :] for text in texts]
    start = answers[0].partition(shown)[0]
    if not name:
        return start, answers[1], shown
    # What every answer has between name and arguments, up to the end of a token that tokenizers do not merge on.
    pairs = zip(*(answer.partition(shown)[2] for answer in answers), strict=False)
    between = "".join(character for character, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)).rstrip("{<")
    text = f"{start}{shown}{between.rstrip() or between}".replace(shown, name)
    return (text, answers[1].replace(shown, name), name) if between else None


def _calling(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call00000", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


# The table of a chat template: for each kind of answer and each next message, whether the bridge is exact.

Next = Literal["U", "T", "TU"]  # What follows an answer: a user message, the results of its calls, or both.
Scope = Literal["all", "chat", "tools", "one-call", "bare-call"]
"""Which dialogues: all; answers without calls; calls and their results after one question; with
one call in an answer; and without text in addition to it."""


@dataclass(frozen=True, slots=True)
class Shape:
    reasoning: bool
    content: bool
    num_calls: int  # 0, 1, or 2 for several.

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
    shape: Shape
    following: Next
    num_contexts: int  # Dialogues of which it was checked at the end.
    gap: BridgeGap | None  # None: proved.
    counterexample: str = ""  # The shortest dialogue that fails, for example `S U A(t) T A(c) U`.


@dataclass(slots=True)
class _Tally:
    num_contexts: int = 0
    gap: BridgeGap | None = None
    counterexample: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
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
    then = {"fork": "start a fork", "realign": "overwrite up to 64 tokens or start a fork", "reject": "are refused"}[
        on_drift
    ]
    return (
        f"the chat template changes earlier tokens: turns of the kind {', '.join(broken)} {then} "
        f"(agent.on_drift={on_drift}); those that extend them: {extending}. areal prove-template shows the dialogues"
    )


def pairs_of(template: ChatTemplate, facts: TemplateFacts, scope: Scope) -> list[tuple[Shape, Next]]:
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
    template: ChatTemplate, facts: TemplateFacts, node: _Node, tools: bool, shape: Shape, following: Next, tally: _Tally
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
    controls = [text for text in control_texts(template.tokenizer, special=True) if text in header]
    shared = any(text in node.prompt[: node.prompt.find(QUESTION)] for text in controls)
    return "assistant" in header.lower() or shared


_LOCAL_GAPS = ("tail_differs", "no_prompt", "no_stop")
"""Reasons that a check of one dialogue at run time does not find."""


class PromptBridge(Protocol):
    """Token ids of prompts, and of what extends a prompt and its answer to the next prompt."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, also those that the template itself never writes."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """The full rendering with the generation prompt. Raises InputError when the template refuses the messages."""
        ...

    def extension(
        self, history: Sequence[Message], new_messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int] | BridgeGap:
        """The tokens from the end token of the last answer, with it, to the end of the next generation prompt.

        `history` ends with the assistant message as delivered to the client; `new_messages` follow it. The caller
        leaves out the first token when the policy generated it. An answer that ends with another of `stop_token_ids`
        is not what the template writes: its next prompt is the full rendering.
        """
        ...

    def call_start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], name: str) -> CallStart | None:
        """What an answer begins with that calls the tool `name`, or any tool if `name` is empty.

        None: the template writes no such answer after the prompt of these messages.
        """
        ...


class TemplateBridge(DialogueTemplate):
    """The bridge of a tokenizer's chat template, derived by rendering. docs/data.md explains it."""

    def __init__(self, tokenizer: Tokenizer, scenario: TemplateScenario) -> None:
        """Raises InputError when the template does not render a question with its answer, or shows no end token."""
        super().__init__(tokenizer, scenario)
        self._local_gaps = {
            (row.shape, row.following): row.gap
            for row in table(self.template, self.facts, max_answers=1)
            if row.gap is not None and row.gap.reason in _LOCAL_GAPS
        }

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        return self.text_and_ids(messages, tools)[1]

    def extension(
        self, history: Sequence[Message], new_messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int] | BridgeGap:
        tail = self.tail(history, new_messages, tools)
        if isinstance(tail, BridgeGap):
            return tail
        return self._local_gaps.get((shape_of(history[-1]), next_of(new_messages))) or tail

    def call_start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], name: str) -> CallStart | None:
        start = start_text(self.template, messages, tools, name)
        if start is None:
            return None
        text, example, called = start
        end = min((place for stop in self.facts.stops if (place := example.find(stop, len(text))) >= 0), default=None)
        return CallStart(token_ids=self.spans.inner(text), example=example[:end], name=called)

    def table(self, *, max_answers: int = 3, scope: Scope = "all") -> tuple[Row, ...]:
        """The proof over all dialogues of up to `max_answers` answers."""
        return table(self.template, self.facts, max_answers=max_answers, scope=scope)


def template_bridge(tokenizer: Tokenizer, scenario: TemplateScenario | None = None) -> TemplateBridge:
    """The bridge of the tokenizer's chat template, made once for each template and scenario. Raises InputError."""
    return _made(tokenizer, repr(tokenizer.chat_template), scenario or TemplateScenario(), datetime.date.today())


@functools.lru_cache(maxsize=32)
def _made(tokenizer: Tokenizer, template: str, scenario: TemplateScenario, today: datetime.date) -> TemplateBridge:
    return TemplateBridge(tokenizer, scenario)


# Random dialogues, and the comparison of every bridge in them with the full rendering, token by token.

_PIECES = (
    "a", "The answer", "42", " ", "\n", "\n\n", "\t", ".", "{", '"x": 1}', "[", "]", "'", "\\", "é", "日本", "🙂",
    "- item", "```python\nprint(1)\n```", "<b>", "&amp;", "{{ x }}", "{% if %}", "None", "assistant", "user", "  ",
)  # fmt: skip
Turn = tuple[tuple[Message, ...], tuple[Message, ...], tuple[dict[str, Any], ...]]
"""History up to an answer, the messages that follow it, tools."""


@dataclass(slots=True)
class Comparison:
    num_dialogues: int = 0
    num_bridges: int = 0
    num_different: int = 0
    num_refused: int = 0  # Answers after which the template refuses the messages.
    num_edits: int = 0
    """Bridges of which the full rendering changes the real text before the answer though it keeps placeholders."""
    gaps: dict[tuple[Shape, Next], int] = field(default_factory=dict[tuple[Shape, Next], int])
    """Answers that no bridge extends, by row of the table."""
    different: Turn | None = None  # The shortest turn whose bridge is no end of the full rendering.


def compare(bridge: TemplateBridge, *, num_dialogues: int, seed: int, scope: Scope = "all") -> Comparison:
    """Compare the bridge after every answer of random dialogues with the full rendering of the same messages."""
    source = random.Random(seed)
    pairs = pairs_of(bridge.template, bridge.facts, scope)
    comparison = Comparison()
    for _ in range(num_dialogues if pairs else 0):
        comparison.num_dialogues += 1
        for turn in _dialogue(source, bridge, pairs):
            if not _compare_turn(bridge, turn, comparison):
                break
    return comparison


def _compare_turn(bridge: TemplateBridge, turn: Turn, comparison: Comparison) -> bool:
    """Count one turn. Returns False when the template refuses its messages."""
    history, new, tools = turn
    extension = bridge.extension(history, new, tools)
    if isinstance(extension, BridgeGap):
        row = shape_of(history[-1]), next_of(new)
        comparison.gaps[row] = comparison.gaps.get(row, 0) + 1
        comparison.num_refused += extension.reason == "refused"
        return extension.reason != "refused"
    comparison.num_bridges += 1
    whole = bridge.prompt([*history, *new], tools)
    if whole[-len(extension) :] != extension or extension[0] not in bridge.stop_token_ids:
        comparison.num_different += 1
        if comparison.different is None or len(history) < len(comparison.different[0]):
            comparison.different = turn
    before = bridge.template.render(history[:-1], tools)
    comparison.num_edits += not bridge.template.render([*history, *new], tools).startswith(before)
    return True


def _dialogue(source: random.Random, bridge: TemplateBridge, pairs: Sequence[tuple[Shape, Next]]) -> Iterator[Turn]:
    messages: list[Message] = []
    if bridge.facts.takes_system and source.random() < 0.5:
        messages.append({"role": "system", "content": _text(source)})
    messages.append({"role": "user", "content": _text(source)})
    with_calls = [pair for pair in pairs if pair[0].num_calls]
    tools = TOOLS if with_calls and (len(with_calls) == len(pairs) or source.random() < 0.8) else ()
    try:
        bridge.template.render(messages, tools)
    except InputError:
        tools = TOOLS
    num_calls = 0
    for _ in range(source.randint(1, 5)):
        shape, following = source.choice([pair for pair in pairs if tools or not pair[0].num_calls])
        answer = _answer(source, shape, num_calls)
        num_calls += shape.num_calls
        new: list[Message] = [
            {"role": "tool", "tool_call_id": call["id"], "name": "lookup", "content": _result(source, bridge)}
            for call in answer.get("tool_calls", ())
        ]
        if following != "T":
            new.append({"role": "user", "content": _text(source)})
        messages.append(answer)
        yield tuple(messages), tuple(new), tools
        messages += new


def _answer(source: random.Random, shape: Shape, first_call: int) -> Message:
    answer: Message = {"role": "assistant", "content": _text(source) if shape.content else ""}
    if shape.reasoning:
        answer["reasoning_content"] = _text(source)
    if shape.num_calls:
        answer["tool_calls"] = [
            {
                "id": f"call{first_call + number:05d}",
                "type": "function",
                "function": {"name": "lookup", "arguments": json.dumps({"word": _text(source)}, ensure_ascii=False)},
            }
            for number in range(shape.num_calls)
        ]
    return answer


def _text(source: random.Random) -> str:
    """Text with at least one word: empty reasoning, for example, is another kind of answer."""
    pieces = source.choices(_PIECES, k=source.randint(0, 6))
    return "".join([*pieces, "word", *source.choices(_PIECES, k=source.randint(0, 4))])


def _result(source: random.Random, bridge: TemplateBridge) -> str:
    """The result of a tool; one of four contains an end token, which must not end the turn."""
    return _text(source) + (source.choice(bridge.facts.stops) if source.random() < 0.25 else "") + _text(source)
