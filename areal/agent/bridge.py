"""The template bridge: what a chat template writes between an answer and the next answer, as token ids."""

import datetime
import functools
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal, Protocol

from areal.agent.turns import Message
from areal.api.errors import InputError
from areal.data.chat import AnswerTail, BridgeGap, ChatTemplate, MessageForms, answer_tail, placeholder, split_tail
from areal.data.tokenizer import Tokenizer

# Text of messages that looks like a control token, encoded as plain text.

_PRIVATE_USE = range(0xE000, 0xF8FF)  # Code points that no tokenizer and no template gives a meaning.


class PlainSpans:
    """Marks control tokens in the content of messages, and encodes what a template renders from such messages.

    A tool result that contains an end token then does not end the turn. Answers are not marked.
    """

    def __init__(self, tokenizer: Tokenizer, controls: Sequence[str]) -> None:
        """`controls`: the texts of the control tokens."""
        self._tokenizer = tokenizer
        longest_first = sorted(controls, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._before = tokenizer.encode("\n", add_special_tokens=False)
        self._ids_of_control: dict[str, list[int]] = {}  # As plain text.

    def marks_for(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
        """Two characters that the messages do not contain; None when no content contains a control token."""
        texts = [text for message in messages if message["role"] != "assistant" for text in _texts_of(message)]
        if not any(self._control.search(text) for text in texts):
            return None
        whole = repr(messages)  # repr shows most private characters as escapes, so both forms are looked for
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in whole and f"\\u{code:04x}" not in whole)
        return next(free), next(free)

    def marked(self, message: Mapping[str, Any], marks: tuple[str, str] | None) -> dict[str, Any]:
        """The message with `marks` around each control token of its content."""
        content = message.get("content")
        if marks is None or message["role"] == "assistant" or not isinstance(content, str | list):
            return dict(message)
        first, last = marks

        def plain(text: str) -> str:
            return self._control.sub(lambda match: f"{first}{match[0]}{last}", text)

        if isinstance(content, str):
            return {**message, "content": plain(content)}
        parts = [{**part, "text": plain(part["text"])} if part["type"] == "text" else part for part in content]
        return {**message, "content": parts}

    def encode(self, text: str, marks: tuple[str, str] | None) -> list[int]:
        """Token ids of rendered text, without those of `marks`."""
        if marks is None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        first, last = marks
        pieces = re.split(f"{first}({self._control.pattern}){last}|[{first}{last}]", text)
        ids = self._tokenizer.encode(pieces[0], add_special_tokens=False)
        for index, piece in enumerate(pieces[1:], start=1):
            if piece:
                ids += self._plain(piece) if index % 2 else self.inner(piece)
        return ids

    def _plain(self, control: str) -> list[int]:
        """A control token as plain text: none of its parts is a token that the tokenizer finds in text."""
        if control not in self._ids_of_control:
            self._ids_of_control[control] = [token for character in control for token in self.inner(character)]
        return self._ids_of_control[control]

    def inner(self, text: str) -> list[int]:
        """Ids of text that is not at the beginning, where some tokenizers insert a space."""
        ids = self._tokenizer.encode("\n" + text, add_special_tokens=False)
        if self._before and ids[: len(self._before)] == self._before:
            return ids[len(self._before) :]
        return self._tokenizer.encode(text, add_special_tokens=False)


def _texts_of(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, list):
        return [part["text"] for part in content if part["type"] == "text"]
    return [content] if isinstance(content, str) else []


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
    between = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)).rstrip("{<")
    text = f"{start}{shown}{between.rstrip() or between}".replace(shown, name)
    return (text, answers[1].replace(shown, name), name) if between else None


