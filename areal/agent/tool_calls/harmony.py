"""The answers of gpt-oss (harmony): messages with a channel and, for calls, a recipient."""

import re

from areal.agent.tool_calls.pieces import Broken, Piece, Schemas, Thought, checked_call

_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]{1,200})")
_MESSAGE = "<|message|>"


def gpt_oss(text: str, schemas: Schemas) -> list[Piece]:
    """Channel analysis is reasoning, final and commentary are text; a message `to=functions.NAME` is a call."""
    pieces: list[Piece] = []
    position = 0
    while position < len(text):
        head_end = text.find(_MESSAGE, position)
        if head_end < 0:
            pieces.append(_END.sub("", text[position:]))
            break
        body_start = head_end + len(_MESSAGE)
        end = _END.search(text, body_start)
        body = text[body_start : end.start() if end else len(text)]
        pieces.append(_message(text[position:head_end], body, schemas))
        position = len(text) if end is None else end.end()
    return pieces


def _message(head: str, body: str, schemas: Schemas) -> Piece:
    channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
    if recipient is not None and recipient[1] != "user":
        source = f"{head}{_MESSAGE}{body}"
        namespace, _, name = recipient[1].partition(".")
        return checked_call(name, body, source=source) if namespace == "functions" else Broken(source)
    if channel is not None and channel[1] == "analysis":
        return Thought(body)
    return body
