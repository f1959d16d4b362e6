"""A tokenizer's chat template: messages in OpenAI's form to text and token ids, with the answers and their ends."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from areal.api.errors import InputError
from areal.data.tokenizer import Tokenizer

# ----------------------------------------------------------------------------------------------------------------------
# A tokenizer's chat template with fixed options and date. Messages have OpenAI's form, whatever the template takes.

_DATE_FORMAT = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(["'])(.*?)\1""")
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ areal_dates[format] if format in areal_dates else "
    'raise_exception("the format of a date is no constant") }}{%- endmacro %}'
)
"""Jinja code before a template that prints the date. transformers replaces a function among the variables by text."""

_MAX_RECENT_CHARACTERS = 32 << 20
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForms:
    """The forms of a message's fields that a template takes."""

    arguments: Literal["text", "mapping"] = "text"
    empty_content: Literal["text", "missing"] = "text"
    """Content of an answer that has only calls: "" or no key `content`. transformers leaves out keys with None."""
    content: Literal["text", "parts"] = "text"
    reasoning_key: str = "reasoning_content"
    """Key of the reasoning. "": within the content, between `reasoning_tags`."""
    reasoning_tags: tuple[str, str] = ("", "")

    def adapted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message of OpenAI's form in this form."""
        adapted = dict(message)
        if message["role"] == "assistant":
            self._adapt_answer(adapted)
        content = adapted.get("content")
        if self.content == "parts" and isinstance(content, str):
            adapted["content"] = [{"type": "text", "text": content}]
        return adapted

    def _adapt_answer(self, message: dict[str, Any]) -> None:
        if message.get("tool_calls"):
            message["tool_calls"] = [self._adapted_call(call) for call in message["tool_calls"]]
        content = message.get("content") or ""
        reasoning = message.pop("reasoning_content", None)
        if reasoning and self.reasoning_key:
            message[self.reasoning_key] = reasoning
        elif reasoning and any(self.reasoning_tags):
            first, last = self.reasoning_tags
            content = f"{first}\n{reasoning}\n{last}\n\n{content}"
        message["content"] = content
        if not content and self.empty_content == "missing":
            del message["content"]

    def _adapted_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if self.arguments == "text" and isinstance(arguments, Mapping):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        if self.arguments == "mapping" and isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except ValueError:
                parsed = None
            function["arguments"] = parsed if isinstance(parsed, dict) else arguments
        return {**call, "function": function}


