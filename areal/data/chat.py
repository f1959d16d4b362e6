"""Prompts: chat templates and plain text to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.api.columns import packed_ids
from areal.api.errors import InputError
from areal.data.chat_template import applied
from areal.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from areal.data.images import PromptImages, RowImage


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as text and as token ids."""

    text: str
    """With one placeholder for each image."""
    token_ids: Sequence[int]
    """With all placeholders of each image."""
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
