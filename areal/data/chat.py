"""Owns how a row becomes a prompt: chat templates and plain text to token ids, and the tokens between two turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areal.api.errors import InputError
from areal.data.tokenizer import Tokenizer

_MARK = "areal0mark0of0an0answer"
"""Stands for an assistant's answer when a template is rendered to see what it puts around one."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as text and as token ids."""

    text: str
    token_ids: list[int]


def encode_prompt(row: dict[str, Any], tokenizer: Tokenizer, *, enable_thinking: bool = False) -> EncodedPrompt:
    """The prompt of a row: its `messages` through the chat template, or its `prompt` as plain text.

    A template writes its own special tokens; plain text gets those the tokenizer adds.
    """
    if "messages" in row:
        messages = checked_messages(row["messages"])
        text = render_chat(tokenizer, messages, add_generation_prompt=True, enable_thinking=enable_thinking)
        ids = tokenizer.encode(text, add_special_tokens=False)
    elif "prompt" in row:
        text = row["prompt"]
        if not isinstance(text, str):
            raise InputError(f"column 'prompt' must be text, and holds {_shown(text)}: choose or write a map_fn")
        ids = tokenizer.encode(text)
    else:
        raise InputError(
            f"a row has neither a column 'messages' nor 'prompt', only {sorted(row)}: name a map_fn that makes one "
            "(train_dataset.map_fn), or add it to the data"
        )
    if not ids:
        raise InputError(f"the prompt of a row is empty (row with columns {sorted(row)}): leave out such rows")
    return EncodedPrompt(text, ids)


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a row. InputError unless they are a list of dicts with role and content."""
    if not isinstance(messages, list) or not messages:
        raise InputError(f"column 'messages' must be a list of {{role, content}}, not {_shown(messages)}")
    for message in messages:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise InputError(f"column 'messages' must be a list of {{role, content}}, and one is {_shown(message)}")
    return messages


def render_chat(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], *, add_generation_prompt: bool, enable_thinking: bool
) -> str:
    """A conversation as the tokenizer's template writes it."""
    if not tokenizer.chat_template:
        raise InputError(
            "rows with 'messages' need a tokenizer with a chat template, and this one has none: take a chat model's "
            "tokenizer, or give the rows a column 'prompt' with plain text"
        )
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
    )


def tokens_between_turns(tokenizer: Tokenizer, user_message: str, *, enable_thinking: bool = False) -> list[int]:
    """What follows an assistant's answer up to the next answer: its end, a user's message, the next header."""
    message = {"role": "user", "content": user_message}
    return tokens_after_answer(tokenizer, [message], enable_thinking=enable_thinking)


def tokens_after_answer(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], *, enable_thinking: bool = False
) -> list[int]:
    """What follows an assistant's answer up to the next one: its end, these messages, the next header.

    Taken from a rendering with a mark in the answer's place, so that the tokens of real answers are never made again.
    """
    marked = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _MARK}, *messages]
    text = render_chat(tokenizer, marked, add_generation_prompt=True, enable_thinking=enable_thinking)
    before, mark, after = text.rpartition(_MARK)
    if not mark or _MARK in before:
        raise InputError("the chat template does not show an earlier answer exactly once: it cannot carry more turns")
    return tokenizer.encode(after, add_special_tokens=False)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