def _calling(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call00000", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


# What a chat template takes and writes, found by rendering short dialogues: forms of messages, and end tokens.

QUESTION, RESULT, MARK = "areal1question", "areal2result", "areal3answer"
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "The word."}},
                "required": ["word"],
            },
        },
    },
)
_CLOSING_TAG = re.compile(r"""split\(\s*["']\s*(?:\\n)*(</(\w+)>)""")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    forms: MessageForms
    stops: tuple[str, ...]  # Texts of the tokens that end an answer, those that the user declares first.
    takes_system: bool
    takes_tools: bool  # Whether a call and its result are rendered.
    refusal: str  # The error of the template for a call and its result.
    takes_reasoning: bool


def user(text: str = QUESTION) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(*, reasoning: bool = False, content: bool = True, num_calls: int = 0, first_call: int = 0) -> dict[str, Any]:
    """An answer with MARK in each of its texts. Ids of calls have nine letters and digits, as some templates demand."""
    message: dict[str, Any] = {"role": "assistant", "content": MARK if content else ""}
    if reasoning:
        message["reasoning_content"] = MARK
    if num_calls:
        message["tool_calls"] = [
            {
                "id": f"call{number:05d}",
                "type": "function",
                "function": {"name": "lookup", "arguments": f'{{"word": "{MARK}"}}'},
            }
            for number in range(first_call, first_call + num_calls)
        ]
    return message


def result_of(call: Mapping[str, Any], text: str = RESULT) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}


def probe(template: ChatTemplate, declared_stops: Sequence[str]) -> TemplateFacts:
    """Find the forms and the end tokens. Raises InputError when not even a question and an answer are rendered."""
    forms = _content_form(template)
    template = template.with_forms(forms)
    call_forms = _call_forms(template)
    if call_forms is not None:
        template = template.with_forms(call_forms)
    reasoning_forms = _reasoning_form(template)
    if reasoning_forms is not None:
        template = template.with_forms(reasoning_forms)
    system = _render(template, [{"role": "system", "content": "areal0system"}, user()])
    return TemplateFacts(
        forms=template.forms,
        stops=_stops(template, declared_stops, with_calls=call_forms is not None),
        takes_system=system is not None and "areal0system" in system,
        takes_tools=call_forms is not None,
        refusal="" if call_forms is not None else _refusal(template),
        takes_reasoning=reasoning_forms is not None,
    )


def _render(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], *, tools: bool = False) -> str | None:
    for schemas in (TOOLS,) if tools else ((), TOOLS):  # some templates render nothing without tools
        try:
            return template.render(messages, schemas)
        except InputError:
            continue
    return None


def _content_form(template: ChatTemplate) -> MessageForms:
    """Content as text, or as a list of parts. Raises InputError."""
    dialogue = [user(), answer(), user("areal4again")]
    for form in ("text", "parts"):
        forms = replace(template.forms, content=form)
        text = _render(template.with_forms(forms), dialogue)
        if text is not None and QUESTION in text and MARK in text:
            return forms
    template.render(dialogue)  # raises the template's own error
    message = "the chat template does not show a question and its answer, so it supports no further turns"
    raise InputError(message, code="data.chat_template")


def _call_forms(template: ChatTemplate) -> MessageForms | None:
    """Arguments as text or mapping, and empty content. None: the template shows no calls or no results.

    Text that the template inserts as it is comes first, because a policy's own spelling of the JSON is then kept.
    """
    question = answer(content=False, num_calls=1)
    written = question["tool_calls"][0]["function"]["arguments"]
    shown: list[MessageForms] = []
    for arguments in ("text", "mapping"):
        for empty in ("text", "missing"):
            forms = replace(template.forms, arguments=arguments, empty_content=empty)
            text = _render(
                template.with_forms(forms), [user(), question, result_of(question["tool_calls"][0])], tools=True
            )
            if text is None or MARK not in text or RESULT not in text:
                continue
            if arguments == "text" and written not in text:  # escaped twice
                continue
            shown.append(forms)
    return shown[0] if shown else None


def _refusal(template: ChatTemplate) -> str:
    called = answer(content=False, num_calls=1)
    try:
        template.render([user(), called, result_of(called["tool_calls"][0])], TOOLS)
    except InputError as error:
        return f"{type(error.__cause__).__name__}: {error.__cause__}"
    return ""


