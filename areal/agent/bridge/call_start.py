"""How a chat template begins an answer that calls a tool, found by rendering such an answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from areal.api.errors import InputError
from areal.data.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStart:
    """What an answer must begin with so that it calls a tool."""

    token_ids: list[int]
    example: str
    """The text of an answer that begins so; it calls `name`."""
    name: str


def start_text(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], name: str
) -> tuple[str, str, str] | None:
    """The text from the generation prompt to the name of a called tool, an example of an answer, and its tool.

    `name`: the tool that must be called, then the text continues up to its arguments; empty = any tool. None: the
    template does not write such an answer after this prompt.
    """
    shown = template.nonce
    try:
        before = template.render(messages, tools)
        texts = [
            template.render([*messages, _calling(shown, arguments)], tools, add_generation_prompt=False)
            for arguments in ({}, {"areal": "1"})
        ]
    except InputError:
        return None
    if any(not text.startswith(before) or shown not in text[len(before) :] for text in texts):
        return None
    answers = [text[len(before) :] for text in texts]
    start = answers[0].partition(shown)[0]
    if not name:
        return start, answers[1], shown
    # What every answer has between name and arguments, up to the end of a token that tokenizers do not merge on.
    pairs = zip(*(answer.partition(shown)[2] for answer in answers), strict=False)
    between = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)).rstrip("{<")
    text = f"{start}{shown}{between.rstrip() or between}".replace(shown, name)
    return (text, answers[1].replace(shown, name), name) if between else None


def _calling(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call00000", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
