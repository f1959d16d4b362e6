"""The form in which an answer is delivered, and when a message that a client sends back is that answer."""

from typing import Any

import orjson

from areal.agent.turns import Message, TurnAnswer


def answer_message(answer: TurnAnswer) -> Message:
    """The assistant message of an answer, as every dialect delivers it and reads it back."""
    message: Message = {"role": "assistant", "content": answer.text or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return message


MessageKey = tuple[str, str, tuple[tuple[str, str, bytes], ...], str, str]


def message_key(message: Message) -> MessageKey:
    """Equal for two messages exactly when they are the same message of a dialogue. Can be hashed.

    Clients change what carries no meaning: empty content becomes None, the text of arguments is written again, and
    reasoning is left out. So reasoning does not count, and arguments are compared as JSON values.
    """
    calls = tuple(
        (str(call.get("id", "")), str(call["function"]["name"]), _canonical(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    )
    content = message.get("content") or ""
    return (message["role"], content, calls, str(message.get("tool_call_id", "")), str(message.get("name", "")))


def _canonical(arguments: Any) -> bytes:
    try:
        value = orjson.loads(arguments) if isinstance(arguments, str) else arguments
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, TypeError):  # TypeError: JSON that orjson reads may be too deep for it to write
        return str(arguments).encode("utf-8", "surrogatepass")
