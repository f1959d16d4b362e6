"""Styles whose calls are JSON between markers: hermes, llama3_json, mistral, deepseek, kimi."""

import re

from areal.agent.tool_calls.pieces import (
    Block,
    Broken,
    Call,
    Piece,
    Schemas,
    blocks,
    checked_call,
    json_call,
    leading_json,
    parsed_json,
)


def hermes(text: str, schemas: Schemas) -> list[Piece]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen 2.5 and 3)."""
    return [
        json_call(parsed_json(part.inner.strip()), source=part.source) if isinstance(part, Block) else part
        for part in blocks(text, "<tool_call>", "</tool_call>")
    ]


_PYTHON_TAG = "<|python_tag|>"
_LOOKS_LIKE_CALL = re.compile(r'\s*\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
_BETWEEN = re.compile(r"[\s;,]*")


def llama3_json(text: str, schemas: Schemas) -> list[Piece]:
    """`{"name": ..., "parameters": {...}}`, several separated by `;`, as the whole answer or after <|python_tag|>."""
    before, tag, calls = text.partition(_PYTHON_TAG)
    if not tag:
        if not _LOOKS_LIKE_CALL.match(text):
            return [text]
        before, calls = "", text
    pieces: list[Piece] = [before]
    position = 0
    while position < len(calls):
        gap = _BETWEEN.match(calls, position)
        first = gap.end() if gap else position
        if first >= len(calls):
            break
        value, end = leading_json(calls, first)
        if end == first:
            pieces.append(Broken((tag if first == position == 0 else "") + calls[position:]))
            break
        pieces.append(json_call(value, source=calls[position:end]))
        position = end
    return pieces


_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"\s*([A-Za-z0-9_.-]{1,128})(?:\[CALL_ID\]([A-Za-z0-9]{1,64}))?\[ARGS\]\s*")


def mistral(text: str, schemas: Schemas) -> list[Piece]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}`, repeated."""
    first, *rest = text.split(_MISTRAL)
    pieces: list[Piece] = [first]
    for part in rest:
        named = _MISTRAL_CALL.match(part)
        start = named.end() if named else len(part) - len(part.lstrip())
        value, end = leading_json(part, start)
        source = _MISTRAL + part[:end]
        if named and isinstance(value, dict):
            pieces.append(checked_call(named[1], value, source=source, call_id=named[2] or ""))
        elif not named and isinstance(value, list) and value:
            pieces += [json_call(one, source=_MISTRAL + str(one)) for one in value]
        elif not named and isinstance(value, dict):
            pieces.append(json_call(value, source=source))
        else:
            pieces.append(Broken(_MISTRAL + part))
            continue
        pieces.append(part[end:])
    return pieces


_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"\s*```(?:json)?\s*(.*?)\s*(?:```\s*)?", re.DOTALL)


def deepseek(text: str, schemas: Schemas) -> list[Piece]:
    """The calls of DeepSeek V3, R1 and V3.1: `NAME<｜tool▁sep｜>{...}`, or a name and a fenced block of JSON."""
    text = text.replace(_CALLS_BEGIN, "").replace(_CALLS_END, "")
    return [_deepseek_call(part) if isinstance(part, Block) else part for part in blocks(text, _CALL_BEGIN, _CALL_END)]


def _deepseek_call(block: Block) -> Call | Broken:
    name, separator, arguments = block.inner.partition("<｜tool▁sep｜>")
    if name.strip() == "function" and "```" in arguments:
        name, _, arguments = arguments.partition("\n")
        if fenced := _FENCED.fullmatch(arguments):
            arguments = fenced[1]
    if not separator:
        return Broken(block.source)
    return checked_call(name.strip(), arguments, source=block.source)


_KIMI_NAME = re.compile(r"\s*(?:functions\.)?([A-Za-z0-9_.-]{1,128}?)(?::(\d{1,9}))?\s*")


def kimi(text: str, schemas: Schemas) -> list[Piece]:
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` (Kimi K2)."""
    for marker in ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"):
        text = text.replace(marker, "")
    return [
        _kimi_call(part) if isinstance(part, Block) else part
        for part in blocks(text, "<|tool_call_begin|>", "<|tool_call_end|>")
    ]


def _kimi_call(block: Block) -> Call | Broken:
    head, separator, arguments = block.inner.partition("<|tool_call_argument_begin|>")
    named = _KIMI_NAME.fullmatch(head)
    if not separator or not named:
        return Broken(block.source)
    return checked_call(named[1], arguments, source=block.source, call_id=head.strip() if named[2] else "")