def _reasoning_form(template: ChatTemplate) -> MessageForms | None:
    """The form in which the template reads reasoning. None: it shows none, not even of the last answer."""
    thought = {**answer(content=True), "reasoning_content": "areal5thought"}
    last = [user(), thought]
    called = answer(content=False, num_calls=1)
    loop = [user(), {**called, "reasoning_content": "areal5thought"}, result_of(called["tool_calls"][0])]
    for key in ("reasoning_content", "reasoning", "thinking"):
        forms = replace(template.forms, reasoning_key=key)
        for dialogue, tools in ((last, False), ([*last, user()], False), (loop, True)):
            text = _render(template.with_forms(forms), dialogue, tools=tools)
            if text is not None and "areal5thought" in text:
                return forms
    tags = _CLOSING_TAG.search(template.source)
    if tags is None:
        return None
    return replace(template.forms, reasoning_key="", reasoning_tags=(f"<{tags[2]}>", tags[1]))


def _stops(template: ChatTemplate, declared: Sequence[str], *, with_calls: bool) -> tuple[str, ...]:
    """The end tokens: the declared ones, and the first control token after an answer where none of them follows it.

    A template may end an answer by the header of the next message, and a call by another token than a text.
    """
    stops = list(declared)
    for end in _ends(template, with_calls=with_calls):
        if any(stop in end for stop in stops):
            continue
        for found in (
            _first_of(end, control_texts(template, special=True)),
            _first_of(end, control_texts(template, special=False)),
        ):
            if found is not None:
                stops.append(found)
                break
    return tuple(stops)


def _ends(template: ChatTemplate, *, with_calls: bool) -> Iterator[str]:
    dialogues: list[tuple[list[dict[str, Any]], str]] = [([user(), answer(), user("areal4again")], "areal4again")]
    if with_calls:
        called = answer(content=False, num_calls=1)
        dialogues.append(([user(), called, result_of(called["tool_calls"][0])], RESULT))
    for messages, following in dialogues:
        text = _render(template, messages, tools=following == RESULT)
        if text is not None:
            start = text.rfind(MARK) + len(MARK)
            yield text[start : text.find(following, start)]


def _first_of(text: str, tokens: Iterable[str]) -> str | None:
    places = [(text.find(token), -len(token), token) for token in tokens if token in text]
    return min(places)[2] if places else None


def control_texts(template: ChatTemplate, *, special: bool) -> list[str]:
    """Texts of the added tokens; `special`: only of those that decoding leaves out."""
    tokens = template.tokenizer.added_tokens_decoder.values()
    return [token.content for token in tokens if token.special or not special]


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
    controls = [text for text in control_texts(template, special=True) if text in header]
    shared = any(text in node.prompt[: node.prompt.find(QUESTION)] for text in controls)
    return "assistant" in header.lower() or shared


__all__ = ["BridgeGap", "CallStart", "PromptBridge", "TemplateBridge", "TemplateScenario", "template_bridge"]

_LOCAL_GAPS = ("tail_differs", "no_prompt", "no_stop")
"""Reasons that a check of one dialogue at run time does not find."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateScenario:
    """What the user declares about a chat template."""

    enable_thinking: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """Further variables of the template, for example {"preserve_thinking": True}."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end an answer, besides the end token of the tokenizer and those that the template shows."""
    date: datetime.date | None = None  # The date that the template prints; None = today.


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