class ChatTemplate:
    """Renders dialogues. Equal messages have equal text, on every day."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        enable_thinking: bool = False,
        options: Mapping[str, Any] | None = None,
        date: datetime.date | None = None,
        forms: MessageForms | None = None,
    ) -> None:
        """`options`: further variables of the template. `date`: the date that it prints; None = today.

        Raises InputError when the tokenizer has no template.
        """
        if not tokenizer.chat_template:
            message = "the tokenizer has no chat template, which messages and agents need: set chat_template.path, use "
            message += "the tokenizer of a chat model, or rows with 'prompt' and a workflow without messages"
            raise InputError(message, code="data.chat_template")
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking
        self.forms = forms or MessageForms()
        self.date = date or datetime.date.today()
        self.options = dict(options or {})
        source = tokenizer.chat_template
        self.source = source if isinstance(source, str) else json.dumps(source, sort_keys=True)
        named = dict.fromkeys(("default", "tool_use"), source) if isinstance(source, str) else dict(source)
        self.nonce = f"areal{secrets.token_hex(8)}"
        """Text that no message contains."""
        self._recent = OrderedDict[bytes, str]()
        self._num_characters = 0
        self._dated = (
            {name: _FIXED_DATE + text for name, text in named.items()} if "strftime_now" in self.source else {}
        )
        self._dates = {match[2]: self.date.strftime(match[2]) for match in _DATE_FORMAT.finditer(self.source)}

    def with_forms(self, forms: MessageForms, *, enable_thinking: bool | None = None) -> ChatTemplate:
        """The same template with other forms. `enable_thinking` None: as it is."""
        thinks = self.enable_thinking if enable_thinking is None else enable_thinking
        return ChatTemplate(self.tokenizer, enable_thinking=thinks, options=self.options, date=self.date, forms=forms)

    @property
    def digest(self) -> str:
        """SHA-256 of the template and everything that it prints besides the messages."""
        parts = [self.source, self.enable_thinking, self.options, str(self.date) if self._dated else ""]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """Render, and keep recent texts: the next prompt of one turn begins the following turn."""
        facts = json.dumps([messages, tools], default=repr).encode()
        key = hashlib.blake2b(facts, digest_size=16).digest()
        if (text := self._recent.get(key)) is None:
            text = self._recent[key] = self.render(messages, tools)
            self._num_characters += len(text)
            while self._num_characters > _MAX_RECENT_CHARACTERS:
                self._num_characters -= len(self._recent.popitem(last=False)[1])
        return text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a dialogue. Raises InputError when the template refuses it."""
        variables: dict[str, Any] = {**self.options, "enable_thinking": self.enable_thinking}
        if tools:
            variables["tools"] = list(tools)
        if self._dated:
            variables["areal_dates"] = self._dates
            variables["chat_template"] = self._dated["tool_use" if tools and "tool_use" in self._dated else "default"]
        adapted = [self.forms.adapted(message) for message in messages]
        return applied(self.tokenizer, adapted, variables | {"add_generation_prompt": add_generation_prompt})


def applied(tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    """The text that the tokenizer's template makes of a dialogue. Raises InputError when the template refuses it."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        text.encode()  # half of a character, as JSON can write it, has no tokens
    except Exception as error:  # a template is foreign code
        message = f"the chat template refuses a dialogue: {type(error).__name__}: {error}"
        raise InputError(message, code="data.template_refused") from error
    return text


# ----------------------------------------------------------------------------------------------------------------------
# What a chat template writes after an answer, found by rendering a placeholder in the answer's place.

GapReason = Literal["history_edited", "answer_edited", "tail_differs", "no_stop", "no_prompt", "hidden", "refused"]

_THOUGHT, _TEXT = "thought", "text"
_KEYS = {"reasoning": "reasoning_content", "content": "content"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeGap:
    """Why nothing extends a history to the next prompt."""

    reason: GapReason
    """history_edited: the template changes the text before the answer once the new messages follow. answer_edited:
    it leaves out or moves a part of the answer, for example the reasoning. tail_differs: the text after an answer
    depends on the answer. no_stop: it contains no token that ends the answer. no_prompt: the template has no
    generation prompt. hidden: the history does not end with an answer that the template shows. refused: the template
    raises."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTail:
    """The text from an answer's end to the end of the next generation prompt."""

    text: str
    """Begins with the end token of the answer, if the template writes one."""
    edit: BridgeGap | None
    """How the template changes the answer or the text before it; None = it does not."""


def answer_tail(
    template: ChatTemplate,
    history: Sequence[Mapping[str, Any]],
    new_messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    stops: Sequence[str] = (),
) -> AnswerTail | BridgeGap:
    """The tail of the last message of `history`, an answer, when `new_messages` follow.

    All answers are replaced by placeholders of their shape, with the same names and ids of calls. `stops`: texts of
    the end tokens; without any, the tail begins right after the placeholder.
    """
    if not history or history[-1]["role"] != "assistant":
        return BridgeGap(reason="hidden", detail="the history does not end with an answer")
    shown = [
        placeholder(message, f"{template.nonce}{index:05d}") if message["role"] == "assistant" else message
        for index, message in enumerate(history)
    ]
    try:
        before = template.prompt(shown[:-1], tools)
        after = template.prompt([*shown, *new_messages], tools)
    except InputError as error:
        return BridgeGap(reason="refused", detail=str(error))
    return split_tail(before, after, shown[-1], f"{template.nonce}{len(history) - 1:05d}", stops)


def split_tail(
    before: str, after: str, answer: Mapping[str, Any], mark: str, stops: Sequence[str]
) -> AnswerTail | BridgeGap:
    """The tail in `after`, the next prompt. `before`: the prompt of `answer`, which is a placeholder with `mark`."""
    position = after.rfind(mark)
    if position < 0:
        return BridgeGap(reason="hidden", detail="the template does not show the answer")
    position += len(mark)
    if stops:
        places = [place for stop in stops if (place := after.find(stop, position)) >= 0]
        if not places:
            return BridgeGap(reason="no_stop", detail=f"no end token of {list(stops)} follows the answer")
        position = min(places)
    return AnswerTail(text=after[position:], edit=_edit(before, after, answer, mark))


def _edit(before: str, after: str, answer: Mapping[str, Any], mark: str) -> BridgeGap | None:
    if not after.startswith(before):
        place = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(after))
        first = max(0, place - 20)
        detail = f"at character {place}: {before[first : place + 30]!r} becomes {after[first : place + 30]!r}"
        return BridgeGap(reason="history_edited", detail=detail)
    return parts_gap(after[len(before) :], answer, mark)


