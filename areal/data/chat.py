"""Prompts of rows: messages through the chat template, or plain text, to token ids."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.api.columns import packed_ids
from areal.api.errors import InputError
from areal.data.chat_template import TemplateScenario, dialogue_template
from areal.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from areal.data.images import PromptImages, RowImage

# Messages and tools of rows, in the one form that everything else takes.

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def checked_messages(messages: Any, column: str = "messages") -> list[dict[str, Any]]:
    """The messages of a row as sessions have them. Raises InputError that says what is wrong.

    Keys with None are left out, the texts of parts are joined by line breaks as in requests of clients, reasoning is
    `reasoning_content`, and a call has its arguments as JSON text in `function`.
    """
    if not isinstance(messages, list) or not messages:
        message = f"column {column!r} must be a list of {{role, content}}, not {_shown(messages)}"
        raise InputError(message, code="data.invalid_column")
    return [_checked(message, column) for message in messages]


def _checked(message: Any, column: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong(column, "must be a list of {role, content}, but one entry is", message)
    kept = {name: value for name, value in message.items() if value is not None}
    if kept["role"] == "assistant":
        keys = [name for name in _REASONING_KEYS if name in kept]
        reasoning = next((kept[name] for name in keys if kept[name]), "")
        if not isinstance(reasoning, str):
            raise _wrong(column, "has reasoning that is no text:", reasoning)
        kept = {name: value for name, value in kept.items() if name not in keys and name != "tool_calls"}
        kept |= {"reasoning_content": reasoning} if reasoning else {}
        calls = message.get("tool_calls") or []
        if message.get("function_call"):
            raise _wrong(column, "has a function_call: write it as tool_calls, in", message)
        kept |= {"tool_calls": [_checked_call(call, column) for call in calls]} if calls else {}
        if "content" not in kept and (calls or reasoning):
            kept["content"] = ""
    if "content" not in kept:
        raise _wrong(column, "must be a list of {role, content}, but one entry has no content:", message)
    return kept | {"content": _checked_content(kept["content"], column)}


def _checked_content(content: Any, column: str) -> str | list[Any]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(column, "has content that is neither text nor a list of {type, ...}:", content)
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    if any(not isinstance(part, dict) or "type" not in part for part in parts):
        raise _wrong(column, "has content that is neither text nor a list of {type, ...}:", content)
    parts = [{name: value for name, value in part.items() if value is not None} for part in parts]
    if any(not str(part["type"]).endswith("text") or not isinstance(part.get("text"), str) for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _checked_call(call: Any, column: str) -> dict[str, Any]:
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(column, "has a tool call without function.name:", call)
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise _wrong(column, "has a tool call whose arguments are no JSON object:", call)
    is_text = isinstance(arguments, str) and bool(arguments.strip())
    written = arguments if is_text else json.dumps(parsed, ensure_ascii=False)
    rest = {name: value for name, value in call.items() if name in ("id", "type") and value is not None}
    return {"type": "function"} | rest | {"function": {"name": function["name"], "arguments": written}}


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The JSON schemas in the column `tools`, which may be JSON text; none without the column. Raises InputError."""
    tools = row.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools or []
    except ValueError:
        tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _wrong("tools", "must be a list of JSON schemas, or the JSON text of one, not", row.get("tools"))
    return tools


def _wrong(column: str, problem: str, value: Any) -> InputError:
    return InputError(f"column {column!r} {problem} {_shown(value)}", code="data.invalid_column")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# Plain text: the tokenizer adds its special tokens, unless a template already wrote them.


@functools.lru_cache(maxsize=32)
def _first_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that the tokenizer adds before a text."""
    inner, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    return tuple(whole[: next(n for n in range(len(whole)) if whole[n : n + len(inner)] == inner)])


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a plain prompt, with one BOS also where the text begins with it, and nothing added at the end."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return list(begun_once(tokenizer, [*_first_ids(tokenizer), *ids]))


def begun_once(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Sequence[int]:
    """Ids of a prompt without a second BOS, which a tokenizer adds to a text that the chat template rendered."""
    first = list(_first_ids(tokenizer))
    size = len(first)
    return token_ids[size:] if first and list(token_ids[: 2 * size]) == first * 2 else token_ids


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

    A template writes its own special tokens; for plain text the tokenizer adds them, and a BOS only once. Text of
    messages never becomes a control token. `tools`: JSON schemas that the template shows to the model; None = those of
    the row. `images`: how the model takes the images of the row. Raises InputError.
    """
    row_images: tuple[RowImage, ...] = ()
    if "messages" in row:
        row = {**row, "messages": checked_messages(row["messages"])}
    if images is not None:
        row, row_images = images.placed(row)
    if "messages" in row:
        template = dialogue_template(tokenizer, TemplateScenario(enable_thinking=enable_thinking))
        shown = tools_of(row) if tools is None else tools
        template.require_shown(row["messages"], shown)
        text, ids = template.text_and_ids(row["messages"], shown)
    elif "prompt" in row:
        text = row["prompt"]
        if not isinstance(text, str):
            message = f"column 'prompt' must be text, but contains {_shown(text)}: choose or write a map_fn"
            raise InputError(message, code="data.invalid_column")
        ids = plain_ids(tokenizer, text)
    else:
        message = f"a row has no column 'messages' or 'prompt', only {sorted(row)}: set train_dataset.map_fn"
        raise InputError(message, code="data.missing_column")
    if not ids:
        message = f"the prompt of a row is empty (row with columns {sorted(row)}): drop such rows with a map_fn"
        raise InputError(message, code="data.invalid_column")
    return EncodedPrompt(text, packed_ids(ids if images is None else images.expanded(ids, row_images)), row_images)


def has_images(row: dict[str, Any], image_key: str) -> bool:
    """Whether a row has images: in its column of images, or as a part of a message."""
    columns = (row.get(name) for name in ("messages", "prompt", "chosen", "rejected"))
    messages = (
        message for column in columns if isinstance(column, list) for message in column if isinstance(message, dict)
    )
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict))
    return bool(row.get(image_key)) or any(part.get("type") in ("image", "image_url") for part in parts)