class TemplateBridge:
    """The bridge of a tokenizer's chat template, derived by rendering. docs/data.md explains it."""

    def __init__(self, tokenizer: Tokenizer, scenario: TemplateScenario) -> None:
        """Raises InputError when the template does not render a question with its answer, or shows no end token."""
        template = ChatTemplate(
            tokenizer, enable_thinking=scenario.enable_thinking, options=scenario.options, date=scenario.date
        )
        self.facts: TemplateFacts = probe(template, declared_stops(tokenizer, scenario.stop_token_ids))
        self.template = template.with_forms(self.facts.forms)
        self._stops = {stop: tokenizer.encode(stop, add_special_tokens=False) for stop in self.facts.stops}
        broken = [stop for stop, ids in self._stops.items() if len(ids) != 1]
        if broken or not self._stops:
            what = f"{broken} are no single tokens" if broken else "no token follows an answer"
            message = f"the chat template has no usable end token: {what}; declare the stop tokens"
            raise InputError(message, code="data.template_stop")
        self._spans = PlainSpans(tokenizer, sorted({*control_texts(template, special=True), *self._stops}))
        self._local_gaps = {
            (row.shape, row.following): row.gap
            for row in table(self.template, self.facts, max_answers=1)
            if row.gap is not None and row.gap.reason in _LOCAL_GAPS
        }

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return frozenset(ids[0] for ids in self._stops.values())

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        marks = self._spans.marks_for(messages)
        text = self.template.render([self._spans.marked(message, marks) for message in messages], tools)
        return self._spans.encode(text, marks)

    def extension(
        self, history: Sequence[Message], new_messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int] | BridgeGap:
        found = self.tail(history, new_messages, tools)
        if isinstance(found, BridgeGap):
            return found
        return self._local_gaps.get((shape_of(history[-1]), next_of(new_messages))) or found

    def tail(
        self,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        may_edit: bool = False,
    ) -> list[int] | BridgeGap:
        """The tokens after the last answer of `history`. `may_edit`: also where the template edits the history."""
        marks = self._spans.marks_for([*history, *new_messages])
        old, new = ([self._spans.marked(message, marks) for message in part] for part in (history, new_messages))
        found = answer_tail(self.template, old, new, tools, stops=self.facts.stops)
        if isinstance(found, BridgeGap):
            return found
        if found.edit is not None and not may_edit:
            return found.edit
        token_ids = self._spans.encode(found.text, marks)
        if token_ids[0] not in self.stop_token_ids:  # text of a message that looks like an end token
            return BridgeGap(reason="no_stop", detail="no end token follows the answer")
        return token_ids

    def call_start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], name: str) -> CallStart | None:
        found = start_text(self.template, messages, tools, name)
        if found is None:
            return None
        text, example, called = found
        end = min((place for stop in self.facts.stops if (place := example.find(stop, len(text))) >= 0), default=None)
        return CallStart(token_ids=self._spans.inner(text), example=example[:end], name=called)

    def table(self, *, max_answers: int = 3, scope: Scope = "all") -> tuple[Row, ...]:
        """The proof over all dialogues of up to `max_answers` answers."""
        return table(self.template, self.facts, max_answers=max_answers, scope=scope)


def declared_stops(tokenizer: Tokenizer, token_ids: frozenset[int]) -> list[str]:
    """Texts of the end token of the tokenizer and of further tokens."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [tokenizer.decode([token]) for token in [*ends, *sorted(token_ids.difference(ends))]]


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
    found = Comparison()
    for _ in range(num_dialogues if pairs else 0):
        found.num_dialogues += 1
        for turn in _dialogue(source, bridge, pairs):
            if not _compare_turn(bridge, turn, found):
                break
    return found


def _compare_turn(bridge: TemplateBridge, turn: Turn, found: Comparison) -> bool:
    """Count one turn. Returns False when the template refuses its messages."""
    history, new, tools = turn
    extension = bridge.extension(history, new, tools)
    if isinstance(extension, BridgeGap):
        row = shape_of(history[-1]), next_of(new)
        found.gaps[row] = found.gaps.get(row, 0) + 1
        found.num_refused += extension.reason == "refused"
        return extension.reason != "refused"
    found.num_bridges += 1
    whole = bridge.prompt([*history, *new], tools)
    if whole[-len(extension) :] != extension or extension[0] not in bridge.stop_token_ids:
        found.num_different += 1
        if found.different is None or len(history) < len(found.different[0]):
            found.different = turn
    before = bridge.template.render(history[:-1], tools)
    found.num_edits += not bridge.template.render([*history, *new], tools).startswith(before)
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
