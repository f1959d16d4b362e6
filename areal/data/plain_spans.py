"""Text of messages that looks like a control token, encoded as plain text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from areal.data.tokenizer import Tokenizer

_PRIVATE_USE = range(0xE000, 0xF8FF)
"""Code points that no tokenizer and no template gives a meaning."""


class PlainSpans:
    """Marks control tokens in the content of messages, and encodes what a template renders from such messages.

    A tool result that contains an end token then does not end the turn. Answers are not marked.
    """

    def __init__(self, tokenizer: Tokenizer, controls: Sequence[str]) -> None:
        """`controls`: the texts of the control tokens."""
        self._tokenizer = tokenizer
        longest_first = sorted(controls, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def marks_for(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
        """Two characters that the messages do not contain; None when no content contains a control token."""
        texts = [text for message in messages if message["role"] != "assistant" for text in _texts_of(message)]
        if not any(self._control.search(text) for text in texts):
            return None
        whole = repr(messages)  # repr shows most private characters as escapes, so both forms are looked for
        free = [chr(code) for code in _PRIVATE_USE if chr(code) not in whole and f"\\u{code:04x}" not in whole]
        return free[0], free[1]

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
        return [token for character in control for token in self.inner(character)]

    def inner(self, text: str) -> list[int]:
        """Ids of text that is not at the beginning, where some tokenizers insert a space."""
        before = self._tokenizer.encode("\n", add_special_tokens=False)
        ids = self._tokenizer.encode("\n" + text, add_special_tokens=False)
        if before and ids[: len(before)] == before:
            return ids[len(before) :]
        return self._tokenizer.encode(text, add_special_tokens=False)


def _texts_of(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, list):
        return [part["text"] for part in content if part["type"] == "text"]
    return [content] if isinstance(content, str) else []
