"""What a chat template writes after an answer, found by rendering a placeholder in the answer's place."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal.api.errors import InputError
from areal.data.chat_template import ChatTemplate

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
