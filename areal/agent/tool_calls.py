"""Splits the text of an answer into reasoning, text and tool calls, by the style of the model's chat template."""

import ast
import asyncio
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import orjson

from areal.agent.turns import ToolCall
from areal.api.errors import ConfigError
from areal.observe.spans import span
from areal.observe.step_files import log_metric

# Python functions as tools: their JSON schemas, and calls of them with the arguments that a model wrote.

Tool = Callable[..., Any]  # A plain or async function. Plain ones run in a thread, which a time limit cannot end.
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def tool_schema(function: Tool) -> dict[str, Any]:
    """The description of a tool that chat templates take: from its name, docstring and annotated parameters."""
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    properties = {parameter.name: _json_type(hints.get(parameter.name, Any)) for parameter in parameters}
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    shape = {"type": "object", "properties": properties, "required": required}
    about = {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": shape}
    return {"type": "function", "function": about}


def _json_type(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return {"anyOf": [_json_type(argument) for argument in arguments if argument is not type(None)]}
    name = _JSON_TYPES.get(origin or hint)
    if name is None:
        return {}
    return {"type": name} | ({"items": _json_type(arguments[0])} if name == "array" and arguments else {})


def parsed_arguments(text: str) -> tuple[dict[str, Any], str]:
    """The arguments of a call from their JSON text, and why they cannot be used (empty: they can)."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError as error:
        return {}, f"the arguments are not JSON: {error}"
    return (arguments, "") if isinstance(arguments, dict) else ({}, "the arguments are not a JSON object")


async def answer_call(
    name: str, arguments: Mapping[str, Any], problem: str, tools: Sequence[Tool], *, timeout_s: float
) -> str | list[dict[str, Any]]:
    """What the model reads about a call: its result, or `error: ...`; `problem`: why it cannot be made, or empty.

    A result with images is a list of parts {type: image, url: data URL} and {type: text, text}; others become text.

    Reports the metric tool_errors (0 or 1), whose mean is per call.
    """
    content: str | list[dict[str, Any]] = ""
    tool = next((tool for tool in tools if tool.__name__ == name), None)
    if not problem and tool is None:
        problem = f"there is no tool {name!r}, only {', '.join(tool.__name__ for tool in tools)}"
    if tool is not None and not problem:
        try:
            with span(f"tool {name}"):
                content = _content(await asyncio.wait_for(_run(tool, arguments), timeout_s))
        except TimeoutError:
            problem = f"{name} did not end within {timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - user code: the model sees the error of its call
            problem = f"{type(error).__name__}: {error}"
    log_metric("tool_errors", float(bool(problem)))
    return f"error: {problem}" if problem else content


async def _run(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(tool):
        return await tool(**arguments)
    return await asyncio.to_thread(tool, **arguments)


def _content(result: Any) -> str | list[dict[str, Any]]:
    parts: list[Any] = result if isinstance(result, list) else []
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    if "image" in kinds and set(kinds) <= {"image", "text"}:
        return parts
    return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


# The pieces that an answer is made of, and the rules by which text becomes a call. No function here raises.


class Call(NamedTuple):
    name: str
    arguments: str  # JSON text of an object.
    call_id: str = ""  # The id that the answer itself contains; empty: none.
    source: str = ""  # Its text in the answer.


class Broken(NamedTuple):
    text: str


class Thought(NamedTuple):
    text: str


Piece = str | Call | Broken | Thought  # A str is text for the reader.
Schemas = Mapping[str, Mapping[str, Any]]  # Name of a tool -> its parameters: name -> JSON schema.
Parser = Callable[[str, Schemas, bool], list[Piece]]
"""Text, schemas of the tools, and whether a limit of length ended the answer: what is not closed then is no call."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_WHOLE = json.JSONDecoder(parse_constant=lambda name: _not_json(name))


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def parsed_json(text: str) -> Any:
    """The JSON value of a text; None when it is not JSON (or null)."""
    try:
        return _WHOLE.decode(text)
    except (ValueError, RecursionError):
        return None


def leading_json(text: str, start: int, *, empty: str | None = None) -> tuple[Any, int]:
    """(the JSON value at `start`, the index after it); (None, start) when there is none. `empty`: what means {}."""
    if empty is not None and text.startswith(empty, start):
        return {}, start
    try:
        return _WHOLE.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start


def checked_call(name: Any, arguments: Any, *, source: str, call_id: str = "") -> Call | Broken:
    """A call, unless its name or its arguments cannot be sent to a client. `source`: its text in the answer."""
    if isinstance(arguments, str):
        arguments = parsed_json(arguments) if arguments.strip() else {}
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, dict):
        return Broken(source)
    try:
        text = json.dumps(arguments, ensure_ascii=False)
        orjson.dumps(orjson.loads(text))  # replies are written by orjson, which refuses lone surrogates and deep values
    except (ValueError, TypeError, RecursionError):
        return Broken(source)
    return Call(name, text, call_id, source)


def json_call(value: Any, *, source: str) -> Call | Broken:
    """A call from an object with `name` and `arguments` (or `parameters`)."""
    if not isinstance(value, dict):
        return Broken(source)
    arguments = value.get("arguments", value.get("parameters"))
    call_id = value.get("id")
    call_id = call_id if isinstance(call_id, str) and _NAME.fullmatch(call_id) else ""
    return checked_call(value.get("name"), {} if arguments is None else arguments, source=source, call_id=call_id)


def typed_value(text: str, schema: Any) -> Any:
    """The value of an argument that is written as plain text: by its schema, else JSON where it is JSON.

    A value of the wrong type stays text: the tool reports it, and the policy reads the report.
    """
    kinds = schema.get("type") if isinstance(schema, dict) else None
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds and not (len(kinds) > 1 and text.strip() == "null"):
        return text
    value = parsed_json(text.strip())
    if value is None and text.strip() != "null":
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
    return value


# The answers of gpt-oss (harmony): messages with a channel and, for calls, a recipient.

HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
HARMONY_END = re.compile("|".join(map(re.escape, HARMONY_ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]{1,200})")
HARMONY_MESSAGE = "<|message|>"
_SPACE = re.compile(r"\s*")


def _after_space(text: str, position: int) -> int:
    spaces = _SPACE.match(text, position)
    return spaces.end() if spaces else position


def harmony_kind(head: str) -> Literal["call", "thought", "text"]:
    """What a message is, by the text before its marker."""
    recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
    if recipient is not None and recipient[1] != "user":
        return "call"
    return "thought" if channel is not None and channel[1] == "analysis" else "text"


def gpt_oss(text: str, schemas: Schemas, is_cut: bool) -> list[Piece]:
    """Channel analysis is reasoning, final and commentary are text; a message `to=functions.NAME` is a call."""
    pieces: list[Piece] = []
    position = 0
    while position < len(text):
        head_end = text.find(HARMONY_MESSAGE, position)
        head = text[position : head_end if head_end >= 0 else len(text)]
        kind, recipient = harmony_kind(head), _RECIPIENT.search(head)
        if head_end < 0:
            pieces.append(Broken(head) if kind == "call" else HARMONY_END.sub("", head))
            break
        start = head_end + len(HARMONY_MESSAGE)
        # The markers that a JSON text contains do not end its message.
        json_end = leading_json(text, _after_space(text, start))[1] if kind == "call" else start
        end = HARMONY_END.search(text, json_end)
        stop, following = (end.start(), end.end()) if end else (len(text), len(text))
        body = text[start:stop]
        if recipient is not None and kind == "call":
            namespace, _, name = recipient[1].partition(".")
            source = f"{head}{HARMONY_MESSAGE}{body}"
            is_known = namespace == "functions" and (end is not None or (body.strip() != "" and not is_cut))
            pieces.append(checked_call(name, body, source=source) if is_known else Broken(source))
        else:
            pieces.append(Thought(body) if kind == "thought" else body)
        position = following
    return pieces


# Styles whose calls are JSON between markers: hermes, llama3_json, mistral, deepseek, kimi. The JSON is decoded first,
# and the marker of its end is looked for after it: a text in it may contain any marker.

Reader = Callable[[str, int], tuple[Callable[..., Call | Broken], int] | None]
"""What makes the call of a block from its `source`, and where its JSON ends. None: the block is no call."""


def _blocks(text: str, start: str, end: str, read: Reader, is_cut: bool) -> list[Piece]:
    """The text outside of the markers, and the calls between them. The last block of a whole answer needs no `end`."""
    pieces: list[Piece] = []
    position = 0
    while (first := text.find(start, position)) >= 0:
        pieces.append(text[position:first])
        inner = first + len(start)
        block = read(text, inner)
        after = _after_space(text, block[1]) if block else inner
        if block and text.startswith(end, after):
            position = after + len(end)
        elif block and after == len(text) and not is_cut:
            position = after
        else:
            block, last = None, text.find(end, inner)
            position = len(text) if last < 0 else last + len(end)
        source = text[first:position]
        pieces.append(block[0](source=source) if block else Broken(source))
    return [*pieces, text[position:]]


def _without(pieces: Iterable[Piece], *markers: str) -> list[Piece]:
    """The pieces whose text has no markers around several calls."""
    kept = list(pieces)
    for marker in markers:
        kept = [piece.replace(marker, "") if isinstance(piece, str) else piece for piece in kept]
    return kept


def hermes(text: str, schemas: Schemas, is_cut: bool) -> list[Piece]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen 2.5 and 3)."""

    def read(text: str, position: int) -> tuple[Callable[..., Call | Broken], int]:
        value, end = leading_json(text, _after_space(text, position))
        return partial(json_call, value), end

    return _blocks(text, "<tool_call>", "</tool_call>", read, is_cut)


_PYTHON_TAG = "<|python_tag|>"
_LOOKS_LIKE_CALL = re.compile(r'\s*\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
_BETWEEN = re.compile(r"[\s;,]*")


def llama3_json(text: str, schemas: Schemas, is_cut: bool) -> list[Piece]:
    """`{"name": ..., "parameters": {...}}`, several separated by `;`, as the whole answer or after <|python_tag|>."""
    begin = 0 if _LOOKS_LIKE_CALL.match(text) else text.find(_PYTHON_TAG)
    if begin < 0:
        return [text]
    pieces: list[Piece] = [text[:begin]]
    position = begin + len(_PYTHON_TAG) * text.startswith(_PYTHON_TAG, begin)
    source = begin  # of the next call
    while True:
        gap = _BETWEEN.match(text, position)
        first = gap.end() if gap else position
        if first >= len(text):
            return pieces
        value, end = leading_json(text, first)
        if end == first:
            return [*pieces, Broken(text[source:])]
        pieces.append(json_call(value, source=text[source:end]))
        position = source = end


_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"\s*([A-Za-z0-9_.-]{1,128})(?:\[CALL_ID\]([A-Za-z0-9]{1,64}))?\[ARGS\]\s*")


def mistral(text: str, schemas: Schemas, is_cut: bool) -> list[Piece]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}`, repeated."""
    pieces: list[Piece] = []
    position = 0
    while (first := text.find(_MISTRAL, position)) >= 0:
        pieces.append(text[position:first])
        start = first + len(_MISTRAL)
        named = _MISTRAL_CALL.match(text, start)
        value, position = leading_json(text, named.end() if named else _after_space(text, start))
        source = text[first:position]
        if named and isinstance(value, dict):
            pieces.append(checked_call(named[1], value, source=source, call_id=named[2] or ""))
        elif not named and isinstance(value, list) and value:
            calls = [json_call(call, source=_MISTRAL + str(call)) for call in value]
            pieces += [call._replace(source=source) if isinstance(call, Call) else call for call in calls]
        elif not named and isinstance(value, dict):
            pieces.append(json_call(value, source=source))
        else:
            following = text.find(_MISTRAL, start)
            position = len(text) if following < 0 else following
            pieces.append(Broken(text[first:position]))
    return [*pieces, text[position:]]


_DEEPSEEK_NAME = re.compile(r"\s*(?!function<)([^<\n]{1,128}?)\s*<｜tool▁sep｜>\s*")
_DEEPSEEK_FENCED = re.compile(r"\s*function<｜tool▁sep｜>\s*([^\n]{1,128}?)\s*\n\s*```(?:json)?\s*")
_FENCE_END = re.compile(r"\s*```")


def deepseek(text: str, schemas: Schemas, is_cut: bool) -> list[Piece]:
    """The calls of DeepSeek V3, R1 and V3.1: `NAME<｜tool▁sep｜>{...}`, or a name and a fenced block of JSON."""

    def read(text: str, position: int) -> tuple[Callable[..., Call | Broken], int] | None:
        fenced = _DEEPSEEK_FENCED.match(text, position)
        named = fenced or _DEEPSEEK_NAME.match(text, position)
        if named is None:
            return None
        value, end = leading_json(text, named.end(), empty="<｜tool▁call▁end｜>")
        closed = _FENCE_END.match(text, end) if fenced else None
        if fenced and not closed and text[end:].strip():
            return None
        return partial(checked_call, named[1], value), closed.end() if closed else end

    pieces = _blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read, is_cut)
    return _without(pieces, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


_KIMI_NAME = re.compile(
    r"\s*((?:functions\.)?([A-Za-z0-9_.-]{1,128}?)(?::(\d{1,9}))?)\s*<\|tool_call_argument_begin\|>\s*"
)


def kimi(text: str, schemas: Schemas, is_cut: bool) -> list[Piece]:
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` (Kimi K2)."""

    def read(text: str, position: int) -> tuple[Callable[..., Call | Broken], int] | None:
        named = _KIMI_NAME.match(text, position)
        if named is None:
            return None
        value, end = leading_json(text, named.end(), empty="<|tool_call_end|>")
        return partial(checked_call, named[2], value, call_id=named[1] if named[3] else ""), end

    pieces = _blocks(text, "<|tool_call_begin|>", "<|tool_call_end|>", read, is_cut)
    return _without(pieces, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")


# Calls as a Python list, `[f(a=1), g(b="x")]` (Llama 4). The text is parsed, never executed.

_MAX_LENGTH = 100_000
_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"


def pythonic(text: str, schemas: Schemas, is_cut: bool) -> list[Piece]:
    """One list of calls with keyword arguments, as the whole answer."""
    source = text.strip()
    is_marked, is_closed = source.startswith(_PYTHON_START), source.endswith(_PYTHON_END)
    source = source.removeprefix(_PYTHON_START).removesuffix(_PYTHON_END).strip()
    if is_marked and is_cut and not is_closed:
        return [Broken(text)]
    if not (source.startswith("[") and source.endswith("]")):
        return [Broken(text)] if _PYTHON_START in text else [text]
    try:
        tree = ast.parse(source, mode="eval").body if len(source) <= _MAX_LENGTH else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if (
        not isinstance(tree, ast.List)
        or not tree.elts
        or not all(isinstance(element, ast.Call) for element in tree.elts)
    ):
        looks_like_call = is_marked or (isinstance(tree, ast.List) and any(isinstance(x, ast.Call) for x in tree.elts))
        return [Broken(text)] if looks_like_call else [text]
    return [_python_call(element, source) for element in tree.elts if isinstance(element, ast.Call)]


def _python_call(node: ast.Call, source: str) -> Call | Broken:
    text = ast.get_source_segment(source, node) or source
    try:
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        name = ast.unparse(node.func)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Broken(text)
    if node.args or None in arguments:
        return Broken(text)
    return checked_call(name, arguments, source=text)


# Styles whose arguments are plain text between markers: qwen3_coder, glm, deepseek_dsml. Schemas give the types. A
# value may contain markers: it ends at the last closing marker before the next argument, and a block at the last one
# before the next block.


class _Form(NamedTuple):
    start: str
    end: str
    opening: re.Pattern[str]  # The start of a block with a call, which a mention of the marker `start` is not.
    head: re.Pattern[str]  # The beginning of a block: name.
    argument: re.Pattern[str]
    """The beginning of an argument: key, and is_text where the style says whether the value is text or JSON."""
    following: re.Pattern[str]  # What stands between a value and the next argument.
    value_end: str
    call_end: str = ""  # Between the last argument and `end`; a value before it needs no `value_end`.


def _text_blocks(text: str, schemas: Schemas, form: _Form, is_cut: bool) -> list[Piece]:
    pieces: list[Piece] = []
    position = 0
    while (first := text.find(form.start, position)) >= 0:
        pieces.append(text[position:first])
        piece, position = _text_block(text, first, schemas, form, is_cut)
        pieces.append(piece)
    return [*pieces, text[position:]]


def _text_block(text: str, first: int, schemas: Schemas, form: _Form, is_cut: bool) -> tuple[Call | Broken, int]:
    """The block that begins at `first`, and the index after it."""
    inner = first + len(form.start)
    opening = form.opening.search(text, inner)
    limit = opening.start() if opening else len(text)
    last = max(text.rfind(form.call_end or form.value_end, inner, limit), inner)
    ends = [end for begin in (last, inner) if (end := text.find(form.end, begin, limit)) >= 0]
    for end in ends:  # the second one, where text after the call mentions a marker
        stop = end + len(form.end)
        call = _text_call(text[inner:end], text[first:stop], schemas, form)
        if isinstance(call, Call) or end == ends[-1]:
            return call, stop
    if form.call_end and last > inner and (opening or not is_cut):
        call = _text_call(text[inner:limit], text[first:limit], schemas, form)
        if isinstance(call, Call):
            return call, limit
    return Broken(text[first:]), len(text)  # the blocks that follow may be part of a value


def _text_call(inner: str, source: str, schemas: Schemas, form: _Form) -> Call | Broken:
    head, arguments = form.head.match(inner), dict[str, Any]()
    stop = inner.rfind(form.call_end) if form.call_end else -1
    is_closed = stop >= 0
    if head is None or (is_closed and inner[stop + len(form.call_end) :].strip()):
        return Broken(source)
    name, position, stop = head["name"].strip(), head.end(), stop if is_closed else len(inner)
    while (position := _after_space(inner, position)) < stop:
        argument = form.argument.match(inner, position, stop)
        if argument is None:
            return Broken(source)
        start, following = argument.end(), form.following.search(inner, argument.end(), stop)
        if following is not None:
            end, position = following.span()
        elif (end := inner.rfind(form.value_end, start, stop)) >= 0:
            position = end + len(form.value_end)
        elif is_closed:
            end = position = stop
        else:
            return Broken(source)
        key, value = argument["key"].strip(), inner[start:end]
        value = value.removesuffix("\n") if form.call_end else value
        match argument.groupdict().get("is_text"):
            case "true":
                arguments[key] = value
            case "false":
                arguments[key] = parsed_json(value.strip())
                if arguments[key] is None and value.strip() != "null":
                    return Broken(source)
            case _:
                arguments[key] = typed_value(value, schemas.get(name, {}).get(key))
    return checked_call(name, arguments, source=source)


_QWEN3_CODER = _Form(
    start="<tool_call>",
    end="</tool_call>",
    opening=re.compile(r"<tool_call>\s*<function="),
    head=re.compile(r"\s*<function=(?P<name>[^>\n]{1,128})>"),
    argument=re.compile(r"<parameter=(?P<key>[^>\n]{1,128})>\n?"),  # one newline on each side belongs to the format
    following=re.compile(r"</parameter>\s*(?=<parameter=)|(?<=\n)(?=<parameter=)"),
    value_end="</parameter>",
    call_end="</function>",
)
_GLM = _Form(
    start="<tool_call>",
    end="</tool_call>",
    opening=re.compile(r"<tool_call>\s*[A-Za-z0-9_.-]{1,128}\s*(?:<arg_key>|</tool_call>)"),
    head=re.compile(r"\s*(?P<name>[A-Za-z0-9_.-]{1,128})\s*"),
    argument=re.compile(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>", re.DOTALL),
    following=re.compile(r"</arg_value>\s*(?=<arg_key>)"),
    value_end="</arg_value>",
)
_DSML = _Form(
    start="<｜DSML｜invoke",
    end="</｜DSML｜invoke>",
    opening=re.compile(r'<｜DSML｜invoke\s+name="'),
    head=re.compile(r'\s*name="(?P<name>[^"\n]{1,128})">'),
    argument=re.compile(
        r'<｜DSML｜parameter name="(?P<key>[^"\n]{1,128})"(?: string="(?P<is_text>true|false)")?>', re.DOTALL
    ),
    following=re.compile(r'</｜DSML｜parameter>\s*(?=<｜DSML｜parameter name=")'),
    value_end="</｜DSML｜parameter>",
)


def qwen3_coder(text: str, schemas: Schemas, is_cut: bool) -> list[Piece]:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` (Qwen3-Coder, Qwen3.5)."""
    return _text_blocks(text, schemas, _QWEN3_CODER, is_cut)


def glm(text: str, schemas: Schemas, is_cut: bool) -> list[Piece]:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` (GLM 4.5 and later)."""
    return _text_blocks(text, schemas, _GLM, is_cut)


def deepseek_dsml(text: str, schemas: Schemas, is_cut: bool) -> list[Piece]:
    """`<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE` ... (DeepSeek V3.2)."""
    markers = [f"<{slash}｜DSML｜{name}>" for slash in ("", "/") for name in ("function_calls", "tool_calls")]
    return _without(_text_blocks(text, schemas, _DSML, is_cut), *markers)


# From the text of an answer to reasoning, text and tool calls; the style that a chat template implies.


def no_calls(text: str, schemas: Schemas, is_cut: bool) -> list[Piece]:
    """A template without tools: everything is text."""
    return [text]


STYLES: dict[str, Parser] = {
    "hermes": hermes, "qwen3_coder": qwen3_coder, "llama3_json": llama3_json, "mistral": mistral,
    "deepseek": deepseek, "deepseek_dsml": deepseek_dsml, "glm": glm, "kimi": kimi, "gpt_oss": gpt_oss,
    "pythonic": pythonic, "none": no_calls,
}  # fmt: skip
CALL_MARKERS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>",), "qwen3_coder": ("<tool_call>",), "glm": ("<tool_call>",), "mistral": (_MISTRAL,),
    "llama3_json": (_PYTHON_TAG,), "deepseek": ("<｜tool▁call",), "kimi": ("<|tool_call",),
    "deepseek_dsml": ("<｜DSML｜", "</｜DSML｜"),
}  # fmt: skip
"""What begins a call, or the text around calls, by style. Text before the first of them is text in every answer."""
CALL_OPENINGS: dict[str, tuple[str, ...]] = {
    "llama3_json": ('{"name":', '{"type":"function","name":'), "pythonic": ("[", _PYTHON_START),
}  # fmt: skip
"""What a text begins with that may be a call as a whole, without white space."""
_MARKERS = (
    ("<|channel|>", "gpt_oss"), ("｜DSML｜", "deepseek_dsml"), ("<｜tool▁call▁begin｜>", "deepseek"),
    ("<|tool_call_begin|>", "kimi"), ("[TOOL_CALLS]", "mistral"), ("<arg_key>", "glm"), ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"), ("<|python_start|>", "pythonic"), ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
)  # fmt: skip
"""The first marker that a chat template contains decides."""
DEFAULT_REASONING = ("<think>", "</think>")
_REASONING = (DEFAULT_REASONING, ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """How the answers of a model are written. Made once for a chat template."""

    name: str
    reasoning: tuple[str, str] | None  # Markers before and after reasoning; None: the style has its own, or none.
    special_tokens: re.Pattern[str] | None  # What is removed from text and reasoning.
    beginnings: frozenset[str] = frozenset()  # Beginnings of markers and special tokens: more text decides about them.
    longest: int = 0  # Characters of the longest one.

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Whether an answer after a prompt with this end begins inside of reasoning."""
        return self.reasoning is not None and prompt_end.rstrip().endswith(self.reasoning[0])

    def leaves_reasoning_open(self, prompt: str) -> bool:
        """Whether a prompt begins reasoning that it does not end."""
        return self.reasoning is not None and prompt.rfind(self.reasoning[0]) > prompt.rfind(self.reasoning[1])


def style_of(name: str, chat_template: Any, special_tokens: Iterable[str] = ()) -> AnswerStyle:
    """The style with a name, or for auto the one that a chat template implies; its markers of reasoning.

    `special_tokens`: those of the tokenizer, as text (`special_tokens`). ConfigError: there is no
    such style.
    """
    # A template is a text, a table of texts by name, or None.
    chat_template = str(chat_template or "")
    if name == "auto":
        name = next((style for marker, style in _MARKERS if marker in chat_template), "none")
    if name not in STYLES:
        message = f"there is no style of tool calls {name!r}: use auto, {', '.join(STYLES)}"
        raise ConfigError(message, code="config.conflict")
    reasoning = next((pair for pair in _REASONING if pair[1] in chat_template), None)
    longest_first = sorted({token for token in special_tokens if token}, key=len, reverse=True)
    removed = re.compile("|".join(re.escape(token) for token in longest_first)) if longest_first else None
    terms = (*longest_first, *CALL_MARKERS.get(name, ()), *(reasoning or DEFAULT_REASONING), *HARMONY_ENDS)
    beginnings = frozenset(term[:size] for term in terms for size in range(1, len(term)))
    return AnswerStyle(
        name=name,
        reasoning=None if name == "gpt_oss" else reasoning,
        special_tokens=removed,
        beginnings=beginnings,
        longest=max(map(len, beginnings)),
    )


def special_tokens(tokenizer: Any) -> list[str]:
    """The special tokens of a Hugging Face tokenizer, as text; empty for another one."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return [token.content for token in added.values() if token.special]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAnswer:
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    num_malformed: int  # Calls that cannot be read. They are part of the text.


def split_answer(
    text: str,
    token_ids: Sequence[int],
    style: AnswerStyle,
    *,
    tools: Sequence[dict[str, Any]],
    turn_id: str,
    in_reasoning: bool = False,
    may_close: bool = True,
    is_cut: bool = False,
) -> SplitAnswer:
    """Split an answer. Never raises, for any text.

    `text`: the answer with its special tokens. `turn_id` and `token_ids` give each call an id, unique in its session.
    `tools`: those of the request, in OpenAI's form; without tools nothing is a call. `in_reasoning`: the prompt has
    opened the reasoning (`AnswerStyle.opens_reasoning`). `may_close`: an end marker alone ends reasoning.
    `is_cut`: a limit of length ended the answer.
    """
    pieces = answer_pieces(text, style, tools=tools, in_reasoning=in_reasoning, may_close=may_close, is_cut=is_cut)
    if not tools:
        pieces = [Broken(piece.arguments) if isinstance(piece, Call) else piece for piece in pieces]
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    thoughts = [piece.text for piece in pieces if isinstance(piece, Thought)]
    return SplitAnswer(
        text=_spoken(pieces, style),
        reasoning="\n".join(cleaned(thought, style).strip("\n") for thought in thoughts if thought),
        tool_calls=tuple(
            ToolCall(_new_id(turn_id, token_ids, index), call.name, call.arguments, model_id=call.call_id)
            for index, call in enumerate(calls)
        ),
        num_malformed=sum(isinstance(piece, Broken) for piece in pieces),
    )


def answer_pieces(
    text: str,
    style: AnswerStyle,
    *,
    tools: Sequence[dict[str, Any]],
    in_reasoning: bool = False,
    may_close: bool = True,
    is_cut: bool = False,
) -> list[Piece]:
    """What an answer consists of, in its order; the arguments are those of `split_answer`.

    A call in reasoning is a thought, and a marker of reasoning in the arguments of a call is a part of them. Without
    tools only reasoning at the start counts. Where the style has no reasoning, it is text without calls.
    """
    schemas = {tool["function"]["name"]: _parameters(tool) for tool in tools}
    parse = STYLES[style.name] if tools or style.name == "gpt_oss" else no_calls
    if style.name == "gpt_oss":
        return parse(text, schemas, is_cut)
    start, end = style.reasoning or DEFAULT_REASONING
    pieces: list[Piece] = []

    def in_call(place: int) -> bool:
        begin = 0
        for call in (piece for piece in parse(text, schemas, is_cut) if isinstance(piece, Call)):
            begin = max(text.find(call.source, begin), begin)
            if begin <= place < begin + len(call.source):
                return True
        return False

    def think(begin: int, inner: int) -> str:
        """Add the reasoning that begins at an index; returns what follows it."""
        last = text.find(end, inner)
        stop, following = (len(text), len(text)) if last < 0 else (last, last + len(end))
        pieces.append(Thought(text[inner:stop]) if style.reasoning else text[begin:following])
        return text[following:]

    first, last = text.find(start), text.find(end)
    if first >= 0 and not text[:first].strip():
        text = think(0, first + len(start))
    elif style.reasoning and (
        in_reasoning or (may_close and last >= 0 and (first < 0 or last < first) and not in_call(last))
    ):
        text = think(0, 0)
    place = text.find(start) if tools else -1
    while place >= 0:
        begins_line = not text[:place].rpartition("\n")[2].strip()
        if (begins_line or end in text[place:]) and not in_call(place):
            pieces += parse(text[:place], schemas, False)
            text, place = think(place, place + len(start)), 0
        else:
            place += len(start)
        place = text.find(start, place)
    return [*pieces, *parse(text, schemas, is_cut)]


def _spoken(pieces: Sequence[Piece], style: AnswerStyle) -> str:
    """The text for the reader, without line ends after a thought before it, and without white space around calls.

    Nothing changes the text before it: that may have been sent.
    """
    text, follows_thought, has_calls, follows_call = "", False, False, False
    for piece in pieces:
        match piece:
            case Thought():
                follows_thought = follows_thought or (piece.text != "" and not text)
            case Call():
                follows_call, has_calls = follows_call or not (has_calls or text.strip()), True
            case _:
                text += cleaned(piece if isinstance(piece, str) else piece.text, style)
    text = text.lstrip("\n") if follows_thought else text
    text = text.lstrip() if follows_call else text
    return text.rstrip() if has_calls else text


def cleaned(text: str, style: AnswerStyle) -> str:
    return text if style.special_tokens is None else style.special_tokens.sub("", text)


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    properties = (tool["function"].get("parameters") or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def _new_id(turn_id: str, token_ids: Sequence[int], index: int) -> str:
    """Nine letters and digits, the form that the strictest chat templates (Mistral) require."""
    seed = f"{turn_id} {index} {','.join(map(str, token_ids))}"
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8])
    return "".join(_DIGITS[number // 62**power % 62] for power in range(9))


__all__ = ["STYLES", "AnswerStyle", "SplitAnswer", "special_tokens", "split_answer", "style_of"]
