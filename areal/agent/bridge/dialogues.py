"""Random dialogues, and the comparison of every bridge in them with the full rendering, token by token."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.agent.bridge import TemplateBridge
from areal.agent.bridge.probe import TOOLS
from areal.agent.bridge.proof import Next, Scope, Shape, next_of, pairs_of, shape_of
from areal.agent.turns import Message
from areal.api.errors import InputError
from areal.data.answer_tail import BridgeGap

_PIECES = (
    "a", "The answer", "42", " ", "\n", "\n\n", "\t", ".", "{", '"x": 1}', "[", "]", "'", "\\", "é", "日本", "🙂",
    "- item", "```python\nprint(1)\n```", "<b>", "&amp;", "{{ x }}", "{% if %}", "None", "assistant", "user", "  ",
)  # fmt: skip
Turn = tuple[tuple[Message, ...], tuple[Message, ...], tuple[dict[str, Any], ...]]
"""History up to an answer, the messages that follow it, tools."""


@dataclass(slots=True)
class Comparison:
    """What the random dialogues showed."""

    num_dialogues: int = 0
    num_bridges: int = 0
    num_different: int = 0
    num_refused: int = 0
    """Answers after which the template refuses the messages."""
    num_edits: int = 0
    """Bridges of which the full rendering changes the real text before the answer though it keeps placeholders."""
    gaps: dict[tuple[Shape, Next], int] = field(default_factory=dict[tuple[Shape, Next], int])
    """Answers that no bridge extends, by row of the table."""
    different: Turn | None = None
    """The shortest turn whose bridge is no end of the full rendering."""


def compare(bridge: TemplateBridge, *, num_dialogues: int, seed: int, scope: Scope = "all") -> Comparison:
    """Compare the bridge after every answer of random dialogues with the full rendering of the same messages."""
    source = random.Random(seed)
    pairs = pairs_of(bridge.template, bridge.facts, scope)
    found = Comparison()
    for _ in range(num_dialogues if pairs else 0):
        found.num_dialogues += 1
        for turn in _dialogue(source, bridge, pairs):
            if not _compare_turn(bridge, turn, found):
                break
    return found


def _compare_turn(bridge: TemplateBridge, turn: Turn, found: Comparison) -> bool:
    """Count one turn. Returns False when the template refuses its messages."""
    history, new, tools = turn
    extension = bridge.extension(history, new, tools)
    if isinstance(extension, BridgeGap):
        row = shape_of(history[-1]), next_of(new)
        found.gaps[row] = found.gaps.get(row, 0) + 1
        found.num_refused += extension.reason == "refused"
        return extension.reason != "refused"
    found.num_bridges += 1
    whole = bridge.prompt([*history, *new], tools)
    if whole[-len(extension) :] != extension or extension[0] not in bridge.stop_token_ids:
        found.num_different += 1
        if found.different is None or len(history) < len(found.different[0]):
            found.different = turn
    before = bridge.template.render(history[:-1], tools)
    found.num_edits += not bridge.template.render([*history, *new], tools).startswith(before)
    return True


def _dialogue(source: random.Random, bridge: TemplateBridge, pairs: Sequence[tuple[Shape, Next]]) -> Iterator[Turn]:
    messages: list[Message] = []
    if bridge.facts.takes_system and source.random() < 0.5:
        messages.append({"role": "system", "content": _text(source)})
    messages.append({"role": "user", "content": _text(source)})
    with_calls = [pair for pair in pairs if pair[0].num_calls]
    tools = TOOLS if with_calls and (len(with_calls) == len(pairs) or source.random() < 0.8) else ()
    try:
        bridge.template.render(messages, tools)
    except InputError:
        tools = TOOLS
    num_calls = 0
    for _ in range(source.randint(1, 5)):
        shape, following = source.choice([pair for pair in pairs if tools or not pair[0].num_calls])
        answer = _answer(source, shape, num_calls)
        num_calls += shape.num_calls
        new: list[Message] = [
            {"role": "tool", "tool_call_id": call["id"], "name": "lookup", "content": _result(source, bridge)}
            for call in answer.get("tool_calls", ())
        ]
        if following != "T":
            new.append({"role": "user", "content": _text(source)})
        messages.append(answer)
        yield tuple(messages), tuple(new), tools
        messages += new


def _answer(source: random.Random, shape: Shape, first_call: int) -> Message:
    answer: Message = {"role": "assistant", "content": _text(source) if shape.content else ""}
    if shape.reasoning:
        answer["reasoning_content"] = _text(source)
    if shape.num_calls:
        answer["tool_calls"] = [
            {
                "id": f"call{first_call + number:05d}",
                "type": "function",
                "function": {"name": "lookup", "arguments": json.dumps({"word": _text(source)}, ensure_ascii=False)},
            }
            for number in range(shape.num_calls)
        ]
    return answer


def _text(source: random.Random) -> str:
    """Text with at least one word: empty reasoning, for example, is another kind of answer."""
    pieces = source.choices(_PIECES, k=source.randint(0, 6))
    return "".join([*pieces, "word", *source.choices(_PIECES, k=source.randint(0, 4))])


def _result(source: random.Random, bridge: TemplateBridge) -> str:
    """The result of a tool; one of four contains an end token, which must not end the turn."""
    return _text(source) + (source.choice(bridge.facts.stops) if source.random() < 0.25 else "") + _text(source)
