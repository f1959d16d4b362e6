"""A tokenizer's chat template with fixed options and date. Messages have OpenAI's form, whatever the template takes."""

import datetime
import hashlib
import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal.api.errors import InputError
from areal.data.tokenizer import Tokenizer

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

    def with_forms(self, forms: MessageForms) -> "ChatTemplate":
        return ChatTemplate(
            self.tokenizer, enable_thinking=self.enable_thinking, options=self.options, date=self.date, forms=forms
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the template and everything that it prints besides the messages."""
        parts = [self.source, self.enable_thinking, self.options, str(self.date) if self._dated else ""]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """As `render`, but recent texts are kept: the next prompt of one turn begins the following turn."""
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