def parts_gap(text: str, answer: Mapping[str, Any], mark: str) -> BridgeGap | None:
    """What a rendered answer, a placeholder with `mark`, lacks, or has in another order."""
    parts = parts_of_answer(answer, mark)
    places = [text.find(part) for part in parts.values()]
    for name, place in zip(parts, places, strict=True):
        if place < 0:
            return BridgeGap(reason="answer_edited", detail=f"the template leaves out the {name} of the answer")
    if places != sorted(places):
        return BridgeGap(reason="answer_edited", detail="the template moves parts of the answer")
    return None


def parts_of_answer(answer: Mapping[str, Any], mark: str) -> dict[str, str]:
    """The texts of a placeholder with `mark`, by name, in the order in which the policy writes them."""
    calls = range(len(answer.get("tool_calls") or ()))
    parts = {"reasoning": _THOUGHT, "content": _TEXT} | {f"call {number}": f"call{number}" for number in calls}
    return {name: f"{part}{mark}" for name, part in parts.items() if name not in _KEYS or answer.get(_KEYS[name])}


def placeholder(answer: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """An answer of the same shape that ends with `mark` wherever the policy writes text."""
    message = dict(answer)
    if message.get("reasoning_content"):
        message["reasoning_content"] = _THOUGHT + mark
    calls = message.get("tool_calls") or ()
    if message.get("content") or not (calls or message.get("reasoning_content")):
        message["content"] = _TEXT + mark  # an empty answer has no other place for a mark
    if calls:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"], f"call{number}{mark}")}}
            for number, call in enumerate(calls)
        ]
    return message


def _arguments(function: Mapping[str, Any], mark: str) -> str:
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        parsed = None
    names = list(parsed) if isinstance(parsed, Mapping) else []
    return json.dumps(dict.fromkeys(names or ["areal"], mark))


# Text of messages that looks like a control token, encoded as plain text.

_PRIVATE_USE = range(0xE000, 0xF8FF)  # Code points that no tokenizer and no template gives a meaning.


