"""Prompts: chat templates and plain text to token ids."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from areal.api.columns import packed_ids
from areal.api.errors import InputError
from areal.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from areal.data.images import PromptImages, RowImage

# ----------------------------------------------------------------------------------------------------------------------
# A tokenizer's chat template with fixed options and date. Messages have OpenAI's form, whatever the template takes.

_DATE_FORMAT = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(["'])(.*?)\1""")
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ areal_dates[format] if format in areal_dates else "
    'raise_exception("the format of a date is no constant") }}{%- endmacro %}'
)
"""Jinja code before a template that prints the date. transformers replaces a function among the variables by text."""

_MAX_RECENT_CHARACTERS = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForms:
    """The forms of a message's fields that a template takes."""

    arguments: Literal["text", "mapping"] = "text"
    empty_content: Literal["text", "missing"] = "text"
    """Content of an answer that has only calls: "" or no content."""
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
        message["content"] = None if not content and self.empty_content == "missing" else content

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
            message = "the tokenizer has no chat template: use the tokenizer of a chat model"
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

    def with_forms(self, forms: MessageForms) -> ChatTemplate:
        return ChatTemplate(
            self.tokenizer, enable_thinking=self.enable_thinking, options=self.options, date=self.date, forms=forms
        )

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


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as text and as token ids."""

    text: str
    """The text with one placeholder for each image."""
    token_ids: Sequence[int]
    """The tokens with all placeholders of each image."""
    images: tuple[RowImage, ...] = ()


def encode_prompt(
    row: dict[str, Any],
    tokenizer: Tokenizer,
    *,
    enable_thinking: bool = False,
    tools: list[dict[str, Any]] | None = None,
    images: PromptImages | None = None,
) -> EncodedPrompt:
    """Encode the prompt of a row: its `messages` with the chat template, or its `prompt` as plain text.

    A template writes its own special tokens; for plain text the tokenizer adds them. `tools`: JSON schemas that the
    template shows to the model. `images`: how the model takes the images of the row. Raises InputError.
    """
    found: tuple[RowImage, ...] = ()
    if "messages" in row:
        checked_messages(row["messages"])
    if images is not None:
        row, found = images.placed(row)
    if "messages" in row:
        messages: list[dict[str, Any]] = row["messages"]
        text = render_chat(
            tokenizer, messages, add_generation_prompt=True, enable_thinking=enable_thinking, tools=tools
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
    elif "prompt" in row:
        text = row["prompt"]
        if not isinstance(text, str):
            message = f"column 'prompt' must be text, but contains {_shown(text)}: choose or write a map_fn"
            raise InputError(message, code="data.invalid_column")
        ids = tokenizer.encode(text)
    else:
        message = f"a row has no column 'messages' or 'prompt', only {sorted(row)}: set train_dataset.map_fn"
        raise InputError(message, code="data.missing_column")
    if not ids:
        message = f"the prompt of a row is empty (row with columns {sorted(row)}): drop such rows with a map_fn"
        raise InputError(message, code="data.invalid_column")
    return EncodedPrompt(text, packed_ids(ids if images is None else images.expanded(ids, found)), found)


def has_images(row: dict[str, Any], image_key: str) -> bool:
    """Whether a row has images: in its column of images, or as a part of a message."""
    columns = (row.get(name) for name in ("messages", "prompt", "chosen", "rejected"))
    messages = (one for column in columns if isinstance(column, list) for one in column if isinstance(one, dict))
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict))
    return bool(row.get(image_key)) or any(part.get("type") in ("image", "image_url") for part in parts)


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a row. Raises InputError unless they are a list of dicts with role and content."""
    if not isinstance(messages, list) or not messages:
        message = f"column 'messages' must be a list of {{role, content}}, not {_shown(messages)}"
        raise InputError(message, code="data.invalid_column")
    for message in messages:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            text = f"column 'messages' must be a list of {{role, content}}, but one entry is {_shown(message)}"
            raise InputError(text, code="data.invalid_column")
    return messages


def render_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    enable_thinking: bool,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Render a conversation with the tokenizer's chat template. Raises InputError when it refuses the conversation."""
    if not tokenizer.chat_template:
        message = "the tokenizer has no chat template: use that of a chat model, or rows with 'prompt', not 'messages'"
        raise InputError(message, code="data.chat_template")
    variables: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "enable_thinking": enable_thinking}
    return applied(tokenizer, messages, variables if tools is None else variables | {"tools": tools})


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


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


def tail_ids(
    template: ChatTemplate, history: Sequence[Mapping[str, Any]], new_messages: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Token ids of the tail, also where the template edits the history. Raises InputError."""
    tail = answer_tail(template, history, new_messages)
    if isinstance(tail, BridgeGap):
        message = f"the chat template supports no further turns: {tail.detail}"
        raise InputError(message, code="data.chat_template")
    return template.tokenizer.encode(tail.text, add_special_tokens=False)


def split_tail(
    before: str, after: str, answer: Mapping[str, Any], mark: str, stops: Sequence[str]
) -> AnswerTail | BridgeGap:
    """The tail in `after`, the next prompt. `before`: the prompt of `answer`, which is a placeholder with `mark`."""
    position = after.rfind(mark)
    if position < 0:
        return BridgeGap(reason="hidden", detail="the template does not show the answer")
    position += len(mark)
    if stops:
        found = [place for stop in stops if (place := after.find(stop, position)) >= 0]
        if not found:
            return BridgeGap(reason="no_stop", detail=f"no end token of {list(stops)} follows the answer")
        position = min(found)
    return AnswerTail(text=after[position:], edit=_edit(before, after, answer, mark))


def _edit(before: str, after: str, answer: Mapping[str, Any], mark: str) -> BridgeGap | None:
    if not after.startswith(before):
        place = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(after))
        first = max(0, place - 20)
        detail = f"at character {place}: {before[first : place + 30]!r} becomes {after[first : place + 30]!r}"
        return BridgeGap(reason="history_edited", detail=detail)
    calls = range(len(answer.get("tool_calls") or ()))
    parts = {"reasoning": _THOUGHT, "content": _TEXT} | {f"call {number}": f"call{number}" for number in calls}
    parts = {name: f"{part}{mark}" for name, part in parts.items() if name not in _KEYS or answer.get(_KEYS[name])}
    places = [after.find(part, len(before)) for part in parts.values()]
    for name, place in zip(parts, places, strict=True):
        if place < 0:
            return BridgeGap(reason="answer_edited", detail=f"the template leaves out the {name} of the answer")
    if places != sorted(places):
        return BridgeGap(reason="answer_edited", detail="the template moves parts of the answer")
    return None


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
