"""Items of the responses dialect, in OpenAI's chat form and back."""

from typing import Any

from areal.agent.dialects.chat_messages import (
    checked_arguments,
    joined_content,
    joined_text,
    refused_part,
    tool_name,
)
from areal.agent.dialects.fields import MAX_ITEMS, Fields, Json, invalid, unsupported
from areal.agent.turns import Message, assistant_message, function_call

_INPUT = ("input_text", "text")
_OUTPUT = ("output_text", "input_text", "text", "refusal")


class _Assistant:
    """Collects the items of one assistant message: reasoning, then text, then calls."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._reasoning: str | None = None
        self._text: str | None = None
        self._calls: list[Json] = []

    def reasoning(self, text: str) -> None:
        if self._text is not None or self._calls:
            self.close()
        self._reasoning = f"{self._reasoning}\n{text}" if self._reasoning else text

    def text(self, text: str) -> None:
        if self._text is not None or self._calls:
            self.close()
        self._text = text

    def call(self, call: Json) -> None:
        self._calls.append(call)

    def close(self) -> None:
        if self._text is not None or self._calls or self._reasoning:
            self.messages.append(assistant_message(self._text, self._reasoning, self._calls))
        self._reasoning, self._text, self._calls = None, None, []

    def add(self, message: Message) -> None:
        self.close()
        self.messages.append(message)


def input_messages(value: Any, instructions: str | None) -> tuple[Message, ...]:
    """The messages of `instructions` and `input`."""
    found = _Assistant()
    if instructions:
        found.add({"role": "system", "content": instructions})
    if isinstance(value, str) and value:
        found.add({"role": "user", "content": value})
    elif isinstance(value, list) and 0 < len(value) <= MAX_ITEMS:
        for index, item in enumerate(value):
            _add_item(found, Fields(item, f"input[{index}]"))
    else:
        raise invalid("input", f"must be a text or a list of 1 to {MAX_ITEMS} items")
    found.close()
    return tuple(found.messages)


def _add_item(found: _Assistant, given: Fields) -> None:
    kind = given.text("type") or "message"
    match kind:
        case "message":
            _add_message(found, given)
        case "function_call":
            call_id, name = given.required_text("call_id"), tool_name(given)
            arguments = checked_arguments(given.text("arguments"), given.name("arguments"))
            found.call(function_call(call_id, name, arguments))
            if (caller := given.object("caller")) and caller.get("type") != "direct":
                raise unsupported(given.name("caller"), "only direct calls are supported")
            if given.text("namespace"):
                raise unsupported(given.name("namespace"), "is not supported")
        case "function_call_output":
            call_id = given.required_text("call_id")
            output = joined_content(given.take("output"), given.name("output"), _INPUT)
            if output is None:
                raise invalid(given.name("output"), "is required")
            found.add({"role": "tool", "tool_call_id": call_id, "content": output})
        case "reasoning":
            found.reasoning(_reasoning(given))
        case _:
            raise refused_part(given, kind)
    given.skip(id="text", status="text")
    given.finish()


def _add_message(found: _Assistant, given: Fields) -> None:
    role = given.required_text("role")
    value, path = given.take("content"), given.name("content")
    if value is None:
        raise invalid(path, "is required")
    match role:
        case "assistant":
            given.skip(phase="text")
            found.text(joined_text(value, path, _OUTPUT) or "")
        case "user":
            found.add({"role": "user", "content": joined_content(value, path, _INPUT)})
        case "system" | "developer":
            found.add({"role": "system", "content": joined_text(value, path, _INPUT)})
        case _:
            raise invalid(given.name("role"), "must be system, developer, user or assistant")


def _reasoning(given: Fields) -> str:
    content = joined_text(given.items("content"), given.name("content"), ("reasoning_text", "text"))
    summary = joined_text(given.items("summary"), given.name("summary"), ("summary_text",))
    if given.text("encrypted_content"):
        raise unsupported(given.name("encrypted_content"), "reasoning is not encrypted here")
    return content or summary or ""