class PlainSpans:
    """Marks control tokens in messages and tools, and encodes what a template renders from them.

    A tool result or an answer that contains an end token then does not end the turn.
    """

    def __init__(self, tokenizer: Tokenizer, controls: Sequence[str]) -> None:
        """`controls`: the texts of the control tokens."""
        self._tokenizer = tokenizer
        longest_first = sorted(controls, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._before = tokenizer.encode("\n", add_special_tokens=False)
        self._ids_of_control: dict[str, list[int]] = {}  # The tokens of its plain text.

    def marks_for(self, *values: Any) -> tuple[str, str] | None:
        """Two characters that messages and tools do not contain; None when no text contains a control token."""
        if not any(self._control.search(text) for text in _texts_of(values)):
            return None
        whole = repr(values)  # repr shows most private characters as escapes, so both forms are looked for
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in whole and f"\\u{code:04x}" not in whole)
        return next(free), next(free)

    def marked(self, value: Any, marks: tuple[str, str] | None) -> Any:
        """A value of JSON with `marks` around each control token in its texts."""
        if marks is None:
            return value
        if isinstance(value, str):
            return self._control.sub(lambda match: f"{marks[0]}{match[0]}{marks[1]}", value)
        if isinstance(value, Mapping):
            return {self.marked(key, marks): self.marked(item, marks) for key, item in value.items()}
        return [self.marked(item, marks) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, marks: tuple[str, str] | None, *, is_inner: bool = False) -> list[int]:
        """Token ids of rendered text, without those of `marks`. `is_inner`: of text that follows another."""
        first_ids = self.inner if is_inner else functools.partial(self._tokenizer.encode, add_special_tokens=False)
        if marks is None:
            return first_ids(text)
        first, last = marks
        pieces = re.split(f"{first}({self._control.pattern}){last}|[{first}{last}]", text)
        ids = first_ids(pieces[0]) if pieces[0] or not is_inner else []
        for index, piece in enumerate(pieces[1:], start=1):
            if piece:
                ids += self._plain(piece) if index % 2 else self.inner(piece)
        return ids

    def text_ids(self, text: str) -> list[int]:
        """Ids of text that follows another, in which every control token is plain text."""
        marks = self.marks_for(text)
        return self.encode(self.marked(text, marks), marks, is_inner=True)

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


def _texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_of(list(value))
        yield from _texts_of(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_of(item)


def without_marks(text: str, marks: tuple[str, str] | None) -> str:
    return text if marks is None else re.sub(f"[{marks[0]}{marks[1]}]", "", text)


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
_NONE_TEST = re.compile(r"content['\"\]]*\s+is\s+none", re.IGNORECASE)
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
    if _NONE_TEST.search(template.source):
        return "it shows them only where content is none, and transformers leaves out such a key before it renders"
    return "a call or its result does not occur in the text that it writes"


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
    inside = _inside(template)
    for end in _ends(template, with_calls=with_calls):
        if any(stop in end for stop in stops):
            continue
        for special in (True, False):
            controls = [text for text in control_texts(template.tokenizer, special=special) if text not in inside]
            if (first := _first_of(end, controls)) is not None:
                stops.append(first)
                break
    return tuple(stops)


def _inside(template: ChatTemplate) -> str:
    """What the template writes between the reasoning and the content of an answer: no token in it ends an answer."""
    try:
        text = template.render([user(), answer(reasoning=True)], add_generation_prompt=False)
    except InputError:
        return ""
    return text[text.find(MARK) : text.rfind(MARK)]


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


def control_texts(tokenizer: Tokenizer, *, special: bool) -> list[str]:
    """Texts of the added tokens; `special`: only of those that decoding leaves out."""
    tokens = tokenizer.added_tokens_decoder.values()
    return [token.content for token in tokens if token.special or not special]


# The template of a tokenizer with all that was found: prompts, what follows an answer, and answers of rows.


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateScenario:
    """What the user declares about a chat template."""

    enable_thinking: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """Further variables of the template, for example {"preserve_thinking": True}."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end an answer, besides the end token of the tokenizer and those that the template shows."""
    date: datetime.date | None = None  # The date that the template prints; None = today.


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The last answer of a dialogue, as the policy should write it."""

    prompt_ids: list[int]  # Empty without the prompt.
    answer_ids: list[int]  # The end token is `end_id`.
    end_id: int
    thinks: bool  # The value of enable_thinking in its prompt,
    num_cut: int  # and the characters at the end of that prompt that are not before the answer.


class DialogueTemplate:
    """Prompts and answers of a tokenizer's chat template, in the forms that it takes."""

    def __init__(self, tokenizer: Tokenizer, scenario: TemplateScenario) -> None:
        """A template that does not render a question with its answer still renders prompts. Raises InputError without
        a template."""
        self.template = ChatTemplate(
            tokenizer, enable_thinking=scenario.enable_thinking, options=scenario.options, date=scenario.date
        )
        self._problem: InputError | None = None
        self._facts: TemplateFacts | None = None
        stops: Sequence[str] = declared_stops(tokenizer, scenario.stop_token_ids)
        try:
            self._facts = probe(self.template, stops)
            self.template, stops = self.template.with_forms(self._facts.forms), self._facts.stops
        except InputError as error:
            self._problem = error
        self._stops = {stop: tokenizer.encode(stop, add_special_tokens=False) for stop in stops}
        broken = [stop for stop, ids in self._stops.items() if len(ids) != 1]
        if self._problem is None and (broken or not self._stops):
            what = f"{broken} are no single tokens" if broken else "no token follows an answer"
            message = f"the chat template has no usable end token: {what}; declare the stop tokens"
            self._problem = InputError(message, code="data.template_stop")
        self._by_thinking = {
            thinks: self.template.with_forms(self.template.forms, enable_thinking=thinks) for thinks in (False, True)
        }
        self._by_thinking[self.template.enable_thinking] = self.template
        self.spans = PlainSpans(tokenizer, sorted({*control_texts(tokenizer, special=True), *self._stops}))

    @property
    def facts(self) -> TemplateFacts:
        """Raises InputError when the template does not render a question with its answer, or shows no end token."""
        if self._problem is not None or self._facts is None:
            raise self._problem or AssertionError
        return self._facts

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(ids[0] for ids in self._stops.values() if len(ids) == 1)

    def text_and_ids(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[str, list[int]]:
        """The full rendering with the generation prompt. Raises InputError when the template refuses the messages."""
        marks = self.spans.marks_for(messages, tools)
        text = self.template.render(self.spans.marked(messages, marks), self.spans.marked(tools, marks))
        return without_marks(text, marks), self.spans.encode(text, marks)

    def tail(
        self,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        may_edit: bool = False,
    ) -> list[int] | BridgeGap:
        """The tokens after the last answer of `history`, from its end token on. `may_edit`: also where the template
        edits the history."""
        marks = self.spans.marks_for(history, new_messages, tools)
        old, new, shown = (self.spans.marked(part, marks) for part in (history, new_messages, tools))
        tail = answer_tail(self.template, old, new, shown, stops=self.facts.stops)
        if isinstance(tail, BridgeGap):
            return tail
        if tail.edit is not None and not may_edit:
            return tail.edit
        token_ids = self.spans.encode(tail.text, marks)
        if token_ids[0] not in self.stop_token_ids:  # text of a message that looks like an end token
            return BridgeGap(reason="no_stop", detail="no end token follows the answer")
        return token_ids

    def after(
        self,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        following: Answered | None = None,
    ) -> list[int]:
        """The tokens from the end of an answer in a dialogue to the next answer, which is `following` if it is known.
        Raises InputError.

        The template may end an answer in the middle of a dialogue with another token than servers stop at.
        """
        template = self.template if following is None else self._by_thinking[following.thinks]
        marks = self.spans.marks_for(history, new_messages, tools)
        old, new, shown = (self.spans.marked(part, marks) for part in (history, new_messages, tools))
        tail = answer_tail(template, old, new, shown, stops=self.facts.stops)
        if isinstance(tail, BridgeGap) and tail.reason == "no_stop" and not history[-1].get("tool_calls"):
            tail = answer_tail(template, old, new, shown)
        if isinstance(tail, BridgeGap):
            message = f"the chat template supports no further turns: {tail.detail}"
            raise InputError(message, code="data.chat_template")
        end = len(tail.text) - (0 if following is None else following.num_cut)
        return self.spans.encode(tail.text[:end], marks, is_inner=True)

    def require_shown(self, messages: Sequence[Message], tools: Sequence[Message]) -> None:
        """InputError when the template leaves out calls of the messages, or the tools."""
        facts = self._facts
        if facts is not None and not facts.takes_tools and any(message.get("tool_calls") for message in messages):
            message = f"the chat template shows no tool calls: {facts.refusal}; drop such rows with a map_fn"
            raise InputError(message, code="data.template_refused")
        if tools and self.template.render(messages, tools) == self.template.render(messages):
            message = "the chat template does not show tools: drop the column 'tools' with a map_fn"
            raise InputError(message, code="data.template_refused")

    def answered(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, with_prompt: bool = True
    ) -> Answered:
        """The last message, an answer, after the prompt that it continues. Raises InputError.

        An answer with reasoning may continue the prompt of the other value of enable_thinking. One that continues none
        is what the template writes in the whole dialogue.
        """
        messages = [*messages[:-1], self._with_reasoning(messages[-1])]
        marks = self.spans.marks_for(messages, tools)
        split = self._split(self.spans.marked(messages, marks), self.spans.marked(tools, marks))
        prompt = split.prompt[: len(split.prompt) - split.num_cut] if with_prompt else ""
        return Answered(
            prompt_ids=self.spans.encode(prompt, marks),
            answer_ids=self.spans.encode(split.answer, marks, is_inner=True) if split.answer else [],
            end_id=self._stops[split.end][0],
            thinks=split.thinks,
            num_cut=split.num_cut,
        )

    def _with_reasoning(self, answer: Message) -> Message:
        """An answer whose reasoning is no part of its content, if the template takes it so."""
        content = answer["content"]
        first, last = (
            self.facts.forms.reasoning_tags if any(self.facts.forms.reasoning_tags) else ("<think>", "</think>")
        )
        if not self.facts.takes_reasoning or answer.get("reasoning_content") or not isinstance(content, str):
            return answer
        thought, closing, rest = content.partition(last)
        if not closing or not thought.lstrip().startswith(first):
            return answer
        reasoning = thought.lstrip().removeprefix(first).strip("\n")
        return {**answer, "reasoning_content": reasoning, "content": rest.lstrip("\n")}

    def _split(self, messages: Sequence[Message], tools: Sequence[Message]) -> _Split:
        """Texts of the prompt and of the answer, and the end token. `messages` are marked."""
        history, answer = messages[:-1], messages[-1]
        for thinks in (self.template.enable_thinking, not self.template.enable_thinking, self.template.enable_thinking):
            template = self._by_thinking[thinks]
            prompt = template.render(history, tools)
            whole = template.render(messages, tools, add_generation_prompt=False)
            if whole.startswith(prompt):
                break
        mark = f"{self.template.nonce}x"
        shown = placeholder(answer, mark)
        like = template.render([*history, shown], tools, add_generation_prompt=False)
        end, closing = self._end(template, [*history, shown], tools, like[like.rfind(mark) + len(mark) :], mark)
        if (gap := parts_gap(like, shown, mark)) is not None:
            if not any(template.forms.reasoning_tags) or answer.get("tool_calls"):
                message = f"an answer cannot be trained: {gap.detail}; drop such rows with a map_fn"
                raise InputError(message, code="data.template_refused")
            return _Split(prompt, _continued(prompt, template.forms, answer), end, thinks)
        if closing and not whole.endswith(closing):
            message = f"the text that the chat template writes after an answer is not always {closing[:40]!r}"
            raise InputError(message, code="data.template_refused")
        stop = len(whole) - len(closing)
        if whole.startswith(prompt):
            return _Split(prompt, whole[len(prompt) : stop], end, thinks)
        num_cut, start = _begin(template.source, prompt, whole, like, parts_of_answer(shown, mark))
        return _Split(prompt, whole[start:stop], end, thinks, num_cut)

    def _end(
        self, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Message], after: str, mark: str
    ) -> tuple[str, str]:
        """The end token of the last answer, and the text from it to the end of the dialogue; "" if no token is there.

        A template may end an answer by the header of the next message alone.
        """
        stops = self.facts.stops
        if (end := _first_of(after, stops)) is not None:
            return end, after[after.find(end) :]
        calls = messages[-1].get("tool_calls") or ()
        following = [result_of(call) for call in calls] or [user()]
        text = template.render([*messages, *following], tools)
        end = _first_of(text[text.rfind(mark) + len(mark) :], stops)
        if end is None:
            message = f"no end token of {list(stops)} follows an answer in the chat template: declare the stop tokens"
            raise InputError(message, code="data.template_stop")
        return end, ""


class _Split(NamedTuple):
    prompt: str
    answer: str
    end: str
    thinks: bool
    num_cut: int = 0


def _begin(source: str, prompt: str, whole: str, like: str, parts: Mapping[str, str]) -> tuple[int, int]:
    """How much of `prompt` is not before an answer that does not continue it, and where the answer begins in `whole`.

    A closed block that only prompts have, such as empty reasoning, stays before an answer without reasoning. `like`:
    the dialogue with `parts` as the answer. Raises InputError when the template edits what precedes the answer.
    """
    first = min(like.find(part) for part in parts.values())
    pairs = enumerate(zip(prompt, like[:first], strict=False))
    same = next((place for place, pair in pairs if pair[0] != pair[1]), min(len(prompt), first))
    if "reasoning" not in parts and same == first:
        tag = _OPEN_TAG.search(prompt[first:])
        return (len(prompt) - first if tag is not None and f"</{tag[1]}>" in source else 0), first
    if "\n" in prompt[same:].strip() or not whole.startswith(prompt[:same]):
        text = f"an answer does not follow the prompt {prompt[-60:]!r} in the chat template"
        raise InputError(f"{text}: set chat_template.args or chat_template.path", code="data.template_refused")
    return len(prompt) - same, same


_OPEN_TAG = re.compile(r"<(\w+)>\s*\Z")


def _continued(prompt: str, forms: MessageForms, answer: Message) -> str:
    """The text of an answer whose reasoning the template would leave out, after a prompt that may open it."""
    text = str(forms.adapted(answer)["content"])
    first = forms.reasoning_tags[0]
    if not prompt.rstrip().endswith(first):
        return text
    rest = text.removeprefix(first)
    return rest.removeprefix("\n") if prompt.endswith("\n") else rest


def declared_stops(tokenizer: Tokenizer, token_ids: frozenset[int]) -> list[str]:
    """Texts of the end token of the tokenizer and of further tokens."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [tokenizer.decode([token]) for token in [*ends, *sorted(token_ids.difference(ends))]]


def dialogue_template(tokenizer: Tokenizer, scenario: TemplateScenario | None = None) -> DialogueTemplate:
    """The template of the tokenizer, made once for each scenario. Raises InputError when it has none."""
    return _made(tokenizer, repr(tokenizer.chat_template), scenario or TemplateScenario(), datetime.date.today())


@functools.lru_cache(maxsize=32)
def _made(tokenizer: Tokenizer, template: str, scenario: TemplateScenario, today: datetime.date) -> DialogueTemplate:
    return DialogueTemplate(tokenizer, scenario)


def stop_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer: the end token of the tokenizer, and those of the chat template, if it has one."""
    end_ids = frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
    return end_ids | dialogue_template(tokenizer).stop_token_ids if tokenizer.chat_template else end_ids


@functools.lru_cache(maxsize=32)
def plain_spans(tokenizer: Tokenizer) -> PlainSpans:
    """Control tokens of a tokenizer in plain text."""
    return PlainSpans(tokenizer, control_texts(tokenizer, special=True))
